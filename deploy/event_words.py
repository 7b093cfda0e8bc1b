"""Events of all processes in words, one line each."""

from __future__ import annotations

import math

from coordinator import events
from coordinator.rounds import listed
from deploy import progress
from deploy.event_log import Event, EventsLost
from deploy.table import number, percent
from protos.address import peer
from protos.units import format_bytes, format_duration


def sentence(event: Event) -> str:
    """``event`` in words."""
    if isinstance(event, EventsLost):
        return f"{event.count} events before this one could not be written"
    return _of_coordinator(event) if isinstance(event, events.Event) else progress.sentence(event)


def _of_coordinator(event: events.Event) -> str:
    if isinstance(event, events.RunBegun):
        return (
            f"{event.run} ({event.method}) begins at round {event.round + 1}/{event.rounds} with "
            f"{names(event.nodes)}: {event.reason}"
        )
    if isinstance(event, events.RunResumed):
        return (
            f"{event.run} ({event.method}) goes on at round {event.round + 1}/{event.rounds}, waiting for "
            f"{names(event.members)}: {event.reason}"
        )
    if isinstance(event, (events.NodeJoined, events.NodeRejoined)):
        again = " again" if isinstance(event, events.NodeRejoined) else ""
        return (
            f"{event.node} ({event.name}) has joined{again} from {peer(event.address)} with the state after "
            f"round {event.round}"
        )
    if isinstance(event, events.NodeLeft):
        return f"{event.node} ({event.name}) {'has left' if event.cleanly else 'is gone'}: {event.reason}"
    if isinstance(event, events.NodeReported):
        text = f"{event.node} reports round {event.round + 1}: loss {number(event.loss)}"
        if event.validation_loss is not None:
            text += f", validation {number(event.validation_loss)}"
        return text
    if isinstance(event, (events.RoundOpened, events.RoundCommitted)):
        return _round(event)
    if isinstance(event, events.TopologyMade):
        who = f"{names(event.reducers)} reduce" if event.reducers else "everything goes to the coordinator"
        return f"topology {event.number} from round {event.round + 1} on: {who}: {event.reason}"
    if isinstance(event, events.CatchUpPlanned):
        cost = f", {format_bytes(event.nbytes)}" if event.nbytes else ""
        return f"{event.node} catches up to round {event.round} ({event.action}{cost}): {event.reason}"
    if isinstance(event, (events.SnapshotBegun, events.SnapshotComplete, events.SnapshotFailed)):
        return _snapshot(event)
    if isinstance(event, events.NodeDeviated):
        return (
            f"{event.node} deviated in round {event.round + 1}, time {event.times}: {event.reason}; it loads "
            "the common state"
        )
    if isinstance(event, events.DigestAgreed):
        return f"all agree on the state after round {event.round + 1}: {event.digest}"
    if isinstance(event, events.JournalTrouble):
        return f"journal: {event.text}{'; the run cannot go on' if event.fatal else ''}"
    if isinstance(event, events.RunPaused):
        return f"the administrator{_by(event.by)} pauses the run after {event.round} rounds: {event.reason}"
    if isinstance(event, events.RunUnpaused):
        return f"the administrator{_by(event.by)} lets the run go on after {event.round} rounds"
    if isinstance(event, events.NodeExpelled):
        return f"the administrator expels {event.node} ({event.name}): {event.reason}"
    if isinstance(event, events.NodeSuspected):
        if event.action == "none":
            return f"{event.node} ({event.name}) is under suspicion no more since round {event.round + 1}"
        return (
            f"{event.node} ({event.name}) is under suspicion after round {event.round + 1} ({event.action}): "
            f"{event.reason}"
        )
    if isinstance(event, events.SliceDisputed):
        return (
            f"the slice that {event.node} ({event.name}) reduced in round {event.round + 1} is in question "
            f"({event.outcome}): {event.reason}"
        )
    if isinstance(event, (events.TokenAdded, events.TokenEnded, events.TokenUsed, events.AccessRefused)):
        return _access(event)
    return f"{event.phase} after {event.round} rounds: {event.reason}"


def _access(event: events.TokenAdded | events.TokenEnded | events.TokenUsed | events.AccessRefused) -> str:
    if isinstance(event, events.AccessRefused):
        whose = f" with the token {event.token}" if event.token else ""
        times = f", {event.times} times" if event.times > 1 else ""
        return f"a call from {event.host}{whose} is refused{times} ({event.kind}): {event.reason}"
    what = f"the token {event.token} ({event.role})"
    if isinstance(event, events.TokenAdded):
        return f"{what} is new"
    if isinstance(event, events.TokenEnded):
        return f"{what} is valid no more: {event.reason}"
    return f"{what} is used from {event.host}"


def _by(name: str) -> str:
    return f" ({name})" if name else ""


def _round(event: events.RoundOpened | events.RoundCommitted) -> str:
    if isinstance(event, events.RoundOpened):
        lagging = f", not waiting for {names(event.lagging)}" if event.lagging else ""
        return f"round {event.round + 1} opens with {names(event.members)}{lagging}; {event.waits}"
    text = f"round {event.round + 1} committed after {format_duration(event.seconds)}: {event.reason}"
    return text + (f", agreement {percent(event.agreement)}" if math.isfinite(event.agreement) else "")


def _snapshot(event: events.SnapshotBegun | events.SnapshotComplete | events.SnapshotFailed) -> str:
    what = f"snapshot {event.snapshot} of the state after round {event.round}"
    if isinstance(event, events.SnapshotFailed):
        return f"{what} failed: {event.reason}"
    if isinstance(event, events.SnapshotComplete):
        return f"{what} is complete: {format_bytes(event.nbytes)} in {format_duration(event.seconds)}"
    return f"{what} begins: {format_bytes(event.nbytes)} from {names(event.donors)}"


def names(nodes: tuple[str, ...]) -> str:
    """Some nodes, in words."""
    return listed(nodes) or "nobody"
