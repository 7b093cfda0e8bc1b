"""Nodes and coordinators that die, freeze, leave and come late: nobody hangs, and who goes on stays equal."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from protos.invite import Invite
from tests.system.conftest import Bed

pytestmark = pytest.mark.slow


@pytest.fixture
def bed(forked_bed: Bed) -> Bed:
    return forked_bed


def test_a_killed_node_does_not_stop_the_others(bed):
    bed.lead(nodes=3, rounds=250)
    for name in ("a", "b", "c"):
        bed.join(name)
    bed.reached("c", 20)
    os.kill(bed.nodes["c"].pid, signal.SIGKILL)  # the deadline is 60 s: its closed connection must be enough
    bed.finished("a", "b")
    assert bed.agree("a", "b", "c") >= 250
    last = bed.rounds("a")[249]
    assert len(last["voters"]) == 2


def test_a_frozen_node_misses_rounds_and_catches_up(bed):
    bed.lead(nodes=3, rounds=300, deadline="0.5s")
    for name in ("a", "b", "c"):
        bed.join(name)
    bed.reached("c", 10)
    frozen = bed.nodes["c"]
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        stopped_at = max(bed.rounds("c"))
        bed.reached("a", stopped_at + 6)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    bed.finished("a", "b", "c")
    assert bed.agree("a", "b", "c") == 300
    missed = [number for number, event in bed.rounds("a").items() if len(event["voters"]) == 2]
    assert missed, "the others must have gone on without the frozen node"
    assert max(bed.rounds("c")) == 299
    later = [event["counted"] for number, event in bed.rounds("c").items() if number > stopped_at + 6]
    assert any(later), "it must be counted again once it is in time"


def test_a_late_node_loads_the_state_and_takes_part(bed):
    bed.lead(nodes=2, rounds=3000)
    for name in ("a", "b"):
        bed.join(name)
    bed.reached("a", 5)
    bed.join("late")
    bed.until(
        lambda: len(bed.rounds("late")) >= 20, "twenty rounds of the late node", watch=bed.nodes["late"]
    )
    came = [event for event in bed.events("late") if event["event"] in ("StateLoaded", "Replayed")]
    assert came, "it was not there from the start: a snapshot, results, or both"
    own = bed.rounds("late")
    assert min(own) > 0
    counted = [event for event in own.values() if event["counted"]]
    assert counted and all(len(event["voters"]) == 3 for event in counted)
    bed.until(lambda: max(own) in bed.rounds("a"), "the same round of an old node")
    assert bed.agree("a", "b", "late") >= 20
    os.kill(bed.coordinator.pid, signal.SIGINT)


def test_interrupting_a_node_leaves_cleanly_over_ipv6(bed):
    bed.lead(nodes=2, rounds=250, listen="[::1]:0")
    assert "@[::1]:" in bed.invite
    for name in ("a", "b"):
        bed.join(name)
    bed.reached("b", 5)
    os.kill(bed.nodes["b"].pid, signal.SIGINT)
    assert bed.ended(bed.nodes["b"]) == 130
    assert "left the run" in bed.nodes["b"].tail()
    bed.finished("a")


def test_interrupting_the_coordinator_ends_everything(bed):
    bed.lead(nodes=2, rounds=100_000)
    for name in ("a", "b"):
        bed.join(name, "--save", str(bed.folder / f"saved-{name}"))
    bed.reached("a", 5)
    port = Invite.parse(bed.invite).port
    os.kill(bed.coordinator.pid, signal.SIGINT)
    assert bed.ended(bed.coordinator) == 130, bed.coordinator.fate()
    for name in ("a", "b"):
        assert bed.ended(bed.nodes[name]) == 1, bed.nodes[name].fate()
        assert "Traceback" not in bed.nodes[name].tail(40)
        assert list((bed.folder / f"saved-{name}").glob("round-*/meta.json")), "the work must not be lost"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the port must be closed"


def test_a_killed_coordinator_ends_the_nodes_with_a_reason(bed):
    bed.lead(nodes=2, rounds=100_000)
    for name in ("a", "b"):
        bed.join(name, "--wait", "2s", "--save", str(bed.folder / f"saved-{name}"))
    bed.reached("a", 5)
    os.kill(bed.coordinator.pid, signal.SIGKILL)
    for name in ("a", "b"):
        assert bed.ended(bed.nodes[name]) == 31, bed.nodes[name].fate()
        text = bed.nodes[name].tail(40)
        assert "coordinator" in text and "Traceback" not in text
        assert list((bed.folder / f"saved-{name}").glob("round-*/meta.json")), "the work must not be lost"


def test_another_text_is_refused_with_both_digests(bed, tmp_path):
    bed.lead(nodes=2, rounds=5)
    other = tmp_path / "other.txt"
    other.write_text("A text that is not the run's.\n" * 2000)
    bed.join("a")
    bed.until(lambda: any(e["event"] == "Joined" for e in bed.events("a")), "the first node")
    stranger = bed.join("stranger", "--data", str(other))
    assert bed.ended(stranger) == 32, stranger.fate()
    text = stranger.tail(40)
    assert "Traceback" not in text
    digests = {word.strip(".,:;()") for word in text.split() if len(word.strip(".,:;()")) == 64}
    assert len(digests) == 2, text
    bed.join("b")
    bed.finished("a", "b")
