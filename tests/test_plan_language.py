"""The language: what chunks are, what the compiler makes of them, and programs made at random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from plan_checks import adversaries, assert_runs_right, inputs_of
from plan_programs import random_plan

from epcomm.collectives.language import Collective, Trace, chunk
from epcomm.collectives.plan import COLLECTIVES, Op, Plan
from epcomm.collectives.plan.reference import execute
from epcomm.collectives.plan.verify import verify
from epcomm.errors import ConfigError, PlanError


def ops(plan: Plan, rank: int) -> list[str]:
    return [step.op.value for position, step in plan.steps() if position.rank == rank]


def test_fusion():
    """A partial sum is sent as it comes and stored nowhere; the result is stored and sent; the last one only stored."""
    with Trace("ring", Collective("allreduce", 4, 1)) as trace:
        total = chunk(0, "input")
        for rank in (1, 2, 3):
            total = chunk(rank, "input").reduce(total, "output")
        for rank in (0, 1, 2):
            total = total.copy(rank)
    plan = trace.plan()
    assert ops(plan, 0) == ["send", "recv_copy_send"]
    assert ops(plan, 1) == ["recv_reduce_send", "recv_copy_send"]
    assert ops(plan, 2) == ["recv_reduce_send", "recv"]
    assert ops(plan, 3) == ["recv_reduce_copy_send"]
    assert plan.num_channels == 1 and plan.scratch_chunks == 0
    verify(plan)
    assert_runs_right(plan)


def test_what_is_read_again_is_stored():
    with Trace("test", Collective("reduce", 3, 1)) as trace:
        total = chunk(1, "input").reduce(chunk(2, "input"), "scratch", 0)
        result = chunk(0, "input").reduce(total, "output")
        again = chunk(1, "scratch", 0).copy(0, "scratch", 1)
        assert result.place != again.place
    plan = trace.plan()
    assert Op.RECV_REDUCE_COPY_SEND in {step.op for _, step in plan.steps()} and plan.scratch_chunks == 2
    verify(plan)


def test_a_channel_of_its_own_is_not_fused():
    with Trace("test", Collective("broadcast", 3, 1)) as trace:
        value = chunk(0, "input").copy(0, "output").copy(1, channel=0).copy(2, channel=1)
        assert value.place.rank == 2
    plan = trace.plan()
    assert ops(plan, 1) == ["recv", "send"] and plan.num_channels == 2
    waits = [(position, step.after) for position, step in plan.steps() if step.after]
    assert [(position.rank, position.channel) for position, _ in waits] == [(0, 1), (1, 1)][1:]
    verify(plan)
    assert_runs_right(plan)


def test_messages_that_would_overtake_get_a_channel():
    """The first message is sent before the second, but received after it, as its receiver has more to do first."""
    with Trace("test", Collective("allreduce", 2, 2), in_place=False) as trace:
        late = chunk(0, "input", 1).copy(0, "scratch", 1).copy(0, "scratch", 2)
        chunk(1, "input", 1).reduce(late, "output", 1).copy(0)
        own = chunk(1, "input", 0)
        for index in range(4):
            own = own.copy(1, "scratch", index)
        own.copy(1, "output", 0).reduce(chunk(0, "input", 0)).copy(0)
    plan = trace.plan()
    verify(plan)
    assert_runs_right(plan)
    sends = [(position.channel, step.src) for position, step in plan.steps() if position.rank == 0 and step.op.sends]
    assert sorted(sends) == [(0, ("input", 0)), (1, ("scratch", 2))]


def test_instances():
    """Instances have parts of every block, on channels of their own; what spans blocks is cut."""
    with Trace("test", Collective("allgather", 2, 2)) as trace:
        for rank in range(2):
            chunk(rank, "input", 0, 2).copy(rank, "output", 2 * rank)
        chunk(0, "output", 0, 2).copy(1)
        chunk(1, "output", 2, 2).copy(0, "scratch", 0)
        chunk(0, "scratch", 0, 2).copy(0, "output", 2)
    for channels, pieces in ((1, 1), (3, 1), (1, 3), (2, 2)):
        plan = trace.plan(channels=channels, pieces=pieces)
        assert plan.collective.num_chunks == 2 * channels * pieces and plan.num_channels == channels
        assert plan.scratch_chunks == 2 * channels * pieces
        verify(plan)
        assert_runs_right(plan)
    with Trace("spans", Collective("allgather", 2, 2)) as trace:
        chunk(0, "input", 0, 2).copy(0, "output", 0)
        chunk(1, "input", 0, 2).copy(0, "output", 2)
        chunk(1, "input", 0, 2).copy(1, "output", 2)
        chunk(0, "output", 0, 4).copy(1)
    # cut, the last copy is two, one of which rank 0 can pass on as it comes
    assert (trace.plan().num_steps, trace.plan(channels=2).num_steps) == (6, 2 * 7)
    for channels in (1, 2):
        plan = trace.plan(channels=channels)
        verify(plan)
        assert_runs_right(plan)


def test_local_sums_into_a_third_place():
    with Trace("test", Collective("allreduce", 2, 1)) as trace:
        for rank in range(2):
            other = chunk(1 - rank, "input").copy(rank, "scratch", 0)
            chunk(rank, "input").reduce(other, "scratch", 1)
        for rank in range(2):
            chunk(rank, "scratch", 1).copy(rank, "output", 0)
    plan = trace.plan()
    assert ops(plan, 0).count("reduce") == 1
    verify(plan)
    assert_runs_right(plan)


def test_misuse_is_told():
    with Trace("test", Collective("allreduce", 2, 2)) as trace:
        old = chunk(0, "output", 0)
        chunk(0, "input", 0).copy(0, "output", 0)
        for call, problem in (
            (lambda: old.copy(1), "chunk 0 of rank 0's output was overwritten since"),
            (lambda: chunk(1, "input").reduce(old), "was overwritten since"),
            (lambda: chunk(2, "input"), "rank: wanted one below 2, got 2"),
            (lambda: chunk(0, "result"), "buffer: wanted one of input, output, scratch"),
            (lambda: chunk(0, "input", 1, 2), "within the 2 chunks of rank 0's input, got 2 from 1 on"),
            (lambda: chunk(0, "input", -1), "got 1 from -1 on"),
            (lambda: chunk(0, "input", 0, 0), "got 0 from 0 on"),
            (lambda: chunk(0, "input").reduce(chunk(1, "input", 0, 2)), "wanted 1 chunks, got 2"),
        ):
            with pytest.raises(ConfigError, match=problem):
                call()
    with pytest.raises(ConfigError, match="inside of `with Trace"):
        chunk(0, "input")
    with pytest.raises(ConfigError, match="channels: wanted an integer >= 1"):
        trace.plan(channels=True)
    with pytest.raises(PlanError, match="wanted chunk 0 of the input of every rank"):
        verify(trace.plan())  # a program that isn't what it says is refused by the proof


def test_collectives_by_any_trees():
    """Are proven, and right in adversarial orders. Between them they have all that the compiler makes."""
    used, num_dependencies = set(), 0
    for seed, kind in itertools.product(range(20), COLLECTIVES):
        plan = random_plan(kind, 1 + seed % 6, seed)
        verify(plan)
        assert_runs_right(plan)
        used |= {step.op for _, step in plan.steps()}
        num_dependencies += sum(len(step.after) for _, step in plan.steps())
    assert used == set(Op) - {Op.NOP} and num_dependencies > 1000


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed):
    """Copies and sums at random, on several channels: outputs are what the program makes them line by line, in any
    order that the plan allows, and the proof finds neither races nor deadlocks."""
    generator = np.random.default_rng(seed)
    num_ranks, num_chunks = int(generator.integers(1, 5)), int(generator.integers(1, 4))
    collective = Collective("allreduce", num_ranks, num_chunks)
    inputs = inputs_of(collective, seed)
    memory = {(rank, "input"): given.copy() for rank, given in enumerate(inputs)}
    for rank, given in enumerate(inputs):
        memory |= {(rank, buffer): np.full_like(given, 99) for buffer in ("output", "scratch")}
    with Trace("random", collective, in_place=False) as trace:
        for _ in range(int(generator.integers(1, 40))):
            (src, src_buffer), (dst, dst_buffer) = (
                (int(generator.integers(num_ranks)), str(generator.choice(["input", "output", "scratch"])))
                for _ in range(2)
            )
            count = int(generator.integers(1, num_chunks + 1))
            at, to = (int(generator.integers(0, num_chunks - count + 1)) for _ in range(2))
            if (src, src_buffer) == (dst, dst_buffer) and at != to and abs(at - to) < count:
                continue  # it would overlap itself
            channel = int(generator.integers(2))
            source, target = chunk(src, src_buffer, at, count), chunk(dst, dst_buffer, to, count)
            read = memory[src, src_buffer][at : at + count].copy()
            if generator.random() < 0.5:
                source.copy(dst, dst_buffer, to, channel=channel)
                memory[dst, dst_buffer][to : to + count] = read
            else:
                target.reduce(source, channel=channel)
                memory[dst, dst_buffer][to : to + count] += read
    plan = trace.plan()
    try:
        verify(plan)
    except PlanError as error:
        assert error.kind == "result"  # it is no allreduce
    wanted = [memory[rank, "output"] for rank in range(num_ranks)]
    for scheduler in adversaries(plan, seed):
        run = execute(plan, inputs, scheduler=scheduler)
        for rank in range(num_ranks):
            np.testing.assert_array_equal(run.outputs[rank], wanted[rank], err_msg=f"rank {rank}")
