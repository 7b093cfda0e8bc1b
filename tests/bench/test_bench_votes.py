"""The bench command, its report, and the votes bench at a small size."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as command
from bench import votes
from bench.report import Report, format_number, interleave, median, median_ratio
from optim import bits

EXPECTED = [
    "tally_m8_of_read",
    "tally_m64_of_read",
    "pack_of_copy",
    "apply_of_copy",
    "unpack_of_copy",
    "int8_over_tally",
]


@pytest.mark.parametrize("nbytes", [64, 512, 4096 + 192])
def test_the_reader_reads_every_byte(nbytes: int) -> None:
    rows = votes.random_votes(3, nbytes, np.random.default_rng(1))
    read = votes.reader(rows)
    wanted = int(np.bitwise_xor.reduce(np.concatenate([row.view(np.uint64) for row in rows])))
    assert read() == wanted
    for place in (0, nbytes // 2, nbytes - 1):
        rows[1][place] ^= 0x10
        assert read() != wanted, f"byte {place} is not read"
        rows[1][place] ^= 0x10


def test_votes_reports_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(votes, "QUICK", (1 << 16, 2))
    assert command.main(["votes", "--quick"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "votes"
    assert list(line["figures"])[: len(EXPECTED)] == EXPECTED
    assert all(isinstance(value, float) and value > 0 for value in line["figures"].values())
    report = votes.run(quick=True)
    bars = {"tally_m8_of_read": 0.7, "tally_m64_of_read": 0.7, "int8_over_tally": 10.0}
    wanted = bars if bits.backend() == "numba" else {}
    assert {name: bar.floor for name, bar in report.bars.items()} == wanted


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> str:
    """A bench in the registry whose second figure misses its bar."""

    def run(quick: bool) -> Report:
        report = Report("sample")
        report.add("ratio", 2.0, floor=1.0)
        report.add("seconds", 12.3456789 if quick else 99.0, ceiling=10.0)
        report.table("A [table]", "kernel", "ms").row("[copy]", 1.5)
        report.note("a [note]")
        return report

    module = types.ModuleType("bench_sample")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench_sample", module)
    monkeypatch.setitem(command.BENCHES, "sample", ("bench_sample", "one [line] about it"))
    return "sample"


def test_the_last_line_is_the_figures(
    sample: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "sample.json"
    assert command.main([sample, "--quick", "--json", str(target)]) == 0
    out, err = capsys.readouterr()
    wanted = {"bench": "sample", "figures": {"ratio": 2.0, "seconds": 12.3457}}
    assert json.loads(out.splitlines()[-1]) == wanted == json.loads(target.read_text())
    assert "A [table]" in out and "[copy]" in out and "a [note]" in out
    assert "held" in out and "MISSED" in out
    assert "seconds is 12.35, the bar is <= 10" in err


def test_check_fails_below_a_bar(sample: str) -> None:
    assert command.main([sample, "--quick", "--check"]) == 1
    assert command.main([sample, "--quick"]) == 0


def test_without_a_name_the_benches_are_listed(sample: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(command.BENCHES)
    assert {"votes", "round", "wire", "methods"} <= set(command.BENCHES)
    assert lines[-1].endswith("one [line] about it")


def test_an_unknown_bench_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["vots"]) == 2
    assert "did you mean 'votes'?" in capsys.readouterr().err
    assert command.main(["xyz"]) == 2
    assert "the benches are votes" in capsys.readouterr().err


def test_a_report_refuses_nonsense() -> None:
    report = Report("sample")
    report.add("a", 1.0)
    with pytest.raises(ValueError, match="reported twice"):
        report.add("a", 2.0)
    with pytest.raises(ValueError, match="not a finite number"):
        report.add("b", float("nan"))
    with pytest.raises(ValueError, match="3 cells for 2 columns"):
        report.table("t", "x", "y").row("1", 2, 3)


def test_interleave_takes_turns_by_the_given_clock() -> None:
    ticks = iter(range(100))
    order: list[str] = []
    times = interleave(
        {"a": lambda: order.append("a"), "b": lambda: (order.append("b"), next(ticks))},
        repeats=2,
        warmup=1,
        clock=lambda: float(next(ticks)),
    )
    assert order == ["a", "b"] * 3
    assert times == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert median(times["b"]) == 2.0
    assert median_ratio(times["b"], times["a"]) == 2.0
    with pytest.raises(ValueError, match="zip"):
        median_ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.123"),
        (12.345, "12.35"),
        (0, "0"),
        (1234567.8, "1,234,568"),
        (1e-5, "1.000e-05"),
        (7, "7"),
    ],
)
def test_numbers_are_readable(value: float, text: str) -> None:
    assert format_number(value) == text
