"""What users call: the collectives as methods of a communicator, with what they mean. The modules beside do them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from epcomm.collectives.movement import Movement
from epcomm.collectives.parts import Tensors
from epcomm.collectives.plan import Plan
from epcomm.collectives.point_to_point import PointToPoint
from epcomm.collectives.reductions import Reductions
from epcomm.work import Work


class Collectives:
    """The part of `Communicator` that calls collectives, on tensors.

    What arguments mean everywhere: `x`, of any strides, is on the communicator's device, and only read unless it is
    `out`. `out`: contiguous, of `x`'s dtype; the result is put there and returned. `dst`, `src`: ranks of this
    communicator. `async_op`: return a `Work` at once. `timeout`: seconds that this call may wait for its peers, by
    default those of `init`. Results have no gradients.

    Raises: `ConfigError` for a wrong argument, before anything is sent; what `Communicator` says of all operations.
    """

    _reductions: Reductions
    _movement: Movement
    _point_to_point: PointToPoint

    def barrier(self, timeout: float | None = None, *, async_op: bool = False) -> Any:
        """Returns once every rank has called it; what they wrote before is visible."""
        return self._reductions.barrier(async_op, timeout)

    def allreduce(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: str | Plan = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The reduction of all ranks' `x`, with the same bits on every rank and, but for "multimem", from run to run.

        `op`: sum, avg, min, max, prod; band, bor, bxor for integers and bool. 16-bit floats are summed in float32 and
        rounded once; avg of integers truncates toward zero. `algorithm`: "one_shot" (up to 32 KiB), "two_shot", or
        "multimem", where NVLink's switch sums and averages floats of 16 and 32 bits, in an order of its own: "auto"
        never takes it. Or, in this and all collectives that have it, a `Plan`, which is proven first, or the name of
        one of `collectives.algorithms`: sums then round as often as the proof says (docs/plans.md). "auto": the kernel
        that was measured to be the fastest, or on a `topology` with known bandwidths the kernel or plan of least price.
        """
        return self._reductions.allreduce(x, op, out, algorithm, async_op, timeout)

    def describe_allreduce(self, x: torch.Tensor, op: str = "sum", *, algorithm: str | Plan = "auto") -> str:
        """What `allreduce` of such a tensor runs: its kernel, or its plan, as errors name them. Sends nothing."""
        return self._reductions.describe_allreduce(x, op, algorithm)

    def bind_allreduce(
        self, x: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None, algorithm: str | Plan = "auto"
    ) -> Callable[[], torch.Tensor]:
        """A function that allreduces `x` into `out` (default: in place) with addresses resolved once, for hot loops."""
        return self._reductions.bind_allreduce(x, op, out, algorithm)

    def reduce(
        self, x: torch.Tensor, dst: int = 0, op: str = "sum", *, out: torch.Tensor | None = None,
        algorithm: str | Plan = "auto", async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Like `allreduce`, with the result on rank `dst` only; the others get None."""
        return self._reductions.reduce(x, dst, op, out, algorithm, async_op, timeout)

    def allgather(
        self, x: torch.Tensor, *, out: Tensors | None = None, algorithm: str | Plan = "auto",
        async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """All ranks' `x`, concatenated on dim 0 in rank order, or in a list `out` of one tensor per rank."""
        return self._movement.allgather(x, out, algorithm, async_op, timeout)

    def gather(
        self,
        x: torch.Tensor,
        dst: int = 0,
        *,
        out: Tensors | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Like `allgather`, with the result on rank `dst` only; the others get None."""
        return self._movement.gather(x, dst, out, async_op, timeout)

    def broadcast(
        self, x: torch.Tensor, src: int = 0, *, out: torch.Tensor | None = None, algorithm: str | Plan = "auto",
        async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Rank `src`'s `x`; elsewhere `x` gives shape and dtype (``out=x`` receives into it)."""
        return self._movement.broadcast(x, src, out, algorithm, async_op, timeout)

    def scatter(
        self,
        x: Tensors | None,
        src: int = 0,
        *,
        out: torch.Tensor | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """This rank's part of rank `src`'s `x`, split evenly on dim 0 or listed. Other ranks pass None and `out`."""
        return self._movement.scatter(x, src, out, async_op, timeout)

    def reduce_scatter(
        self,
        x: Tensors,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: str | Plan = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """This rank's part (dim 0 split evenly, or one of a list) of the reduction of all ranks' `x`."""
        return self._movement.reduce_scatter(x, op, out, algorithm, async_op, timeout)

    def alltoall(
        self, x: Tensors, *, out: Tensors | None = None, algorithm: str | Plan = "auto",
        async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Part r of the result (dim 0 split evenly) is part `rank` of rank r's `x`.

        `x` and `out` may both be lists of one tensor per rank, of any shapes: what rank r sends fills ``out[r]``.
        """
        return self._movement.alltoall(x, out, algorithm, async_op, timeout)

    def alltoallv(
        self,
        x: torch.Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int] | None = None,
        *,
        out: torch.Tensor | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """`alltoall` with `send_splits[r]` rows for rank r. `recv_splits`, if given, must be what the peers send."""
        return self._movement.alltoallv(x, send_splits, recv_splits, out, async_op, timeout)

    def send(
        self, x: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Sends `x` to rank `dst`. The k-th send of a pair meets the k-th recv; size, dtype and tag must agree."""
        return self._point_to_point.transfer("send", x, dst, tag, async_op, timeout)

    def recv(
        self, out: torch.Tensor, src: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Receives from rank `src` into `out` and returns it."""
        return self._point_to_point.transfer("recv", out, src, tag, async_op, timeout)

    def recv_any(self, out: torch.Tensor, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """`recv` of the first such message that comes, of whichever rank: returns `out` and that rank. On CPUs only."""
        return self._point_to_point.receive_any(out, tag, async_op, timeout)
