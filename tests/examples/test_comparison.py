"""The notebook of the comparison runs from its first cell to its last, from its own folder."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "comparison.ipynb"


def test_every_cell_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("Agg", force=True)
    monkeypatch.chdir(NOTEBOOK.parent)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in cells:
        assert not cell.get("outputs"), "results are not part of the file"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    assert "signmuon" in shown and "10gbit" in shown and "% of the time" in shown
    assert {row[0] for row in names["front"]} >= {"signmuon", "muloco1bit_K64"}  # type: ignore[attr-defined]
