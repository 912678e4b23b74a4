"""Runs device functions of the GPU kernels, interpreted, on rows and bytes beyond the reach of 32 bits.

A script, for a process in which Triton is an interpreter: `TRITON_INTERPRET=1 python tests/far_addresses.py`. Its
memory is reserved, not committed: only the pages that are touched exist.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel, one
from epcomm.device.gpu.memory import copy
from epcomm.kernels.gpu.dispatch import _send_row
from epcomm.kernels.gpu.dispatch_receive import _expand_row
from epcomm.kernels.gpu.exchange import take
from epcomm.kernels.gpu.partial_sums import _sum_row
from epcomm.kernels.gpu.reduction import _reduce_tiles
from epcomm.kernels.gpu.row_sum import sum_token
from epcomm.kernels.protocol import collectives
from epcomm.kernels.protocol import expert_parallel as protocol

GIB = 1 << 30
ROW_BYTES = 8192
FAR_ROW = 9 * GIB // ROW_BYTES + 3  # beyond what 32 bits reach even when they count words of 4 bytes
FAR = FAR_ROW * ROW_BYTES
EPOCH = 4


@kernel("copy_far", programs=one)
def copy_far(to, source, num_bytes):
    copy(tl.cast(to, tl.int64), tl.cast(source, tl.int64), tl.cast(num_bytes, tl.int64))


@kernel("send_far", programs=one)
def send_far(ctx, state, routing, tensor, token, WIDE: tl.constexpr, TILE: tl.constexpr):
    ctx, state, routing = tl.cast(ctx, tl.int64), tl.cast(state, tl.int64), tl.cast(routing, tl.int64)
    _send_row(ctx, state, routing, tl.cast(tensor, tl.int64), tl.cast(token, tl.int64), 1, tl.cast(EPOCH, tl.int64),
              False, WIDE, TILE, "none")  # fmt: skip


@kernel("expand_far", programs=one)
def expand_far(state, tensor, places, row, arrivals, block, WIDE: tl.constexpr, TILE: tl.constexpr):
    _expand_row(tl.cast(state, tl.int64), tl.cast(tensor, tl.int64), tl.cast(places, tl.int64), tl.cast(row, tl.int64),
                1, tl.cast(arrivals, tl.int64), tl.cast(block, tl.int64), WIDE, TILE)  # fmt: skip


@kernel("partial_far", programs=one)
def partial_far(state, routing, tensor, row, out, WIDE: tl.constexpr):
    _sum_row(tl.cast(state, tl.int64), tl.cast(routing, tl.int64), tl.cast(tensor, tl.int64), tl.cast(row, tl.int64),
             tl.cast(0, tl.int64), tl.cast(out, tl.int64), False, tl.float32, WIDE)  # fmt: skip


@kernel("sum_far", programs=one)
def sum_far(ctx, state, routing, tensor, token, WIDE: tl.constexpr):
    ctx, state, routing = tl.cast(ctx, tl.int64), tl.cast(state, tl.int64), tl.cast(routing, tl.int64)
    sum_token(ctx, state, routing, tl.cast(0, tl.int64), tl.cast(tensor, tl.int64), tl.cast(token, tl.int64), 1,
              False, tl.cast(EPOCH, tl.int64), tl.float32, tl.float32, WIDE, "none")  # fmt: skip


@kernel("reduce_far", programs=one)
def reduce_far(ctx, to, own, start, end):
    _reduce_tiles(tl.cast(to, tl.int64), tl.cast(ctx, tl.int64), 2, tl.cast(own, tl.int64), tl.cast(0, tl.int64),
                  start, tl.cast(end, tl.int64), 2, tl.float32, tl.float32, "sum", False, 16, 16, 2048)  # fmt: skip


@kernel("take_far", programs=one)
def take_far(ctx, args, out, source, start, piece):
    take(tl.cast(ctx, tl.int64), tl.cast(args, tl.int64), tl.cast(out, tl.int64), 0, tl.cast(source, tl.int64),
         tl.cast(start, tl.int64), tl.cast(piece, tl.int64))  # fmt: skip


class Sparse:
    """Zeros, as many bytes as asked for; only what is touched takes memory."""

    def __init__(self, num_bytes: int = FAR + GIB):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        self._map = mmap.mmap(-1, num_bytes, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def at(self, offset: int, num_bytes: int) -> np.ndarray:
        """The bytes there."""
        return np.frombuffer(self._map, np.uint8, num_bytes, offset)


class Words:
    """A block of 64-bit words."""

    def __init__(self, num_words: int):
        self.array = np.zeros(num_words, np.int64)
        self.address = self.array.ctypes.data


def payload(num_bytes: int = ROW_BYTES) -> np.ndarray:
    """Small whole numbers in float32, as bytes: their sums are exact."""
    return np.random.default_rng(num_bytes).integers(1, 100, num_bytes // 4).astype(np.float32).view(np.uint8)


def check(memory: Sparse, offset: int, wanted: np.ndarray, what: str) -> None:
    """The bytes are there, and not where an address of 32 bits would have put them."""
    assert (memory.at(offset, wanted.size) == wanted).all(), f"{what}: the bytes aren't at {offset:#x}"
    wrapped = offset % (1 << 32)
    assert not memory.at(wrapped, wanted.size).any(), f"{what}: something was written at {wrapped:#x}"
    memory.at(offset, wanted.size)[:] = 0


class OneRank:
    """What the kernels of expert parallelism look up, for one rank with one expert, whose token's row is FAR_ROW."""

    def __init__(self, segment: Sparse):
        self.ctx, self.state, self.routing = Words(64), Words(256), Words(256)
        self.ctx.array[control.RANK], self.ctx.array[control.SIZE] = 0, 1
        self.bases, self.owner, self.first_row = (
            np.array([segment.address]),
            np.zeros(1, np.int32),
            np.zeros(1, np.int32),
        )
        self.first_row[0] = FAR_ROW - 1
        self.position, self.expert = Sparse(), Sparse()
        self.position.at(4 * FAR_ROW, 4).view(np.int32)[0] = 1  # of token FAR_ROW
        state, routing = self.state.array, self.routing.array
        state[protocol.LAYOUT] = protocol.PADDED
        state[protocol.NUM_EXPERTS] = 1
        state[protocol.WINDOW] = self.bases.ctypes.data
        state[protocol.OWNER] = self.owner.ctypes.data
        state[protocol.NUM_BLOCKS] = state[protocol.NUM_OUTPUTS] = 1
        state[protocol.BLOCKS] = state[protocol.OUTPUTS] = ROW_BYTES
        routing[protocol.TOPK] = 1
        routing[protocol.BASE] = self.first_row.ctypes.data
        routing[protocol.POSITION] = self.position.address
        routing[protocol.EXPERT] = self.expert.address

    @property
    def leading(self) -> tuple[int, int, int]:
        """The kernels' first arguments."""
        return self.ctx.address, self.state.address, self.routing.address


def far_copy() -> None:
    memory, row = Sparse(), payload()
    for num_bytes in (ROW_BYTES, 37):
        copy_far.function[(1,)](memory.address + FAR, row.ctypes.data, num_bytes)
        check(memory, FAR, row[:num_bytes], f"copy of {num_bytes} bytes")


def far_rows() -> None:
    """Token FAR_ROW's row is sent to row FAR_ROW, from where combine sums it into token FAR_ROW's result."""
    segment, source, results, row = Sparse(), Sparse(), Sparse(), payload()
    rank, tensor = OneRank(segment), Words(protocol.TENSOR_WORDS)
    tensor.array[protocol.T_ADDRESS], tensor.array[protocol.T_OUT] = source.address, results.address
    for name in (protocol.T_ROW_BYTES, protocol.T_STRIDE, protocol.T_OUT_STRIDE):
        tensor.array[name] = ROW_BYTES
    tensor.array[protocol.T_ELEMENTS] = ROW_BYTES // 4
    for wide in (True, False):
        source.at(FAR, ROW_BYTES)[:] = row
        send_far.function[(1,)](*rank.leading, tensor.address, FAR_ROW, WIDE=wide, TILE=4096 if wide else 1024)
        assert (segment.at(ROW_BYTES + FAR, ROW_BYTES) == row).all(), "dispatch"
        sum_far.function[(1,)](*rank.leading, tensor.address, FAR_ROW, WIDE=wide)
        check(results, FAR, row, "combine")
        check(segment, ROW_BYTES + FAR, row, "dispatch")


def far_expansion() -> None:
    """Arrived row FAR_ROW is copied to row FAR_ROW of the block, from where it is summed before it travels back."""
    arrivals, block, sums, places, row = Sparse(), Sparse(), Sparse(), Sparse(), payload()
    places.at(4 * FAR_ROW, 4).view(np.int32)[0] = FAR_ROW
    rank, tensor = OneRank(block), Words(protocol.TENSOR_WORDS)
    rank.state.array[protocol.BLOCK_ROWS], rank.routing.array[protocol.PLACES] = FAR_ROW + 1, places.address
    tensor.array[protocol.T_ADDRESS] = block.address
    for name in (protocol.T_ROW_BYTES, protocol.T_STRIDE):
        tensor.array[name] = ROW_BYTES
    tensor.array[protocol.T_ELEMENTS] = ROW_BYTES // 4
    _, state, routing = rank.leading
    for wide in (True, False):
        arrivals.at(FAR, ROW_BYTES)[:] = row
        to = (arrivals.address, block.address)
        expand_far.function[(1,)](
            state, tensor.address, places.address, FAR_ROW, *to, WIDE=wide, TILE=4096 if wide else 1024
        )
        partial_far.function[(1,)](state, routing, tensor.address, FAR_ROW, sums.address + FAR, WIDE=wide)
        check(sums, FAR, row, "sum on one rank")
        check(block, FAR, row, "expansion")


def far_reduction() -> None:
    own, staged, out = Sparse(), Sparse(), Sparse()
    ctx = Words(64)
    ctx.array[control.RANK], ctx.array[control.SIZE] = 0, 2
    ctx.array[control.PEERS], ctx.array[control.PEERS + 1] = own.address, staged.address
    row = payload()
    own.at(FAR, ROW_BYTES)[:], staged.at(FAR, ROW_BYTES)[:] = row, row
    reduce_far.function[(1,)](ctx.address, out.address, own.address, FAR // 4, (FAR + ROW_BYTES) // 4)
    check(out, FAR, (2 * row.view(np.float32)).view(np.uint8), "reduction")


def far_exchange() -> None:
    out, row = Sparse(), payload()
    ctx, args, table = Words(64), Words(256), Words(64)
    ctx.array[control.SIZE] = 1
    args.array[collectives.TABLE] = table.address
    table.array[collectives.RECEIVE_BYTES], table.array[collectives.RECEIVE_OFFSET] = FAR + ROW_BYTES, 0
    take_far.function[(1,)](ctx.address, args.address, out.address, row.ctypes.data, FAR, ROW_BYTES)
    check(out, FAR, row, "exchange")


if __name__ == "__main__":
    for test in (far_copy, far_rows, far_expansion, far_reduction, far_exchange):
        test()
        print(f"{test.__name__}: ok")
