"""The network of interpreted ranks: what it promises, and that it promises no more.

In a module of its own: it imports Triton, and ranks that interpret kernels must not have imported it before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from epcomm.device import control
from epcomm.device.gpu.remote import RemoteNetwork
from epcomm.heap.cpu import Mapping, create_memory_file

WORD_BYTES = 32 * control.LINE  # of each segment; what else is put goes behind them


def line(number: int) -> int:
    """The 64-bit word that opens a line."""
    return number * control.LINE // 8


class Parts:
    """This rank's view of a segment of two."""

    def __init__(self) -> None:
        self.own, peer = memory(1 << 16), memory(1 << 16)
        self.mappings, self.bases = [self.own, peer], np.array([self.own.address, peer.address])
        self.network = (0, 0, 0)


def memory(num_bytes: int) -> Mapping:
    descriptor = create_memory_file(num_bytes)
    try:
        return Mapping(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def arrivals(send: Callable[[RemoteNetwork], None], watched: Sequence[int]) -> list[tuple[int, ...]]:
    """The states, in order, of these 64-bit words of the peer's part while `send` is done, and after it."""
    parts, network = Parts(), RemoteNetwork(0, [0, 1], longest_delay=0.1)
    network.add(parts, WORD_BYTES)
    assert parts.bases.tolist() == [parts.own.address, 0]
    words = parts.mappings[1].array(0, 1 << 16).view(np.int64)
    parts.own.array(0, 8 * 64).view(np.int64)[:] = np.arange(64)
    send(network)
    states = [tuple(words[list(watched)].tolist())]
    while network._delivered < network._count:
        time.sleep(0.0005)
        states.append(tuple(words[list(watched)].tolist()))
    network.settle(1, 10.0)
    network.close()
    states.append(tuple(words[list(watched)].tolist()))
    return list(dict.fromkeys(states))


def test_network_is_late_and_out_of_order() -> None:
    places = [line(number) for number in range(1, 21)]

    def send(network: RemoteNetwork) -> None:
        for number in range(1, 21):
            network.raise_word(0, 1, 8 * line(number), number)

    states = arrivals(send, places)
    assert 0 in states[0] and states[-1] == tuple(range(1, 21))
    assert any(0 in state[: state.index(max(state))] for state in states)  # a later one came before an earlier one


def test_network_keeps_the_order_of_one_word() -> None:
    def send(network: RemoteNetwork) -> None:
        for number in range(1, 21):
            network.raise_word(0, 1, 8 * line(3), number)

    states = arrivals(send, [line(3)])
    assert states == sorted(states) and states[-1] == (20,)


ORDERS = [("put quiet raise", True), ("raise put quiet", False), ("put raise", False)]


@pytest.mark.parametrize("order, is_right", ORDERS, ids=[order for order, _ in ORDERS])
def test_network_tells_orders_apart(order: str, is_right: bool) -> None:
    """A kernel that raises before it puts, or without a `quiet` in between, is seen to: words run ahead of rows."""

    numbers = range(1, 21)

    def send(network: RemoteNetwork) -> None:
        for step in order.split():
            for number in numbers:
                if step == "put":
                    network.put(0, 1, WORD_BYTES + 8 * number, 8 * number, 8)
                elif step == "raise":
                    network.raise_word(0, 1, 8 * line(number), number)
                else:
                    network.quiet()

    rows = [WORD_BYTES // 8 + number for number in numbers]
    states = arrivals(send, [line(number) for number in numbers] + rows)
    runs_ahead = any(word and not row for state in states for word, row in zip(state[:20], state[20:], strict=True))
    assert runs_ahead is not is_right


@pytest.mark.parametrize("offset", [8, WORD_BYTES])
def test_network_refuses_words_that_are_not_counted(offset: int) -> None:
    """GIN counts what was raised per line of the words at the front of a segment: others would be lost."""
    with pytest.raises(ValueError, match=f"a word at {offset}: wanted the start of a line below {WORD_BYTES}"):
        arrivals(lambda network: network.raise_word(0, 1, offset, 1), [0])
