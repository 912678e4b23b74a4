"""Experts with replicas, uneven numbers of them, and placements that change between steps, against the definition.

Which replica a token goes to is the library's choice. So each rank reports who got what here, and all reports together
must be the definition's (expert, source rank, token), each exactly once. Expert e multiplies rows by 1 + e; sums are
exact in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from ep_cases import KIND_IDS, KINDS, KINDS_BY_RANK, check_raised, on_ranks
from failure_cases import raised_by
from test_moe_layer import Case as LayerCase
from test_moe_layer import run_forward

import epcomm
from epcomm import Placement, rebalance
from epcomm.errors import CapacityError, ClosedError, ConfigError, MismatchError, PeerFailedError
from epcomm.moe.layer import MoELayer
from epcomm.testing.ranks import rank_outcomes
from epcomm.testing.routing import TOKENS, choose_experts, payload, weights

NUM_EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 5, 3, 6, 7
Delivered = list[tuple[int, int, int]]  # (logical expert, source rank, token)

#: By number of ranks; each has every expert.
PLACEMENTS = {
    1: [Placement(((3, 0, 4, 1, 2),)), Placement.even(5, 1)],
    2: [
        Placement(((2, 0, 1), (1, 3, 4, 0))),
        Placement(((), (4, 2, 0, 1, 3))),
        Placement(((0, 1, 2, 3, 4), (0, 1, 2, 3, 4))),
        Placement(((4, 1), (2, 3, 0))),
    ],
    3: [
        Placement(((2, 0), (), (1, 2, 4, 0, 3))),
        Placement(((0, 1, 2, 3, 4),) * 3),
        Placement(((3,), (4, 3, 2, 1, 0), (3, 1))),
        Placement.from_owner([2, 0, 1, 1, 2], 3),
    ],
}
SIZES: dict[str, Any] = dict(num_experts=NUM_EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=MAX_TOKENS)
SIZES["dtype"] = torch.float32


class Step(NamedTuple):
    """All ranks' inputs of one routing."""

    size: int
    number: int

    @property
    def indices(self) -> list[torch.Tensor]:
        gate = ("holes_and_duplicates", "uniform", "zipf")[self.number % 3]
        tokens = [TOKENS["full" if self.number % 2 else "uneven"](rank, MAX_TOKENS) for rank in range(self.size)]
        owner = [0] * NUM_EXPERTS
        return [choose_experts(gate, n, TOPK, owner, 10 * self.number + rank) for rank, n in enumerate(tokens)]

    @property
    def x(self) -> list[torch.Tensor]:
        shapes = [(len(index), HIDDEN) for index in self.indices]
        return [payload(shape, torch.float32, self.number, rank) for rank, shape in enumerate(shapes)]

    @property
    def weights(self) -> list[torch.Tensor]:
        return [weights(index.shape, self.number, rank) for rank, index in enumerate(self.indices)]

    @property
    def delivered(self) -> Delivered:
        """Each row that there has to be somewhere."""
        return sorted(
            (expert, source, token)
            for source, index in enumerate(self.indices)
            for token, experts in enumerate(index.tolist())
            for expert in set(experts) - {-1}
        )

    @property
    def loads(self) -> torch.Tensor:
        experts = torch.tensor([expert for expert, _, _ in self.delivered], dtype=torch.int64)
        return torch.bincount(experts, minlength=NUM_EXPERTS)

    def combined(self, rank: int) -> torch.Tensor:
        index, factors = self.indices[rank], self.weights[rank].double()
        terms = torch.where(index >= 0, factors * (1 + index), 0.0)
        return (terms.sum(dim=1, keepdim=True) * self.x[rank].double()).float()


def row_delivered(ep: Any, received: Any) -> Iterator[tuple[tuple[int, ...], int, int, list[tuple[int, float]]]]:
    """Of each real row: where it is, source rank, token, and its (logical experts, weight) with repetitions."""
    source, token, ids = received.source_rank, received.source_token, ep.local_expert_ids
    if token.dim() == 2:
        for local, count in enumerate(received.expert_counts_list):
            for row in range(count):
                yield (local, row), int(source[local, row]), int(token[local, row]), [(ids[local], 1.0)]
        return
    local, factors = received.topk_idx, received.topk_weights
    for row in (token >= 0).nonzero()[:, 0].tolist():
        slots = zip(local[row].reshape(-1).tolist(), factors[row].reshape(-1).tolist())
        yield (row,), int(source[row]), int(token[row]), [(ids[number], w) for number, w in slots if number >= 0]


def round_trip(ep: Any, step: Step, repeats: int = 1) -> Delivered:
    """Route, dispatch and combine, checked but for the choice of replicas; returns what came here."""
    rank, x, what = ep.rank, step.x, f"rank {ep.rank}, {step}"
    is_flat = ep.config.layout == "flat"
    routing = ep.route(step.indices[rank])
    for _ in range(repeats):
        received = ep.dispatch(x[rank], routing, step.weights[rank])
        y, here = torch.full_like(received.x, torch.nan), []
        for at, source, token, experts in row_delivered(ep, received):
            assert torch.equal(received.x[at], x[source][token]), what
            factor = sum(weight * (1 + expert) for expert, weight in experts) if is_flat else 1 + experts[0][0]
            y[at] = factor * received.x[at]
            here += [(expert, source, token) for expert in dict(experts)]
        out = ep.combine(y, received, None if is_flat else step.weights[rank])
        assert torch.equal(out, step.combined(rank)), what
    assert routing.send_counts[1].sum() == len({(e, t) for e, source, t in step.delivered if source == rank})
    assert sum(received.expert_counts_list) == len(here) or is_flat  # flat: of selections, repeated ones too
    assert set(ep.local_expert_ids) >= {expert for expert, _, _ in here}
    return here


def run_placements(comm: epcomm.Communicator, options: dict[str, Any], num_steps: int = 3) -> list[Delivered]:
    delivered = []
    for placement in PLACEMENTS[comm.size]:
        ep = comm.expert_parallel(**SIZES, **options, placement=placement)
        assert ep.local_expert_ids == list(placement.experts[comm.rank]) == ep.local_experts.tolist()
        assert ep.placement == placement and ep.num_experts == NUM_EXPERTS and ep.load is None
        delivered += [round_trip(ep, Step(comm.size, number)) for number in range(num_steps)]
        ep.close()
    return delivered


def check_delivered(reports: Sequence[Sequence[Delivered]], steps: Sequence[Step]) -> None:
    """`reports[rank][i]` is what came to a rank in the i-th step; `steps` are repeated as often as it takes."""
    for i, of_ranks in enumerate(zip(*reports, strict=True)):
        assert sorted(sum(of_ranks, [])) == steps[i % len(steps)].delivered, i


OPTIONS = [dict(mode=mode, layout=layout) for mode, layout in KINDS]
OPTIONS += [dict(mode=mode, layout=layout, wire="rank") for mode, layout in KINDS_BY_RANK]
OPTION_IDS = [*KIND_IDS, *(f"{mode}-{layout}-by-rank" for mode, layout in KINDS_BY_RANK)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_every_expert_gets_each_token_once(options: dict[str, Any], world: int) -> None:
    reports = on_ranks(world, run_placements, options)
    check_delivered(reports, [Step(world, number) for number in range(3)])


def test_replicas_share_the_tokens() -> None:
    def body(comm: epcomm.Communicator) -> tuple[list[int], list[int]]:
        sizes = {**SIZES, "max_tokens": 512}
        ep = comm.expert_parallel(**sizes, placement=PLACEMENTS[3][1], alignment=8)
        index = torch.zeros(512, 1, dtype=torch.int32)
        received = ep.dispatch(torch.ones(512, HIDDEN), ep.route(index))
        alone = ep.dispatch(torch.ones(1, HIDDEN), ep.route(index[:1]))
        return received.expert_counts_list, alone.expert_counts_list

    of_many, of_few = zip(*on_ranks(3, body))
    for counts in of_many:
        assert abs(counts[0] - 512) <= 24 and counts[1:] == [0] * 4
    assert sorted(counts[0] for counts in of_few) == [0, 1, 2]  # not all ranks' first tokens to one replica


# ---- changing placements


FIELDS = ("expert_counts", "expert_offsets", "topk_idx", "source_rank")  # all of them defined in every layout


def run_changes(comm: epcomm.Communicator, options: dict[str, Any]) -> list[Delivered]:
    placements: list[Any] = PLACEMENTS[comm.size]
    room = Placement((tuple(range(NUM_EXPERTS)),) * comm.size)
    ep = comm.expert_parallel(**SIZES, **options, placement=room, track_load=True)
    by_rank = [1 % comm.size, 0, 0, 1 % comm.size, 0]
    delivered, total = [], torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for number, placement in enumerate([*placements, by_rank, room, *placements[:2]]):
        step = Step(comm.size, number)
        old = ep.route(step.indices[comm.rank])
        received, lazy = (ep.dispatch(step.x[comm.rank], old) for _ in range(2))
        before = [getattr(received, name) for name in FIELDS]
        rows = received.x.clone()
        work = comm.allreduce(torch.ones(3), async_op=True)  # what is queued comes first
        ep.set_placement(placement)
        assert work.is_completed()
        refused = [
            raised_by(ep.dispatch, step.x[comm.rank], old),
            raised_by(ep.combine, received.x, received),
            raised_by(ep.combine, received.x, old),
        ]
        for name, raised in zip(("routing", "received", "received"), refused, strict=True):
            assert type(raised.error) is ClosedError, raised
            assert f"`{name}`" in raised.text and "placement was changed" in raised.text
        if placement is not by_rank:
            assert ep.placement == placement and ep.local_expert_ids == list(placement.experts[comm.rank])
        else:
            assert ep.local_expert_ids == [expert for expert, rank in enumerate(by_rank) if rank == comm.rank]
        delivered += [round_trip(ep, Step(comm.size, more)) for more in (number, number + 1)]
        # lent, and as it was
        for name, value in zip(FIELDS, before, strict=True):
            found = getattr(lazy, name)  # for the first time
            assert found is value is None or torch.equal(found, value), name
        real = received.is_real if ep.config.layout == "padded" else slice(None)
        assert torch.equal(received.x[real], rows[real])
        total += 2 * step.loads + Step(comm.size, number + 1).loads
        assert torch.equal(ep.load.total, total)
    ep.close()
    return delivered


def check_changes(reports: Sequence[Sequence[Delivered]], world: int) -> None:
    check_delivered(reports, [Step(world, (i + 1) // 2) for i in range(len(reports[0]))])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_placement_changes_between_steps(options: dict[str, Any], world: int) -> None:
    reports = on_ranks(world, run_changes, options)
    check_changes(reports, world)


@pytest.mark.parametrize("kernels", ["triton", "mixed"])
@pytest.mark.parametrize("wire", ["expert", "rank"])
def test_placement_changes_on_interpreted_ranks(kernels: str, wire: str) -> None:
    reports = on_ranks(2, run_changes, dict(wire=wire), kernels=kernels, longest=0)
    check_changes(reports, 2)


@pytest.mark.parametrize("options", [dict(host_sync=False), dict(mode="latency")], ids=["throughput", "latency"])
def test_without_host_sync_on_interpreted_ranks(options: dict[str, Any]) -> None:
    check_delivered(on_ranks(2, run_placements, options, kernels="mixed", longest=0), [Step(2, n) for n in range(3)])


def test_ranks_that_differ_in_the_placement() -> None:
    def make() -> None:
        comm = epcomm.init(timeout=20.0)
        comm.expert_parallel(**SIZES, placement=PLACEMENTS[2][comm.rank])

    for outcome in rank_outcomes(make, 2):
        assert isinstance(outcome, MismatchError), outcome
        assert all(placement.text in str(outcome) for placement in PLACEMENTS[2][:2])

    def change(comm: epcomm.Communicator) -> Delivered:
        ep = comm.expert_parallel(**SIZES, placement=PLACEMENTS[2][2])
        raised = raised_by(ep.set_placement, PLACEMENTS[2][comm.rank])
        assert type(raised.error) is MismatchError, raised
        assert all(placement.text in raised.text for placement in PLACEMENTS[2][:2]), raised
        comm.reset()
        assert ep.placement == PLACEMENTS[2][2]
        round_trip(ep, Step(2, 0))
        ep.set_placement(PLACEMENTS[2][0])
        return [round_trip(ep, Step(2, 1))]

    check_delivered(on_ranks(2, change), [Step(2, 1)])


def test_a_change_that_a_failure_cut_in_two_is_noticed() -> None:
    def body(comm: epcomm.Communicator) -> list[Delivered]:
        ep = comm.expert_parallel(**SIZES, placement=PLACEMENTS[2][2], track_load=True)
        ep.route(Step(2, 0).indices[comm.rank])
        if comm.rank == 1:

            def fail(config: Any) -> None:
                raise RuntimeError("behind the barrier")

            usual, ep._memory.set_placement = ep._memory.set_placement, fail
            raised = raised_by(ep.set_placement, PLACEMENTS[2][0])
            assert "behind the barrier" in raised.text
            ep._memory.set_placement = usual
            comm.abort()
        else:
            ep.set_placement(PLACEMENTS[2][0])
        comm.reset()
        assert not ep.load.total.any()  # ranks needn't have come equally far
        raised = raised_by(ep.route, Step(2, 0).indices[comm.rank])
        assert type(raised.error) is MismatchError and "placed by" in raised.text, raised
        comm.reset()
        ep.set_placement(PLACEMENTS[2][1])
        return [round_trip(ep, Step(2, 1))]

    check_delivered(on_ranks(2, body), [Step(2, 1)])


# ---- loads


def run_loads(comm: epcomm.Communicator, options: dict[str, Any]) -> list[float]:
    ep = comm.expert_parallel(**SIZES, **options, placement=PLACEMENTS[comm.size][0], track_load=True)
    wanted = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for number in range(4):
        step = Step(comm.size, number)
        round_trip(ep, step, repeats=1 + number % 2)  # a routing counts once
        wanted += step.loads
        assert torch.equal(ep.load.total, wanted)
        assert torch.equal(ep.load.mean, wanted.double() / (number + 1))
    unused = ep.route(Step(comm.size, 9).indices[comm.rank])
    if ep.config.mode == "latency":  # counts aren't known yet
        assert torch.equal(ep.load.total, wanted)
    else:
        assert torch.equal(ep.load.total, wanted + Step(comm.size, 9).loads)
    del unused
    return ep.load.mean.tolist()


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_loads_are_those_of_all_ranks(options: dict[str, Any]) -> None:
    first, *others = on_ranks(3, run_loads, options)
    assert others == [first] * 2


@pytest.mark.parametrize("options", [dict(host_sync=False), dict(mode="latency")], ids=["throughput", "latency"])
def test_loads_on_interpreted_ranks(options: dict[str, Any]) -> None:
    first, *others = on_ranks(2, run_loads, options, kernels="mixed", longest=0)
    assert others == [first]


def test_loads_are_per_logical_expert_without_replicas() -> None:
    def body(comm: epcomm.Communicator) -> None:
        ep = comm.expert_parallel(**SIZES, placement=[1, 0, 1, 0, 1], track_load=True)
        ep.route(Step(2, 1).indices[comm.rank])
        assert torch.equal(ep.load.total, Step(2, 1).loads)

    on_ranks(2, body)


def test_refused_routings_do_not_count() -> None:
    def body(comm: epcomm.Communicator) -> None:
        ep = comm.expert_parallel(**SIZES, max_recv_rows=3, placement=PLACEMENTS[2][1], track_load=True)
        assert type(raised_by(ep.route, Step(2, 1).indices[comm.rank]).error) is CapacityError
        assert not ep.load.total.any()

    on_ranks(2, body)


def run_rebalanced(comm: epcomm.Communicator, mode: str) -> list[int]:
    """Rows of this rank before and after each of two changes, for a gate that prefers two of the experts."""
    num_experts, topk, max_tokens = 12, 2, 256
    ep = comm.expert_parallel(
        num_experts=num_experts, topk=topk, hidden=4, max_tokens=max_tokens, mode=mode, layout="contiguous",
        placement=rebalance([0] * num_experts, comm.size, num_physical=15), track_load=True,
    )  # fmt: skip
    popularity = torch.ones(num_experts)
    popularity[[7, 11]] = torch.tensor([40.0, 12.0])
    rows = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        index = torch.multinomial(popularity.expand(max_tokens, -1), topk, generator=generator)
        received = ep.dispatch(torch.ones(max_tokens, 4, dtype=torch.bfloat16), ep.route(index))
        rows.append(sum(received.expert_counts_list))
        ep.set_placement(rebalance(ep.load.mean, comm.size, num_physical=15))  # a mismatch, were the loads not equal
    return rows


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_rebalancing_evens_out_a_skewed_gate(mode: str) -> None:
    most = [max(of_ranks) for of_ranks in zip(*on_ranks(3, run_rebalanced, mode))]
    mean = 256 * 2  # rows per rank
    assert most[0] > 1.3 * mean > 1.15 * mean > most[1] and most[2] < 1.15 * mean


# ---- wrong arguments

WRONG: list[tuple[Any, str]] = [
    (Placement.even(4, 3), "num_experts=4"),
    (Placement.even(6, 3), "num_experts=6"),
    (Placement.even(5, 2), "size=2"),
    (7, "got 7"),
    ("abcde", "'abcde'"),
    ([0, 1, 2, 0], "[0, 1, 2, 0]"),
    ([0, 1, 2, 0, 3], "[0, 1, 2, 0, 3]"),
    ([0, 1, 2, 0, -1], "[0, 1, 2, 0, -1]"),
]


def run_wrong(comm: epcomm.Communicator) -> None:
    ep = comm.expert_parallel(**SIZES, placement=PLACEMENTS[3][0])
    good: Any = PLACEMENTS[3][0]

    def check(call: Callable[[Any], Any], wrong: Any, *texts: str) -> None:
        check_raised(comm, lambda: call(wrong if comm.rank == 1 else good), ConfigError, *texts)

    def alone(call: Callable[[], Any], *texts: str) -> None:
        check_raised(comm, lambda: call() if comm.rank == 1 else comm.barrier(), ConfigError, *texts)

    for wrong, text in WRONG:
        check(lambda p: comm.expert_parallel(**SIZES, placement=p), wrong, "expert_parallel", "`placement`", text)
        check(ep.set_placement, wrong, "set_placement", "`placement`", text)
    check(ep.set_placement, None, "`placement`", "None")
    # 7 physical experts, of which 5 on one rank
    check(ep.set_placement, PLACEMENTS[3][1], "`placement`", "at most 7", "15")
    index = torch.tensor([[0, 5, 1]])
    call = functools.partial(ep.route, index if comm.rank == 1 else index - 1)
    check_raised(comm, call, ConfigError, "-1 or 0 to 4", "5 at [0, 1]")
    index = torch.tensor([[0, 4], [1, -2]])
    call = functools.partial(ep.route, index.clamp(min=-1 - (comm.rank == 1)))
    check_raised(comm, call, ConfigError, "-1 or 0 to 4", "-2 at [1, 1]")

    split = ep.dispatch(torch.ones(0, HIDDEN), ep.route(index[:0]), split=True)
    alone(lambda: ep.set_placement(good), "set_placement", "finish")
    assert type(raised_by(split.finish).error) is ClosedError
    round_trip(ep, Step(3, 1))
    alone(lambda: comm.expert_parallel(**{**SIZES, "topk": 6}, placement=good), "`topk`", "num_experts=5", "6")
    alone(lambda: comm.expert_parallel(**SIZES, track_load=0.9), "`track_load`", "0.9")
    ep.close()
    raised = raised_by(ep.set_placement, good)
    assert type(raised.error) is ClosedError and "closed" in raised.text


def test_wrong_arguments() -> None:
    on_ranks(3, run_wrong)


def run_room(comm: epcomm.Communicator) -> None:
    """Two experts on a rank at most: three need more rows, unless topk or `max_recv_rows` bounds them."""
    few, more = Placement(((0, 1), (2, 3), (4,))), Placement(((0, 1, 2), (3, 4), ()))
    for options, texts in (
        (dict(layout="contiguous"), ("max_recv_rows=63", "42 rows", "3 experts")),
        (dict(layout="padded"), ("63", "42 rows", "3 experts")),
        (dict(layout="contiguous", topk=2), None),
        (dict(layout="contiguous", max_recv_rows=50), None),
        (dict(layout="flat"), None),
    ):
        ep = comm.expert_parallel(**{**SIZES, **options}, placement=few)
        if texts is None:
            ep.set_placement(more)
            assert ep.placement == more
        else:
            chosen = more if comm.rank == 1 else few
            check_raised(comm, functools.partial(ep.set_placement, chosen), ConfigError, *texts)
            assert ep.placement == few
        ep.close()


def test_a_placement_must_fit_in_the_memory() -> None:
    on_ranks(3, run_room)


def test_change_during_a_capture() -> None:
    def body(comm: epcomm.Communicator) -> None:
        ep = comm.expert_parallel(**SIZES, mode="latency", placement=PLACEMENTS[1][0])
        with ep._target.stream.capture():
            raised = raised_by(ep.set_placement, PLACEMENTS[1][1])
        assert type(raised.error) is ConfigError and "capture" in raised.text
        round_trip(ep, Step(1, 0))

    on_ranks(1, body, kernels="triton", longest=0)


# ---- a layer


def run_new_layer(comm: epcomm.Communicator) -> tuple[list[int], list[list[float]]]:
    torch.manual_seed(comm.rank)
    placement = Placement(((0, 5, 2), (4,), (1, 2, 3, 4, 0)))
    sizes = dict(hidden=8, intermediate=4, num_experts=6, topk=2, max_tokens=4, expert_bias=True)
    layer = MoELayer(comm, **sizes, placement=placement)
    return layer.ep.local_expert_ids, [
        torch.cat([parameter[local].flatten() for parameter in layer.experts.parameters()]).tolist()
        for local in range(len(layer.ep.local_expert_ids))
    ]


def test_replicas_of_a_new_layer_have_the_same_weights() -> None:
    weights_of: dict[int, list[list[float]]] = {}
    for ids, weights_here in on_ranks(3, run_new_layer):
        for expert, found in zip(ids, weights_here, strict=True):
            weights_of.setdefault(expert, []).append(found)
    assert sorted(map(len, weights_of.values())) == [1, 1, 1, 2, 2, 2]
    assert all(found == first for first, *others in weights_of.values() for found in others)
    assert len({tuple(first) for first, *_ in weights_of.values()}) == 6


def test_layer_with_replicas() -> None:
    placement = Placement(((0, 5, 2), (), (1, 2, 3, 4, 0)))
    options = (("placement", placement),)
    on_ranks(3, run_forward, [LayerCase(options=options), LayerCase(mode="latency", options=options, tokens="uneven")])


def run_behind_a_queued_split(comm: epcomm.Communicator) -> None:
    """A split that is queued begins before the change, which is refused until it is finished."""
    ep = comm.expert_parallel(num_experts=4, topk=1, hidden=8, max_tokens=4, alignment=4)
    index = torch.full((2, 1), 3 * comm.rank)
    routing = ep.route(index)
    works = [comm.allreduce(torch.ones(1 << 16), async_op=True) for _ in range(3)]
    work = ep.dispatch(torch.ones(2, 8, dtype=torch.bfloat16), routing, split=True, async_op=True)
    raised = raised_by(ep.set_placement, [1, 1, 0, 0])
    assert isinstance(raised.error, (ConfigError, PeerFailedError)) and "unfinished split" in raised.text, raised
    del works, work
    comm.reset()
    ep.set_placement([1, 1, 0, 0])
    received = ep.dispatch(torch.ones(2, 8, dtype=torch.bfloat16), ep.route(index))
    assert received.x[: received.expert_counts_list[0]].eq(1).all()


def test_change_behind_a_queued_split() -> None:
    on_ranks(2, run_behind_a_queued_split, longest=0)
