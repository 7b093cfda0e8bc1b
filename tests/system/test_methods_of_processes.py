"""Every method by four processes: equal bits after every round, and what a killed node keeps."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from safetensors.torch import load_file

from deploy.processes import Children, Grace
from node.checkpoint import find
from node.events import Event, RoundDone
from node.model import model_on_meta
from optim.methods import build_method
from protos.invite import Invite
from protos.runfile import RunFile
from tests.node.fleet import Fleet
from tests.node.member import Member, errors_of
from tests.node.tiny import equal
from tests.system.conftest import DEADLINE, ROOT

pytestmark = pytest.mark.slow

ROUNDS, CONTEXT = 5, 16
NODES = ("n0", "n1", "n2", "n3")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "sign-muon-1": ("sign-muon", {}),
    "signum": ("signum", {}),
    "ddp-muon": ("ddp-muon", {}),
    "ddp-adamw": ("ddp-adamw", {}),
    "lordo": ("lordo", {"local_steps": 3, "rank": 2}),
    "lowrank-ddp": ("lowrank-ddp", {"rank": 2, "basis_every": 3}),
    "local-adamw": ("local-adamw", {"local_steps": 3}),
    "diloco": ("diloco", {"local_steps": 4}),
    "muloco": ("muloco", {"local_steps": 3}),
    "muloco-1bit": ("muloco-1bit", {"local_steps": 3}),
    "sign-muon": ("sign-muon", {"local_steps": 4}),
    "streaming": ("muloco", {"local_steps": 4, "fragments": 2, "overlap": 1}),
}


def run_of(case: str) -> RunFile:
    method, settings = METHODS[case]
    return RunFile.model_validate(
        {
            "run": {"rounds": ROUNDS, "nodes": len(NODES), "evaluate_every": 2, "validation_windows": 4},
            "model": {"d_model": 16, "layers": 1, "heads": 2, "context": CONTEXT},
            "data": {"batch": 1},
            "round": {"adaptive": False},  # every vote counts on a busy machine too
            "method": {"name": method, **settings},
        }
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[dict[int, Any]]]]:
    """Four processes that take part in one run after the other; gives the rounds of each node of a run."""
    folder = tmp_path_factory.mktemp("runs")
    fleet = Fleet()
    try:
        with Children(Grace(interrupt=3.0, terminate=2.0, kill=5.0)) as children:
            runs = []
            for case in METHODS:
                run = run_of(case)
                tables = build_method(run.method, model_on_meta(run.model)).tables
                runs.append(f"{case}={fleet.coordinator(run, tables).invite}")
            environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            nodes = [
                children.start(
                    name,
                    [sys.executable, "-m", "tests.system.several_runs", name, str(folder), *runs],
                    log=folder / f"{name}.log",
                    environment=environment,
                )
                for name in NODES
            ]
            for node in nodes:
                assert children.wait(node, DEADLINE) == 0, node.fate()
    finally:
        fleet.close()

    def rounds(case: str) -> list[dict[int, Any]]:
        logs = [(folder / f"{case}-{name}.jsonl").read_text().splitlines() for name in NODES]
        events = [[json.loads(line) for line in log] for log in logs]
        return [{e["round"]: e for e in of_node if e["event"] == "RoundDone"} for of_node in events]

    yield rounds


@pytest.mark.parametrize("case", METHODS)
def test_four_processes_hold_the_same_bits_after_every_round(
    case: str, told: Callable[[str], list[dict[int, Any]]]
) -> None:
    rounds, method = told(case), run_of(case).method
    assert all(sorted(of_node) == list(range(ROUNDS)) for of_node in rounds)
    for number in range(ROUNDS):
        events = [of_node[number] for of_node in rounds]
        assert len({event["digest"] for event in events}) == 1, number
        assert all(event["counted"] and len(event["voters"]) == len(NODES) for event in events)
        steps = method.micro_steps(number)
        assert {(event["micro_steps"], event["tokens"]) for event in events} == {(steps, steps * CONTEXT)}
        assert len({event["loss"] for event in events}) == len(NODES), "everybody reads other samples"
    assert len({event["digest"] for event in rounds[0].values()}) == ROUNDS, (
        "the state must change in every round"
    )
    measured = [event["validation_loss"] for of_node in rounds for event in of_node.values()]
    assert len([loss for loss in measured if loss is not None]) == 3


def test_a_killed_node_comes_back_with_its_error_feedback(bed):
    method, settings = METHODS["muloco"]
    bed.lead(nodes=2, rounds=100_000, method=method, settings=settings)
    saves = bed.folder / "saved"
    bed.join("a")
    victim = bed.join("b", "--save", str(saves), "--save-every", "1")
    bed.reached("b", 6)
    os.kill(victim.pid, signal.SIGKILL)
    assert bed.ended(victim) != 0
    left = find(saves)
    errors = errors_of(load_file(left / "local.safetensors"))
    assert errors and any(tensor.any() for tensor in errors.values())

    # Here, where one can look into it; then once more as a process.
    run = RunFile.load(bed.folder / "run.toml")
    back = Member(run, Invite.parse(bed.invite), "b-here", saves, resume=True, tiny=False)
    digests: dict[int, str] = {}

    def hear(event: Event) -> None:
        if isinstance(event, RoundDone) and event.counted:
            digests[event.round] = event.digest

    summary = back.train(hear, counted=5)
    assert summary.trained == 5
    assert equal(errors, back.exchange.errors), "as it was before the kill, at the first contribution since"
    assert not equal(errors, errors_of(back.optimizer.local_tensors())), "and then it moves on"
    bed.reached("a", max(digests))
    assert {number: bed.rounds("a")[number]["digest"] for number in digests} == digests

    bed.join("b-again", "--resume", str(left if left.exists() else saves))
    bed.until(
        lambda: sum(event["counted"] for event in bed.rounds("b-again").values()) >= 5,
        "five rounds of the node that came back",
        watch=bed.nodes["b-again"],
    )
    last = max(bed.rounds("b-again"))
    bed.reached("a", last)
    assert bed.agree("a", "b", "b-again") > 5
    os.kill(bed.coordinator.pid, signal.SIGINT)
