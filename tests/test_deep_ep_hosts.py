"""DeepEP's surface on ranks of several hosts: parts of this machine that share no memory."""

from __future__ import annotations

from dataclasses import replace

import test_deep_ep as high_throughput
import test_deep_ep_elastic as elastic
import test_deep_ep_hybrid as hybrid
import test_deep_ep_low_latency as low_latency
from ep_cases import Step
from host_cases import WORLDS, on_hosts

import epcomm
from epcomm.integrations import deep_ep


def test_several_hosts(port: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        buffer, elastic_buffer = deep_ep.Buffer(comm), deep_ep.ElasticBuffer(comm)
        assert elastic_buffer.get_physical_domain_size() == (2, 1)
        hybrid_buffer = hybrid.buffer_for(comm, hybrid.BASE)
        places = hybrid_buffer.node_rank, hybrid_buffer.local_rank, hybrid_buffer.num_of_nodes
        assert places == [(0, 0, 2), (1, 0, 2), (1, 1, 2)][comm.rank]
        for number in range(3):
            high_throughput.round_trip(buffer, Step(high_throughput.CASES[0], 3, number))
            low_latency.round_trip(buffer, Step(low_latency.CASES[0], 3, number), hooked=number == 1)
            step = Step(replace(elastic.CASES[0], layout="contiguous", alignment=4), 3, number)
            elastic.round_trip(elastic_buffer, step, waits=number == 0)
            hybrid.permuted_trip(hybrid_buffer, Step(replace(hybrid.CASES[0], alignment=4), 3, number), number == 0)

    on_hosts(WORLDS["1+2"], port, body)
