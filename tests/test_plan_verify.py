"""The proof of plans: each kind of error in a plan made for it, then a thousand plans broken at random, each verdict
checked against runs in adversarial orders."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from plan_checks import assert_runs_right, completed_first, inputs_of, wrong_ranks
from plan_mutations import MUTATIONS, mutated, sources

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan import Collective, Dependency, Location, Op, Plan, Position, Program, Step
from epcomm.collectives.plan.reference import execute, starving
from epcomm.collectives.plan.verify import verify
from epcomm.errors import PlanError


def location(text: str) -> Location:
    """ "input 3" as a location."""
    buffer, offset = text.split()
    return Location(buffer, int(offset))


def step(op: str, src: str | None = None, dst: str | None = None, **fields) -> Step:
    places = (None if text is None else location(text) for text in (src, dst))
    return Step(Op(op), *places, **fields)


def plan_of(kind: str, *ranks: list[list[Step]], num_chunks: int = 1, **fields) -> Plan:
    """A plan whose programs have their numbers as channels."""
    programs = tuple(
        tuple(Program(channel, tuple(steps)) for channel, steps in enumerate(programs)) for programs in ranks
    )
    return Plan("test", Collective(kind, len(ranks), num_chunks), programs, **fields)


def refused(plan: Plan, kind: str) -> PlanError:
    with pytest.raises(PlanError) as caught:
        verify(plan)
    assert caught.value.kind == kind, caught.value
    return caught.value


COPY = step("copy", "input 0", "output 0")
BROADCAST = plan_of(
    "broadcast",
    [[COPY, step("send", "input 0", send_to=1)]],
    [[step("recv", dst="output 0", receive_from=0)]],
)


def with_step(plan: Plan, rank: int, program: int, index: int, new: Step) -> Plan:
    ranks = [list(programs) for programs in plan.programs]
    steps = list(ranks[rank][program].steps)
    steps[index] = new
    ranks[rank][program] = replace(ranks[rank][program], steps=tuple(steps))
    return replace(plan, programs=tuple(map(tuple, ranks)))


def test_a_right_plan_is_proven():
    proof = verify(BROADCAST)
    assert (proof.roundings, proof.num_messages, proof.num_chunks_sent, proof.same_bits) == (0, 1, 1, True)
    assert_runs_right(BROADCAST)


def test_a_plan_without_steps():
    """In place one rank has nothing to do; out of place it has."""
    plan = Plan("nothing", Collective("allreduce", 1, 1), ((),), out_of_place=False)
    assert verify(plan).num_messages == 0
    assert_runs_right(plan)
    assert "nothing wrote it" in str(refused(replace(plan, out_of_place=True), "result"))


@pytest.mark.parametrize(
    "new, problem",
    [
        (step("send", "input 1", send_to=1), "input has 1 chunks"),
        (step("send", "input 0", send_to=1, count=2), "input has 1 chunks"),
        (step("send", "scratch 0", send_to=1), "scratch has 0 chunks"),
        (step("send", "input 0", send_to=2), "another rank below 2"),
        (step("send", "input 0", send_to=0), "another rank below 2"),
        (step("send", "input 0", send_to=1, after=(Dependency(1, 0),)), "step 0 of program 1"),
        (step("send", "input 0", send_to=1, after=(Dependency(0, 2),)), "step 2 of program 0"),
    ],
)
def test_what_is_not_there(new, problem):
    error = refused(with_step(BROADCAST, 0, 0, 1, new), "range")
    assert problem in str(error) and "rank 0, channel 0, step 1" in str(error)
    assert error.step == Position(0, 0, 1, 0)


def test_a_copy_that_overlaps_itself():
    steps = [step("copy", "input 0", "output 0", count=2), step("copy", "output 0", "output 1", count=2)]
    plan = plan_of("allreduce", [steps], num_chunks=3)
    assert "overlap" in str(refused(plan, "range"))


def test_messages_that_do_not_match():
    unsent = with_step(BROADCAST, 0, 0, 1, step("nop"))
    error = refused(unsent, "message")
    assert "rank 0 sends 0 messages to rank 1 on channel 0, which receives 1" in str(error)
    assert error.step == Position(1, 0, 0, 0)
    unreceived = with_step(BROADCAST, 1, 0, 0, step("nop"))
    assert refused(unreceived, "message").step == Position(0, 0, 1, 0)
    sends = [step("copy", "input 0", "output 0", count=2), step("send", "input 0", send_to=1, count=2)]
    receives = [step("recv", dst=f"output {chunk}", receive_from=0) for chunk in range(2)]
    twice = plan_of("broadcast", [sends], [receives], num_chunks=2)
    assert "receives 2" in str(refused(twice, "message"))
    other_count = with_step(twice, 1, 0, 1, step("nop"))
    error = refused(other_count, "message")
    assert "another count" in str(error) and error.other == Position(0, 0, 1, 0)


def test_two_programs_may_not_share_a_fifo():
    sends = [[COPY, step("send", "input 0", send_to=1)], [step("send", "input 0", send_to=1)]]
    receives = [[step("recv", dst="output 0", receive_from=0), step("recv", dst="output 0", receive_from=0)]]
    plan = plan_of("broadcast", sends, receives)
    plan = replace(plan, programs=(tuple(replace(p, channel=0) for p in plan.programs[0]), plan.programs[1]))
    assert "order is open" in str(refused(plan, "message"))


def exchange(num_messages: int, fifo_depth: int) -> Plan:
    """Two ranks' allgather: each sends all its chunks, then receives the other's."""
    def program(rank: int) -> list[Step]:
        chunks, other = range(num_messages), 1 - rank
        return [
            step("copy", "input 0", f"output {rank * num_messages}", count=num_messages),
            *(step("send", f"input {chunk}", send_to=other) for chunk in chunks),
            *(step("recv", dst=f"output {other * num_messages + chunk}", receive_from=other) for chunk in chunks),
        ]

    return plan_of("allgather", [program(0)], [program(1)], num_chunks=num_messages, fifo_depth=fifo_depth)


@pytest.mark.parametrize("fifo_depth", [1, 2, 8])
def test_sends_that_fill_a_fifo(fifo_depth):
    verify(exchange(fifo_depth, fifo_depth))
    assert_runs_right(exchange(fifo_depth, fifo_depth))
    too_many = exchange(fifo_depth + 1, fifo_depth)
    error = refused(too_many, "deadlock")
    assert f"a free slot of {fifo_depth}" in str(error)
    with pytest.raises(PlanError, match="wait forever"):
        wrong_ranks(too_many, in_place=False)


def test_a_ring_of_pieces_needs_a_slot_more_than_it_has_pieces():
    plan = ALGORITHMS["ring"].plan("allgather", 4, pieces=7)
    verify(plan)
    assert refused(replace(plan, fifo_depth=1), "deadlock")
    with pytest.raises(PlanError, match="wait forever"):
        wrong_ranks(replace(plan, fifo_depth=1), in_place=False)


def test_a_cycle_of_dependencies_is_named():
    plan = plan_of("allreduce", [[step("copy", "input 0", "output 0", after=(Dependency(1, 0),))],
                                 [step("nop", after=(Dependency(0, 0),))]])  # fmt: skip
    error = refused(plan, "deadlock")
    assert str(error).count("waits for rank 0") == 2


def unordered(first: Step, second: Step, *after: Dependency) -> Plan:
    """One rank's allreduce with two programs."""
    return plan_of("allreduce", [[first], [replace(second, after=after)]], scratch_chunks=1)


@pytest.mark.parametrize(
    "second, ordered_kind",
    [
        (step("copy", "output 0", "scratch 0"), None),  # reads what the first writes
        (step("copy", "input 0", "output 0"), None),  # writes it, too
        (step("reduce", "input 0", "output 0"), "result"),  # reads and writes it
    ],
)
def test_accesses_in_no_order(second, ordered_kind):
    error = refused(unordered(COPY, second), "race")
    assert {error.step, error.other} == {Position(0, 0, 0, 0), Position(0, 1, 0, 1)}
    assert "rank 0, channel 0, step 0" in str(error) and "rank 0, channel 1, step 0" in str(error)
    ordered = unordered(COPY, second, Dependency(0, 0))
    if ordered_kind:
        refused(ordered, ordered_kind)
    else:
        verify(ordered)


def test_reads_are_in_no_conflict():
    verify(replace(unordered(COPY, step("copy", "input 0", "scratch 0")), in_place=False))


def test_in_place_a_copy_onto_itself_is_a_write():
    error = refused(unordered(COPY, step("copy", "input 0", "scratch 0")), "race")
    assert "(in place)" in str(error)


def test_a_write_after_the_other_programs_read():
    plan = unordered(step("copy", "scratch 0", "scratch 1"), step("copy", "input 0", "scratch 0"))
    plan = replace(plan, scratch_chunks=2)
    refused(plan, "race")


def answered(*after: Dependency) -> Plan:
    """Rank 0's second program overwrites what its first one sends, once rank 1's second program answered."""
    first = [step("copy", "input 0", "scratch 0"), step("send", "scratch 0", send_to=1), COPY]
    return plan_of(
        "broadcast",
        [first, [step("recv", dst="scratch 0", receive_from=1)]],
        [[step("recv", dst="output 0", receive_from=0)], [step("send", "scratch 0", send_to=0, after=after)]],
        scratch_chunks=1,
    )


def test_messages_order_accesses_of_other_ranks():
    error = refused(answered(), "race")
    assert {error.step.program, error.other.program} == {0, 1} and error.step.rank == 0
    verify(answered(Dependency(0, 0)))


@pytest.mark.parametrize("fifo_depth", [1, 2])
def test_slots_do_not_order_accesses(fifo_depth):
    """With one slot rank 0's second message, and the token after it, wait until the first one is received: with two
    not.
    """
    send = step("send", "input 0", send_to=1)
    plan = plan_of(
        "broadcast",
        [[COPY, send, send], [replace(send, after=(Dependency(0, 2),))]],
        [[step("recv", dst="output 0", receive_from=0), step("recv", dst="scratch 0", receive_from=0)],
         [step("recv", dst="scratch 1", receive_from=0), step("copy", "output 0", "scratch 2")]],
        scratch_chunks=3, fifo_depth=fifo_depth,
    )  # fmt: skip
    error = refused(plan, "race")
    assert {error.step, error.other} == {Position(1, 0, 0, 0), Position(1, 1, 1, 1)}


def test_in_place_the_input_is_the_output():
    """Rank 1's output replaces its input before that has been sent."""
    def program(rank: int) -> list[Step]:
        sends = [step("send", "input 0", send_to=1 - rank)]
        sums = [step("copy", "input 0", "output 0"), step("recv", dst="scratch 0", receive_from=1 - rank),
                step("reduce", "scratch 0", "output 0")]  # fmt: skip
        return sums[:1] + sends + sums[1:] if rank == 0 else sends + sums

    plan = plan_of("allreduce", [program(0)], [program(1)], scratch_chunks=1)
    verify(plan)
    late = program(1)
    late = [late[1], step("recv", dst="scratch 0", receive_from=0), late[3], step("send", "input 0", send_to=0)]
    plan = plan_of("allreduce", [program(0)], [late], scratch_chunks=1)
    assert "(in place)" in str(refused(plan, "result"))
    verify(replace(plan, in_place=False))
    assert_runs_right(replace(plan, in_place=False))
    assert wrong_ranks(plan, in_place=True) == [0]


def test_an_input_that_is_no_output_is_kept():
    plan = plan_of(
        "reduce",
        [[step("recv_reduce_copy", "input 0", "output 0", receive_from=1)]],
        [[step("send", "input 0", send_to=0), step("reduce", "input 0", "input 0")]],
    )
    error = refused(plan, "result")
    assert "rank 1's input[0]" in str(error) and error.step == Position(1, 0, 1, 0)


@pytest.mark.parametrize(
    "program, got",
    [
        ([], "nothing wrote it"),
        ([step("copy", "scratch 0", "output 0")], "what was never written"),
        ([COPY, step("reduce", "input 0", "output 0")], "chunk 0 of rank 0, 2 times"),
        ([step("copy", "input 1", "output 0")], "chunk 1 of rank 0"),
        ([COPY, step("reduce", "input 1", "output 0")], "chunk 0 of rank 0; chunk 1 of rank 0"),
    ],
)
def test_results_that_are_wrong(program, got):
    plan = plan_of("allreduce", [[*program, step("copy", "input 1", "output 1")]], num_chunks=2, scratch_chunks=1,
                   in_place=False)  # fmt: skip
    error = refused(plan, "result")
    assert got in str(error) and "wanted chunk 0 of the input of every rank, once" in str(error)
    assert wrong_ranks(plan, in_place=False) == [0]


def test_roundings_and_bits():
    """A sum of n ranks one after the other rounds n - 1 times, in a tree less often; another order is other bits."""
    names = ("ring", "one_shot", "recursive_doubling")
    proofs = {name: verify(ALGORITHMS[name].plan("allreduce", 8)) for name in names}
    assert {name: proof.roundings for name, proof in proofs.items()} == {
        "ring": 7, "one_shot": 7, "recursive_doubling": 3,
    }  # fmt: skip
    assert all(proof.same_bits for proof in proofs.values())

    def program(rank: int) -> list[Step]:  # own input first: ranks 1 and 2 sum in another order than rank 0
        others = [other for other in range(3) if other != rank]
        return [
            *(step("send", "input 0", send_to=other) for other in others),
            COPY,
            *(step("recv_reduce_copy", "output 0", "output 0", receive_from=other) for other in others),
        ]

    proof = verify(plan_of("allreduce", *([program(rank)] for rank in range(3))))
    assert not proof.same_bits and proof.roundings == 2


NUM_MUTANTS = 6000


@pytest.mark.parametrize("part", range(4))
def test_mutants(part):
    check_mutants(range(part * NUM_MUTANTS // 4, (part + 1) * NUM_MUTANTS // 4))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_mutants():
    check_mutants(range(10**6, 10**6 + 20000))


def check_mutants(seeds: range) -> None:
    """Every verdict on a broken plan is confirmed by running it: see `confirm`."""
    plans, verdicts, kinds, wrong_results = sources(), Counter(), Counter(), 0
    for seed in seeds:
        generator = np.random.default_rng(seed)
        mutation = list(MUTATIONS)[seed % len(MUTATIONS)]
        changed = (mutated(plans[at], mutation, generator) for at in generator.permutation(len(plans)))
        plan = next(plan for plan in changed if plan is not None)
        try:
            verify(plan)
        except PlanError as error:
            verdict = error.kind
            confirm(plan, error, seed)
            wrong_results += verdict == "race" and has_wrong_result(plan, error)
        else:
            verdict = "right"
            assert_runs_right(plan)
        verdicts[verdict] += 1
        kinds[mutation] += verdict != "right"
    assert set(verdicts) == {"right", "range", "message", "deadlock", "race", "result"}, verdicts
    assert set(kinds) == set(MUTATIONS) and verdicts["race"] > 0.03 * len(seeds), (kinds, verdicts)
    # The few others do no harm in these runs: what is overwritten too early is the same, or not needed any more.
    assert wrong_results > 0.9 * verdicts["race"], (wrong_results, verdicts)


def has_wrong_result(plan: Plan, error: PlanError) -> bool:
    """Is the result wrong when one of the two steps of a race is late?"""
    late = (error.step, error.other)
    return any(wrong_ranks(plan, in_place, starving(0, step)) for in_place in plan.placements for step in late)


def confirm(plan: Plan, error: PlanError, seed: int) -> None:
    """A run shows what the verdict says.

    Range, message, deadlock: no run ends well, or, where the order of a FIFO is open, both orders happen. Race: both
    orders of the two steps happen. Result: without races every run is the same, and it is wrong.
    """
    if error.kind == "race" or (error.kind == "message" and "order is open" in str(error)):
        try:
            happens = [completed_first(plan, *pair) for pair in ((error.step, error.other), (error.other, error.step))]
        except PlanError:
            assert error.kind == "message"
        else:
            assert all(happens), f"seed {seed}: {error}"
    elif error.kind == "result":
        assert any(wrong_ranks(plan, in_place) for in_place in plan.placements), f"seed {seed}: {error}"
    else:
        with pytest.raises(PlanError):
            for in_place in plan.placements:
                execute(plan, inputs_of(plan.collective), in_place=in_place, scheduler=starving(seed))
