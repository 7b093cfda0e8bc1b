"""What it costs a node to come back, in bytes counted at its transport, and what it then holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.journal_file import FileJournal
from coordinator.journal_folder import JournalFolder
from node.events import Event, Joined, Replayed, RoundDone, StateLoaded
from node.model import model_on_meta
from optim.methods import build_method
from optim.round_optimizer import RoundOptimizer
from protos.runfile import RunFile
from tests.node.fleet import DEADLINE, Fleet, Log
from tests.node.member import Member

LAST = 4  # round after which the node goes away
AFTER = 20  # rounds that it takes part in again
FRAMING = 256  # bytes of a result that are no votes: frames, the commit, the padding of tensors to 512 votes
STATE_FRAMING = 4096  # the same of a snapshot, the manifest included
Settings = dict[int, list[dict[str, Any]]]


def settings(optimizer: RoundOptimizer) -> list[dict[str, Any]]:
    """Everything of every parameter group but its parameters: learning rates above all."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


class Seen:
    """What a listener reads from its node at the events it is called with."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name
        self.settings: Settings = {}
        self.down: dict[str, int] = {}  # until the first round that it takes part in again

    def by(
        self, member: Member, also: Callable[[Event], None] = lambda event: None
    ) -> Callable[[Event], None]:
        tell = self.log.listener(self.name)

        def listen(event: Event) -> None:
            if isinstance(event, RoundDone):
                self.settings[event.round] = settings(member.optimizer)
            elif isinstance(event, (Replayed, StateLoaded)):
                counts = member.exchange.meter.counts()
                self.down = {kind: counts["down", kind] for kind in ("result", "state")}
            tell(event)
            also(event)

        return listen


@pytest.mark.parametrize(("away", "action"), [(20, "replay"), (100, "load")])
def test_a_node_pays_for_what_it_missed_or_for_a_state_whatever_is_less(
    fleet: Fleet, tmp_path: Path, away: int, action: str
) -> None:
    run = RunFile.model_validate(
        {
            "run": {"rounds": LAST + 1 + away + AFTER, "nodes": 2, "evaluate_every": 0},
            "model": {"d_model": 32, "layers": 1, "heads": 1, "context": 8},
            "data": {"batch": 1},
            "method": {"name": "sign-muon", "warmup": 4},
            "round": {"adaptive": False},
        }
    )
    reference = build_method(run.method, model_on_meta(run.model))
    digests_of = {"run_digest": run.digest, "table_digest": reference.tables.digest}
    folder = JournalFolder.open(tmp_path / "journal", **digests_of, run_toml=run.to_toml())
    coordinator = fleet.coordinator(run, reference.tables, journal=lambda post: FileJournal(folder, post))
    log = Log()
    steady, back = Seen(log, "steady"), Seen(log, "back")

    def hold(event: Event) -> None:
        """The run stands where the node comes back, and until it holds the state: no clock decides."""
        if not isinstance(event, RoundDone):
            return
        if event.round == LAST + away:
            log.wait("back", Joined)
            if action == "replay":
                log.wait("back", Replayed)
        elif event.round == LAST + away + 3 and action == "load":
            log.wait("back", StateLoaded)

    def stay() -> RoundOptimizer:
        member = Member(run, coordinator.invite, "steady", tmp_path / "steady", tiny=False)
        assert member.train(steady.by(member, hold)).done
        return member.optimizer

    staying = fleet.pool.submit(stay)
    leaver = Member(run, coordinator.invite, "leaver", tmp_path / "leaver", tiny=False)
    assert leaver.train(log.listener("leaver"), last=LAST).round == LAST + 1
    log.wait_for(lambda: len(log.of("steady", RoundDone)) > LAST + away)
    member = Member(run, coordinator.invite, "back", tmp_path / "leaver", resume=True, tiny=False)
    assert member.train(back.by(member)).done
    others = staying.result(DEADLINE)

    replayed, loaded = log.of("back", Replayed), log.of("back", StateLoaded)
    missed = sum(event.count for event in replayed)
    shared = others.shared_tensors()
    state = sum(tensor.nbytes for tensor in shared.values())
    votes = sum(tensor.numel() for tensor in shared.values()) // 8
    assert state == 32 * votes, "all of it is parameters, and all of them are voted on"
    assert back.down["result"] <= missed * (votes + FRAMING)
    if action == "replay":
        assert (missed, loaded, back.down["state"]) == (away, [], 0)
        assert back.down["result"] >= away * votes, "they have been counted"
    else:
        assert [event.round > LAST + away for event in loaded] == [True] and missed <= 4
        assert state <= back.down["state"] <= state + STATE_FRAMING
        assert back.down["state"] + back.down["result"] < away * votes, "a replay would have been dearer"

    digests = {event.round: event.digest for event in log.of("steady", RoundDone)}
    theirs = log.of("back", RoundDone)
    assert theirs[-1].counted and theirs[-1].round == run.run.rounds - 1
    assert all(event.digest == digests[event.round] for event in theirs)
    assert len(back.settings) >= 3 and all(steady.settings[n] == of for n, of in back.settings.items())
    assert len({str(of) for of in back.settings.values()}) == len(back.settings), "the learning rate moves"
    assert settings(member.optimizer) == settings(others)
    assert member.optimizer.round_index == others.round_index
