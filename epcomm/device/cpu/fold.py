"""The loop nest of the n-ary kernels: destination[i] = fold over k of sources[k][i], in one pass, in the order of k.

Columns are taken in blocks as wide as the registers allow. For each block an inner loop over the sources, whose number
is known at run time only, folds one source's columns into accumulators that stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from epcomm.device.cpu.arithmetic import Format, Values, convert, cpu_features
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import F32, I64, VECTOR_BYTES, pointer, prefetch, prefetch_line, word

#: Accumulators of 64 bytes in a block: half of the registers of AVX-512, else half of 512 bytes (AVX2, NEON).
ACCUMULATORS = 16 if "avx512f" in cpu_features() else 4
#: Streaming takes narrower blocks: more sources' lines are then on their way from memory at once.
_STREAMING_ACCUMULATORS = 4
#: Bytes that streaming fetches ahead of its loads, shared by all sources: with many more, lines are evicted before use.
_PREFETCH_BYTES = 8192
_LEAST_PREFETCH_BYTES = 256
#: Tells a flag from an address: nothing is mapped in the first page.
_LEAST_ADDRESS = 4096


@dataclass(frozen=True)
class Fold:
    """What to compute, as emitters of IR."""

    input: Format
    output: Format
    #: ``(builder, accumulator, value, weight) -> accumulator``; the accumulator is None for source 0, the weight (a
    #: scalar) None if not `weighted`
    combine: Callable[[Any, Any, Any, Any], Any]
    #: ``(builder, accumulator, divisor) -> accumulator``, once per column at the end; the divisor is the call's
    finish: Callable[[Any, Any, Any], Any] | None = None
    #: of source 0, if that is another one than the others'
    first: Format | None = None
    weighted: bool = False
    #: when streaming; for sources so short that the hardware's prefetcher is still learning when they end
    prefetch: bool = False

    @property
    def step_items(self) -> int:
        """The least number of items that fill whole vectors of all formats."""
        formats = self.input, self.output, self.first or self.input
        return VECTOR_BYTES // min(each.item_bytes for each in formats)

    def block_items(self, accumulators: int) -> int:
        """Items of whole steps in a block of at most so many accumulators, but at least one step."""
        step_accumulators = self.step_items * self.input.accumulator_bytes // VECTOR_BYTES
        return self.step_items * max(1, accumulators // step_accumulators)


def _columns(fold: Fold, items: int, streaming: bool = False) -> Any:
    """Folds columns `first` .. `first + items`; one item is done in scalars.

    The streaming one also prefetches as many columns of `ahead_sources`, from the byte offset `ahead` on.
    """
    single = items == 1
    in_bytes, out_bytes = items * fold.input.item_bytes, items * fold.output.item_bytes
    one = ir.Constant(F32, 1.0)

    @intrinsic
    def columns(typingctx, destination, sources, weights, divisor, num_sources, first, ahead_sources, ahead):
        def codegen(context, builder, signature, args):
            destination, sources, weights, divisor, num_sources, first, ahead_sources, ahead = args
            out_offset = builder.mul(first, I64(fold.output.item_bytes))
            if fold.weighted:
                # without weights every source's weight is read from the same constant
                constant = builder.ptrtoint(cgutils.global_constant(builder, "one", one), I64)
                plain = builder.icmp_signed("==", weights, I64(0))
                weights = builder.select(plain, constant, weights)
                weight_bytes = builder.select(plain, I64(0), I64(4))

            def fold_source(k, accumulators):
                stored = fold.input if accumulators or fold.first is None else fold.first
                offset = builder.mul(first, I64(stored.item_bytes))
                source = builder.add(load_word(builder, sources, k), offset)
                weight = None
                if fold.weighted:
                    weight = builder.load(pointer(builder, builder.add(weights, builder.mul(k, weight_bytes)), F32))
                if streaming and fold.prefetch:
                    ahead_source = builder.add(load_word(builder, ahead_sources, k), ahead)
                    for line in range(0, in_bytes, VECTOR_BYTES):
                        prefetch(builder, builder.add(ahead_source, I64(line)))
                values: Values = []
                for at in range(0, items * stored.item_bytes, VECTOR_BYTES):
                    values += stored.load(builder, builder.add(source, I64(at)), vector=not single)
                values = convert(builder, values, stored, fold.input)
                return [
                    fold.combine(builder, accumulator, value, weight)
                    for accumulator, value in zip(accumulators or [None] * len(values), values, strict=True)
                ]

            results = loop_over_sources(builder, num_sources, fold_source)
            if fold.finish is not None:
                results = [fold.finish(builder, result, divisor) for result in results]
            results = convert(builder, results, fold.input, fold.output)
            per_vector = len(results) * VECTOR_BYTES // out_bytes if not single else 1
            for index in range(0, len(results), per_vector):
                at = builder.add(builder.add(destination, out_offset), I64(index // per_vector * VECTOR_BYTES))
                fold.output.store(builder, results[index : index + per_vector], at, streaming)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return columns


def load_word(builder: Any, block: Any, index: Any) -> Any:
    """Word `index` (64 bits) of the block at address `block`."""
    return builder.load(pointer(builder, builder.add(block, builder.shl(index, I64(3))), I64))


def loop_over_sources(builder: Any, num_sources: Any, fold_source: Callable[[Any, Values | None], Values]) -> Values:
    """``fold_source(k, accumulators)`` for k = 0 (where there are none yet), then 1 up to `num_sources`."""
    initial = fold_source(I64(0), None)
    before = builder.block
    loop, after = builder.append_basic_block("source"), builder.append_basic_block("folded")
    builder.cbranch(builder.icmp_signed(">", num_sources, I64(1)), loop, after)

    builder.position_at_end(loop)
    k = builder.phi(I64)
    k.add_incoming(I64(1), before)
    accumulators = [builder.phi(value.type) for value in initial]
    updated = fold_source(k, accumulators)
    following = builder.add(k, I64(1))
    k.add_incoming(following, builder.block)
    for accumulator, start, value in zip(accumulators, initial, updated, strict=True):
        accumulator.add_incoming(start, before)
        accumulator.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, num_sources), loop, after)
    last = builder.block

    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in initial]
    for result, start, value in zip(results, initial, updated, strict=True):
        result.add_incoming(start, before)
        result.add_incoming(value, last)
    return results


def make_fold(name: str, fold: Fold) -> Any:
    """``f(destination, sources, weights, divisor, num_sources, num_items, streaming)`` for kernels.

    There is at least one source. `streaming` is 0, another flag, or the address of the sources of the call that
    follows: as many addresses, whose first bytes are then fetched while this call reads its last. `name` is that of the
    kernel which is made of it.
    """
    step_items, block_items = fold.step_items, fold.block_items(ACCUMULATORS)
    stream_items = fold.block_items(_STREAMING_ACCUMULATORS)
    item, step, block = _columns(fold, 1), _columns(fold, step_items), _columns(fold, block_items)
    stream = _columns(fold, stream_items, streaming=True)
    in_bytes, out_bytes = fold.input.item_bytes, fold.output.item_bytes
    prefetches = fold.prefetch

    def run(destination, sources, weights, divisor, num_sources, num_items, streaming):
        done = 0
        unaligned = -destination & (VECTOR_BYTES - 1)
        if streaming != 0 and unaligned % out_bytes == 0:
            head = min(unaligned // out_bytes, num_items)
            while done < head:
                item(destination, sources, weights, divisor, num_sources, done, 0, 0)
                done += 1
            # what lies `distance` ahead may be in this call's sources or in those of the call that follows
            row_bytes = num_items * in_bytes
            distance = min(max(_PREFETCH_BYTES // num_sources, _LEAST_PREFETCH_BYTES), row_bytes)
            has_following = streaming >= _LEAST_ADDRESS
            if prefetches and not has_following:
                for at in range(0, distance, VECTOR_BYTES):
                    for k in range(num_sources):
                        prefetch_line(word(sources, k) + done * in_bytes + at)
            following = streaming if has_following else sources
            while done + stream_items <= num_items:
                ahead = done * in_bytes + distance
                if ahead < row_bytes:
                    ahead_sources = sources
                else:
                    ahead_sources, ahead = following, ahead - row_bytes
                stream(destination, sources, weights, divisor, num_sources, done, ahead_sources, ahead)
                done += stream_items
        while done + block_items <= num_items:
            block(destination, sources, weights, divisor, num_sources, done, 0, 0)
            done += block_items
        while done + step_items <= num_items:
            step(destination, sources, weights, divisor, num_sources, done, 0, 0)
            done += step_items
        while done < num_items:
            item(destination, sources, weights, divisor, num_sources, done, 0, 0)
            done += 1

    # Machine code is linked by this name and a counter: in the caches that two processes left, the counters can agree.
    run.__qualname__ = f"fold-{name}"
    return device(run)
