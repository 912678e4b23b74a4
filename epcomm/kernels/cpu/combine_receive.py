"""The receiving half of a combine: sums the rows of this rank's tokens, read from their owners' output blocks.

Roles, all programs: wait for every peer's READY, then sum the rows of their share of the tokens, in slot order (by
rank: in rank order), in float32 (float64 for float64), rounded once; the last to finish raises DONE at every peer. Rows
that were quantised are summed by another T_ROW_SUM.

Edges
  RAW  READY: the peer's expert outputs (by rank: their sums per token) are in the output block whose number it carries,
       or in the returns if the peer is on another node.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.function import call6
from epcomm.device.cpu.memory import fence, load32, load_acquire, load_float, set_word, store_float, word
from epcomm.kernels.cpu.counts import base_of, meet_everyone, raise_everywhere, signal_word
from epcomm.kernels.cpu.phases import arrive
from epcomm.kernels.cpu.returns import returns
from epcomm.kernels.cpu.slots import is_dropped
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _output_block(ctx, state, rank, epoch):
    """Address of the output block that `rank` named in its READY of this epoch."""
    ready = signal_word(ctx, state, protocol.READY + (epoch & 1), word(ctx, control.RANK), rank)
    # the number comes from a peer: never let it lead outside of the segment
    block = min(load_acquire(ready) & protocol.PAYLOAD_MASK, word(state, protocol.NUM_OUTPUTS) - 1)
    return base_of(state, rank) + word(state, protocol.OUTPUTS) + block * word(state, protocol.OUTPUT_BYTES)


# What is gathered of one token before its rows are summed: a record of words in the program's scratch memory. Two
# records alternate, so that while one token's rows are summed the first bytes of the next one's are already fetched.
_COUNT, _ROWS = 0, 1  # number of rows; then (block address, word with a tensor's offset there, row number) of each
_ROW_WORDS = 3
# behind them, for `most` = MOST_SOURCES: each slot's row or -1; each row's weight (float32); each row's address


@device
def _slots(record, most):
    return record + 8 * (_ROWS + _ROW_WORDS * most)


@device
def _weights(record, most):
    return record + 8 * (_ROWS + (_ROW_WORDS + 1) * most)


@device
def _sources(record, most):
    return record + 8 * (_ROWS + (_ROW_WORDS + 2) * most)


@device
def _add_row(ctx, state, record, count, rank, epoch, row, returned):
    """Adds a row to a record: it is at `rank`, or came back from another node to row `returned`."""
    at = record + 8 * (_ROWS + _ROW_WORDS * count)
    if base_of(state, rank) != 0:
        set_word(at, 0, _output_block(ctx, state, rank, epoch))
        set_word(at, 1, protocol.T_OFFSET)
        set_word(at, 2, row)
    else:
        set_word(at, 0, returns(ctx, state))
        set_word(at, 1, protocol.T_RETURN)
        set_word(at, 2, returned)


@device
def _gather(ctx, args, state, epoch, token, record):
    """Finds a token's rows and their weights."""
    if word(args, protocol.BY_RANK):
        _gather_ranks(ctx, args, state, epoch, token, record)
    else:
        _gather_slots(ctx, args, state, epoch, token, record)


@device
def _gather_slots(ctx, args, state, epoch, token, record):
    """The rows of a token's experts, in slot order. A slot that repeats an expert adds its weight to that row's."""
    routing, most = word(args, protocol.ROUTING), word(state, protocol.MOST_SOURCES)
    topk, given = word(routing, protocol.TOPK), word(args, protocol.WEIGHTS)
    owner, base, departure = (
        word(state, protocol.OWNER),
        word(routing, protocol.BASE),
        word(routing, protocol.DEPARTURE),
    )
    slots, weights = _slots(record, most), _weights(record, most)
    count = 0
    for slot in range(topk):
        at = token * topk + slot
        expert = load32(word(routing, protocol.EXPERT) + 4 * at)
        row = -1
        if expert >= 0:
            row = load32(base + 4 * expert) + load32(word(routing, protocol.POSITION) + 4 * at)
            if is_dropped(state, row):
                row = -1
        if row >= 0:
            returned = load32(departure + 4 * expert) + load32(word(routing, protocol.POSITION) + 4 * at)
            _add_row(ctx, state, record, count, load32(owner + 4 * expert), epoch, row, returned)
            if given != 0:
                store_float(weights + 4 * count, load_float(given + 4 * at))
            set_word(slots, slot, count)
            count += 1
        elif expert >= -1:
            set_word(slots, slot, -1)
        else:
            number = word(slots, -2 - expert)
            set_word(slots, slot, number)
            if given != 0 and number >= 0:
                store_float(weights + 4 * number, load_float(weights + 4 * number) + load_float(given + 4 * at))
    set_word(record, _COUNT, count)


@device
def _gather_ranks(ctx, args, state, epoch, token, record):
    """A token's row on each rank, in rank order. Their weights were applied there."""
    routing, size = word(args, protocol.ROUTING), word(ctx, control.SIZE)
    base = word(routing, protocol.BASE) + 4 * word(state, protocol.NUM_EXPERTS)
    departure = word(routing, protocol.DEPARTURE) + 4 * word(state, protocol.NUM_EXPERTS)
    is_flat = word(state, protocol.LAYOUT) == protocol.FLAT
    count = 0
    for rank in range(size):
        position = load32(word(routing, protocol.RANK_POSITION) + 4 * (token * size + rank))
        row = load32(base + 4 * rank) + position
        if position >= 0 and not (is_flat and is_dropped(state, row)):
            _add_row(ctx, state, record, count, rank, epoch, row, load32(departure + 4 * rank) + position)
            count += 1
    set_word(record, _COUNT, count)


@device
def _locate(record, most, tensor):
    """Fills in the addresses of the gathered rows in one tensor; returns where they are."""
    sources = _sources(record, most)
    row_bytes = word(tensor, protocol.T_ROW_BYTES)
    for k in range(word(record, _COUNT)):
        at = record + 8 * (_ROWS + _ROW_WORDS * k)
        set_word(sources, k, word(at, 0) + word(tensor, word(at, 1)) + word(at, 2) * row_bytes)
    return sources


@device
def _sum_token(args, most, token, record, following):
    """out[token] = bias[token] + the weighted sum of the gathered rows, for every tensor.

    `following` is the record of the token that comes next, whose rows are fetched ahead, or 0 while caches hold all.
    """
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
        sources, weights, count = _locate(record, most, tensor), _weights(record, most), word(record, _COUNT)
        bias = word(tensor, protocol.T_BIAS)
        if bias != 0:
            set_word(sources, count, bias + token * word(tensor, protocol.T_BIAS_STRIDE))
            store_float(weights + 4 * count, 1.0)
            count += 1
        call6(
            word(tensor, protocol.T_ROW_SUM),
            word(tensor, protocol.T_OUT) + token * word(tensor, protocol.T_OUT_STRIDE),
            sources,
            weights if word(args, protocol.WEIGHTS) != 0 and not word(args, protocol.BY_RANK) else 0,
            count,
            word(tensor, protocol.T_ELEMENTS),
            _locate(following, most, tensor) if following != 0 else 0,
        )


@device
def _write_slots(args, most, token, topk, record, streaming):
    """out[token, slot] = the slot's row, zeros for a slot without expert (reduce=False)."""
    given = word(args, protocol.WEIGHTS)
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
        sources = _locate(record, most, tensor)
        for slot in range(topk):
            number = word(_slots(record, most), slot)
            out = word(tensor, protocol.T_OUT) + (token * topk + slot) * word(tensor, protocol.T_OUT_STRIDE)
            weight = given + 4 * (token * topk + slot) if given != 0 else 0
            elements, row_sum = word(tensor, protocol.T_ELEMENTS), word(tensor, protocol.T_ROW_SUM)
            call6(row_sum, out, sources + 8 * max(number, 0), weight, number >= 0, elements, streaming)


@device
def _combine_tokens(ctx, args, state, epoch, first, last, record, record_bytes):
    """Sums (or writes) the rows of tokens first..last - 1."""
    routing, most = word(args, protocol.ROUTING), word(state, protocol.MOST_SOURCES)
    moved = word(routing, protocol.TOTAL_ROWS) * word(args, protocol.ROW_BYTES_TOTAL)
    streaming = moved > word(state, protocol.STREAMING_BYTES)
    if first < last:
        _gather(ctx, args, state, epoch, first, record)
    for token in range(first, last):
        following = record + record_bytes if (token - first) % 2 == 0 else record - record_bytes
        if token + 1 < last:
            _gather(ctx, args, state, epoch, token + 1, following)
        if word(args, protocol.REDUCE):
            _sum_token(args, most, token, record, following if streaming else 0)
        else:
            _write_slots(args, most, token, word(routing, protocol.TOPK), record, streaming)
        record = following
    if streaming:
        fence()


@device
def sum_rows(ctx, args, epoch, program, num_programs):
    """This program's part in the receiving half of combine `epoch`."""
    state, routing = word(args, protocol.STATE), word(args, protocol.ROUTING)
    kind, value = protocol.READY + (epoch & 1), epoch << protocol.PAYLOAD_BITS
    status = meet_everyone(ctx, state, kind, value, sites.COMBINE_READY)  # RAW
    if status != control.OK:
        return status
    num_tokens, scratch_bytes = word(routing, protocol.NUM_TOKENS), word(state, protocol.SCRATCH_BYTES)
    first, last = num_tokens * program // num_programs, num_tokens * (program + 1) // num_programs
    scratch, record_bytes = word(state, protocol.SCRATCH) + program * scratch_bytes, scratch_bytes // 2
    _combine_tokens(ctx, args, state, epoch, first, last, scratch, record_bytes)
    if arrive(state, num_programs):
        set_word(state, protocol.COMBINE_EPOCH, epoch)
        raise_everywhere(ctx, state, protocol.DONE, epoch)
    return control.OK


@kernel("combine_receive")
def combine_receive(ctx, args, program, num_programs):
    """For a combine that only sent."""
    epoch = word(word(args, protocol.STATE), protocol.COMBINE_EPOCH) + 1
    return sum_rows(ctx, args, epoch, program, num_programs)
