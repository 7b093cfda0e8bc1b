"""A run that two islands of two ranks have saved goes on with nodes of four ranks and one, and a new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.leases import Lease, LeaseBook
from coordinator.nodes import Node
from coordinator.plan import RunPlan
from coordinator.reports import Reports
from coordinator.run import Run
from node.checkpoint import Meta, load_parameters, newest
from node.export import export
from node.model import build_model, model_on_meta
from optim.methods import build_method
from protos.atoll_pb2 import Report
from protos.runfile import RunFile
from tests.node.fleet import Coordinator, Fleet
from tests.node.island_rig import Island, Single, small_run

SAVED, ROUNDS = 4, 6  # of two nodes, and of the whole run
METHODS = {"sign-muon": {}, "lordo": {"local_steps": 2}}


@pytest.fixture
def four() -> Iterator[Island]:
    """Four processes, which are also those of two islands of two."""
    made = Island(4)
    yield made
    made.close()


def coordinator_of(fleet: Fleet, run: RunFile, nodes: int) -> Coordinator:
    return fleet.coordinator(run, build_method(run.method, model_on_meta(run.model)).tables, nodes)


def stop_after(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """The coordinator stops once all nodes have applied so many rounds."""
    go_on, reported = Run.between_rounds, Reports.take

    def between(run: Run) -> None:
        if run.round != rounds:
            go_on(run)

    def heard(reports: Reports, node: Node, report: Report) -> None:
        reported(reports, node, report)
        run = reports._run
        if all(each.report.round == run.round - 1 == rounds - 1 for each in run.registry.nodes.values()):
            run.stop("it was stopped halfway")

    monkeypatch.setattr(Run, "between_rounds", between)
    monkeypatch.setattr(Reports, "take", heard)


def leases_of(monkeypatch: pytest.MonkeyPatch) -> list[Lease]:
    """All that are taken from now on, by anybody."""
    taken: list[Lease] = []
    take = LeaseBook.take

    def recorded(book: LeaseBook, node: str, round_index: int, count: int) -> Lease:
        taken.append(take(book, node, round_index, count))
        return taken[-1]

    monkeypatch.setattr(LeaseBook, "take", recorded)
    return taken


def validation(singles: Sequence[Single], round_index: int) -> float:
    """The validation loss after a round, of whoever has measured it."""
    losses = [single.rounds[round_index].validation_loss for single in singles]
    (found,) = (loss for loss in losses if loss is not None)
    return found


def assert_adjacent(leases: Sequence[Lease], start: int) -> int:
    """They cover every sample from ``start`` to the one that is returned, once."""
    for lease in sorted(leases):
        assert lease.start == start
        start = lease.end
    return start


def ends(island: Island, done: bool) -> list[dict[str, Any]]:
    """What the leader told of each round; all ranks have come to their end."""
    told = []
    for rank in island.ranks:
        end, before = rank.until("done")
        assert end["done"] == done, end
        told.append([line for line in before if "digest" in line])
    assert all([line["digest"] for line in each] == [line["digest"] for line in told[0]] for each in told)
    return told[0]


@pytest.mark.parametrize("method", METHODS)
def test_islands_of_two_and_two_go_on_as_four_and_one_and_one(
    method: str,
    four: Island,
    fleet: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run(method, nodes=2, rounds=ROUNDS, **METHODS[method])
    whole = coordinator_of(fleet, run, 2)
    pair = [Single(whole.invite, accumulate=2) for _ in range(2)]
    for single in pair:
        single.wait()
    expected = pair[0].rounds
    assert len(expected) == ROUNDS

    leases = leases_of(monkeypatch)
    with monkeypatch.context() as halfway:
        stop_after(halfway, SAVED)
        first = coordinator_of(fleet, run, 2)
        folders = [tmp_path / "first", tmp_path / "second"]
        islands = [Island(2, four.ranks[:2]), Island(2, four.ranks[2:])]
        for island, folder in zip(islands, folders, strict=True):
            island.join(first.invite, save=str(folder), ordered=True)
        for island in islands:
            told = ends(island, done=False)
            assert [line["digest"] for line in told] == [event.digest for event in expected[:SAVED]]
        assert "halfway" in first.outcome.result(60).reason
    metas = [Meta.read(path) for folder in folders if (path := newest(folder)) is not None]
    read = assert_adjacent(leases, 0)
    assert [(meta.round, meta.samples) for meta in metas] == [(SAVED, read)] * 2
    assert {meta.state_digest for meta in metas} == {expected[SAVED - 1].digest}
    leases.clear()

    second = coordinator_of(fleet, run, 3)
    last = tmp_path / "last"
    four.join(second.invite, resume=str(folders[0]), save=str(last))
    singles = [Single(second.invite, resume=folders[1]), Single(second.invite)]
    for single in singles:
        single.wait()
    told = ends(four, done=True)
    assert [line["round"] for line in told] == list(range(SAVED, ROUNDS))
    for single in singles:
        assert [event.digest for event in single.rounds] == [line["digest"] for line in told]
    assert told[0]["loss"] == pytest.approx(expected[SAVED].loss, rel=1e-6), "the same state and samples"
    assert_adjacent(leases, read)
    plan = RunPlan.of(run)
    assert sum(lease.count for lease in leases) == 3 * sum(map(plan.samples, range(SAVED, ROUNDS)))

    measured = {line["round"]: line["validation"] for line in told if line["validation"] is not None}
    for single in singles:
        measured |= {e.round: e.validation_loss for e in single.rounds if e.validation_loss is not None}
    before, after = validation(pair, SAVED - 1), validation(pair, ROUNDS - 1)
    assert measured.keys() == {ROUNDS - 1}
    assert measured[ROUNDS - 1] == pytest.approx(after, abs=0.5 * (before - after))

    path = newest(last)
    assert path is not None
    meta = Meta.read(path)
    assert (meta.round, meta.state_digest) == (ROUNDS, told[-1]["digest"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    export(last, tmp_path / "hf")
    model = build_model(run.model, run.run.seed).eval()
    load_parameters(path, {name: each.detach() for name, each in model.named_parameters()})
    tokens = torch.arange(32).view(4, 8) * 7 % 251
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        torch.testing.assert_close(theirs(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)
