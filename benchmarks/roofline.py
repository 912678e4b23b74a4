"""The machine's streaming-copy bandwidth: what moving rows would cost if moving them were all there is to do.

All ranks copy at once, each from private memory into shared memory, `working_set` bytes per pass in rows of the
hidden size, with the best of several copies: torch, numpy (memcpy) and a compiled loop of non-temporal stores,
which wins out of cache and loses in it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.timing import clock, quiet_interpreter

IN_CACHE_BYTES = 1 << 20
OUT_OF_CACHE_BYTES = 256 << 20
_SECONDS_PER_METHOD = 0.15
_VECTOR_BYTES = 64
_STEP_BYTES = 4 * _VECTOR_BYTES


@intrinsic
def _stream_steps(typingctx, destination, source, steps):
    """Copy `steps` times four vectors with non-temporal stores; the destination is aligned to a vector."""
    word, vector = ir.IntType(64), ir.VectorType(ir.IntType(32), _VECTOR_BYTES // 4)

    def generate(context, builder, signature, arguments):
        destination, source, steps = arguments
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, steps) as loop:
            begin = builder.mul(loop.index, word(_STEP_BYTES))
            offsets = [builder.add(begin, word(_VECTOR_BYTES * lane)) for lane in range(4)]
            addresses = [builder.inttoptr(builder.add(source, offset), vector.as_pointer()) for offset in offsets]
            values = [builder.load(address, align=1) for address in addresses]
            for value, offset in zip(values, offsets, strict=True):
                address = builder.inttoptr(builder.add(destination, offset), vector.as_pointer())
                builder.store(value, address, align=_VECTOR_BYTES).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _fence(typingctx):
    """Order the non-temporal stores before what follows."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit("void(int64, int64, int64, int64)", nogil=True, cache=True)
def _stream_rows(destination, source, rows, row_bytes):
    for row in range(rows):
        _stream_steps(destination + row * row_bytes, source + row * row_bytes, row_bytes // _STEP_BYTES)
    _fence()


def copy_roofline(world: Any, row_bytes: int, working_set: int) -> dict:
    """Payload GB/s of each rank when all copy at once, by the best method, with the other methods' numbers beside it.

    Collective. A method's number is the median of its passes.
    """
    row_bytes = max(_STEP_BYTES, row_bytes // _STEP_BYTES * _STEP_BYTES)
    rows = max(1, min(working_set, OUT_OF_CACHE_BYTES) // row_bytes)
    size = rows * row_bytes
    with mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as memory:
        shared = np.frombuffer(memory, dtype=np.uint8)
        shared[:] = 0
        private = np.ones(size + _VECTOR_BYTES, dtype=np.uint8)[:size]
        methods = _methods(shared, private, rows, row_bytes)
        rates = {name: size / _seconds_per_pass(world, run) / 1e9 for name, run in methods.items()}
        if not bool((shared == 1).all()):
            raise AssertionError("the roofline's copy is wrong")
        del shared, methods
    best = max(rates, key=lambda name: rates[name])
    return {
        "ranks": world.size,
        "row_bytes": row_bytes,
        "working_set": size,
        "gb_per_s": round(rates[best], 3),
        "method": best,
        "methods": {name: round(rate, 3) for name, rate in rates.items()},
    }


def _methods(shared: np.ndarray, private: np.ndarray, rows: int, row_bytes: int) -> dict[str, Callable[[], Any]]:
    into, source = torch.from_numpy(shared), torch.from_numpy(private)
    destination_address, source_address = into.data_ptr(), source.data_ptr()
    return {
        "torch copy_": lambda: into.copy_(source),
        "memcpy": lambda: np.copyto(shared, private),
        "non-temporal": lambda: _stream_rows(destination_address, source_address, rows, row_bytes),
    }


def _seconds_per_pass(world: Any, run: Callable[[], Any]) -> float:
    """Median over passes of the time from the first rank's start to the last one's end.

    Ranks that share a core copy one after the other: a rank's own time would leave out what it waited for its turn.
    """
    world.gate.wait()
    start = clock()
    run()
    once = max(world.gather(clock() - start)) / 1e9
    passes = int(min(2000, max(5, _SECONDS_PER_METHOD / once)))
    samples = np.empty((2, passes), dtype=np.int64)
    with quiet_interpreter():
        for index in range(passes):
            world.gate.wait()
            samples[0, index] = clock()
            run()
            samples[1, index] = clock()
    everyone = np.stack(world.gather(samples))
    return float(np.median(everyone[:, 1].max(0) - everyone[:, 0].min(0))) / 1e9


class Rooflines:
    """Rooflines of one world, measured once per row size and order of magnitude of the working set."""

    def __init__(self, world: Any):
        self._world = world
        self._known: dict[tuple[int, int], dict] = {}

    def at(self, row_bytes: int, working_set: int) -> dict:
        """The roofline for moving about `working_set` bytes in rows of `row_bytes`; collective."""
        working_set = max(row_bytes, min(working_set, OUT_OF_CACHE_BYTES))
        key = (row_bytes, working_set.bit_length())
        if key not in self._known:
            self._known[key] = copy_roofline(self._world, row_bytes, working_set)
            self._world.emit("roofline", self._known[key])
        return self._known[key]
