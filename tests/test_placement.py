"""What ranks must agree on besides shapes, and results that lie oddly in memory."""

from __future__ import annotations

import pytest
import torch

import epcomm
from epcomm.errors import MismatchError
from epcomm.testing.ranks import rank_outcomes, run_ranks


def test_a_placement_that_only_some_ranks_pass_is_a_mismatch():
    """[0, 0, 1, 1] is how two ranks would share four experts: with three ranks it is not the default."""

    def run():
        comm = epcomm.init(timeout=20.0)
        placement = [0, 0, 1, 1] if comm.rank == 0 else None
        comm.expert_parallel(num_experts=4, topk=1, hidden=8, max_tokens=4, placement=placement)

    outcomes = rank_outcomes(run, 3)
    assert all(isinstance(outcome, MismatchError) for outcome in outcomes), outcomes
    assert "placement=(0, 0, 1, 1)" in str(outcomes[1])


@pytest.mark.parametrize("size", [1, 2])
def test_slots_are_written_within_an_out_of_odd_strides(size):
    """torch calls a tensor contiguous whatever the strides of its dimensions of size 1 are."""

    def run():
        with epcomm.init(timeout=20.0) as comm:
            ep = comm.expert_parallel(num_experts=4, topk=1, hidden=8, max_tokens=5, dtype=torch.float32)
            x = torch.arange(40.0).view(5, 8) + 100 * comm.rank
            for _ in range(3):
                received = ep.dispatch(x, ep.route(torch.tensor([[0], [3], [-1], [2], [1]])))
                memory = torch.full((3, 5, 8), -1.0)
                out = memory[1:2].transpose(0, 1)
                assert out.shape == (5, 1, 8) and out.is_contiguous() and out.stride(1) != 8
                assert ep.combine(received.x, received, out=out, reduce=False) is out
                wanted = x.clone()
                wanted[2] = 0
                assert torch.equal(out[:, 0], wanted)
                assert (memory[[0, 2]] == -1).all(), "written outside of out"

    run_ranks(run, size)
