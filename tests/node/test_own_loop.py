"""A script with its own model, data and loop in a run: its replicas are those of any other node."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import atoll
from deploy.costs import run_costs
from node.events import Joined, RoundDone, Saved
from node.export import ExportError, export
from node.launch import LaunchError, Options
from node.own_data import OwnSamples
from node.own_loop import OwnRun, tensors_of
from protos.address import Address
from protos.digests import state_digest
from protos.runfile import RunFile
from tests.node.fleet import DEADLINE, Fleet, Log

SAMPLES = 24


class Net(nn.Module):
    """A convolution, a matrix and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.conv(x).flatten(1)))
        return out


def data() -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 1, 4, 4, generator=chance)
    return x, x.flatten(1)[:, :3].argmax(1)


def own_run(rounds: int = 4, nodes: int = 2, **method: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "run": {"rounds": rounds, "nodes": nodes, "evaluate_every": 2},
            "model": {"name": "own", "tensors": tensors_of(Net())},
            "data": {"batch": 3},
            "method": {"name": "sign-muon", **method},
        }
    )


_SEEDED = threading.Lock()  # torch has one generator for all threads


def seeded(seed: int) -> Net:
    with _SEEDED:
        torch.manual_seed(seed)
        return Net()


def train(run: OwnRun, seen: list[list[int]] | None = None, **batches: Any) -> nn.Module:
    """What a script does; ``seen`` gets the indices of its batches."""
    (x, y), model = data(), seeded(run.seed)
    optimizer = run.optimizer(model)
    for batch in run.batches(SAMPLES, **batches):
        if seen is not None:
            seen.append(batch.tolist())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        run.report(loss)
        optimizer.step()
    return model


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def digest(model: nn.Module) -> str:
    return state_digest(dict(model.named_parameters()))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def script(invite: str, name: str, log: Log, **batches: Any) -> tuple[str, list[list[int]], OwnRun]:
    seen: list[list[int]] = []
    with atoll.join(invite, Options(name=name), log.listener(name)) as run:
        model = train(run, seen, **batches)
    return digest(model), seen, run


VOTES: dict[str, Any] = {}
LOCAL = {"name": "muloco-1bit", "local_steps": 3}


@pytest.mark.parametrize("method", [VOTES, LOCAL], ids=["votes", "local steps"])
def test_two_scripts_train_the_same_bits_on_different_samples(fleet: Fleet, method: dict[str, Any]) -> None:
    run, log = own_run(**method), Log()
    coordinator = fleet.coordinator(run, run_costs(run).tables)
    both = [
        fleet.pool.submit(script, str(coordinator.invite), name, log, validate=lambda: 0.5)
        for name in ("one", "two")
    ]
    (first, seen, ours), (second, others, _) = (each.result(DEADLINE) for each in both)
    assert first == second, "replicas are the same bits"
    done = {name: log.of(name, RoundDone) for name in ("one", "two")}
    assert [event.digest for event in done["one"]] == [event.digest for event in done["two"]]
    assert len(done["one"]) == 4
    if not method:  # with local steps, the outer momentum is shared, too
        assert done["one"][-1].digest == first
    steps = run.method.micro_steps(1)
    assert len(seen) == len(others) == 4 * steps and all(len(batch) == 3 for batch in seen)
    read = [index for batch in seen + others for index in batch]
    epochs = len(read) // SAMPLES
    assert [read.count(index) for index in range(SAMPLES)] == [epochs] * SAMPLES, "each once in an epoch"
    assert all(event.counted and len(event.voters) == 2 for event in done["one"])
    assert all(event.loss > 0 and event.tokens == 3 * steps for event in done["one"])
    measured = [{done[name][index].validation_loss for name in done} - {None} for index in range(4)]
    assert measured == [set(), {0.5}, set(), {0.5}], "every second round, at one node at least"
    assert ours.summary is not None and ours.summary.done and ours.summary.trained == 4


def test_a_script_that_comes_late_takes_over_the_state(fleet: Fleet) -> None:
    run, log = own_run(rounds=100_000, nodes=1), Log()
    coordinator = fleet.coordinator(run, run_costs(run).tables)

    def take_part(name: str, seed: int) -> None:
        with atoll.join(str(coordinator.invite), Options(name=name), log.listener(name)) as own:
            (x, y), model = data(), seeded(seed)
            optimizer = own.optimizer(model)
            for batch in own.batches(SAMPLES):
                loss_of(model, x[batch], y[batch])
                optimizer.step()
                if len(log.of("late", RoundDone)) >= 3:
                    break

    nodes = [fleet.pool.submit(take_part, "early", run.run.seed)]
    log.wait("early", RoundDone, 2)
    nodes.append(fleet.pool.submit(take_part, "late", run.run.seed + 1))
    for node in nodes:
        node.result(DEADLINE)
    early, late = ({e.round: e.digest for e in log.of(name, RoundDone)} for name in ("early", "late"))
    both = early.keys() & late.keys()
    assert len(both) >= 2 and all(early[index] == late[index] for index in both)


def test_alone_it_is_what_step_does_by_itself() -> None:
    run = own_run(rounds=5, nodes=1, schedule="constant", warmup=0)
    with atoll.local(run) as alone:
        trained = train(alone)
    torch.manual_seed(run.run.seed)
    model, (x, y) = Net(), data()
    optimizer = atoll.build_method(run.method, model)
    order = OwnSamples(SAMPLES)
    for index in range(5):
        rows = order.batch(3 * index, 3, run.run.seed)[:, 0]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    assert digest(trained) == digest(model)


def test_a_closure_tells_the_loss() -> None:
    log = Log()
    with atoll.local(own_run(rounds=1, nodes=1), on_event=log.listener("one")) as run:
        model, (x, y) = Net(), data()
        optimizer = run.optimizer(model)
        for batch in run.batches(SAMPLES):
            inputs, labels = x[batch], y[batch]
            optimizer.step(partial(loss_of, model, inputs, labels))
    (done,) = log.of("one", RoundDone)
    assert done.loss > 0.0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_exception_leaves_cleanly_and_saves(
    fleet: Fleet, tmp_path: Path, kind: type[BaseException]
) -> None:
    run, log = own_run(rounds=1000, nodes=1), Log()
    coordinator = fleet.coordinator(run, run_costs(run).tables)

    def fail() -> None:
        options = Options(name="one", save=tmp_path)
        with atoll.join(str(coordinator.invite), options, log.listener("one")) as own:
            model = Net()
            optimizer, (x, y) = own.optimizer(model), data()
            for step, batch in enumerate(own.batches(SAMPLES)):
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                if step == 2:
                    raise kind("enough")
                optimizer.step()

    with pytest.raises(kind, match="enough"):
        fleet.pool.submit(fail).result(DEADLINE)
    (saved,) = log.of("one", Saved)
    assert saved.round == 2 and saved.path.exists()
    export(tmp_path, tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == set(Net().state_dict())
    with pytest.raises(ExportError, match=r"own model: name a file that ends in \.safetensors"):
        export(tmp_path, tmp_path / "folder")
    with atoll.local(run, Options(resume=tmp_path)) as again:  # and what was saved can be gone on from
        optimizer = again.optimizer(Net())
        next(again.batches(SAMPLES))
        assert optimizer.round_index == 0, "step() has made no round of its own"


def test_leaving_while_the_others_are_waited_for(fleet: Fleet) -> None:
    run, log = own_run(nodes=2), Log()
    coordinator = fleet.coordinator(run, run_costs(run).tables)
    with atoll.join(str(coordinator.invite), None, log.listener("one")) as own:
        own.optimizer(Net())
        batches = own.batches(SAMPLES)
        fleet.pool.submit(next, batches, None)
        log.wait("one", Joined)
    assert not own._thread.is_alive(), "it has not waited for the second node"


def test_options_are_taken_as_texts(tmp_path: Path) -> None:
    folder = str(tmp_path / "saves")
    options = Options(save=folder, resume=folder, identity="key", metrics="127.0.0.1:0")  # type: ignore[arg-type]
    assert (options.save, options.identity) == (Path(folder), Path("key"))
    assert options.metrics == Address("127.0.0.1", 0)
    with atoll.local(own_run(rounds=2, nodes=1), options) as run:
        train(run)
    assert (Path(folder) / "round-00000002").exists()


def test_another_model_is_named(fleet: Fleet) -> None:
    run = own_run(nodes=1)
    coordinator = fleet.coordinator(run, run_costs(run).tables)
    other = Net()
    other.head = nn.Linear(16, 5)
    words = r"where the run has 'head.weight embedding 3x16', this model has 'head.weight embedding 5x16'"
    with pytest.raises(LaunchError, match=words), atoll.join(str(coordinator.invite)) as own:
        own.optimizer(other)
    assert not own._thread.is_alive()


def test_a_run_is_entered_first() -> None:
    with pytest.raises(LaunchError, match=r"with atoll\.join"):
        print(atoll.local(own_run(nodes=1)).seed)


def test_steps_and_batches_go_together() -> None:
    with pytest.raises(LaunchError, match="comes before"), atoll.local(own_run(nodes=1)) as run:
        next(run.batches(SAMPLES))
    with pytest.raises(LaunchError, match="once for each batch"), atoll.local(own_run(nodes=1)) as run:
        run.optimizer(Net()).step()
    with pytest.raises(LaunchError, match="was not called"), atoll.local(own_run(nodes=1)) as run:
        run.optimizer(Net())
        for _ in run.batches(SAMPLES):
            pass
    with pytest.raises(LaunchError, match="all epochs"), atoll.local(own_run(nodes=1)) as run:
        run.optimizer(Net())
        next(run.batches(SAMPLES))
        next(run.batches(SAMPLES))
    with atoll.local(own_run(nodes=1)) as run:
        optimizer = run.optimizer(Net())
        next(run.batches(SAMPLES))
    with pytest.raises(LaunchError, match="once for each batch"):
        optimizer.step()


def test_own_samples_come_once_an_epoch_and_have_a_digest() -> None:
    samples = OwnSamples(10)
    rows = samples.batch(3, 20, seed=1)
    assert torch.equal(samples.batch(7, 5, seed=1), rows[4:9])
    assert sorted(rows[7:17, 0].tolist()) == list(range(10)) and set(rows[7:17, 1].tolist()) == {1}
    assert OwnSamples(10).digest == samples.digest
    assert len({samples.digest, OwnSamples(11).digest, OwnSamples(10, "v2").digest}) == 3
    with pytest.raises(ValueError, match="0 samples"):
        OwnSamples(0)
