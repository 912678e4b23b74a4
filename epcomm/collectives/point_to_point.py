"""send and recv: numbered per ordered pair of ranks, beside the sequence of collectives."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from epcomm.collectives.checks import check_out, check_rank, check_tensor, check_timeout
from epcomm.device import control
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.heap.private import PrivateMemory
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol.collectives import CollectiveRegions
from epcomm.operation import Context, Operation, ParameterBlock
from epcomm.runtime import Runtime
from epcomm.work import Fifo


@dataclass
class _Channel:
    """One direction of one pair: it counts slots, and its context runs beside the collectives."""

    operation: Operation
    count: PrivateMemory
    context: Context
    fifo: Fifo
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while a thread is inside of a transfer

    def start_generation(self, generation: int) -> None:
        self.count.array.view(np.int64)[0] = generation << control.GENERATION_SHIFT
        self.count.publish()


class PointToPoint:
    """The channels of one rank, made when first used."""

    def __init__(self, runtime: Runtime, regions: CollectiveRegions):
        self._runtime, self._regions = runtime, regions
        self._channels: dict[tuple[str, int], _Channel] = {}
        runtime.on_reset(self)

    def start_generation(self, generation: int) -> None:
        for channel in self._channels.values():
            channel.start_generation(generation)

    def _channel(self, kind: str, peer: int) -> _Channel:
        channel = self._channels.get((kind, peer))
        if channel is None:
            own, regions, target = self._runtime.rank, self._regions, self._runtime.target
            sender, receiver = (own, peer) if kind == "send" else (peer, own)
            args, count = ParameterBlock(target, protocol.NUM_MESSAGE_WORDS), target.private(8)
            args.words[protocol.PEER], args.words[protocol.COUNT] = peer, count.address
            args.words[protocol.INBOX : protocol.OUTBOX + 1] = (
                regions.inbox + sender * protocol.INBOX_BYTES,
                regions.message_sent + sender * control.LINE,
                regions.message_taken + receiver * control.LINE,
                regions.outbox + receiver * protocol.INBOX_BYTES,
            )
            operation = Operation(target.send() if kind == "send" else target.recv(), args, kind)
            context = self._runtime.new_context(sequenced=False)
            channel = _Channel(operation, count, context, Fifo(f"epcomm-{kind}-{peer}", target.device.type == "cuda"))
            channel.start_generation(self._runtime.generation)
            self._channels[kind, peer] = channel
        return channel

    def transfer(self, kind: str, tensor: torch.Tensor, peer: int, tag: int, async_op: bool,
                 timeout: float | None) -> Any:  # fmt: skip
        """Sends `tensor` to, or receives it from, `peer`; the k-th send of a pair meets the k-th recv."""
        where, name = f"rank {self._runtime.rank}: {kind}", "x" if kind == "send" else "out"
        try:
            data = check_tensor(where, name, tensor, self._runtime.target.device)
            check_timeout(where, timeout)
            check_rank(where, "dst" if kind == "send" else "src", peer, self._runtime.size)
            if peer == self._runtime.rank:
                raise UnsupportedError(f"{where}: a rank can't {kind} to or from itself; copy the tensor")
            if kind == "recv":
                check_out(where, tensor, tensor.shape, tensor)
        except (ConfigError, UnsupportedError) as error:
            raise self._runtime.reject(error) from None
        data = data.contiguous()
        num_bytes = data.numel() * data.element_size()
        message = f"a message of {num_bytes} bytes, {data.dtype}, tag={tag}"
        fingerprint = self._runtime.texts.fingerprint(message, is_message=True)
        channel = self._channel(kind, peer)

        def run() -> Any:
            if not channel.lock.acquire(blocking=False):
                raise self._runtime.reject(ConfigError(f"{where}: another thread is in a {kind} with rank {peer}"))
            try:
                channel.operation.args.words[protocol.MESSAGE] = fingerprint
                channel.operation.text = f"{kind} {'to' if kind == 'send' else 'from'} rank {peer} of {message}"
                values = (data.data_ptr(), data.data_ptr(), num_bytes)
                channel.context.set_timeout(self._runtime.timeout if timeout is None else timeout)
                self._runtime.run_beside(channel.context, channel.operation, *values)
            finally:
                channel.lock.release()
            return tensor if kind == "recv" else None

        return channel.fifo.call(run, async_op, f"{where} of {message}")

    def drain(self) -> None:
        """Returns once everything submitted so far has run, and no thread is inside of a transfer."""
        for channel in list(self._channels.values()):
            channel.fifo.drain()
            with channel.lock:
                continue

    def stop(self) -> None:
        for channel in self._channels.values():
            channel.fifo.stop()
