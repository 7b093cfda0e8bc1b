"""The restarts bench: its figures and bars from given runs, and where kills are drawn."""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import restarts
from bench.faults import POINTS
from bench.restarts import APART, LORDO, Course
from coordinator.audit import Violation


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    restarts.add_options(parser)
    return parser.parse_args(arguments)


def test_rounds_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, int, str]] = []

    def course(
        folder: Path, rounds: int, kills: int, seed: int = 0, method: Mapping[str, Any] = LORDO
    ) -> Course:
        called.append((kills, seed, method["name"]))
        digests = {index: f"{index}" for index in range(rounds)}
        if kills and method is not LORDO:
            digests[7] = "another"
            del digests[rounds - 1]
            return Course(digests, [Violation("twice", "sample 3 was trained twice")], [1.0, 4.0, 2.0])
        return Course(digests, [], [3.0])

    monkeypatch.setattr(restarts, "course", course)
    report = restarts.run(quick=False, options=options("--seed", "4"))
    assert called == [(0, 0, "sign-muon"), (50, 4, "sign-muon"), (0, 0, "lordo"), (10, 4, "lordo")]
    assert report.figures == {
        "rounds_that_differ": 2,
        "violations": 1,
        "lordo_rounds_that_differ": 0,
        "lordo_violations": 0,
        "pause_median_seconds": 2.0,
        "pause_longest_seconds": 4.0,
        "kills": 50,
        "rounds": 52 * APART,
        "lordo_kills": 10,
        "lordo_rounds": 12 * APART,
    }
    assert [text.split()[0] for text in report.missed()] == ["rounds_that_differ", "violations"]
    assert report.notes[0] == "sample 3 was trained twice"


@pytest.mark.parametrize("name", POINTS)
def test_every_point_of_a_fault_is_there(name: str) -> None:
    *path, last = POINTS[name].name.split(".")
    owner: Any = importlib.import_module(POINTS[name].module)
    for part in path:
        owner = getattr(owner, part)
    assert last in vars(owner), "where arm() replaces it"


def test_kills_are_drawn_in_every_phase_of_a_coordinator() -> None:
    chance = random.Random(1)
    drawn = [restarts._drawn(chance) for _ in range(200)]
    assert {fault.point for fault in drawn} == {*restarts.POINTS}
    assert {*restarts.POINTS} - {""} <= {*POINTS}
    assert all(fault.times == 1 for fault in drawn if fault.point == "gathering")
    assert max(fault.times for fault in drawn) > APART, "deliveries are counted one by one"
    first = [restarts._drawn(chance, first=True) for _ in range(50)]
    assert "gathering" not in {fault.point for fault in first}, "a fresh run is not awaited by anybody"
