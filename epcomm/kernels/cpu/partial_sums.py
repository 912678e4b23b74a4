"""Combine by rank, before anything travels back: the weighted sum of each token's rows on this rank.

The weights are the token's rank's: it pushes them to the arrivals of whoever has the rows. The sum is in slot order, in
float32 (float64 for float64), and rounded once to the dtype of y; or quantised, as float32.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.function import call5, call6
from epcomm.device.cpu.memory import load32, load_float, set_word, store_float, word
from epcomm.kernels.cpu.counts import base_of, meet_everyone, raise_at
from epcomm.kernels.cpu.departures import departures, send_weights
from epcomm.kernels.cpu.phases import arrive
from epcomm.kernels.cpu.slots import scales_of, slot_weight
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def share_weights(ctx, args, state, epoch, program, num_programs):
    """Pushes the weights of this program's tokens to the ranks that have their rows."""
    routing, weights = word(args, protocol.ROUTING), word(args, protocol.WEIGHTS)
    size, topk = word(ctx, control.SIZE), word(routing, protocol.TOPK)
    base = word(routing, protocol.BASE) + 4 * word(state, protocol.NUM_EXPERTS)
    departure = word(routing, protocol.DEPARTURE) + 4 * word(state, protocol.NUM_EXPERTS)
    num_tokens = word(routing, protocol.NUM_TOKENS)
    for token in range(num_tokens * program // num_programs, num_tokens * (program + 1) // num_programs):
        for rank in range(size):
            position = load32(word(routing, protocol.RANK_POSITION) + 4 * (token * size + rank))
            if position >= 0:
                row, block = load32(base + 4 * rank) + position, base_of(state, rank)
                if block != 0:
                    factors = block + word(state, protocol.ARRIVALS) + word(state, protocol.ARRIVED_FACTOR)
                else:
                    row = load32(departure + 4 * rank) + position
                    factors = departures(ctx, state) + word(state, protocol.DEPARTING + protocol.R_FACTOR)
                factors += 4 * topk * row
                for slot in range(topk):  # those of other ranks' experts aren't read
                    store_float(factors + 4 * slot, slot_weight(routing, weights, token, slot, topk))
    if arrive(state, num_programs):
        me = word(ctx, control.RANK)
        for distance in range(size):
            rank = (me + distance) % size
            if base_of(state, rank) == 0:
                send_weights(ctx, args, state, rank)
            raise_at(ctx, state, rank, protocol.WEIGHTED, epoch)


@device
def sum_on_this_rank(ctx, args, state, block, epoch, program, num_programs):
    """Puts the sums of this program's share of what arrived into the output block."""
    routing = word(args, protocol.ROUTING)
    weighted = word(args, protocol.HAS_WEIGHTS)
    if weighted:
        status = meet_everyone(ctx, state, protocol.WEIGHTED, epoch, sites.COMBINE_WEIGHTED)  # RAW
        if status != control.OK:
            return status
    topk, num_arrived = word(routing, protocol.TOPK), word(routing, protocol.NUM_ARRIVED)
    arrivals = base_of(state, word(ctx, control.RANK)) + word(state, protocol.ARRIVALS)
    weights = word(state, protocol.SCRATCH) + program * word(state, protocol.SCRATCH_BYTES)
    sources = weights + 8 * word(state, protocol.MOST_SOURCES)
    whole = sources + 8 * word(state, protocol.MOST_SOURCES)  # a row of float32s, before it is quantised
    whole += -whole & (control.LINE - 1)
    for row in range(num_arrived * program // num_programs, num_arrived * (program + 1) // num_programs):
        for i in range(word(args, protocol.NUM_TENSORS)):
            tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
            count = 0
            for slot in range(topk):
                place = load32(word(routing, protocol.PLACES) + 4 * (row * topk + slot))
                if place >= 0:
                    source = word(tensor, protocol.T_ADDRESS) + place * word(tensor, protocol.T_STRIDE)
                    set_word(sources, count, source)
                    if weighted:
                        factor = arrivals + word(state, protocol.ARRIVED_FACTOR) + 4 * (row * topk + slot)
                        store_float(weights + 4 * count, load_float(factor))
                    count += 1
            out = block + word(tensor, protocol.T_OFFSET) + row * word(tensor, protocol.T_ROW_BYTES)
            elements, quantize = word(tensor, protocol.T_ELEMENTS), word(tensor, protocol.T_QUANTIZE)
            to = out if quantize == 0 else whole
            call6(word(tensor, protocol.T_PARTIAL_SUM), to, sources, weights if weighted else 0, count, elements, 0)
            if quantize != 0:
                argument = word(tensor, protocol.T_QUANTIZE_ARGUMENT)
                call5(quantize, whole, out, scales_of(out, elements), elements, argument)
    return control.OK
