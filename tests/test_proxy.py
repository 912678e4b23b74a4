"""What a proxy does with records that come in parts: each word waits for the bytes before it, and for no others."""

from __future__ import annotations

import ctypes
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from epcomm.device.cpu import network
from epcomm.device.cpu.link import BUFFER_BYTES
from epcomm.hosts.tcp_proxy import Proxy

SOON = 10.0  # seconds
GENERATION = 7
SIZE = 1 << 20


class Part:
    """A rank's part of a segment."""

    def __init__(self) -> None:
        self.array = np.zeros(SIZE, dtype=np.uint8)
        self.address, self.size = self.array.ctypes.data, SIZE


class Segment:
    def __init__(self) -> None:
        self.own = Part()
        self.network: Any = None

    @property
    def number(self) -> int:
        return self.network[0]

    @property
    def bytes(self) -> np.ndarray:
        return self.own.array

    def word(self, offset: int) -> int:
        return int(self.bytes[offset : offset + 8].view(np.int64)[0])


class End:
    """A proxy, what it complained of, and the other end of its link."""

    def __init__(self) -> None:
        own, self.peer = socket.socketpair()
        self.errors: list[tuple[int, str]] = []
        self.proxy = Proxy({1: own}, lambda: None, lambda rank, text: self.errors.append((rank, text)))
        self.segment = self.new_segment()

    def new_segment(self) -> Segment:
        segment = Segment()
        self.proxy.register(segment)
        return segment

    def header(self, offset: int, num_bytes: int, value: int = 0, segment: int | None = None) -> bytes:
        """Of a record: `num_bytes`, or what else it does, and a word's value."""
        return struct.pack("<4q", self.segment.number if segment is None else segment, offset, num_bytes, value)

    def send(self, *parts: bytes) -> None:
        self.peer.sendall(b"".join(parts))


@pytest.fixture
def end() -> Iterator[End]:
    opened = End()
    yield opened
    opened.peer.close()
    opened.proxy.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_word_is_raised_when_the_bytes_before_it_are_there(end: End) -> None:
    for call in range(1, 4):
        first, second, bulk = 8 * call, 8 * call + 64, 1 << 16
        end.send(end.header(1024, 101), bytes([call]) * 100)
        time.sleep(0.02)
        end.send(bytes([call]), end.header(first, network.RAISES, call), end.header(4096, bulk))
        end.send(bytes([call]) * (bulk - 1))
        wait_for(lambda word=first, value=call: end.segment.word(word) == value)
        assert (end.segment.bytes[1024 : 1024 + 101] == call).all()
        end.send(bytes([call]), end.header(second, network.RAISES, call)[:-1])
        time.sleep(0.02)
        assert end.segment.word(second) == 0
        assert (end.segment.bytes[4096 : 4096 + bulk] == call).all()
        end.send(end.header(second, network.RAISES, call)[-1:])
        wait_for(lambda word=second, value=call: end.segment.word(word) == value)
    assert not end.errors


def test_records_of_any_length_in_pieces_of_any_length(end: End) -> None:
    generator = np.random.default_rng(0)
    for call in range(1, 4):
        wanted = np.zeros(SIZE, dtype=np.uint8)
        stream, place = [], 64
        while place < SIZE - 3 * BUFFER_BYTES:
            length = int(generator.choice([0, 1, 31, 33, 500, BUFFER_BYTES - 32, BUFFER_BYTES, 2 * BUFFER_BYTES + 5]))
            wanted[place : place + length] = generator.integers(0, 256, length, dtype=np.uint8)
            stream += [end.header(place, length), wanted[place : place + length].tobytes()]
            place += length
        sent = b"".join([*stream, end.header(8 * call, network.RAISES, call)])
        while sent:
            length = int(generator.choice([1, 7, 40, 3000, 100_000]))
            end.send(sent[:length])
            sent = sent[length:]
        wait_for(lambda value=call: end.segment.word(8 * value) == value)
        assert np.array_equal(end.segment.bytes[64:place], wanted[64:place])
    assert not end.errors


def test_settling_waits_for_the_bytes_before_the_marker(end: End) -> None:
    end.send(end.header(0, 8))
    with pytest.raises(TimeoutError, match=r"rank\(s\) \[1\]"):
        end.proxy.settle(GENERATION, 0.1)
    end.send(bytes(8), end.header(0, network.MARKS, GENERATION))
    end.proxy.settle(GENERATION, SOON)


IMPOSSIBLE = [
    (SIZE - 7, 8), (-8, network.RAISES), (0, -9), (SIZE, 1), (4, network.RAISES), (8, 2**63 - 1), (-(2**63), 2**63 - 1)
]  # fmt: skip


@pytest.mark.parametrize("record", IMPOSSIBLE, ids=str)
def test_a_record_that_cannot_be_writes_nothing(end: End, record: tuple[int, int]) -> None:
    end.send(end.header(*record, 1), end.header(64, network.RAISES, 1))
    wait_for(lambda: bool(end.errors))
    assert end.errors == [(1, f"sent {record[1]} bytes at {record[0]} of segment 0")]
    assert not end.segment.bytes.any()


@pytest.mark.parametrize("number", [1, -1, 2**62])
def test_a_segment_that_cannot_be(end: End, number: int) -> None:
    end.send(end.header(0, 8, segment=number), bytes(8))
    wait_for(lambda: bool(end.errors))
    assert end.errors[0][1].endswith(f"of segment {number}")


def test_what_comes_for_freed_memory_goes_nowhere(end: End) -> None:
    for call in range(1, 4):
        gone = end.new_segment()
        number, part = gone.number, gone.own
        end.send(end.header(0, 100, segment=number), bytes([call]) * 50)  # it is freed while bytes come for it
        wait_for(lambda part=part: bool(part.array[0]))
        del gone
        end.send(bytes([call]) * 50, end.header(8, network.RAISES, call))
        wait_for(lambda value=call: end.segment.word(8) == value)
        end.send(end.header(0, 3 * BUFFER_BYTES, segment=number), b"x" * 3 * BUFFER_BYTES)
        end.send(end.header(512, network.RAISES, 1, segment=number), end.header(16, network.RAISES, call))
        wait_for(lambda value=call: end.segment.word(16) == value)
        assert (part.array[:100] == call).all() and not part.array[100:].any()
    assert not end.errors


def test_freed_memory_is_given_back(end: End) -> None:
    segments = [end.new_segment(), end.new_segment()]
    busy, idle = (weakref.ref(segment.own) for segment in segments)
    end.send(end.header(0, 100, segment=segments[0].number), b"x")
    wait_for(lambda: segments[0].word(0) == ord("x"))
    segments.clear()
    assert busy() is not None, "the link still writes there"
    assert idle() is None
    end.send(bytes(99), end.header(8, network.RAISES, 1))
    wait_for(lambda: end.segment.word(8) == 1)
    end.new_segment()
    assert busy() is None


def test_what_is_written_down_is_sent_in_order(end: End) -> None:
    """More records than an outbox, or a call of the system, holds."""
    source = np.arange(1, 3001, dtype=np.int64)
    records = [
        (8 * index, 8, source[index:].ctypes.data) if index % 3 else (8 * index, network.RAISES, int(source[index]))
        for index in range(len(source))
    ]
    wanted = b"".join(
        end.header(offset, length, 0 if length > 0 else value) + (source[index].tobytes() if length > 0 else b"")
        for index, (offset, length, value) in enumerate(records)
    )
    with ThreadPoolExecutor(1) as reader:
        got = reader.submit(end.peer.recv, len(wanted), socket.MSG_WAITALL)
        write_down(end.proxy.outboxes.of_rank[1], records)
        assert got.result(SOON) == wanted
    wait_for(lambda: end.proxy.sent_bytes == 8 * 2000)


def write_down(outbox: np.ndarray, records: list[tuple[int, int, int]]) -> None:
    """As kernels do."""
    post = ctypes.CDLL(None).sem_post
    for index, record in enumerate(records, int(outbox[network.WRITTEN])):
        wait_for(lambda: outbox[network.WRITTEN] - outbox[network.TAKEN] < network.NUM_RECORDS)
        place = network.RING + index % network.NUM_RECORDS * network.RECORD_WORDS
        outbox[place + network.WINDOW : place + network.RECORD_WORDS][:4] = 0, *record
        outbox[network.WRITTEN] += 1
        outbox[place + network.NUMBER] = index + 1
        post(ctypes.c_void_p(outbox[network.SEMAPHORE :].ctypes.data))


def test_what_is_written_down_is_sent_before_the_link_is_closed(end: End) -> None:
    source = np.arange(1 << 17, dtype=np.int64)  # more than a socket takes at once
    with ThreadPoolExecutor(1) as closer:
        write_down(end.proxy.outboxes.of_rank[1], [(0, source.nbytes, source.ctypes.data), (8, network.RAISES, 5)])
        closed = closer.submit(end.proxy.close)
        wanted = end.header(0, source.nbytes) + source.tobytes() + end.header(8, network.RAISES, 5)
        assert end.peer.recv(len(wanted), socket.MSG_WAITALL) == wanted
        closed.result(SOON)
    assert end.peer.recv(1) == b"" and not end.errors


def test_memory_stays_until_it_was_sent(end: End) -> None:
    segments = [end.new_segment()]
    part = weakref.ref(segments[0].own)
    segments[0].bytes[:] = 7
    record = (0, SIZE, segments[0].own.address)
    write_down(end.proxy.outboxes.of_rank[1], [record, record])
    segments.clear()
    end.new_segment()
    assert part() is not None
    wanted = 2 * (end.header(0, SIZE) + b"\x07" * SIZE)
    assert end.peer.recv(len(wanted), socket.MSG_WAITALL) == wanted
    wait_for(lambda: end.new_segment() is not None and part() is None)
    assert not end.errors


def test_what_goes_to_a_peer_that_is_gone_is_dropped(end: End) -> None:
    end.peer.close()
    outbox = end.proxy.outboxes.of_rank[1]
    write_down(outbox, [(8, network.RAISES, value) for value in range(2 * network.NUM_RECORDS)])
    wait_for(lambda: outbox[network.TAKEN] == 2 * network.NUM_RECORDS)
    assert not end.errors


def test_memory_that_cannot_be_read_is_an_error(end: End) -> None:
    outbox = end.proxy.outboxes.of_rank[1]
    write_down(outbox, [(0, 100, 8), (8, network.RAISES, 1)])
    wait_for(lambda: bool(end.errors))
    assert end.errors == [(1, "can't be sent anything: Bad address")]
    wait_for(lambda: outbox[network.TAKEN] == 2)
