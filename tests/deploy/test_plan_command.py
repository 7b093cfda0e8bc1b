"""`atoll plan`: what it asks for, what it shows, and what it refuses in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.errors import UserError
from deploy.plan import HEADERS
from deploy.plan_command import Question, answer, view
from deploy.shape import parameters, shape_for
from node.model import model_on_meta
from optim.methods import build_method
from protos.runfile import RunFile

runner = CliRunner()
LINKS = ["--uplink", "1gbit", "--step-time", "2s"]


@pytest.mark.parametrize(
    "count",
    [10_000, 117_056, 500_000, 3_000_000, 20_000_000, 125_000_000, 720_000_000, 7_000_000_000, 10**12],
)
def test_a_shape_has_about_as_many_parameters(count: int) -> None:
    shape = shape_for(count)
    built = sum(parameter.numel() for parameter in model_on_meta(shape).parameters())
    assert built == parameters(shape.d_model, shape.layers, shape.vocab or 256)
    assert built == pytest.approx(
        count, rel=0.1 if count < 100_000 else 0.05 if count < 30_000_000 else 0.015
    )
    assert shape.vocab == (32_768 if count >= 20_000_000 else 256)
    if count >= 3_000_000:
        assert 30 < shape.d_model / shape.layers < 200


def test_a_shape_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"256 token ids has 100 parameters; give from 7\.\d+k to 10T"):
        shape_for(100)
    with pytest.raises(UserError, match="no usual decoder"):
        shape_for(10**14)
    with pytest.raises(UserError, match="1,000,000 token ids"):
        shape_for(10_000_000, vocab=1_000_000)


def test_a_plan_as_a_table() -> None:
    result = runner.invoke(app, ["plan", "--params", "720M", "--nodes", "8", *LINKS])
    assert result.exit_code == 0, result.output
    for expected in (
        "718,596,736 parameters",
        "8, each 1 Gbit/s up, 1 Gbit/s down; 2 s a step",
        "muloco-1bit K=64",
        "take ",
        "the coordinator's link is the limit",
        "python -m bench methods",
    ):
        assert expected in result.output, expected
    assert "nan" not in result.output


@pytest.mark.parametrize("name", ["", "a-run-with-a-name-that-takes-more-room-than-there-is"])
def test_a_plan_in_80_columns_cuts_no_number(name: str, tmp_path: Path) -> None:
    question = Question("1gbit", "2s", params="720M", nodes=8)
    if name:
        file = tmp_path / "run.toml"
        file.write_text(f"[run]\nname = '{name}'\n[method]\nname = 'lordo'\n")
        question = Question("5mbit", "2s", file=file)
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(view(answer(question)))
    text = capture.get()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for column in ("steps", "exchange", "busy", "loss", "up", "down", "peak", "bits", "state B", "host B"):
        assert f" {column} " in text, column
    assert text.count("muloco-1bit K=64 ") >= 2, "the methods stand in both tables"


def test_a_plan_as_json_counts_the_tables_that_a_run_would_have() -> None:
    arguments = ["plan", "--params", "117056", "--nodes", "3", "--hub", "1gbit", "--uplink", "20mbit"]
    result = runner.invoke(app, [*arguments, "--step-time", "100ms", "--latency", "0", "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["model"]["parameters"] == 117_056
    rows = {row["label"]: row for row in values["methods"]}
    for name in ("sign-muon", "lordo", "muloco", "diloco"):
        runfile = RunFile.model_validate({"method": {"name": name}})
        up, down = build_method(runfile.method, model_on_meta(runfile.model)).tables.mean_nbytes
        row = rows[name]
        assert (row["bytes_up"], row["bytes_down"]) == (up, down)
        least, most = 8 * HEADERS * max(up, down), 8 * HEADERS * (up + down)
        assert least / 20e6 <= row["node_seconds"] <= most / 20e6 * 1.0001
        assert row["hub_seconds"] == pytest.approx(row["node_seconds"] * 3 * 20e6 / 1e9)
        assert row["utilisation"] == pytest.approx(
            0.1 * row["steps"] / (0.1 * row["steps"] + row["exchange_seconds"])
        )
    assert values["recommended"]["label"] in rows and values["note"] == ""


def test_a_fast_link_gets_the_best_method_and_a_thin_one_the_fewest_bytes() -> None:
    def recommended(uplink: str) -> str:
        arguments = [
            "plan",
            "--params",
            "100M",
            "--nodes",
            "4",
            "--uplink",
            uplink,
            "--step-time",
            "2s",
            "--json",
        ]
        result = runner.invoke(app, [*arguments, "--hub", "1tbit"])
        assert result.exit_code == 0, result.output
        return str(json.loads(result.output)["recommended"]["label"])

    assert recommended("100gbit") == "sign-muon"
    assert recommended("10mbit") == "muloco-1bit K=64"


def test_a_run_file_brings_its_model_nodes_and_method(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nname = 'mine'\nnodes = 5\n[method]\nname = 'muloco'\noverlap = 8\n")
    result = runner.invoke(app, ["plan", str(file), *LINKS, "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["situation"]["nodes"] == 5 and values["model"]["parameters"] == 117_056
    own = values["methods"][0]
    assert (own["label"], own["loss"], own["waiting_seconds"]) == ("mine (muloco)", None, 0.0)
    measured = tmp_path / "measured.toml"
    measured.write_text("[method]\nname = 'muloco-1bit'\n")
    values = json.loads(runner.invoke(app, ["plan", str(measured), *LINKS, "--json"]).output)
    assert values["methods"][0]["loss"] is not None


def test_another_codec_changes_bytes_and_leaves_the_loss_open() -> None:
    def rows(*more: str) -> dict[str, dict[str, float]]:
        result = runner.invoke(app, ["plan", "--params", "20M", "--nodes", "3", *LINKS, "--json", *more])
        assert result.exit_code == 0, result.output
        return {row["label"]: row for row in json.loads(result.output)["methods"]}

    plain, coded = rows(), rows("--codec", "1bit")
    assert coded["diloco"]["bytes_up"] < plain["diloco"]["bytes_up"]
    assert coded["diloco"]["loss"] is None and coded["sign-muon"] == plain["sign-muon"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--params", "720M", "--nodes", "8", "--uplink", "fast", "--step-time", "2s"],
            "'20 Mbit/s', '20mbit'",
        ),
        (
            ["--params", "720M", "--nodes", "8", "--uplink", "1Gb/s", "--step-time", "2s"],
            "may mean bits or bytes",
        ),
        (["--params", "720M", "--nodes", "8", "--uplink", "0", "--step-time", "2s"], "there is no unit"),
        (["--params", "720M", "--nodes", "8", "--uplink", "0bit", "--step-time", "2s"], "more than nothing"),
        (
            ["--params", "720M", "--nodes", "8", "--uplink", "1gbit", "--step-time", "soon"],
            "is not a duration",
        ),
        (["--params", "720M", "--nodes", "8", "--uplink", "1gbit", "--step-time", "0s"], "more than 0 s"),
        (["--params", "many", "--nodes", "8", *LINKS], "'720M', '1.5B' or '117056'"),
        (["--params", "3", "--nodes", "8", *LINKS], "no usual decoder"),
        (["--params", "720M", *LINKS], "give --nodes"),
        (["--nodes", "8", *LINKS], "nothing names one; give one of FILE, --params 720M or --model"),
        (["--nodes", "8", "--params", "720M", "--model", "hf:x", *LINKS], "--params and --model name one"),
        (["--nodes", "8", "--model", "gpt2", *LINKS], "write 'hf:' and a folder"),
        (
            ["--nodes", "8", "--params", "20M", "--codec", "zip", *LINKS],
            "--codec zip with muloco-1bit: unknown codec 'zip': use fp32",
        ),
        (["nowhere.toml", *LINKS], "cannot be read"),
    ],
)
def test_nonsense_is_refused_in_words(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code in (10, 12), result.output
    assert message in result.output and "Traceback" not in result.output
    assert "pydantic" not in result.output
