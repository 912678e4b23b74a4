"""What a proxy does with a frame that comes in parts: each word waits for the bytes before it, and for no others."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from epcomm.device.cpu import network
from epcomm.proxy import Proxy

SOON = 10.0  # seconds
GENERATION = 7


class Memory:
    """A rank's part of a segment."""

    def __init__(self, num_bytes: int):
        self.array = np.zeros(num_bytes, dtype=np.uint8)
        self.address, self.size, self.own = self.array.ctypes.data, num_bytes, self
        self.network: Any = None

    def word(self, offset: int) -> int:
        return int(self.array[offset : offset + 8].view(np.int64)[0])


class End:
    """A proxy, what it complained of, and the other end of its link."""

    def __init__(self) -> None:
        own, self.peer = socket.socketpair()
        self.errors: list[tuple[int, str]] = []
        self.memory = Memory(1 << 20)
        self.proxy = Proxy({1: own}, lambda: None, lambda rank, text: self.errors.append((rank, text)))
        self.proxy.register(self.memory)

    def send_table(self, *entries: tuple[int, int, int]) -> None:
        """A frame's beginning: (offset, bytes or what else the record does, value) per record."""
        window = self.memory.network[0]
        table = b"".join(struct.pack("<4q", window, *entry) for entry in entries)
        self.peer.sendall(struct.pack("<q", len(entries)) + table)


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
        end.send_table((1024, 100, 0), (first, network.RAISES, call), (4096, bulk, 0), (second, network.RAISES, call))
        time.sleep(0.02)
        assert end.memory.word(first) == 0
        end.peer.sendall(bytes([call]) * 100 + bytes([call]) * (bulk - 1))
        wait_for(lambda word=first, value=call: end.memory.word(word) == value)
        assert (end.memory.array[1024 : 1024 + 100] == call).all()
        time.sleep(0.02)
        assert end.memory.word(second) == 0
        end.peer.sendall(bytes([call]))
        wait_for(lambda word=second, value=call: end.memory.word(word) == value)
        assert (end.memory.array[4096 : 4096 + bulk] == call).all()
    assert not end.errors


def test_settling_waits_for_the_bytes_before_the_marker(end: End) -> None:
    end.send_table((0, 8, 0), (0, network.MARKS, GENERATION))
    with pytest.raises(TimeoutError, match=r"rank\(s\) \[1\]"):
        end.proxy.settle(GENERATION, 0.1)
    end.peer.sendall(bytes(8))
    end.proxy.settle(GENERATION, SOON)


@pytest.mark.parametrize("entry", [((1 << 20) - 7, 8, 0), (-8, network.RAISES, 1), (0, -9, 0), (1 << 20, 1, 0)])
def test_a_frame_that_cannot_be_writes_nothing(end: End, entry: tuple[int, int, int]) -> None:
    end.send_table((64, network.RAISES, 1), entry)
    wait_for(lambda: bool(end.errors))
    assert end.errors[0][0] == 1 and f"at {entry[0]} of segment 0" in end.errors[0][1]
    assert not end.memory.array.any()
