"""The overlap bench: figures and bars from given rounds, the choice of a batch, and small real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import namespaces, overlap, overlap_fleet
from bench.namespaces import NamespacesUnavailable, address, linked
from bench.overlap import DELAYED, OVERLAPPED, QUICK, SERIAL, Case, Measured, Size, fill, next_batch
from bench.overlap_fleet import WARM_ROUNDS, Course, Fleet, Run, fleet
from bench.overlap_island import Counts, count
from bench.report import Report
from node.events import RoundDone

TINY = Case("signum", {"d_model": 16, "layers": 1, "heads": 2, "context": 8}, 2)
LINKS = pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))
CLEAN = [Counts(20, [20, 20], [5, 5], [900, 901])]


def done(number: int, began: float, compute: float, exchange: float) -> RoundDone:
    spans = (("compute", 0.0, compute), ("exchange", compute, compute + exchange))
    return RoundDone(
        round=number,
        rounds=99,
        loss=1.0,
        tokens=1,
        counted=True,
        voters=("a", "b"),
        agreement=1.0,
        reason="",
        digest="",
        bytes_up=0,
        bytes_down=0,
        compute_seconds=0.0,
        busy_seconds=0.0,
        seconds={"data": 0.125, "compute": compute - 0.25, "propose": 0.125, "exchange": exchange},
        began=began,
        spans=spans,
    )


def course(pace: float, *, compute: float = 1.0, exchange: float = 1.0, rounds: int = 4) -> Course:
    """Node 1 computes half a second longer than node 0, which waits for it; the first rounds are slow."""
    times = [-100.0 + 50 * number for number in range(WARM_ROUNDS)]
    times += [pace * number for number in range(rounds)]
    return Course(
        [
            [done(n, t, compute - 0.5, exchange + 0.5) for n, t in enumerate(times)],
            [done(n, t + 0.01, compute, exchange) for n, t in enumerate(times)],
        ]
    )


def measured(serial: float, overlapped: float, delayed: float, **phases: float) -> Measured:
    paces = {SERIAL: serial, OVERLAPPED: overlapped, DELAYED: delayed}
    # a pass under load, and one without: ratios are those of a pass
    courses = {kind: [course(load * pace, **phases) for load in (1.0, 3.0)] for kind, pace in paces.items()}
    return Measured(QUICK[0], 7, courses)


def test_a_course_leaves_the_first_rounds_out_and_splits_waiting_from_computing() -> None:
    of = course(3.0, compute=2.0, exchange=0.75)
    assert of.rounds == [3.0] * 3
    assert of.seconds("data", "compute", "propose") == [2.0] * 4, "of the slower node"
    assert of.waits == [0.75] * 4, "of the node that was ready last"


def test_figures_bars_and_picture(tmp_path: Path) -> None:
    report = Report("overlap")
    fill(report, [measured(2.1, 1.5, 1.2)], CLEAN, judged=True)
    assert report.figures["speedup"] == pytest.approx(1.4)
    assert report.figures["speedup_ddp_adamw_delayed"] == pytest.approx(1.75)
    assert report.figures["compute_over_exchange"] == 1.0
    assert report.figures["gathers_for_exchange"] == 0
    assert report.figures["control_bytes"] == 901
    assert report.missed() == []
    report.write_pictures(tmp_path / "overlap.json")
    assert (tmp_path / "overlap-timeline.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("of", "counts", "missed"),
    [
        (measured(2.1, 1.7, 1.2), CLEAN, ["speedup is 1.235, the bar is >= 1.3"]),
        (measured(2.1, 1.5, 1.2, compute=1.5), CLEAN, ["compute_over_exchange is 1.5"]),
        (measured(2.1, 1.5, 1.2, exchange=1.5), CLEAN, ["compute_over_exchange is 0.667"]),
        (measured(2.1, 1.5, 1.2), [*CLEAN, Counts(20, [20, 21], [5], [9])], ["gathers_for_exchange is 1"]),
        (measured(2.1, 1.5, 1.2), [Counts(20, [19, 20], [5], [9])], ["gathers_for_exchange is 1"]),
    ],
)
def test_a_missed_bar_is_said(of: Measured, counts: list[Counts], missed: list[str]) -> None:
    report = Report("overlap")
    fill(report, [of], counts, judged=True)
    said = report.missed()
    assert len(said) == len(missed)
    assert all(sentence.startswith(begin) for sentence, begin in zip(said, missed, strict=True))


def test_speed_is_not_judged_without_thin_links(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def measure(cases: tuple[Case, ...], size: Size, *, shaped: bool) -> list[Measured]:
        shapes.append(shaped)
        if shaped:
            raise NamespacesUnavailable("network namespaces need root")
        return [measured(1.0, 1.0, 1.0)]

    monkeypatch.setattr(overlap, "measure", measure)
    monkeypatch.setattr(overlap, "count", lambda method, rounds: CLEAN)
    report = overlap.run(quick=False)
    assert shapes == [True, False]
    assert report.missed() == [] and set(report.bars) == {"gathers_for_exchange"}
    assert any("NOT JUDGED" in note and "need root" in note for note in report.notes)


def test_the_batch_moves_to_where_both_take_as_long() -> None:
    assert next_batch(10, 0.5) == 20
    assert next_batch(10, 2.0) == 5
    assert next_batch(1, 40.0) == 1, "a single sample is the least"
    assert next_batch(3, 0.001) == 24, "not too far at once"


def test_the_kinds_of_runs() -> None:
    overlapped, delayed = TINY.run(3, OVERLAPPED, 4), TINY.run(3, DELAYED, 4)
    assert (TINY.run(3, SERIAL, 4).overlap, overlapped.overlap, delayed.overlap) == (False, True, True)
    assert (overlapped.file.method.delay, delayed.file.method.delay) == (0, 1)
    assert overlapped.file.data.batch == 3 and overlapped.file.run.nodes == overlap_fleet.NODES


@LINKS
def test_every_namespace_can_have_a_rate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(namespaces, "_command", lambda *words: commands.append(words))
    monkeypatch.setattr(namespaces.os, "open", lambda *a: 0)
    monkeypatch.setattr(namespaces.os, "close", lambda file: None)
    with linked(2, [5_000_000, 7_000_000]) as paths:
        assert len(paths) == 2
    shaped = [words for words in commands if words[0] == "tc"]
    assert [words[words.index("rate") + 1] for words in shaped] == ["5000000bit"] * 2 + ["7000000bit"] * 2
    assert any(f"{address(1)}/24" in words for words in commands)


@pytest.fixture(scope="module")
def loopback() -> Any:
    with fleet(shaped=False) as processes:
        yield processes


def test_real_nodes_tell_the_same_of_one_run_after_another(loopback: Fleet) -> None:
    digests = {}
    for kind in overlap.KINDS:
        run: Run = TINY.run(2, kind, WARM_ROUNDS + 2)
        nodes = loopback.course(run).nodes
        assert [len(rounds) for rounds in nodes] == [WARM_ROUNDS + 2] * 2
        assert [e.digest for e in nodes[0]] == [e.digest for e in nodes[1]]
        assert all("compute" in {name for name, _, _ in event.spans} for event in nodes[0])
        flights = ["flight" in {name for name, _, _ in event.spans} for event in nodes[0]]
        assert flights == [run.overlap] * len(flights)
        digests[kind] = nodes[0][-1].digest
    assert digests[SERIAL] == digests[OVERLAPPED] != digests[DELAYED]


def test_an_island_moves_no_tensor_for_its_exchange() -> None:
    for each in count("sign-muon", rounds=3):
        assert each.extra == 0 and len(each.rounds) == 2
        assert each.passes > 8, "weights are gathered for the passes"
        assert min(each.control) > 0
