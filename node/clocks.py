"""Clocks: where durations come from, and how long each phase of a round took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

Span: TypeAlias = "tuple[str, float, float]"  # what went on, when it began and ended

GRAIN: Final = 1e-3  # seconds, and share of the round so far: gaps below it are no gaps


@dataclass(frozen=True)
class Clocks:
    """Seconds: ``wall`` for phases, ``cpu`` for the share that is compute."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time

    @classmethod
    def of(cls, device: torch.device) -> Clocks:
        """On an accelerator the CPU's time says little: there, both clocks are the wall's."""
        return cls() if device.type == "cpu" else cls(cpu=time.perf_counter)


class Stopwatch:
    """Adds up the wall time of each phase of a round; what runs in a phase within another counts there alone.

    Attributes:
        seconds: by phase, since :meth:`restart`.
        began: when that was, in seconds of ``date``; 0 before.
    """

    def __init__(self, clock: Callable[[], float], date: Callable[[], float] = time.time) -> None:
        self._clock, self._date = clock, date
        self.seconds: dict[str, float] = {}
        self.began = self._mark = 0.0
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._within = 0.0  # seconds of the phases within the present one

    def restart(self) -> None:
        """Begin a new round; the seconds of the last one stay with whoever holds them."""
        self.seconds, self._spans = {}, {}
        self.began, self._mark = self._date(), self._clock()

    @property
    def spans(self) -> tuple[Span, ...]:
        """When each phase went on, in seconds since the round began, to the microsecond, by their beginnings.

        What goes on in short turns is one span: a thousand micro-steps do not make thousands of them.
        """
        found = [
            (name, round(begin, 6), round(end, 6))
            for name, spans in self._spans.items()
            for begin, end in spans
        ]
        return tuple(sorted(found, key=lambda span: span[1:]))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note when something beside the phases goes on; in any one thread, but in one alone."""
        spans, begin = self._spans.setdefault(name, []), self._clock()
        try:
            yield
        finally:
            self._note(spans, begin - self._mark, self._clock() - self._mark)

    @staticmethod
    def _note(spans: list[tuple[float, float]], begin: float, end: float) -> None:
        if spans and begin - spans[-1][1] <= GRAIN * max(1.0, begin):
            begin = spans.pop()[0]
        spans.append((begin, end))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as ``name``."""
        before, self._within = self._within, 0.0
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            self._note(self._spans.setdefault(name, []), start - self._mark, end - self._mark)
            spent = end - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._within
            self._within = before + spent
