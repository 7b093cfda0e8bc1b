"""Holding packets back: the rule on a made-up queue and clock, and the requests to the process."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.links.delay import Desk, Line, set_lines


class Queue:
    """Numbers packets, and notes when each leaves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.arrived: dict[int, float] = {}
        self.left: dict[int, float] = {}
        self.dropped: set[int] = set()
        self._new: list[bytes] = []

    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.arrived[len(self.arrived)] = self.now
            self._new.append((len(self.arrived) - 1).to_bytes(4, "big"))

    def read(self) -> list[bytes]:
        new, self._new = self._new, []
        return new

    def free(self, number: bytes) -> None:
        for packet in range(int.from_bytes(number, "big") + 1):
            if packet not in self.dropped:
                self.left.setdefault(packet, self.now)

    def drop(self, number: bytes) -> None:
        self.dropped.add(int.from_bytes(number, "big"))


def play(line: Line, queue: Queue, gaps: list[tuple[float, int]]) -> None:
    """Packets arrive after gaps; the process wakes when packets come and when they are due."""
    for gap, count in gaps:
        until = queue.now + gap
        while (due := line.release(queue.now)) is not None and due <= until:
            queue.now = due
        queue.now = until
        queue.arrive(count)
        line.read()
    while (due := line.release(queue.now)) is not None:
        queue.now = due


GAPS = st.lists(st.tuples(st.floats(0, 0.05), st.integers(0, 5)), min_size=1, max_size=40)


@given(GAPS, st.floats(0.001, 0.2), st.floats(0, 1), st.integers(0, 2**32))
def test_packets_wait_their_time_and_keep_their_order(
    gaps: list[tuple[float, int]], delay: float, part: float, seed: int
) -> None:
    queue = Queue()
    line = Line(queue, random.Random(seed).random, lambda: queue.now)
    jitter = delay * part
    line.set(delay, jitter, 0.0)
    play(line, queue, gaps)
    assert set(queue.left) == set(queue.arrived)
    for packet, arrived in queue.arrived.items():
        assert arrived + delay - jitter - 1e-9 <= queue.left[packet] <= arrived + delay + jitter + 1e-9
    times = [queue.left[packet] for packet in sorted(queue.left)]
    assert times == sorted(times)


def test_sparse_packets_see_all_of_the_jitter() -> None:
    queue = Queue()
    line = Line(queue, random.Random(1).random, lambda: queue.now)
    line.set(0.02, 0.01, 0.0)
    play(line, queue, [(0.1, 1)] * 400)
    waits = sorted(queue.left[packet] - queue.arrived[packet] for packet in queue.left)
    assert 0.0100 <= waits[0] < 0.0105 and 0.0295 < waits[-1] <= 0.0300
    assert abs(sum(waits) / len(waits) - 0.02) < 0.001


@given(GAPS, st.integers(0, 2**32))
def test_packets_get_lost_as_often_as_asked_and_the_others_pass(
    gaps: list[tuple[float, int]], seed: int
) -> None:
    queue = Queue()
    generator = random.Random(seed)
    line = Line(queue, generator.random, lambda: queue.now)
    line.set(0.01, 0.0, 0.3)
    play(line, queue, gaps)
    expected = random.Random(seed)
    assert queue.dropped == {packet for packet in sorted(queue.arrived) if expected.random() < 0.3}
    assert set(queue.left) == set(queue.arrived) - queue.dropped


def test_all_lost_is_a_cut_link() -> None:
    queue = Queue()
    line = Line(queue, random.random, lambda: queue.now)
    line.set(0.01, 0.0, 1.0)
    play(line, queue, [(0.01, 3)] * 5)
    assert len(queue.dropped) == 15 and not queue.left


def test_lines_take_only_what_they_are() -> None:
    queue = Queue()
    lines = {7: Line(queue, random.random, lambda: queue.now)}
    set_lines(lines, {"7": [0.1, 0.05, 0.5]})
    assert (lines[7].delay, lines[7].jitter, lines[7].loss) == (0.1, 0.05, 0.5)
    for wrong in ({"8": [0, 0, 0]}, {"7": [0, 0]}, {"x": [0, 0, 0]}, {"7": ["a", 0, 0]}):
        with pytest.raises(ValueError):
            set_lines(lines, wrong)
    assert lines[7].delay == 0.1


_numbers = itertools.count()


@pytest.fixture
def desk() -> tuple[Desk, str]:
    name = f"\0atoll-test-desk-{os.getpid()}-{next(_numbers)}"
    return Desk(name, {7: Line(Queue(), random.random, lambda: 0.0)}), name


def ask(desk: Desk, name: str, request: bytes) -> tuple[bool, bytes]:
    """Whether the desk goes on after a request, and what it answered."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(10)
        asking.connect(name)
        asking.sendall(request)
        going_on: list[bool] = []
        answering = threading.Thread(target=lambda: going_on.append(desk.answer()))
        answering.start()
        answer = asking.recv(4096)
        answering.join(10)
        return going_on[0], answer


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="abstract sockets are a thing of Linux")
def test_the_desk_answers_changes_and_ends(desk: tuple[Desk, str]) -> None:
    here, name = desk
    with here.socket:
        going_on, answer = ask(here, name, b'{"lines": {"7": [0.5, 0, 0.25]}}')
        assert going_on and json.loads(answer) == {"lines": {"7": [0.5, 0.0, 0.25]}}
        for nonsense in (b"[]", b"{", b'{"lines": {"9": [0, 0, 0]}}', b"\xff"):
            assert ask(here, name, nonsense) == (True, b"")
        assert here.lines[7].delay == 0.5
        assert ask(here, name, b'{"end": true}')[0] is False
