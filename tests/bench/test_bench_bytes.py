"""The bench of bytes on a tiny model: real nodes, every preset."""

from __future__ import annotations

import json

import pytest

from bench import __main__ as command
from bench import bytes as bench_bytes
from node.model import model_on_meta
from optim.methods import build_method
from optim.roles import classify
from protos.methods import PRESETS

FIGURES = ["lordo_vs_fp32_ddp", "lordo_vs_lowrank_ddp", "lordo_state_vs_adam", "muloco1bit_vs_fp32_ddp"]
TINY = {"d_model": 32, "layers": 1, "heads": 2, "context": 16}


def test_it_counts_every_preset(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_bytes, "QUICK", TINY)
    monkeypatch.setattr(bench_bytes, "QUICK_ROUNDS", 2)
    assert command.main(["bytes", "--quick"]) == 0
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert line["bench"] == "bytes"
    assert set(FIGURES) <= set(line["figures"])
    assert line["figures"]["lordo_state_vs_adam"] == 8.0
    assert line["figures"]["overhead"] > 0
    assert all(name in out for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_matrices_and_the_rest_are_all_there_is(name: str) -> None:
    run_file = bench_bytes._run_file(name, TINY, 2)
    model = model_on_meta(run_file.model)
    tables = build_method(run_file.method, model).tables
    roles = classify(model)
    everything = bench_bytes.matrix_nbytes(tables, {role.name for role in roles})
    matrices = bench_bytes.matrix_nbytes(tables, {role.name for role in roles if role.role == "matrix"})
    others = bench_bytes.matrix_nbytes(tables, {role.name for role in roles if role.role != "matrix"})
    assert everything == pytest.approx(tables.mean_nbytes)
    assert [a + b for a, b in zip(matrices, others, strict=True)] == pytest.approx(tables.mean_nbytes)
    assert all(0 < share < total for share, total in zip(matrices, everything, strict=True))
