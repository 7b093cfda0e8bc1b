"""What is wrong with a run, and what to do: a list of pure checks on what is known of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from coordinator import events as of_coordinator
from coordinator.rounds import State
from deploy.event_log import EventsLost
from deploy.event_words import names, sentence
from deploy.evidence import Evidence
from deploy.finding import Finding, Level, worst_first
from deploy.moments import Moment
from node import events as of_node
from protos import refusal
from protos.units import format_bytes

OFTEN: Final = 0.1  # share of rounds without a member's vote that deserves a word
FLAPPING: Final = 3  # times that a node has come back
TIGHT: Final = 0.25  # free space, as a share of what the journal takes, that is little


Check = Callable[[Evidence], Iterable[Finding]]
E = TypeVar("E")


def deviations(evidence: Evidence) -> Iterator[Finding]:
    """Nodes that left the common state, as the coordinator has counted."""
    times: Counter[str] = Counter()
    for event in _of(evidence, of_coordinator.NodeDeviated):
        times[event.node] = max(times[event.node], event.times)
    for node, count in sorted(times.items()):
        yield Finding(
            "bad",
            f"{node} has left the common state {_times(count)}: {_last_deviation(evidence, node)}",
            "it loads the common state by itself. If it happens again on that machine and on no other, look "
            "for faulty memory or another version of torch, numpy or the GPU's driver there; with the same "
            "versions every node computes the same bits",
        )
    counted = _counters(evidence).get(refusal.DIGEST_MISMATCH, 0)
    if counted and not times:
        yield Finding(
            "bad",
            f"nodes have left the common state {_times(counted)}",
            "the coordinator's log says which; its events.jsonl tells this command more",
        )
    if not counted and not times and (evidence.status or _of(evidence, of_coordinator.DigestAgreed)):
        yield Finding("ok", "no node has left the common state")


def first_difference(evidence: Evidence) -> Iterator[Finding]:
    """The first round after which the logs hold different digests, and what these nodes did just before."""
    digests: dict[int, dict[str, str]] = defaultdict(dict)
    for moment in evidence.moments:
        event = moment.event
        if isinstance(event, of_coordinator.NodeReported) and event.digest:
            digests[event.round][event.node] = event.digest
        elif isinstance(event, of_node.RoundDone) and event.digest:
            digests[event.round][moment.who] = event.digest
    compared = {index: by_node for index, by_node in digests.items() if len(by_node) > 1}
    if not compared:
        return
    for index in sorted(compared):
        by_node = compared[index]
        usual, count = Counter(by_node.values()).most_common(1)[0]
        others = tuple(sorted(node for node, digest in by_node.items() if digest != usual))
        if not others:
            continue
        before = "; ".join(filter(None, (_before(evidence.moments, node, index) for node in others)))
        sides = f"{count} of {len(by_node)} nodes hold one state after round {index + 1}, {names(others)} not"
        yield Finding(
            "bad",
            f"the first difference: {sides}{f'. Before that: {before}' if before else ''}",
            "a difference right after a load or a resume points at that, one out of nothing at the machine: "
            "compare its device and its versions with the others' (--precision and --batch may differ)",
        )
        return
    yield Finding("ok", f"all digests of {len(compared)} rounds are equal, of {_voices(compared)} nodes")


def lagging(evidence: Evidence) -> Iterator[Finding]:
    """Members that are behind, and members whose votes are missing from many rounds."""
    status = evidence.status
    if status is not None:
        behind = tuple(node.node for node in status.nodes if node.state == State.LAGGING.value)
        if behind:
            yield Finding(
                "warn",
                f"behind the others and not waited for: {names(behind)}",
                "what they send in time still counts. If they stay behind: give them a smaller --batch, a "
                "faster link, or the others more work a round (local_steps)",
            )
    for node, missed, rounds in _missing(evidence):
        if missed >= max(2, OFTEN * rounds):
            yield Finding(
                "warn",
                f"{node} was not counted in {missed} of {rounds} rounds",
                "a slower machine wants a smaller --batch; a slow link shows in the exchange phase of "
                "'atoll timeline'; raise [round] deadline if rounds wait as long as it allows",
            )


def absences(evidence: Evidence) -> Iterator[Finding]:
    """Nodes that come and go."""
    gone: dict[str, list[str]] = defaultdict(list)
    for event in _of(evidence, of_coordinator.NodeLeft):
        if not event.cleanly:
            gone[event.node].append(event.reason)
    for node, reasons in sorted(gone.items()):
        why, count = Counter(reasons).most_common(1)[0]
        level: Level = "bad" if len(reasons) >= FLAPPING else "warn"
        yield Finding(
            level,
            f"{node} was cut off {_times(len(reasons))}, {_times(count)} because: {why}",
            "missing heartbeats mean a frozen machine or a link without room: look at that machine's own log "
            "of the same time. Nothing is lost, it takes up its work again when it is back",
        )
    loads = Counter(e.node for e in _of(evidence, of_coordinator.CatchUpPlanned) if e.action == "load")
    for node, count in sorted(loads.items()):
        if count >= FLAPPING:
            yield Finding(
                "warn",
                f"{node} has loaded a snapshot {_times(count)}",
                "if the results that it missed were kept longer it could replay them, which is cheaper: give "
                "the journal more space, or the node a faster link",
            )


def abstentions(evidence: Evidence) -> Iterator[Finding]:
    """Nodes that had nothing to contribute."""
    last: dict[str, tuple[int, str]] = {}
    for moment in evidence.moments:
        if isinstance(moment.event, of_node.Abstained):
            last[moment.who] = (last.get(moment.who, (0, ""))[0] + 1, moment.event.reason)
    for node in evidence.status.nodes if evidence.status else ():
        if node.abstained and node.node not in last:
            last[node.node] = (node.abstained, "its own log says why")
    for who, (count, reason) in sorted(last.items()):
        yield Finding(
            "warn",
            f"{who} contributed nothing to {count} rounds: {reason}",
            "a gradient that is not finite once in a while is left out and harmless; often, it asks for a "
            "smaller learning rate or --precision fp32",
        )


_ADVICE: Final[dict[str, tuple[Level, str, str]]] = {
    refusal.JOIN: (
        "bad",
        "nodes were refused at the door",
        "each was told why: another run file, data, precision or version of Atoll than the run's; the "
        "versions must be equal on all machines",
    ),
    refusal.BAD_TOKEN: (
        "warn",
        "calls came without the invite's token",
        "a node has an old invite, or a stranger knocks at the port",
    ),
    refusal.SECOND_SESSION: (
        "warn",
        "a node appeared twice",
        "two processes run with one identity, for example from a copied checkpoint: end one of them",
    ),
    refusal.WRONG_TABLE: (
        "bad",
        "contributions were laid out otherwise than this run's",
        "that node has another version of Atoll: update it, and start it again with the invite",
    ),
    refusal.NOT_FINITE: ("warn", "contributions held numbers that are not finite", "see the nodes' logs"),
    refusal.BAD_DIGEST: (
        "bad",
        "contributions arrived damaged",
        "a link or memory flips bits: find the machine whose votes are missing and test its memory",
    ),
    refusal.STALLED: (
        "warn",
        "transfers stood still and were closed",
        "a link without room, or a frozen node; the node sends again",
    ),
    refusal.BROKEN: (
        "warn",
        "transfers broke off",
        "a node or a link went away in the middle; the node sends again",
    ),
    refusal.LATE: (
        "warn",
        "contributions came after their round was closed",
        "slower nodes want a smaller --batch or a longer [round] deadline",
    ),
    refusal.FELL_BEHIND: (
        "warn",
        "nodes asked for results that are no longer kept",
        "they load a snapshot instead; more space for the journal keeps results longer",
    ),
}
_HARMLESS: Final = (refusal.DUPLICATE, refusal.REPLACED, refusal.BAD_SESSION, refusal.DIGEST_MISMATCH)


def refusals(evidence: Evidence) -> Iterator[Finding]:
    """What the coordinator refused or ignored."""
    counters = {kind: count for kind, count in _counters(evidence).items() if count}
    for kind, count in sorted(counters.items()):
        if kind in _ADVICE:
            level, text, advice = _ADVICE[kind]
            yield Finding(level, f"{text} ({kind}, {_times(count)})", advice)
        elif kind not in _HARMLESS:
            yield Finding(
                "warn",
                f"messages were refused ({kind}, {_times(count)})",
                "what sends them is no node of this version; the coordinator's log (--debug) says from where",
            )
    if evidence.status is not None and not counters:
        yield Finding("ok", "nothing was refused or ignored")


def disk(evidence: Evidence) -> Iterator[Finding]:
    """Whether the journal can be written, and was whole."""
    for event in _of(evidence, of_coordinator.JournalTrouble):
        yield Finding("bad" if event.fatal else "warn", f"journal: {event.text}", "")
    for lost in _of(evidence, EventsLost):
        yield Finding(
            "warn", f"{lost.count} events could not be written to a log", "look for a disk that is full"
        )
    for journal in evidence.journals:
        where, room = journal.folder, f"{format_bytes(journal.free)} free"
        if journal.free < TIGHT * journal.used:
            yield Finding(
                "bad" if journal.free < 0.05 * journal.used else "warn",
                f"the disk of {where} is nearly full: {room}, the journal takes {format_bytes(journal.used)}",
                "free some space, or keep fewer results: a coordinator that cannot write its journal "
                "suspends the run",
            )
        else:
            yield Finding("ok", f"{where} takes {format_bytes(journal.used)}, {room}")
        if journal.lost:
            yield Finding(
                "warn",
                f"{len(journal.lost)} results in {where} were damaged, last of round {journal.lost[-1] + 1}",
                "who lacks them loads a later snapshot; a disk that damages more should be replaced",
            )
        for first, end in journal.skips:
            yield Finding(
                "warn",
                f"rounds {first + 1} to {end} are not in {where}: the nodes were ahead of it",
                "the disk had lost what was written last, for example with the machine's power; the run went "
                "on with the nodes' state and nothing is trained twice",
            )


def versions(evidence: Evidence) -> Iterator[Finding]:
    """Whether the logs are of one run."""
    started = _of(evidence, of_node.Started)
    runs = {
        (event.run, event.method)
        for events in (
            started,
            _of(evidence, of_coordinator.RunBegun),
            _of(evidence, of_coordinator.RunResumed),
        )
        for event in events
    }
    sizes = {event.parameters for event in started}
    if len(runs) > 1:
        known = "; ".join(f"{run} ({method})" for run, method in sorted(runs))
        yield Finding("bad", f"the logs are of different runs: {known}", "give the logs of one run")
    elif len(sizes) > 1:
        counts = ", ".join(f"{size:,}" for size in sorted(sizes))
        yield Finding(
            "bad",
            f"the nodes' models differ in size: {counts} parameters",
            "the run file names a model by a path or a hub id that is not the same everywhere",
        )


def progress(evidence: Evidence) -> Iterator[Finding]:
    """Whether rounds are committed."""
    status = evidence.status
    if status is not None:
        text = f"{status.phase}, {status.round} of {status.rounds} rounds: {status.reason}"
        fine = status.phase in ("training", "done")
        level: Level = "ok" if fine else "bad" if status.phase == "failed" else "warn"
        yield Finding(level, text, "" if fine else "it goes on when what it waits for is there")
    ends = _of(evidence, of_coordinator.CoordinatorStopped)
    if ends and ends[-1].phase != "done":
        yield Finding(
            "bad" if ends[-1].phase == "failed" else "warn",
            f"the coordinator's log ends with: {sentence(ends[-1])}",
            "the same command with the same journal goes on with the run",
        )
    for journal in evidence.journals:
        if journal.rounds:
            done = "the run is done" if journal.ended else "the run can go on from there"
            last = journal.rounds[-1]
            yield Finding("ok", f"the journal holds {last.round + 1} rounds, {done}; the last: {last.reason}")


CHECKS: Final[tuple[Check, ...]] = (
    progress,
    versions,
    deviations,
    first_difference,
    lagging,
    absences,
    abstentions,
    refusals,
    disk,
)


def examine(evidence: Evidence, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """What all checks find, the worst first."""
    return worst_first(finding for check in checks for finding in check(evidence))


# --------------------------------------------------------------------------------------------------- helpers


def _of(evidence: Evidence, kind: type[E]) -> list[E]:
    return [moment.event for moment in evidence.moments if isinstance(moment.event, kind)]


def _counters(evidence: Evidence) -> dict[str, int]:
    return dict(evidence.status.counters) if evidence.status is not None else {}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _voices(digests: dict[int, dict[str, str]]) -> int:
    return len({node for by_node in digests.values() for node in by_node})


def _last_deviation(evidence: Evidence, node: str) -> str:
    last = [event for event in _of(evidence, of_coordinator.NodeDeviated) if event.node == node][-1]
    return f"last in round {last.round + 1}, {last.reason}"


def _before(moments: Sequence[Moment], node: str, round_index: int) -> str:
    """The last that a node told beside rounds before it had applied a round."""
    last = ""
    for moment in moments:
        if moment.who != node:
            continue
        event = moment.event
        if isinstance(event, of_node.RoundDone):
            if event.round >= round_index:
                break
        elif not isinstance(event, (of_node.MicroStep, of_node.Saved, EventsLost)):
            last = f"{node}: {sentence(event)}"
    return last


def _missing(evidence: Evidence) -> Iterator[tuple[str, int, int]]:
    """(node, rounds without its vote, rounds that it was a member of), from the best source there is."""
    members: dict[int, tuple[str, ...]] = {}
    missed: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    for moment in evidence.moments:
        event = moment.event
        if isinstance(event, of_coordinator.RoundOpened):
            members[event.round] = event.members
        elif isinstance(event, of_coordinator.RoundCommitted) and event.round in members:
            rounds.update(members[event.round])
            missed.update(node for node in members[event.round] if node not in event.voters)
    if not rounds and evidence.status is not None:
        for node in evidence.status.nodes:
            if node.state != "left":
                rounds[node.node] = max(node.missed, evidence.status.round)
                missed[node.node] = node.missed
    return ((node, missed[node], count) for node, count in sorted(rounds.items()))
