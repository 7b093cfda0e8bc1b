"""Small runs with false nodes: who is named, and what becomes of the loss; and the bench's figures."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench import byzantine
from bench.adversaries import ADVERSARIES, Attacked
from bench.byzantine import Case, Found
from protos.runfile import RunFile
from protos.toml_writer import to_toml

SMALL: dict[str, Any] = {
    "model": {"d_model": 32, "layers": 1, "heads": 1, "context": 32},
    "data": {"batch": 2},
}
FP32 = {"codec": "fp32", "embedding_codec": "fp32"}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def attacked(adversaries: Sequence[str], rounds: int, **sections: dict[str, Any]) -> tuple[Attacked, float]:
    """A small run of eight nodes, and its loss at the end."""
    run = {"nodes": 8, "rounds": rounds, "evaluate_every": 0, "validation_windows": 32}
    sim = Attacked(RunFile.parse(to_toml({**SMALL, "run": run, **sections})), adversaries)
    *_, record = sim.rounds()
    assert record.validation is not None
    sim.digest()  # all nodes hold the same state
    return sim, record.validation.loss


@pytest.mark.parametrize(
    ("adversaries", "causes"),
    [
        ([], []),
        (["flip", "random", "replay"], ["disagrees", "disagrees", "replays"]),
        (["zeros", "heavy", "copy"], ["constant", "invalid", "copies"]),
        (["nan", "nan", "nan"], ["abstains", "abstains", "abstains"]),
    ],
)
def test_false_nodes_are_named_and_honest_ones_are_not(adversaries: list[str], causes: list[str]) -> None:
    sim, loss = attacked(adversaries, 10)
    assert [sim.causes[place] for place in sorted(sim.named)] == causes
    assert sorted(sim.named) == list(range(8 - len(adversaries), 8))
    assert loss < 5.3, "it learns: an untrained model has 5.5 nats"


def test_whoever_is_expelled_counts_no_more() -> None:
    sim, _ = attacked(["flip", "flip", "flip"], 10, byzantine={"expel": 1.2})
    voters, _ = sim._reduce(0, [None] * 8, [1] * 8)
    assert voters == [] and all(sim._actions[place] == "expel" for place in (5, 6, 7))


def test_a_trimmed_mean_holds_where_the_mean_fails() -> None:
    lordo = {"name": "lordo", "rank": 4, "local_steps": 4, "lr": 0.02, **FP32}
    _, honest = attacked([], 4, method=lordo)
    _, plain = attacked(["flip"] * 3, 4, method=lordo)
    _, trimmed = attacked(["flip"] * 3, 4, method={**lordo, "trim": 3})
    assert trimmed - honest < 0.3
    assert plain - honest > 1.0


def test_the_bench_reports_every_attack_with_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(case: Case, rounds: int) -> Found:
        case.runfile(rounds)
        return Found(2.0 + len(case.adversaries) / 100, len(case.adversaries), 8, 0, ("disagrees",))

    monkeypatch.setattr(byzantine, "play", made_up)
    monkeypatch.setattr(byzantine, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    report = byzantine.run(False)
    for name in (*ADVERSARIES, "mixed", "flip_expel"):
        assert {f"gap_{name}", f"named_{name}", f"named_after_{name}"} <= report.figures.keys()
        assert report.bars[f"gap_{name}"].ceiling == byzantine.GAP
    assert "gap_zeros_named" in report.figures and "gap_zeros_named" not in report.bars
    assert report.figures["gap_flip"] == pytest.approx(0.03)
    assert report.missed() == [sentence for sentence in report.missed() if "gap_lordo_mean" in sentence]
    assert byzantine.run(True).figures.keys() < report.figures.keys()
