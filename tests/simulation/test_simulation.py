"""Coordinator and nodes on a virtual clock: invariants hold under random faults, and the checker can fail."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench import simulation
from bench.virtual import generate, machine, node, world
from bench.virtual.generate import random_schedule
from bench.virtual.machine import plan_of
from bench.virtual.schedule import COORDINATOR, COORDINATOR_PHASES, Fault, Schedule, ScriptError
from bench.virtual.shrink import shrink
from bench.virtual.simulate import simulate
from coordinator.leases import Lease, LeaseBook
from coordinator.plan import RunPlan
from node.exchange.base import RoundOrder
from tests.simulation.simulation_rig import hasty_run, schedules, told

RANDOM = 240  # schedules
GROUPS = 8
QUIET = Schedule(nodes=3, rounds=6, seed=5)
QUICKLY = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# ------------------------------------------------------------------------------------------ scripts


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_a_script_says_all(schedule: Schedule) -> None:
    assert Schedule.parse(schedule.script()) == schedule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run nodes=x", "line 1: .*invalid literal"),
        ("run nodes=2\nexplode n0 phase=sending", "line 2: 'explode' does not happen to n0"),
        ("kill n0 phase=sleeping", "n0 has no phase 'sleeping'"),
        ("restart coordinator phase=sending", "coordinator has no phase 'sending'"),
        ("kill", "to whom"),
        ("kill n0 phase=sending when=now", "'when=now' is none of"),
    ],
)
def test_a_script_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        Schedule.parse(text)


def test_comments_and_empty_lines() -> None:
    text = "# a run\nrun nodes=2 seed=3\n\njoin n2 round=1  # late\n"
    assert Schedule.parse(text) == Schedule(2, 8, 3, 0, (Fault("join", "n2", 1),))


# ------------------------------------------------------------------------------------------ invariants


def test_a_quiet_run() -> None:
    outcome = simulate(QUIET)
    assert not outcome.violations, told(QUIET, outcome)
    assert outcome.rounds == 6 and len(set(outcome.payloads.values())) == 6
    assert outcome.seconds < 60


def test_equal_schedules_take_equal_turns() -> None:
    schedule = replace(random_schedule(17), seed=99)
    first, second = simulate(schedule), simulate(schedule)
    assert first.log == second.log and first.payloads == second.payloads


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_schedules(group: int) -> None:
    fired = 0
    for seed in range(group, RANDOM, GROUPS):
        schedule = random_schedule(seed)
        outcome = simulate(schedule)
        assert not outcome.violations, told(schedule, outcome)
        fired += outcome.fired
    assert fired > RANDOM / GROUPS, "faults must happen"


@QUICKLY
@given(schedules())
def test_schedules_that_shrink(schedule: Schedule) -> None:
    outcome = simulate(schedule)
    assert not outcome.violations, told(schedule, outcome)


@settings(QUICKLY, max_examples=15)
@given(st.lists(st.floats(-3600, 3600), min_size=4, max_size=4), st.integers(0, 1000))
def test_clocks_of_nodes_decide_nothing(ahead: list[float], seed: int) -> None:
    schedule = Schedule(nodes=4, rounds=5, seed=seed)
    skews = tuple(
        Fault("skew", f"n{index}", index, "computing", seconds) for index, seconds in enumerate(ahead)
    )
    right, wrong = simulate(schedule), simulate(replace(schedule, faults=skews))
    assert not wrong.violations, told(schedule, wrong)
    assert wrong.fired == len(ahead)
    assert wrong.payloads == right.payloads


RESTARTS = st.builds(
    Fault,
    st.just("restart"),
    st.just(COORDINATOR),
    st.integers(0, 9),
    st.sampled_from(COORDINATOR_PHASES),
    st.sampled_from((0.5, 2.0, 8.0)),
)


def restart(round_index: int, phase: str) -> Fault:
    return Fault("restart", COORDINATOR, round_index, phase, 2.0)


def patient(schedule: Schedule) -> RunPlan:
    """Every vote is waited for."""
    policy = replace(machine.POLICY, deadline=300.0, start_timeout=300.0)
    return replace(plan_of(schedule), policy=policy, adaptive=False)


@settings(QUICKLY, max_examples=30)
@example(list(map(restart, (3, 4), ("committed", "reducing"))), 0)  # a snapshot is due in the second
@example(list(map(restart, (3, 4), ("durable", "journaling"))), 1)
@given(st.lists(RESTARTS, min_size=1, max_size=6), st.integers(0, 1000))
def test_restarts_of_the_coordinator_change_nothing(faults: list[Fault], seed: int) -> None:
    """No node has to compute a round again, whose votes would be others then."""
    schedule = Schedule(nodes=3, rounds=10, seed=seed)  # with a snapshot that is due, and one in the making
    killed = replace(schedule, faults=tuple(faults))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "ABSTAIN", 0.0)
        patch.setattr(machine, "plan_of", patient)
        quiet, again = simulate(schedule), simulate(killed)
    assert not again.violations, told(killed, again)
    assert again.payloads == quiet.payloads, told(killed, again)


# ------------------------------------------------------------------------------------------ the checker


def rules(schedule: Schedule, **options: object) -> set[str]:
    return {violation.rule for violation in simulate(schedule, **options).violations}  # type: ignore[arg-type]


def test_a_coordinator_that_announces_too_early_is_caught() -> None:
    assert "2" in rules(QUIET, make_run=hasty_run)


def test_a_vote_for_other_samples_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = node.Node._compute
    kept: dict[str, tuple[torch.Tensor | None, str]] = {}

    def resend(self: node.Node, order: RoundOrder) -> tuple[torch.Tensor | None, str]:
        return kept.setdefault(self.name, honest(self, order))

    monkeypatch.setattr(node.Node, "_compute", resend)
    assert {"2", "6"} <= rules(QUIET)


def test_lost_samples_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseBook, "_give_back", lambda self, lease: None)
    schedule = replace(QUIET, faults=(Fault("kill", "n1", 2, "sending", 3.0),))
    assert "6" in rules(schedule)


def test_samples_that_are_leased_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take = LeaseBook.take

    def again(self: LeaseBook, name: str, round_index: int, count: int) -> Lease:
        lease = take(self, name, round_index, count)
        self.frontier = lease.start  # the next node gets the same
        return lease

    monkeypatch.setattr(LeaseBook, "take", again)
    assert "6" in rules(QUIET)


def test_a_state_that_is_not_the_common_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = node.Replica.apply

    def sometimes(self: node.Replica, payload: bytes | None) -> None:
        apply(self, payload)
        if payload is not None and self.round == 4 and self is not keep.reference:
            self.flip()

    class Keep:
        reference: object = None

    keep = Keep()
    honest = world.Checker.__init__

    def noted(self: world.Checker) -> None:
        honest(self)
        keep.reference = self.reference

    monkeypatch.setattr(world.Checker, "__init__", noted)
    monkeypatch.setattr(node.Replica, "apply", sometimes)
    assert "1" in rules(QUIET)


def test_a_run_that_stands_still_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.Node, "_report", lambda self, round_index: None)
    monkeypatch.setattr(node.Node, "_try", stands_still)
    schedule = replace(QUIET, nodes=1, faults=(Fault("join", "n1", 0),))

    async def silent(self: node.Node, order: RoundOrder) -> None:
        await self._sleep(1e6)

    monkeypatch.setattr(node.Node, "_round", silent)
    assert "progress" in rules(schedule)


async def stands_still(self: node.Node, work: object) -> None:
    """Orders are not carried out."""


def test_a_failure_shrinks_to_what_is_needed() -> None:
    needed = Fault("kill", "n1", 2, "sending", 30.0)
    noise = (Fault("delay", "n0", 1, "sending", 5.0), needed, Fault("jump", "coordinator", 0, "open", 1.0))

    def fails(schedule: Schedule) -> bool:
        return any(fault.kind == "kill" and fault.seconds > 2 for fault in schedule.faults)

    shorter = shrink(replace(QUIET, faults=noise), fails)
    assert shorter == Schedule(2, 4, QUIET.seed, 0, (replace(needed, seconds=3.0),))


# ------------------------------------------------------------------------------------------ the bench


def test_the_bench_counts_and_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulation, "QUICK", 3)
    report = simulation.run(True)
    assert report.figures["schedules"] == 3 and report.figures["violations"] == 0
    assert report.bars["violations"].ceiling == 0 and report.figures["schedules_per_second"] > 0
    monkeypatch.setattr(LeaseBook, "_give_back", lambda self, lease: None)
    schedule = replace(QUIET, faults=(Fault("kill", "n1", 2, "sending", 3.0),))
    monkeypatch.setattr(simulation, "random_schedule", lambda seed: schedule)
    assert simulation.run(True).figures["violations"] == 3
    printed = capsys.readouterr().err
    assert printed.count("run nodes=") == 3 and "\n# 6: " in printed


def test_random_schedules_are_of_every_kind() -> None:
    faults = [fault for seed in range(600) for fault in random_schedule(seed).faults]
    kinds = {(fault.who == "coordinator", fault.kind) for fault in faults}
    wanted = {(True, kind) for kind in generate.COORDINATOR_FAULTS}
    assert kinds >= wanted | {(False, kind) for kind in (*generate.NODE_FAULTS, "join")}
    assert {fault.phase for fault in faults} >= {*generate.NODE_PHASES, *generate.COORDINATOR_PHASES}


def test_votes_differ_and_have_the_payloads_size() -> None:
    draws = np.random.default_rng(random.Random(3).getrandbits(60))
    votes = {node.random_votes(draws) for _ in range(8)}
    assert len(votes) == 8 and {len(vote) for vote in votes} == {node.TABLES.of(0).nbytes}
