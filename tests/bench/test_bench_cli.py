"""The bench of the commands' start: what they import is found out, and a heavy module misses its bar."""

from __future__ import annotations

import pytest

from bench import cli


def test_imports_are_those_of_the_command_to_its_end() -> None:
    modules = cli.imported(("-c", "import colorsys; from xml.dom import pulldom"))
    assert {"colorsys", "xml.dom.pulldom"} <= modules
    assert "torch" not in modules


def test_cpu_seconds_are_those_of_the_process() -> None:
    assert cli.cost(("-c", "import time\nwhile time.process_time() < 0.3: pass")).cpu >= 0.3


@pytest.mark.parametrize(("heavy", "missed"), [("typer", True), ("torch", False)])
def test_a_heavy_module_misses_the_bar(monkeypatch: pytest.MonkeyPatch, heavy: str, missed: bool) -> None:
    monkeypatch.setattr(cli, "FLOORS", {"python": ("-c", "pass"), "torch": ("-c", "import json")})
    monkeypatch.setattr(cli, "COMMANDS", {"help": ("--help",)})
    monkeypatch.setattr(cli, "HEAVY", (heavy,))
    report = cli.run(quick=True)
    assert report.figures["help_heavy_modules"] == missed
    assert any("help_heavy_modules" in sentence for sentence in report.missed()) == missed
    assert any(note.startswith("help imports typer") for note in report.notes) == missed
    assert report.bars["help_cpu_seconds"].ceiling == cli.BAR
