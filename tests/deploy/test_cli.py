from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from deploy.cli import app
from protos.methods import PRESETS
from protos.runfile import RunFile

ROOT = Path(__file__).parents[2]
runner = CliRunner()


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """The command sets the root logger up; other tests want it as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("matplotlib").setLevel(logging.NOTSET)


def _imported(arguments: list[str]) -> set[str]:
    """The modules that a command has imported when it ends."""
    code = (
        "import sys\n"
        "from deploy.cli import main\n"
        f"sys.argv = ['atoll', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_neither_torch_nor_grpc() -> None:
    modules = _imported(["--help"])
    assert "deploy.cli" in modules
    assert not {"torch", "grpc", "numpy", "matplotlib", "pydantic"} & modules


HEAVY = {"torch", "numba", "matplotlib", "scipy", "transformers"}


def test_what_only_asks_or_counts_does_without_torch(tmp_path: Path) -> None:
    file = str(tmp_path / "run.toml")
    assert not HEAVY & _imported(["run", "init", file])
    assert not HEAVY & _imported(["run", "check", file])
    assert not HEAVY & _imported(["status", "atoll+insecure://x@127.0.0.1:1"])
    plan = _imported(["plan", "--params", "20M", "--nodes", "4", "--uplink", "1gbit", "--step-time", "1s"])
    assert "optim.tables" in plan and not {*HEAVY, "grpc", "numpy"} & plan


def test_help_names_the_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("run", "coordinator", "join", "train", "status", "demo"):
        assert re.search(rf"^ *{command} ", result.output, re.MULTILINE), command


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of the program with its words."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, each in (inner or {}).items():
        yield from _commands(each, (*path, name))


COMMANDS = dict(_commands(typer.main.get_command(app)))
ACTS = {  # what they do is their result: to look at it, another command, or a log, is there
    *(("coordinator",), ("join",), ("train",), ("run", "init"), ("replay",), ("testbed", "link")),
    *(("throttle", action) for action in ("set", "clear", "run")),
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0 and "Usage:" in result.output
    assert re.search(rf"Examples?: .*atoll {' '.join(command)} ", result.output, re.DOTALL)


def test_every_command_that_reports_does_so_as_json() -> None:
    without = {
        path for path, command in COMMANDS.items() if not any("--json" in p.opts for p in command.params)
    }
    assert without == ACTS


def test_shells_complete_commands_and_options() -> None:
    asked = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": "atoll sta", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from deploy.cli import main; main()"],
        cwd=ROOT,
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["status"], done.stderr


def test_init_writes_a_run_file_that_check_accepts(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    options = ["--nodes", "4", "--method", "signum", "--set", "data.batch=2"]
    result = runner.invoke(app, ["run", "init", str(file), *options])
    assert result.exit_code == 0, result.output
    run = RunFile.load(file)
    assert (run.run.nodes, run.method.name, run.data.batch) == (4, "signum", 2)
    result = runner.invoke(app, ["run", "check", str(file)])
    assert result.exit_code == 0, result.output
    assert f"{file} is fine; digest {run.digest}" in result.output
    for expected in (
        "[model]",
        "d_model",
        "default",
        "an fp32 ring in every step",
        "optimizer state",
        "between 4 nodes",
        "1-bit votes",
        "512 steps of each node, 262,144 tokens in all",
    ):
        assert expected in result.output, expected


def test_init_does_not_overwrite(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("mine")
    result = runner.invoke(app, ["run", "init", str(file)])
    assert result.exit_code == 12 and "exists already" in result.output and "--force" in result.output
    assert file.read_text() == "mine"
    assert runner.invoke(app, ["run", "init", str(file), "--force"]).exit_code == 0
    assert RunFile.load(file) == RunFile.parse(file.read_text())


def test_init_to_stdout() -> None:
    result = runner.invoke(app, ["run", "init", "-", "--rounds", "7"])
    assert result.exit_code == 0 and RunFile.parse(result.output).run.rounds == 7
    result = runner.invoke(app, ["run", "init", "-", "--method", "diloco"])
    assert result.exit_code == 0 and RunFile.parse(result.output).run.rounds == 5


def test_init_refuses_broken_values(tmp_path: Path) -> None:
    result = runner.invoke(app, ["run", "init", str(tmp_path / "r.toml"), "--set", "model.heads=7"])
    assert result.exit_code == 10 and "heads" in result.output and "Traceback" not in result.output
    assert not (tmp_path / "r.toml").exists()


def test_check_as_json(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nnodes = 3\n[method]\nschedule = 'constant'\n")
    result = runner.invoke(app, ["run", "check", str(file), "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["digest"] == RunFile.load(file).digest
    assert "run.rounds" in values["defaults"] and "method.schedule" not in values["defaults"]
    assert any("constant" in sentence for sentence in values["advice"])
    costs = values["round"]
    assert costs["parameters"] == sum(kind["entries"] for kind in costs["kinds"])
    for way in ("bytes_up", "bytes_down"):
        assert costs[way] == sum(kind[way] for kind in costs["kinds"])
    assert (costs["steps"], costs["tokens_node"], costs["tokens"]) == (1, 256, 768)
    assert costs["ring_fp32_step_bytes_up"] == pytest.approx(8 * costs["parameters"] * 2 / 3)
    assert 1 <= costs["bits_per_parameter_step_up"] < 1.02
    assert costs["hub_fp32_ratio"] == pytest.approx(32 / costs["bits_per_parameter_step_up"])
    assert values["state"] == {"device_bytes": 4 * costs["parameters"], "host_bytes": 0, "complete": True}


def test_check_shows_the_memory_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[method]\nname = 'muloco'\n")
    result = runner.invoke(app, ["run", "check", str(file), "--ranks", "2"])
    assert result.exit_code == 0, result.output
    for text in ("the fullest of 2 ranks", "state in host memory", "between rounds", "the most in a round"):
        assert text in result.output
    result = runner.invoke(app, ["run", "check", str(file), "--ranks", "2", "--json"])
    values = json.loads(result.output)
    parameters = values["round"]["parameters"]
    assert sum(rank["weights"] for rank in values["ranks"]) == 4 * parameters
    for key in ("device", "host"):
        assert sum(rank["state"][key] for rank in values["ranks"]) == values["state"][f"{key}_bytes"]
    assert all(rank["peak"] > rank["resting"] > 0 for rank in values["ranks"])
    file.write_text("[method]\nname = 'muloco'\noptimizer = 'torch:NAdam'\nlr = 0.01\n")
    result = runner.invoke(app, ["run", "check", str(file), "--ranks", "2"])
    assert "activations and what the class of torch.optim keeps" in result.output, "its state is not counted"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            "name = 'muloco-1bit'",
            [
                "16 steps: 4,096 tokens a node, 12,288 in all",
                "1-bit votes, majority",
                "int4, mean",
                "in host memory",
            ],
        ),
        ("name = 'muloco'\nfragments = 4", ["8 steps", "4 fragments in turn", "largest round", "2bit, mean"]),
        ("name = 'lordo'", ["fp32 bases, from the reducer", "int4, mean", "fp32, mean"]),
        ("name = 'lowrank-ddp'", ["one of 16 rounds"]),
        (
            "name = 'diloco'\noptimizer = 'torch:SGD'\nlr = 0.1",
            ["and what the class of torch.optim keeps", "100 steps"],
        ),
    ],
)
def test_check_of_methods_with_local_steps(tmp_path: Path, method: str, expected: list[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[run]\nnodes = 3\n[method]\n{method}\n")
    result = runner.invoke(app, ["run", "check", str(file)])
    assert result.exit_code == 0, result.output
    for text in expected:
        assert text in result.output, text


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("name = 'diloco'\noptimizer = 'torch:Sgd'\nlr = 0.1", "did you mean SGD"),
        ("name = 'muloco'\nlocal_steps = 400\nfragments = 100", "100 fragments"),
    ],
)
def test_check_names_a_method_that_does_not_fit_the_model(tmp_path: Path, method: str, expected: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[method]\n{method}\n")
    result = runner.invoke(app, ["run", "check", str(file)])
    assert result.exit_code in (10, 12)
    assert "cannot train this model" in result.output and expected in result.output
    assert "Traceback" not in result.output


def test_a_model_that_a_script_makes(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[model]\nname = 'own'\ntensors = ['fc.weight matrix 4x4']\n")
    result = runner.invoke(app, ["run", "check", str(file)])
    assert "1 step: 4 samples a node, 12 in all" in result.output
    assert "6,144 samples in all" in result.output
    result = runner.invoke(app, ["train", str(file)])
    assert result.exit_code == 14, result.output
    assert "atoll: the model of this run is made by a script" in result.output


@pytest.mark.parametrize("name", PRESETS)
def test_init_writes_every_method(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.toml"
    assert runner.invoke(app, ["run", "init", str(file), "--method", name]).exit_code == 0
    assert RunFile.load(file).method.name == name
    result = runner.invoke(app, ["run", "check", str(file), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["values"]["method"]["name"] == name


def test_check_lists_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nnode = 3\nrounds = 0\n")
    result = runner.invoke(app, ["run", "check", str(file)])
    assert result.exit_code == 10
    assert "2 problems" in result.output and "did you mean 'nodes'?" in result.output
    assert "Traceback" not in result.output


def test_a_missing_file_is_no_traceback(tmp_path: Path) -> None:
    result = runner.invoke(app, ["run", "check", str(tmp_path / "none.toml")])
    assert result.exit_code == 10 and "cannot be read" in result.output and "Traceback" not in result.output


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = runner.invoke(app, ["--debug", "run", "check", str(tmp_path / "none.toml")])
    assert result.exit_code == 10 and "Traceback" in result.output and "cannot be read" in result.output


@pytest.mark.parametrize("arguments", [["fly"], ["run", "check"], ["status"], ["status", "x", "--fast"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_INVITE", raising=False)
    assert runner.invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("command", [["status"], ["join"]])
def test_something_that_is_not_an_invite(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "192.0.2.7:4600"])
    assert result.exit_code == 11
    assert "atoll://TOKEN@HOST:PORT" in result.output and "Traceback" not in result.output


def test_nobody_there() -> None:
    result = runner.invoke(app, ["status", "atoll+insecure://secret@127.0.0.1:1"])
    assert result.exit_code == 31
    assert "no coordinator answers at 127.0.0.1:1" in result.output and "secret" not in result.output


def test_the_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith("atoll")


@pytest.mark.parametrize(("options", "shown"), [([], False), (["--debug"], True)])
def test_matplotlib_tells_of_its_font_cache_only_where_logs_are_asked_for(
    options: list[str], shown: bool
) -> None:
    runner.invoke(app, [*options, "run", "check", "no such file"])
    log = logging.getLogger("matplotlib.font_manager")
    assert log.isEnabledFor(logging.WARNING) is shown and log.isEnabledFor(logging.ERROR)
