"""The facade: `Communicator`. What operations mean is documented here; the layers below do them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from epcomm.collectives.bind import Binder
from epcomm.collectives.checks import check_timeout
from epcomm.collectives.methods import Collectives
from epcomm.collectives.movement import Movement
from epcomm.collectives.planned import PlanBinder
from epcomm.collectives.point_to_point import PointToPoint
from epcomm.collectives.reductions import Reductions
from epcomm.errors import ConfigError, EpcommError, UnsupportedError
from epcomm.kernels.protocol.collectives import collective_regions
from epcomm.kernels.target import Target
from epcomm.moe.config import make_config
from epcomm.moe.expert_parallel import ExpertParallel
from epcomm.moe.hierarchical import HierarchicalExpertParallel, check_nodes
from epcomm.moe.placement import Placement
from epcomm.runtime import Runtime
from epcomm.work import Fifo
from epcomm.world.agreement import check_topology
from epcomm.world.hub import Hub

if TYPE_CHECKING:
    from epcomm.topology import Topology


class Communicator(Collectives):
    """The ranks that talk to each other, from the view of one of them. Made by `init`; a context manager.

    Attributes: ``rank``, ``size``, ``nodes`` (of each rank: 0, 1, ... by first appearance; ranks of one node share
    memory), ``device``, ``transport``, ``topology``, ``closed``. Every method but `check`, `abort`, `reject` and those
    for messages is collective: all ranks call the same operations in the same order. Tensors are on `device`; results
    are new tensors unless `out` is given (``out is x`` works in place); with ``async_op=True`` they are a `Work`.
    Instead of hanging, operations raise `MismatchError`, `PeerFailedError`, `PeerLostError` or `TimeoutError`; the
    communicator is then failed until `reset`. SIGINT ends a wait of the main thread.
    """

    def __init__(
        self, hub: Hub, target: Target, num_programs: int, timeout: float, topology: Topology | None = None
    ):
        def exchange(payload: bytes) -> list[bytes]:
            return [message for message, _ in hub.allgather(payload, timeout=timeout, check=lambda: None)]

        network = target.connect(hub.rank, hub.nodes, exchange)
        self.rank, self.size, self.nodes = hub.rank, hub.size, list(hub.nodes if network is None else network.nodes)
        if topology is not None:
            try:
                check_topology(topology, self.nodes)
            except ConfigError:  # on all ranks
                if network is not None:
                    network.close(is_together=True)
                raise
        self.device = target.device
        regions = collective_regions(self.size, num_programs, target.copy_engine_bytes, max(self.nodes) + 1)
        self._runtime = Runtime(target, hub, network, regions, num_programs, timeout)
        self.transport = self._runtime.transport
        self._fifo = Fifo("epcomm-async", is_stream_ordered=self.device.type == "cuda")
        self._binder = Binder(self._runtime, regions, num_programs, topology)
        plans = PlanBinder(self._binder)
        self._reductions = Reductions(self._runtime, self._binder, plans, self._fifo)
        self._movement = Movement(self._runtime, self._binder, plans, self._fifo)
        self._point_to_point = PointToPoint(self._runtime, regions)

    # ---- life

    @property
    def closed(self) -> bool:
        return self._runtime.closed

    def check(self) -> None:
        """Raises what has gone wrong so far, here or at a peer; returns at once."""
        self._runtime.check()

    def abort(self, message: str = "abort() was called") -> None:
        """Fails the communicator: peers raise `PeerFailedError` quoting `message`."""
        self._runtime.abort(f"{message} (rank {self.rank})")

    def reject(self, error: EpcommError) -> EpcommError:
        """For code built on a communicator: an argument error, to be raised by the caller, which peers learn of too."""
        return self._runtime.reject(error)

    def reset(self, timeout: float | None = None) -> None:
        """Collective: makes a failed communicator usable again, once every rank has left its failed operation.

        Handles stay; routings and results from before raise `ClosedError`. Works from before are complete. `timeout`:
        seconds, for this call.
        """
        check_timeout(f"rank {self.rank}: reset", timeout)
        self._fifo.drain()
        self._point_to_point.drain()
        self._runtime.reset(timeout)
        if max(self.nodes) > 0:  # its words arrive after all that was put before the failure
            limit = self._runtime.timeout if timeout is None else timeout
            self._runtime.run_within(limit, self._binder.barrier("reset()"))

    def close(self) -> None:
        """Collective unless the communicator has failed: waits for all ranks, then frees everything. Idempotent.

        Results on symmetric memory stay, except with the transports "nvshmem" and "gin": their memory ends here.
        """
        self._close(lambda: self._runtime.run(self._binder.barrier("close()")))

    def _close(self, barrier: Callable[[], Any] | None) -> None:
        if not self._runtime.closed and barrier is not None:
            self._fifo.drain()
        try:
            self._runtime.close(barrier)
        finally:
            self._fifo.stop()
            self._point_to_point.stop()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        else:
            if not self._runtime.closed and self._runtime.failure is None:
                self.abort(f"{type(error).__name__}: {error}")
            self._close(None)

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.transport}{', closed' if self.closed else ''}>"

    @cached_property
    def topology(self) -> Topology | None:
        """The machine the ranks are on: what `init` was given, else what is known of this one.

        Of CPUs that is `read_host` with as many ranks, of GPUs `known_gpus`. None for ranks on several hosts, and where
        Linux doesn't describe the host.
        """
        if self._binder.machine is not None:
            return self._binder.machine.topology
        if max(self.nodes) > 0:
            return None
        from epcomm.topology import known_gpus, read_host  # choices don't need it

        if self.device.type == "cuda":
            return known_gpus(self._runtime.target.kind, self.size, self._binder.has_multicast)
        try:
            return read_host(num_ranks=self.size)
        except UnsupportedError:
            return None

    @property
    def num_programs(self) -> int:
        """Threads, or multiprocessors of a GPU, that an operation may use."""
        return self._runtime.num_programs

    @property
    def waited(self) -> list[int]:
        """Nanoseconds that operations here have waited for each rank so far, first polls left out. On CUDA zeros."""
        return self._runtime.context.words[-self.size :].tolist()

    # ---- expert parallelism

    def expert_parallel(
        self,
        *,
        num_experts: int,
        topk: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        mode: str = "throughput",
        layout: str | None = None,
        alignment: int = 1,
        placement: Placement | Sequence[int] | None = None,
        max_recv_rows: int | None = None,
        blocks: int = 3,
        wire: str = "auto",
        host_sync: bool | None = None,
        graph_blocks: int = 2,
        overflow: str = "raise",
        zero_tail: bool = False,
        track_load: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> Any:
        """Collective: a handle for the dispatch and combine of one shape of MoE layer.

        Args:
            num_experts, topk: of the layer. hidden, dtype: of its rows. max_tokens: per rank and call. `topk`, `hidden`
                and `dtype` only size memory: calls may be smaller.
            mode: "throughput" exchanges counts once per routing (training, prefill); "latency" in every dispatch, with
                a local `route` (decode).
            layout: how received rows lie. "contiguous" (throughput's default): [rows, hidden] grouped by local expert,
                each group padded with zero rows to a multiple of `alignment`. "padded" (latency's): [local experts,
                size * max_tokens, hidden], each expert's rows from 0 on. "flat": [rows, hidden], one row per token.
            placement: rank of each expert, or a `Placement`: any number of experts per rank, and replicas, among which
                tokens are spread. Default: contiguous blocks whose sizes differ by at most 1.
            max_recv_rows: rows of a receive block; default: the worst case (memory is taken only as it is used).
            wire: "expert" sends a row once per (token, expert), straight to its place. "rank" sends it once per (token,
                rank), copies it to its experts' places there, and sums their outputs there before they travel back (see
                `ExpertParallel.combine` for what is rounded when). "auto": `moe.wire` prices both. Results lie alike.
            blocks: receive blocks (and output blocks): results that may be alive at once, plus one.
            host_sync: whether the host waits to learn how many rows there are. False: what is received has always
                `max_recv_rows` rows (padded: its shape anyway); those past the last one have a source token and expert
                of -1 and weights of 0. Nothing then keeps calls from being captured in CUDA graphs. A wrong index
                counts as -1 and, like rows past `max_recv_rows`, may be reported by a later call or `check()`, which
                then fails the communicator. None: False in latency mode with the padded layout.
            graph_blocks: with host_sync=False, more blocks, for the results of captured calls, which live until any
                graph is replayed.
            overflow: "raise" or "drop" the rows past `max_recv_rows`: combine leaves them out. Not in padded layout.
            zero_tail: with host_sync=False, rows past the last one are zeros.
            track_load: keep `ExpertParallel.load`, the tokens of all ranks per expert.
            nodes: the node of each rank, any integers. A row then goes once to each node that has experts of its token,
                and is forwarded there: see `epcomm.moe.hierarchical`. Throughput mode only.

        Returns: an `ExpertParallel`; with nodes a `HierarchicalExpertParallel`, which has route, dispatch and combine.

        Raises:
            ConfigError: an argument is wrong. MismatchError: ranks passed different ones.
        """
        where = f"rank {self.rank}: expert_parallel"
        options: dict[str, Any] = dict(
            num_experts=num_experts,
            topk=topk,
            hidden=hidden,
            max_tokens=max_tokens,
            dtype=dtype,
            mode=mode,
            layout=layout,
            alignment=alignment,
            placement=placement,
            max_recv_rows=max_recv_rows,
            blocks=blocks,
            wire=wire,
            host_sync=host_sync,
            graph_blocks=graph_blocks,
            overflow=overflow,
            zero_tail=zero_tail,
            track_load=track_load,
        )
        try:
            config = make_config(where, self.size, link_speed=self._runtime.target.link_speed, **options)
            checked = None if nodes is None else check_nodes(where, nodes, config)
        except ConfigError as error:
            raise self._runtime.reject(error) from None
        self._fifo.drain()
        if checked is not None:
            self._runtime.run(self._binder.barrier(f"{config.text} by nodes={checked}"))
            return HierarchicalExpertParallel(self, checked, options)
        self._runtime.run(self._binder.barrier(config.text))  # all ranks want the same handle
        name = f"handle {self._runtime.sequence}"  # the number of that barrier: the same on all ranks
        return ExpertParallel(self._runtime, self._fifo, config, name, self._binder.barrier)
