"""A snapshot of a run: everything a dashboard shows, as plain values that never change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coordinator.dashboard.recorder import CurvePoint, EventView, Recorder, RoundView
from coordinator.nodes import Node
from coordinator.status import node_status, parameters_of, reason_of
from protos.address import peer

if TYPE_CHECKING:
    from coordinator.hub import Hub

RATE_SECONDS: Final = 5.0  # over which rates are means
LEFT_SHOWN: Final = 16
COORDINATOR: Final = "coordinator"  # end of a link; nodes are called node-N


@dataclass(frozen=True)
class NodeView:
    """A node.

    Attributes:
        state: as in the status; ``"leaving"`` once it was told to leave.
        seat: where it stands in the round in flight; empty outside of it.
        trained: rounds up to its last report; -1 before the first.
        lag: rounds whose results it has not been given; ``None`` where that is not known, or it is gone.
        bytes_up, bytes_down: that it has sent and received, as it last reported.
        rate_up, rate_down: bytes per second: as counted here, or, where they travel between nodes, from one
            report to the next.
        reduces: share of each round that it reduces.
        way: how others reach it: ``"coordinator"`` where all goes there, else as :meth:`Mesh.way` says.
        seen: seconds since it last said something.
    """

    node: str
    name: str
    host: str
    state: str
    seat: str
    ranks: int
    weight: int
    trained: int
    lag: int | None
    loss: float
    agreement: float
    missed: int
    abstained: int
    compute_share: float
    bytes_up: int
    bytes_down: int
    rate_up: float
    rate_down: float
    reduces: float
    way: str
    seen: float
    reason: str


@dataclass(frozen=True)
class LinkView:
    """What travels between a node and the coordinator, or a node and the reducer of a slice.

    Attributes:
        source, target: the coordinator is the target of its links; the reducer of theirs.
        rate_up, rate_down: bytes per second from and to the source. Measured at the coordinator; between
            nodes what the slices come to at the pace of the last rounds.
        way: ``"coordinator"``, ``"direct"``, ``"swarm"`` or ``"tunnel"``.
    """

    source: str
    target: str
    rate_up: float
    rate_down: float
    way: str


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment; losses in nats per token, NaN where nothing is measured yet.

    Attributes:
        at: seconds since 1970.
        seconds: since the run began.
        reason: why it is in its phase, in words.
        paused: why the administrator has paused it; empty: not paused.
        transport: of the run file; ``ways``: what has come of it, in words.
        pace: mean seconds from one commit to the next.
        bytes_in, bytes_out: of the coordinator, in all calls.
        rate_in, rate_out: bytes per second.
        payload_bytes, result_bytes: of a round at each node.
        members: of the roster.
        counters: refused and ignored messages by kind.
        expelled: (node, name, reason).
    """

    at: float
    seconds: float
    run: str
    method: str
    phase: str
    reason: str
    paused: str
    round: int
    rounds: int
    epoch: int
    transport: str
    ways: str
    parameters: int
    payload_bytes: int
    result_bytes: int
    loss: float
    validation_loss: float
    bits_per_byte: float
    agreement: float
    pace: float
    bytes_in: int
    bytes_out: int
    rate_in: float
    rate_out: float
    members: int
    nodes: tuple[NodeView, ...]
    links: tuple[LinkView, ...]
    timeline: tuple[RoundView, ...]
    curve: tuple[CurvePoint, ...]
    events: tuple[EventView, ...]
    counters: tuple[tuple[str, int], ...]
    expelled: tuple[tuple[str, str, str], ...]

    @property
    def present(self) -> int:
        """Nodes that have not left."""
        return sum(node.state != "left" for node in self.nodes)


class Rates:
    """Bytes per second, as means over the last seconds.

    Args:
        seconds: of the window.
    """

    def __init__(self, seconds: float = RATE_SECONDS) -> None:
        self._seconds = seconds
        self._samples: deque[tuple[float, Mapping[str, int]]] = deque()

    def take(self, now: float, counters: Mapping[str, int]) -> dict[str, float]:
        """Add counters that only grow, and return their rates; 0 for those that are new or began anew."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._seconds:
            self._samples.popleft()
        if self._samples and now - self._samples[0][0] > 4 * self._seconds:
            self._samples.clear()  # nobody has looked for a while
        self._samples.append((now, dict(counters)))
        since, before = self._samples[0]
        if now <= since:
            return dict.fromkeys(counters, 0.0)
        return {
            name: max(0, value - before[name]) / (now - since) if name in before else 0.0
            for name, value in counters.items()
        }


class Camera:
    """Takes snapshots of a run, on its loop.

    Args:
        hub: of the run.
        recorder: that listens to it.
    """

    def __init__(self, hub: Hub, recorder: Recorder) -> None:
        self._hub = hub
        self._recorder = recorder
        self._rates = Rates()
        self._parameters = parameters_of(hub.tables)
        recorder.moved = lambda: hub.run.moved_bytes
        recorder.losses = hub.run.history.losses

    def take(self) -> Snapshot:
        """The run as it is now."""
        hub, run, recorder = self._hub, self._hub.run, self._recorder
        now, plan = run.now(), run.plan
        counters = {f"<{COORDINATOR}": hub.bytes_in, f">{COORDINATOR}": hub.bytes_out}
        for node in run.registry.nodes.values():
            here = (node.bytes_in, node.bytes_out)
            said = here if plan.transport == "hub" else (node.report.bytes_up, node.report.bytes_down)
            counters[f"<<{node.node}"], counters[f">>{node.node}"] = here
            counters[f"<{node.node}"], counters[f">{node.node}"] = map(max, here, said)
        rates = self._rates.take(now, counters)
        shares = self._shares()
        gone = run.registry.left[-LEFT_SHOWN:]
        validation, bits = run.history.last_validation
        payload, result = hub.tables.mean_nbytes
        return Snapshot(
            at=run.wall(),
            seconds=0.0 if run.started_at is None else (run.ending.at or now) - run.started_at,
            run=plan.name,
            method=plan.method,
            phase=run.phase,
            reason=reason_of(run),
            paused=run.administration.paused,
            round=run.round,
            rounds=plan.rounds,
            epoch=run.registry.roster.epoch,
            transport=plan.transport,
            ways="" if plan.transport == "hub" else run.mesh.reason,
            parameters=self._parameters,
            payload_bytes=round(payload),
            result_bytes=round(result),
            loss=run.history.last_loss,
            validation_loss=validation,
            bits_per_byte=bits,
            agreement=run.history.agreement,
            pace=recorder.pace(),
            bytes_in=hub.bytes_in,
            bytes_out=hub.bytes_out,
            rate_in=rates[f"<{COORDINATOR}"],
            rate_out=rates[f">{COORDINATOR}"],
            members=len(run.registry.roster),
            nodes=tuple(
                self._node(node, rates, shares, now) for node in (*run.registry.nodes.values(), *gone)
            ),
            links=(*self._links_of_hub(rates), *self._links_of_slices(shares)),
            timeline=tuple(recorder.rounds),
            curve=recorder.points(),
            events=recorder.happened(),
            counters=tuple(sorted(run.counters.items())),
            expelled=tuple((one.node, one.name, one.reason) for one in run.administration.record.expelled),
        )

    def _node(
        self, node: Node, rates: Mapping[str, float], shares: Mapping[str, float], now: float
    ) -> NodeView:
        run = self._hub.run
        status = node_status(node, between_nodes=run.plan.transport != "hub")
        trained = node.report.round + 1 if node.report.state_digest else -1
        present = node.state != "left"
        active = run.active
        seat = None if active is None else active.members.get(node.node)
        way = run.mesh.way("", node.node) if shares else COORDINATOR
        holds = node.position if node.seated else node.held
        return NodeView(
            node=node.node,
            name=node.name,
            host=peer(node.address),
            state="leaving" if present and node.stopping else node.state,
            seat="" if seat is None or not present else seat.state.value,
            ranks=node.ranks,
            weight=node.weight,
            trained=trained,
            lag=None if not present or holds is None else max(0, run.round - holds),
            loss=status.loss if trained >= 0 else math.nan,
            agreement=node.agreement,
            missed=node.missed,
            abstained=node.abstained,
            compute_share=status.compute_share,
            bytes_up=node.report.bytes_up,
            bytes_down=node.report.bytes_down,
            rate_up=rates.get(f"<{node.node}", 0.0),
            rate_down=rates.get(f">{node.node}", 0.0),
            reduces=shares.get(node.node, 0.0),
            way=way,
            seen=max(0.0, now - node.seen_at),
            reason=node.reason,
        )

    def _shares(self) -> dict[str, float]:
        """Share of what travels in a round, contributions and results, that each reducer takes."""
        run = self._hub.run
        shares: dict[str, float] = {}
        tables = run.tables.tables
        for table in tables:
            whole = table.nbytes + table.result_nbytes
            for one in run.mesh.assigned(table):
                part = one.slice.end - one.slice.start + one.slice.out_end - one.slice.out_start
                shares[one.reducer] = shares.get(one.reducer, 0.0) + part / whole / len(tables)
        return shares

    def _links_of_hub(self, rates: Mapping[str, float]) -> list[LinkView]:
        return [
            LinkView(
                node.node,
                COORDINATOR,
                rates.get(f"<<{node.node}", 0.0),
                rates.get(f">>{node.node}", 0.0),
                COORDINATOR,
            )
            for node in self._hub.run.registry.nodes.values()
        ]

    def _links_of_slices(self, shares: Mapping[str, float]) -> list[LinkView]:
        run, links = self._hub.run, []
        pace = self._recorder.pace()
        each = 1 / pace if run.phase == "training" and pace > 0 else 0.0
        up, down = (nbytes * each for nbytes in self._hub.tables.mean_nbytes)
        for reducer, share in shares.items():
            for member in run.registry.names():
                if member != reducer:
                    way = run.mesh.way(member, reducer)
                    links.append(LinkView(member, reducer, up * share, down * share, way))
        return links
