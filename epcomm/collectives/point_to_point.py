"""send and recv: numbered per ordered pair of ranks, beside the sequence of collectives."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from epcomm.collectives.checks import check_out, check_rank, check_tensor, check_timeout
from epcomm.device import control
from epcomm.errors import ConfigError, TimeoutError, UnsupportedError
from epcomm.heap.private import PrivateMemory
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol.collectives import CollectiveRegions
from epcomm.operation import Context, Operation, ParameterBlock
from epcomm.runtime import Runtime
from epcomm.work import Fifo

_POLL_SECONDS = 1e-4  # between looks at what has come from any rank


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
        self._any = Fifo("epcomm-recv-any")
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
        message, fingerprint = self._message(data, tag)
        channel = self._channel(kind, peer)

        def run() -> Any:
            if not channel.lock.acquire(blocking=False):
                raise self._runtime.reject(ConfigError(f"{where}: another thread is in a {kind} with rank {peer}"))
            try:
                channel.operation.args.words[protocol.MESSAGE] = fingerprint
                channel.operation.text = f"{kind} {'to' if kind == 'send' else 'from'} rank {peer} of {message}"
                values = (data.data_ptr(), data.data_ptr(), data.nbytes)
                channel.context.set_timeout(self._runtime.timeout if timeout is None else timeout)
                self._runtime.run_beside(channel.context, channel.operation, *values)
            finally:
                channel.lock.release()
            return tensor if kind == "recv" else None

        return channel.fifo.call(run, async_op, f"{where} of {message}")

    def _message(self, data: torch.Tensor, tag: int) -> tuple[str, int]:
        """What sender and receiver must agree on: its text and fingerprint."""
        text = f"a message of {data.nbytes} bytes, {data.dtype}, tag={tag}"
        return text, self._runtime.texts.fingerprint(text, is_message=True)

    def receive_any(self, out: torch.Tensor, tag: int, async_op: bool, timeout: float | None) -> Any:
        """Receives the first such message that comes, of whichever rank; the result is `out` and that rank."""
        where = f"rank {self._runtime.rank}: recv_any"
        try:
            if not self._runtime.target.shares_control:
                raise UnsupportedError(f"{where}: what has come is only seen in memory of CPUs; name the rank")
            check_out(where, check_tensor(where, "out", out, self._runtime.target.device), out.shape, out)
            check_timeout(where, timeout)
        except (ConfigError, UnsupportedError) as error:
            raise self._runtime.reject(error) from None

        message, fingerprint = self._message(out, tag)

        def run() -> tuple[torch.Tensor, int]:
            seconds = self._runtime.timeout if timeout is None else timeout
            source = self._first_to_come(f"{where} of {message}", fingerprint, seconds)
            return self.transfer("recv", out, source, tag, False, timeout), source

        return self._any.call(run, async_op, where)

    def _first_to_come(self, where: str, fingerprint: int, seconds: float) -> int:
        """A rank whose next message is the one that is wanted, and has come."""
        deadline = time.monotonic() + seconds
        while True:
            for peer in range(self._runtime.size):
                if peer != self._runtime.rank and self._has_come(peer, fingerprint):
                    return peer
            self._runtime.check()
            if time.monotonic() > deadline:
                raise self._runtime.fail(TimeoutError(f"{where}: waited {seconds:g} s for a message of any rank"))
            time.sleep(_POLL_SECONDS)

    def _has_come(self, peer: int, fingerprint: int) -> bool:
        channel, own = self._channel("recv", peer), self._runtime.control.own
        count = int(channel.count.array.view(np.int64)[0])
        slot = self._regions.inbox + peer * protocol.INBOX_BYTES
        slot += count % protocol.INBOX_NUM_SLOTS * protocol.INBOX_SLOT_BYTES
        sent = self._regions.message_sent + peer * control.LINE
        if (
            channel.fifo.pending or own.array(sent, 8).view(np.int64)[0] <= count
        ):  # another receive waits, or nothing came
            return False
        return bool(own.array(slot, 8).view(np.int64)[0] == fingerprint)

    def drain(self) -> None:
        """Returns once everything submitted so far has run, and no thread is inside of a transfer."""
        self._any.drain()
        for channel in list(self._channels.values()):
            channel.fifo.drain()
            with channel.lock:
                continue

    def stop(self) -> None:
        self._any.stop()
        for channel in self._channels.values():
            channel.fifo.stop()
