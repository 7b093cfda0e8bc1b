"""One dial: a link and a number of nodes choose what `atoll plan` would recommend."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.dial import between_nodes, choose
from deploy.errors import UserError
from deploy.own_model import own_tensors
from deploy.plan import Situation, estimate, recommend
from deploy.plan_command import measured_methods
from deploy.shape import shape_for
from node.shapes import roles_of
from protos.runfile import RunFile

runner = CliRunner()
ROLES = roles_of(shape_for(20_000_000))


def behind(rate: float, nodes: int = 6, step: float = 1.0, hub: float = 0.0) -> Situation:
    return Situation(nodes, rate, rate, hub or rate, hub or rate, step)


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8, 1e9, 1e11])
def test_with_a_fast_coordinator_it_is_the_plan_s_method(rate: float) -> None:
    situation = behind(rate, hub=1e13)
    choice = choose(ROLES, situation)
    estimates = [estimate(offer, situation) for offer in measured_methods(ROLES, None)]
    assert (choice.method.label, choice.transport) == (recommend(estimates).label, "hub")
    assert choice.reason == recommend(estimates).reason


def test_a_faster_link_never_chooses_a_worse_method() -> None:
    losses = [choose(ROLES, behind(10.0**power)).method.loss for power in range(5, 12)]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) >= 3


def test_where_the_coordinator_is_the_limit_nodes_exchange_directly() -> None:
    chosen = choose(ROLES, behind(1e8, nodes=24, step=10.0))
    assert chosen.transport == "direct" and chosen.busy >= 0.9
    assert chosen.values()["exchange", "transport"] == "direct"
    links = between_nodes(behind(1e8, nodes=4))
    assert links.uplink == pytest.approx(1e8 / 1.5) and links.hub_uplink == math.inf


def test_run_init_writes_what_the_dial_chooses(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    options = ["--link", "100mbit", "--nodes", "6", "--step-time", "0.5s", "--set", "model.d_model=128"]
    result = runner.invoke(app, ["run", "init", str(file), *options])
    assert result.exit_code == 0, result.output
    run, text = RunFile.load(file), file.read_text()
    assert run.run.nodes == 6 and run.model.d_model == 128
    choice = choose(roles_of(run.model), behind(1e8, step=0.5))
    assert (run.method.name, run.exchange.transport) == (choice.method.name, choice.transport)
    assert "# For 6 nodes behind 100mbit and steps of 0.5s (--link)" in text
    assert text.count("\n") < 60, "what follows from the rest is not written"


@pytest.mark.parametrize("clash", [["--method", "signum"], ["--set", "exchange.transport=hub"]])
def test_a_dial_and_a_choice_by_hand_exclude_each_other(clash: list[str]) -> None:
    result = runner.invoke(app, ["run", "init", "-", "--link", "1gbit", *clash])
    assert result.exit_code == 12 and "leave them out" in result.output


def test_the_tensors_of_a_model_that_a_file_makes(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("WIDTH = 3\n")
    script = tmp_path / "train.py"
    script.write_text(
        "from helper import WIDTH\nfrom torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, WIDTH))\n"
        "def other():\n    return 7\n"
        "if __name__ == '__main__':\n    raise SystemExit('it is not to be run')\n"
    )
    expected = ["0.weight matrix 4x5", "0.bias vector 4", "2.weight embedding 3x4", "2.bias vector 3"]
    assert own_tensors(f"{script}:make") == expected
    for where, words in (
        (f"{script}:none", "has no function 'none'"),
        (f"{script}:other", "returns a int, not a torch.nn.Module"),
        (f"{tmp_path}/none.py:make", "there is no file"),
        ("train:make", "write a file and a function in it"),
    ):
        with pytest.raises(UserError, match=words):
            own_tensors(where)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys\nsys.exit('no invite')\n", "running .* failed: SystemExit: no invite; .*__main__"),
        ("from .near import far\n", "running .* failed: ImportError: attempted relative import"),
        ("def make(width):\n    pass\n", r"make\(\) failed: TypeError: .*; it is called without arguments"),
        (
            "from torch import nn\ndef make():\n    return nn.LazyLinear(4)\n",
            "cannot be listed: .*dummy batch",
        ),
    ],
)
def test_a_file_that_fails(tmp_path: Path, text: str, words: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(UserError, match=words):
        own_tensors(f"{script}:make")


def test_a_model_whose_file_has_data_classes_and_imports_inside_the_function(tmp_path: Path) -> None:
    (tmp_path / "late_helper.py").write_text("WIDTH = 3\n")
    script = tmp_path / "script_with_classes.py"
    script.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom torch import nn\n"
        "@dataclass\nclass Sizes:\n    inputs: int = 5\n"
        "def make():\n    from late_helper import WIDTH\n"
        "    return nn.Sequential(nn.Linear(Sizes().inputs, WIDTH), nn.Linear(WIDTH, 2))\n"
    )
    path = list(sys.path)
    assert len(own_tensors(f"{script}:make")) == 4
    assert sys.path == path and f"_script_{script.stem}" not in sys.modules, "nothing is left behind"
