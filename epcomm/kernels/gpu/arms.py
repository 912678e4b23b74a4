"""Every arm of every kernel that users reach, to be compiled ahead of time: `GpuKernels` says what is in each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from epcomm.device.gpu.aot import name_of
from epcomm.device.gpu.bitcode import NETWORKS
from epcomm.device.gpu.compile import Kernel
from epcomm.kernels.gpu.target import GpuKernels
from epcomm.kernels.protocol import collectives
from epcomm.kernels.protocol.arithmetic import COMBINE_FORMS, ROW_SUM_DTYPES, SWITCH_DTYPES, SWITCH_OPS, supported_ops
from epcomm.kernels.protocol.lines import IN_LINES, LL128, PROTOCOLS, SIMPLE

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_INTEGERS = tuple(getattr(torch, f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u"))
_NOTHING = np.zeros(0, np.int64)  # for blocks that this target neither reads nor writes

#: (experts, ranks)
EXTENTS = ((8, 2), (64, 4), (256, 8), (512, 16))

#: (rows, scales) of a dispatch that quantises
QUANTIZED = ((_BF16, "float32"), (_BF16, "packed"), (_F16, "power_of_two"), (_F32, "float32"))
MORE_QUANTIZED = tuple(
    (dtype, scales) for dtype in (_BF16, _F16, _F32) for scales in ("float32", "power_of_two", "packed")
)

#: (expert outputs, results) of each tensor of a combine
COMBINES = (
    ((_BF16, _BF16),),
    ((_F16, _F16),),
    ((_F32, _F32),),
    ((_F64, _F64),),
    ((_BF16, _F32),),
    ((_F32, _BF16),),
    ((_BF16, _BF16), (_F32, _F32)),
)
MORE_COMBINES = tuple(((rows, results),) for rows in ROW_SUM_DTYPES for results in ROW_SUM_DTYPES) + (
    ((_BF16, _F32), (_F16, _F32), (_F64, _F64)),
)

#: the same, and their scales, of a combine that quantises
QUANTIZED_COMBINES = (
    (((_BF16, _BF16),), "float32"),
    (((_F16, _F32),), "power_of_two"),
    (((_F32, _F64),), "float32"),
)
MORE_QUANTIZED_COMBINES = tuple(
    (((rows, results),), form) for rows in (_BF16, _F16, _F32) for results in ROW_SUM_DTYPES for form in COMBINE_FORMS
)

#: one of each size and kind of number; each kind of arithmetic
REDUCTIONS = (
    *((dtype, "sum") for dtype in (_BF16, _F16, _F32, _F64, torch.int8, torch.int16, torch.int32, torch.int64)),
    *((_BF16, op) for op in ("avg", "min", "prod")),
    *((torch.int32, op) for op in ("avg", "max", "prod", "bxor")),
    *((dtype, "avg") for dtype in (_F32, torch.int8, torch.int64, torch.uint64)),
)
MORE_REDUCTIONS = tuple((dtype, op) for dtype in (_BF16, _F16, _F32, _F64, *_INTEGERS) for op in supported_ops(dtype))

#: (reduction, protocol) of plans whose partial sums are float32
WIDE_SUMS = [((_BF16, "sum"), SIMPLE), ((_F16, "avg"), LL128)]
MORE_WIDE_SUMS = [((dtype, op), way) for way in PROTOCOLS for dtype in (_BF16, _F16) for op in ("sum", "avg", "prod")]


def _block(root: int = -1, are_alone: bool = False) -> np.ndarray:
    """What a target reads in a collective's parameter block to choose an arm."""
    words = np.zeros(collectives.NUM_WORDS, np.int64)
    words[[collectives.ROOT, collectives.ARE_ALONE]] = root, are_alone
    return words


def arms(everything: bool = False) -> dict[str, Kernel]:
    """Arms by name, such as "dispatch EXPERTS=256 RANKS=8": a representative few, or all that users reach.

    Those of ranks that load and store don't reach are in `link_arms`.
    """
    found = [*_arms(QUANTIZED, COMBINES, QUANTIZED_COMBINES, REDUCTIONS, everything)]
    if everything:
        found += _arms(MORE_QUANTIZED, MORE_COMBINES, MORE_QUANTIZED_COMBINES, MORE_REDUCTIONS, everything)
    return {name_of(kernel): kernel for kernel in found}  # several operations may share one


def link_arms(everything: bool = False) -> dict[str, Kernel]:
    """Arms by name that are linked with a network's device library, for each of `NETWORKS`: their constant NETWORK.

    A few of each, or whatever of the representative ones reaches other ranks.
    """
    found = [kernel for network in NETWORKS for kernel in _network_arms(network, everything)]
    return {name_of(kernel): kernel for kernel in found if kernel.network in NETWORKS}


def _network_arms(network: str, everything: bool) -> Iterator[Kernel]:
    kernels = GpuKernels()
    kernels.network = network
    yield from (kernels.barrier(), kernels.send(), kernels.recv())
    yield from (kernels.exchange(_block(), None, True), kernels.exchange(_block(root=0), None, True))
    yield kernels.reduce(_block(), "rails", _BF16, "sum")
    yield kernels.execute_plan(_NOTHING, (_BF16, "sum"), SIMPLE, False)
    if everything:
        yield from _expert_parallel_arms(kernels, QUANTIZED, COMBINES, QUANTIZED_COMBINES, False)
        yield kernels.reduce(_block(), "rails", _F32, "sum")
        yield kernels.reduce(_block(are_alone=True), "rails", _BF16, "sum")
        yield kernels.exchange(_block(), (_BF16, "sum"), True)
        yield kernels.execute_plan(_NOTHING, (_BF16, "sum"), SIMPLE, True)
        yield kernels.execute_plan(_NOTHING, None, SIMPLE, False)
    else:
        yield from (kernels.exchange_counts(256, 8), kernels.dispatch(256, 8, False))
        by_rank = kernels.combine(_NOTHING, COMBINES[0], 8, True, None)
        yield from (by_rank, kernels.combine_receive(by_rank))


def _quantized_dispatch(kernels: GpuKernels, is_expanded: bool, dtype: torch.dtype, form: str) -> Kernel:
    kernel = kernels.quantized_dispatch(_NOTHING, 256, 8, is_expanded, dtype, form, 0)
    assert kernel is not None, form
    return kernel


def _arms(
    quantized: Sequence[tuple[torch.dtype, str]],
    combines: Sequence[tuple],
    quantized_combines: Sequence[tuple],
    reductions: Sequence[tuple[torch.dtype, str]],
    everything: bool,
) -> Iterator[Kernel]:
    kernels = GpuKernels()
    yield from (kernels.barrier(), kernels.send(), kernels.recv())
    yield from _expert_parallel_arms(kernels, quantized, combines, quantized_combines, everything)
    yield kernels.exchange(_NOTHING, None, False)
    for reduction in reductions:
        yield kernels.reduce(_NOTHING, "one_shot", *reduction)
        yield kernels.reduce(_NOTHING, "two_shot", *reduction)
        yield kernels.exchange(_NOTHING, reduction, False)
    yield from (kernels.exchange(_block(), None, True), kernels.exchange(_block(root=0), None, True))
    for reduction in reductions if everything else reductions[::5]:
        yield from (kernels.reduce(_block(are_alone=alone), "rails", *reduction) for alone in (False, True))
        yield kernels.exchange(_block(), reduction, True)
    for way in PROTOCOLS:
        yield kernels.execute_plan(_NOTHING, None, way, False)
    for reduction in reductions if everything else reductions[::8]:
        yield kernels.execute_plan(_NOTHING, reduction, SIMPLE, False)
    for reduction, way in itertools.product(reductions if everything else reductions[:1], IN_LINES):
        yield kernels.execute_plan(_NOTHING, reduction, way, False)
    for reduction, way in MORE_WIDE_SUMS if everything else WIDE_SUMS:
        yield kernels.execute_plan(_NOTHING, reduction, way, True)
    for dtype, op in itertools.product(SWITCH_DTYPES, SWITCH_OPS):
        yield kernels.reduce(_NOTHING, "multimem", dtype, op)


def _expert_parallel_arms(
    kernels: GpuKernels,
    quantized: Sequence[tuple[torch.dtype, str]],
    combines: Sequence[tuple],
    quantized_combines: Sequence[tuple],
    everything: bool,
) -> Iterator[Kernel]:
    yield kernels.route()
    for extents in EXTENTS:
        yield kernels.exchange_counts(*extents)
        for is_expanded in (False, True):
            whole = kernels.dispatch(*extents, is_expanded)
            yield from (whole, kernels.dispatch_receive(whole))
    for rows in quantized:
        yield _quantized_dispatch(kernels, False, *rows)
    for rows in quantized if everything else quantized[:1]:
        yield _quantized_dispatch(kernels, True, *rows)
    for dtypes in combines:
        yield kernels.combine(_NOTHING, dtypes, 8, False, None)
    for dtypes in combines if everything else (combines[0], combines[-1]):
        by_rank = kernels.combine(_NOTHING, dtypes, 8, True, None)
        yield from (by_rank, kernels.combine_receive(by_rank))
    for dtypes, form in quantized_combines:
        yield kernels.combine(_NOTHING, dtypes, 8, False, form)
        by_rank = kernels.combine(_NOTHING, dtypes, 8, True, form)
        yield from (by_rank, kernels.combine_receive(by_rank))
