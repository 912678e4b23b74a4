"""The weighted sum of several rows, anywhere in memory: what combine does with the rows of one token's experts.

One rank's program runs it over rows that other ranks wrote; whoever calls it has waited for them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from numba import types

from epcomm.device import control
from epcomm.device.cpu.arithmetic import F64, FORMATS, call_intrinsic, element_of, splat_like
from epcomm.device.cpu.compile import Kernel, kernel
from epcomm.device.cpu.fold import Fold, make_fold
from epcomm.device.cpu.memory import zero_bytes
from epcomm.kernels.protocol.arithmetic import check_row_sum

#: ``int64 f(int64 destination, int64 sources, int64 weights, int64 num_sources, int64 num_elements, int64 streaming)``
ROW_SUM_SIGNATURE = types.int64(*[types.int64] * 6)


@functools.cache
def row_sum(input_dtype: torch.dtype, output_dtype: torch.dtype) -> Kernel:
    """The kernel that writes the sum over k of ``weights[k] * sources[k][i]`` to ``destination[i]``, rounded once.

    `sources` is the address of `num_sources` addresses, none of which is the destination unless the dtypes are equal;
    `weights` that of as many float32s, or 0 for a plain sum. No sources give zeros. Products are added in the order of
    k with fused multiply-adds, in float32, or in float64 for a float64 input.

    `streaming` is for rows that no cache holds: the sources are prefetched, the stores bypass the caches, and the
    caller fences before it signals. It is 0, 1, or the address of `num_sources` addresses that the next call reads:
    those rows' first bytes are then fetched during this row's last, half as fast again for two sources of 14 KiB.
    """
    check_row_sum(input_dtype, output_dtype)
    for dtype in (input_dtype, output_dtype):
        FORMATS[dtype].check_available()
    name = "row_sum-" + "-".join(str(dtype).removeprefix("torch.") for dtype in (input_dtype, output_dtype))
    source, target = FORMATS[input_dtype], FORMATS[output_dtype]
    fold = make_fold(name, Fold(source, target, _add_product, weighted=True, prefetch=True))
    output_bytes = target.item_bytes

    def add_rows(destination, sources, weights, num_sources, num_elements, streaming):
        if num_sources == 0:
            zero_bytes(destination, num_elements * output_bytes)
        else:
            fold(destination, sources, weights, 1, num_sources, num_elements, streaming)
        return control.OK

    add_rows.__qualname__ = name  # as in make_fold
    return kernel(name, ROW_SUM_SIGNATURE)(add_rows)


def _add_product(builder: Any, accumulator: Any, value: Any, weight: Any) -> Any:
    element = element_of(value)
    weight = splat_like(builder, builder.fpext(weight, F64) if element == F64 else weight, value)
    if accumulator is None:
        return builder.fmul(value, weight)
    return call_intrinsic(builder, "fma", value, weight, accumulator)
