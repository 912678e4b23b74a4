"""The loops of the proof, compiled: over all steps in an order in which they could run.

Each takes `steps`, int64 [num_steps, NUM_COLUMNS] with the columns below. Numbers of steps follow programs: step `i`
comes right after `i - 1` unless its INDEX is 0. MATCH is the step that sends what this one receives, FIRST_DEPENDENCY
and END_DEPENDENCY bound its part of `dependencies`; SRC and DST are addresses in the memory of its rank.
"""

from __future__ import annotations

from numba import types

from epcomm.device.cpu.compile import host_function
from epcomm.kernels.protocol.plans import READS, RECEIVES, REDUCES, SENDS, WRITES  # bits of FLAGS

RANK, PROGRAM, INDEX, FLAGS, COUNT, SRC, DST, MATCH, FIRST_DEPENDENCY, END_DEPENDENCY = range(10)
NUM_COLUMNS = 10

#: A chunk nothing was ever written to.
UNDEFINED = 0
#: What is wrong with a value: nothing; it has a part that is undefined; it sums different positions, or a rank twice.
SOUND, HAS_UNDEFINED, IS_MIXED, IS_TWICE = 0, 1, 2, 3

#: Which program uses a chunk, if it isn't one.
NOBODY, SEVERAL = -1, -2

_COLUMN = types.int64[::1]
_TABLE = types.int64[:, ::1]


@host_function("plan_order", types.int64(_COLUMN, _COLUMN, _COLUMN, _COLUMN))
def order_of(first_later, later, num_earlier, order):
    """Fills `order` with all steps, each after those that must be complete before it; returns how many it could place.

    `later[first_later[i] : first_later[i + 1]]` wait for step i, which itself waits for `num_earlier[i]` (consumed).
    """
    num_ready = 0
    for i in range(len(num_earlier)):
        if num_earlier[i] == 0:
            order[num_ready] = i
            num_ready += 1
    at = 0
    while at < num_ready:
        i = order[at]
        for entry in range(first_later[i], first_later[i + 1]):
            j = later[entry]
            num_earlier[j] -= 1
            if num_earlier[j] == 0:
                order[num_ready] = j
                num_ready += 1
        at += 1
    return num_ready


@host_function("plan_users", types.int64(_TABLE, _COLUMN, _COLUMN, types.boolean[::1]))
def users_of(steps, memory_of_rank, users, is_written):
    """Finds which program of its rank uses each chunk: itself, SEVERAL, or NOBODY, as which `users` starts; returns 0.

    Chunks are those of all ranks, rank r's from memory_of_rank[r]; `is_written` starts as false.
    """
    for i in range(len(steps)):
        for operand in range(2):
            is_dst = operand == 1
            if not is_dst and not steps[i, FLAGS] & READS or is_dst and not steps[i, FLAGS] & WRITES:
                continue
            first = memory_of_rank[steps[i, RANK]] + (steps[i, DST] if is_dst else steps[i, SRC])
            for chunk in range(first, first + steps[i, COUNT]):
                if users[chunk] == NOBODY:
                    users[chunk] = steps[i, PROGRAM]
                elif users[chunk] != steps[i, PROGRAM]:
                    users[chunk] = SEVERAL
                is_written[chunk] |= is_dst
    return 0


@host_function(
    "plan_race", types.int64(_TABLE, _COLUMN, _COLUMN, types.int64, types.int32[:, ::1], _COLUMN, _TABLE, _COLUMN)
)
def race_of(steps, dependencies, order, rank, clocks, last_write, last_read, pair):
    """Fills `pair` with two steps of the rank that access a chunk, one of them writing, in no order; returns if any.

    `clocks[i, p]` becomes the number of steps of the rank's program p that are complete before step i is; it starts as
    zeros. `last_write[address]` and `last_read[address, program]` start as -1. It suffices to compare each access with
    the write before it and each write with the reads since: an order of those puts all others in order.
    """
    num_programs = clocks.shape[1]
    for i in order:
        if steps[i, INDEX] > 0:
            for p in range(num_programs):
                clocks[i, p] = clocks[i - 1, p]
        if steps[i, MATCH] >= 0:
            for p in range(num_programs):
                clocks[i, p] = max(clocks[i, p], clocks[steps[i, MATCH], p])
        for entry in range(steps[i, FIRST_DEPENDENCY], steps[i, END_DEPENDENCY]):
            for p in range(num_programs):
                clocks[i, p] = max(clocks[i, p], clocks[dependencies[entry], p])
        if steps[i, RANK] != rank:
            continue
        program, flags = steps[i, PROGRAM], steps[i, FLAGS]
        for operand in range(2):
            is_dst = operand == 1
            if not is_dst and not flags & READS or is_dst and not flags & WRITES:
                continue
            first = steps[i, DST] if is_dst else steps[i, SRC]
            for address in range(first, first + steps[i, COUNT]):
                writer = last_write[address]
                if writer >= 0 and writer != i and clocks[i, steps[writer, PROGRAM]] <= steps[writer, INDEX]:
                    pair[0], pair[1] = writer, i
                    return 1
                if not is_dst:
                    last_read[address, program] = i
                    continue
                for p in range(num_programs):
                    reader = last_read[address, p]
                    if reader >= 0 and reader != i and clocks[i, p] <= steps[reader, INDEX]:
                        pair[0], pair[1] = reader, i
                        return 1
                    last_read[address, p] = -1
                last_write[address] = i
        clocks[i, program] = steps[i, INDEX] + 1
    return 0


@host_function(
    "plan_dataflow", types.int64(_TABLE, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _COLUMN, _TABLE, types.int64)
)
def dataflow_of(steps, order, memory_of_rank, memory, writers, first_message, messages, sums, num_leaves):
    """Runs the steps on symbols; returns the number of sums made.

    A value is UNDEFINED, a leaf (1 to num_leaves), or num_leaves + 1 + s for `sums[s]`, two values. `memory` holds the
    values of all ranks' chunks, rank r's from memory_of_rank[r], `writers` the step that wrote each last; the message
    of step i is at first_message[i] in `messages`.
    """
    num_sums = 0
    for i in order:
        flags, base = steps[i, FLAGS], memory_of_rank[steps[i, RANK]]
        src, dst, match = base + steps[i, SRC], base + steps[i, DST], steps[i, MATCH]
        for chunk in range(steps[i, COUNT]):
            value = UNDEFINED
            if flags & RECEIVES:
                value = messages[first_message[match] + chunk]
            elif flags & REDUCES:
                value = memory[dst + chunk]
            if flags & REDUCES:
                sums[num_sums, 0], sums[num_sums, 1] = memory[src + chunk], value
                num_sums += 1
                value = num_leaves + num_sums
            elif flags & READS:
                value = memory[src + chunk]
            if flags & WRITES:
                memory[dst + chunk] = value
                writers[dst + chunk] = i
            if flags & SENDS:
                messages[first_message[i] + chunk] = value
    return num_sums


@host_function("plan_contents", types.int64(_TABLE, types.int64, _COLUMN, types.uint64[:, ::1], _COLUMN, _COLUMN))
def contents_of(sums, num_leaves, positions, ranks, states, depths):
    """What each value is made of: of which ranks' chunks (a bit each in `ranks`), at which position; returns 0.

    The rows of UNDEFINED and of the leaves are given; the sums' follow. `depths` is the longest chain of sums in it.
    """
    for s in range(len(sums)):
        value, left, right = num_leaves + 1 + s, sums[s, 0], sums[s, 1]
        positions[value] = positions[left]
        depths[value] = 1 + max(depths[left], depths[right])
        states[value] = max(states[left], states[right])
        if states[value] == SOUND and positions[left] != positions[right]:
            states[value] = IS_MIXED
        for word in range(ranks.shape[1]):
            if states[value] == SOUND and ranks[left, word] & ranks[right, word]:
                states[value] = IS_TWICE
            ranks[value, word] = ranks[left, word] | ranks[right, word]
    return 0
