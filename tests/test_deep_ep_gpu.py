"""DeepEP's surface on the GPU's kernels, interpreted: `Buffer` on all ranks, everything beside ranks with the CPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_deep_ep as high_throughput
import test_deep_ep_elastic as elastic
import test_deep_ep_hybrid as hybrid
import test_deep_ep_low_latency as low_latency
from ep_cases import Step, on_ranks

import epcomm
from epcomm.integrations import deep_ep


def test_buffer() -> None:
    def body(comm: epcomm.Communicator) -> None:
        buffer = deep_ep.Buffer(comm)
        for number in range(3):
            high_throughput.round_trip(buffer, Step(high_throughput.CASES[0], 2, number))
            low_latency.round_trip(buffer, Step(low_latency.CASES[0], 2, number), hooked=number == 1)
        buffer.destroy()

    on_ranks(2, body, kernels="triton")


@pytest.mark.slow
def test_mixed_world() -> None:
    def body(comm: epcomm.Communicator) -> None:
        buffer = deep_ep.Buffer(comm)
        for number in range(2):
            step = Step(high_throughput.CASES[0], 2, number)
            for trip in high_throughput.TRIPS:
                trip(buffer, step)
            step = Step(low_latency.CASES[0], 2, number)
            low_latency.round_trip(buffer, step, hooked=number == 1)
            low_latency.quantized_trip(buffer, step, number == 1, low_latency.FORMATS[-1])
            for layout in ("flat", "contiguous"):
                step = Step(replace(elastic.CASES[0], layout=layout, alignment=4), 2, number)
                elastic.round_trip(deep_ep.ElasticBuffer(comm), step, waits=number == 0)
            step = Step(replace(hybrid.CASES[0], alignment=4), 2, number)
            hybrid.permuted_trip(hybrid.buffer_for(comm, step.case), step, waits=number == 0)

    on_ranks(2, body, kernels="mixed", timeout=110.0)
