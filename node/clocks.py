"""Clocks: where durations come from, and how long each phase of a round took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


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
    """Adds up the wall time of each phase of a round.

    Attributes:
        seconds: by phase, since :meth:`restart`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    def restart(self) -> None:
        """Begin a new round; the seconds of the last one stay with whoever holds them."""
        self.seconds = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as ``name``."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start
