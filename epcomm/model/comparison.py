"""Published figures beside the floor of their own configuration, in µs."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from epcomm.model import allreduce, expert_parallel
from epcomm.model.gpus import BYTES_PER_MICROSECOND, GPUS
from epcomm.model.published import ALLREDUCE, EXPERT_PARALLEL, AllreduceFigure, ExpertParallelFigure
from epcomm.model.routing import Routing


def expert_parallel_floor(figure: ExpertParallelFigure) -> float | None:
    """The least µs of the figure's configuration and wire format; None for hardware without a model.

    Where the wire format is unknown, that of the lowest floor. Without the launch where a kernel alone was timed.
    """
    exchange = _exchange(figure)
    if exchange is None:
        return None
    wires = exchange.wires() if figure.wire is None else (figure.wire,)
    predictions = [expert_parallel.predict(exchange, figure.operation, wire) for wire in wires]
    return min(each.floor(launched=not figure.kernel_only) for each in predictions)


def published_microseconds(figure: ExpertParallelFigure) -> float | None:
    """A figure as µs: a GB/s by the bytes that its source counts; None for a GB/s of hardware without a model."""
    if figure.unit == "µs":
        return figure.value
    exchange = _exchange(figure)
    if exchange is None:
        return None
    return exchange.logical_bytes(figure.operation, figure.counted) / (figure.value * BYTES_PER_MICROSECOND)


def _exchange(figure: ExpertParallelFigure) -> expert_parallel.Exchange | None:
    if figure.gpu not in GPUS:
        return None
    routing = Routing(figure.experts, figure.topk, figure.groups, figure.topk_groups)
    gpu = GPUS[figure.gpu]
    return expert_parallel.Exchange(gpu, figure.ranks, figure.tokens, figure.hidden, routing, figure.mode, figure.dtype)


def allreduce_floor(figure: AllreduceFigure) -> float | None:
    """The least µs of the figure's algorithm, or of the best one where the figure's is another; None as above."""
    if figure.gpu not in GPUS:
        return None
    gpu = GPUS[figure.gpu]
    if figure.algorithm is None:
        return allreduce.predict_all(gpu, figure.ranks, figure.num_bytes)[0].floor
    return allreduce.predict(gpu, figure.ranks, figure.num_bytes, figure.algorithm).floor


def share_of_floor(figure: ExpertParallelFigure | AllreduceFigure) -> float | None:
    """The floor over the published time: 1 is at the floor, 0.5 takes twice as long, more than 1 beats it."""
    if isinstance(figure, AllreduceFigure):
        floor: float | None = allreduce_floor(figure)
        published: float | None = figure.microseconds
    else:
        floor, published = expert_parallel_floor(figure), published_microseconds(figure)
    return None if floor is None or published is None else floor / published


def expert_parallel_figures(mode: str, ranks: int) -> list[ExpertParallelFigure]:
    """The figures of a mode with that many ranks, or with the nearest number that someone has published."""
    figures = [figure for figure in EXPERT_PARALLEL if figure.mode == mode]
    nearest = _nearest(ranks, (figure.ranks for figure in figures))
    return [figure for figure in figures if figure.ranks == nearest]


def allreduce_figures(ranks: int, num_bytes: int) -> list[AllreduceFigure]:
    """The figures with that many ranks and bytes, or with the nearest numbers that someone has published."""
    nearest_ranks = _nearest(ranks, (figure.ranks for figure in ALLREDUCE))
    figures = [figure for figure in ALLREDUCE if figure.ranks == nearest_ranks]
    nearest_bytes = _nearest(num_bytes, (figure.num_bytes for figure in figures))
    return [figure for figure in figures if figure.num_bytes == nearest_bytes]


def _nearest(wanted: int, available: Iterable[int]) -> int:
    """By ratio, since a model scales by factors; of equals the smaller."""
    return min(sorted(available), key=lambda each: abs(log(each / wanted)))
