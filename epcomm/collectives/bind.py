"""From a validated request to a bound operation: which kernel, with which parameter block. Bound once, called often."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from epcomm.collectives.copy_engine import CopyMove
from epcomm.collectives.selection import is_scattered_by_rails, num_shares, priced_machine
from epcomm.device.control import GENERATION_SHIFT
from epcomm.heap.private import PrivateMemory
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol.arithmetic import partial_scale
from epcomm.kernels.protocol.collectives import CollectiveRegions
from epcomm.kernels.protocol.nodes import node_table
from epcomm.kernels.target import Kernel, Target
from epcomm.operation import Operation, ParameterBlock
from epcomm.runtime import Runtime

if TYPE_CHECKING:
    from epcomm.topology import Topology

Bound = TypeVar("Bound")
_MAX_BOUND = 512  # shapes that vary without end must not grow memory without end


class Binder:
    """The state block of a communicator's collectives, and its bound operations by request."""

    def __init__(
        self, runtime: Runtime, regions: CollectiveRegions, num_channels: int, topology: Topology | None = None
    ):
        self.runtime, self.num_channels, self.regions = runtime, num_channels, regions
        self._memory = runtime.target.private(8 * (protocol.CHUNKS + 2 * num_channels))
        self._sources = runtime.target.private(8 * num_channels * runtime.size)  # only kernels use it
        self._state = self._memory.array.view(np.int64)
        self._state[protocol.MULTICAST] = runtime.target.multicast(runtime.collectives)
        self.has_multicast = bool(self._state[protocol.MULTICAST])
        self._nodes = private_words(runtime.target, node_table(runtime.nodes))
        self.num_nodes = max(runtime.nodes) + 1
        self.spans_hosts = self.num_nodes > 1
        self.machine = priced_machine(topology)
        self._state[protocol.NODES] = self._nodes.address
        self._state[protocol.PUSHED_WORDS : protocol.PARTIAL_SLOTS + 1] = (
            regions.pushed,
            regions.received,
            regions.partial,
        )
        self._state[protocol.BARRIER : protocol.NUM_CHANNELS + 1] = (
            regions.barrier,
            regions.tiny,
            regions.one_shot_flags,
            regions.one_shot,
            regions.words,
            regions.staged,
            regions.reduced,
            regions.sent,
            num_channels,
        )
        self.bound: dict[Hashable, Any] = {}
        self.start_generation(runtime.generation)
        runtime.on_reset(self)

    def start_generation(self, generation: int) -> None:
        """Epochs and chunk counts start again above those of all earlier generations."""
        start = generation << GENERATION_SHIFT
        self._state[[protocol.BARRIER_EPOCH, protocol.ONE_SHOT_EPOCH]] = start
        self._state[protocol.CHUNKS :] = start
        self._memory.publish()

    def cached(self, key: Hashable, bind: Callable[[], Bound]) -> Bound:
        """The operation bound under `key`."""
        operation = self.bound.get(key)
        if operation is None:
            operation = bind()
            self.remember(key, operation)
        return operation

    def remember(self, key: Hashable, operation: Any) -> None:
        """Keeps a bound operation for the next request like it."""
        if len(self.bound) >= _MAX_BOUND:
            self.bound.clear()
        self.bound[key] = operation

    def operation(self, kernel: Kernel, args: ParameterBlock, text: str, table: Any = None) -> Operation:
        """Binds a kernel; the operation keeps alive what its parameter block points to."""
        return self.runtime.operation(kernel, args, text, keep=(self._memory, self._nodes, self._sources, table))

    def block(self) -> ParameterBlock:
        """The parameters that all collectives have."""
        args = ParameterBlock(self.runtime.target, protocol.NUM_WORDS)
        args.words[protocol.STATE] = self._memory.address
        args.words[protocol.SOURCES] = self._sources.address
        args.words[protocol.ROOT] = -1
        return args

    def barrier(self, text: str) -> Operation:
        """A barrier in which all ranks must pass the same text."""
        return self.operation(self.runtime.target.barrier(), self.block(), text)

    def reduce(self, text: str, num_bytes: int, dtype: torch.dtype, op: str, kernel: str, root: int) -> Operation:
        """Allreduce, or with `root` >= 0 a reduce to that rank."""
        kept = num_bytes if root in (-1, self.runtime.rank) else 0
        return self._reduction(text, num_bytes, dtype, op, kernel, root, 0, kept)

    def reduce_scatter(
        self, text: str, offsets: list[int], each: int, dtype: torch.dtype, op: str
    ) -> Operation | CopyMove:
        """Of `each` bytes per rank, from these offsets on; where ranks are on several hosts they lie side by side."""
        size, rank = self.runtime.size, self.runtime.rank
        most_members = max(map(self.runtime.nodes.count, self.runtime.nodes))
        scale = partial_scale(dtype, op)
        if self.spans_hosts and is_scattered_by_rails(size * each, most_members, scale):
            return self._reduction(text, size * each, dtype, op, "rails", -1, rank * each, each)
        table = [offsets, [each] * size, [0] * size, [each] * size]
        return self.exchange(text, table, each, reduction=(dtype, op))

    def _reduction(self, text: str, num_bytes: int, dtype: torch.dtype, op: str, algorithm: str, root: int,
                   kept_offset: int, kept_bytes: int) -> Operation:  # fmt: skip
        args, are_alone = self.block(), self.num_nodes == self.runtime.size
        scale = 1 if are_alone else partial_scale(dtype, op)
        args.words[protocol.ROOT] = root
        args.words[[protocol.ARE_ALONE, protocol.PARTIAL_SCALE]] = are_alone, scale
        args.words[protocol.NUM_SHARES] = num_shares(num_bytes, self.num_nodes, scale)
        args.words[[protocol.KEPT_OFFSET, protocol.KEPT_BYTES]] = kept_offset, kept_bytes
        return self.operation(self.runtime.target.reduce(args.words, algorithm, dtype, op), args, text)

    def exchange(
        self,
        text: str,
        table: list[list[int]],
        max_pair_bytes: int,
        *,
        shared: bool = False,
        root: int = -1,
        reduction: tuple[torch.dtype, str] | None = None,
    ) -> Operation | CopyMove:
        """Data movement. `table`: send offsets, send bytes, receive offsets, receive bytes, each by peer.

        `shared`: all that get anything from a rank get the same. `root`: all ranks get that one's bytes, and no others.
        """
        if self.runtime.target.copy_engine_bytes and reduction is None and not self.spans_hosts:
            return CopyMove(self.runtime, self.barrier(text), self.regions.copies, table, max_pair_bytes, shared)
        args = self.block()
        memory = private_words(self.runtime.target, itertools.chain(*table))
        args.words[protocol.TABLE] = memory.address
        args.words[protocol.MAX_PAIR_BYTES] = max_pair_bytes
        args.words[protocol.SHARED] = shared
        args.words[protocol.ROOT] = root
        kernel = self.runtime.target.exchange(args.words, reduction, self.spans_hosts)
        return self.operation(kernel, args, text, memory)


def private_words(target: Target, words: Iterable[int]) -> PrivateMemory:
    """A table for kernels."""
    values = np.array([*words], dtype=np.int64)
    memory = target.private(values.nbytes)
    memory.array[:] = values.view(np.uint8)
    memory.publish()
    return memory
