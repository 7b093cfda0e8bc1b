"""The hub: everything that nodes can ask of the coordinator, without the transport.

Admission, sessions, exchanges, state transfers and the status. A transport (``server``) turns streams into
calls of this object and refusals into its own status codes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Final

from google.protobuf.message import DecodeError

from coordinator.administration import barred
from coordinator.admission import RunFacts, other_version, refusal
from coordinator.ending import ENDED
from coordinator.exchange import Exchange
from coordinator.intake import Intake
from coordinator.nodes import Node, Outbox, session_secret
from coordinator.pacing import Pacer, exchanging
from coordinator.partial_snapshot import Upload
from coordinator.probing import Probing
from coordinator.replay import replay
from coordinator.run import Run
from coordinator.sliced_round import SlicedRound
from coordinator.start import Claim, choose
from coordinator.status import parameters_of, status_of
from coordinator.sweeping import sweep
from coordinator.timer import Alarm
from coordinator.tunnels import TunnelEnd, Tunnels
from protos.atoll_pb2 import (
    ChunksRequest,
    GetRunReply,
    GetRunRequest,
    JoinReply,
    JoinRequest,
    NodeMessage,
    ResultsRequest,
    StatusReply,
)
from protos.limits import state_limit
from protos.refusal import (
    BAD_MESSAGE,
    BAD_SESSION,
    EXPELLED,
    JOIN,
    KEY_IN_USE,
    OLD_VERSION,
    SECOND_SESSION,
    Refused,
)
from protos.traffic import OTHERS, Content, Traffic
from protos.wire import MAX_MESSAGE_BYTES, PROTOCOL, SESSION_UNKNOWN

MAX_NODES: Final = 4096
STREAMS_A_RANK: Final = 2  # exchanges: the one in use, and one that broke without this side knowing yet
MAX_CONTROL_BYTES: Final = 64 << 10  # of a node's message on its session
MAX_DIGEST: Final = 128  # characters in a report
MAX_TOKENS: Final = 1 << 40  # in a report: sums over a run stay within 64 bits


class Hub:
    """One run and the nodes that take part in it.

    Lives on one event loop; nothing here is thread-safe. All refusals are
    :class:`~protos.refusal.Refused`.

    Args:
        run: whose nodes they are; its plan, tables and timer are the hub's too.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.plan, self.tables = run.plan, run.tables
        self._intake = Intake(run)
        self.bytes_in = 0  # messages of all calls, as they travel
        self.bytes_out = 0
        self.traffic = Traffic()
        self.pacer = Pacer(
            now=run.now,
            exchanging=lambda: exchanging(run),
            moved=lambda: self.bytes_in + self.bytes_out,
            members=lambda: len(run.registry.roster.members),
            patience=run.plan.stall / 4,
        )
        self._state_limit = run.plan.limits.state or state_limit(parameters_of(run.tables))
        self.tunnels = Tunnels()
        self.probing = Probing(run, self.pacer)
        self.swarm_secret = ""  # that the nodes of the run share
        self._timer = run.timer
        self._sessions: dict[str, Node] = {}  # by secret
        self._sweep_due = 0.0
        self._alarm: Alarm | None = None
        self._schedule_sweep()

    # --------------------------------------------------------------------------------------------- admission

    def get_run(self, request: GetRunRequest) -> GetRunReply:
        """What a newcomer needs before it can build the model."""
        if version := other_version(request.protocol):
            raise self._refused(OLD_VERSION, version)
        return GetRunReply(
            protocol=PROTOCOL,
            run_file=self.plan.run_file,
            run_digest=self.plan.run_digest,
            table_digest=self.tables.digest,
            data_digest=self.run.data_digest,
            round=self.run.round,
        )

    def join(self, request: JoinRequest, address: str, token: str = "") -> JoinReply:
        """Admit a node; ``address`` is where it called from, for people, ``token`` the sha256 (hex) of the
        secret that it has shown. That the key is its own :mod:`coordinator.access` has checked."""
        run = self.run
        if version := other_version(request.protocol):
            raise self._refused(OLD_VERSION, version)
        if not run.registry.nodes and not run.begun:  # nobody is left who could disagree
            run.data_digest, run.state_bytes = self.plan.data_digest, 0
        if run.phase == "suspended":
            raise run.ending.refusal()
        former = run.registry.former(request.former, request.key)
        known = former is not None
        # Who was a member, or may be one of a journal that has lost its tail, is let in whatever it holds.
        committed = self.plan.rounds if known or run.gathering.awaited else run.round
        facts = RunFacts(
            run_digest=self.plan.run_digest,
            table_digest=self.tables.digest,
            dtype=self.plan.dtype,
            data_digest=run.data_digest,
            state_bytes=run.state_bytes,
            state_limit=self._state_limit,
            rounds=self.plan.rounds,
            start=choose(node.claim for node in run.registry.nodes.values()),
            committed=committed if run.begun else None,
            max_weight=self.plan.max_weight,
        )
        over = run.phase in ENDED and not (run.phase == "done" and known)
        problem = f"the run has ended: {run.reason}" if over else refusal(request, facts)
        expelled = run.administration.record.expelled
        why = barred(expelled, request.former, request.name, address, known=known, key=request.key)
        problem = problem or why or None
        if problem is None and len(run.registry.nodes) >= MAX_NODES:
            problem = f"the run has {MAX_NODES} nodes already"
        if problem is not None:
            raise self._refused(EXPELLED if problem == why else JOIN, problem)
        self._check_key(request, former)
        run.data_digest = run.data_digest or request.data_digest
        run.state_bytes = run.state_bytes or request.state_bytes
        node = self._admitted(request, address, former)
        node.key, node.token = request.key, token
        run.registry.nodes[node.node] = node
        self._sessions[node.secret] = node
        if request.HasField("endpoint"):
            run.mesh.announced(node, request.endpoint)
        return JoinReply(
            node=node.node,
            session=node.secret,
            heartbeat_seconds=self.plan.heartbeat,
            needs_state=run.newcomers.trusted(node) is None
            if run.begun
            else request.round < facts.start.round,
        )

    def _check_key(self, request: JoinRequest, former: str | None) -> None:
        """A key is in one session at a time; who can tell the secret of that session takes it over."""
        for other in self.run.registry.with_key(request.key):
            if other.node == former:
                continue
            if other.outbox is None:  # it has not taken up its session, or never will
                self.close_session(other, "its key has joined again")
                continue
            raise self._refused(
                KEY_IN_USE,
                f"{other.node} ({other.name}) is in this run with this node's key: end that process, or give "
                "this one a key of its own with --identity; if it was copied, have that node expelled",
            )

    def _refused(self, kind: str, text: str) -> Refused:
        self.count(kind)
        return Refused(kind, text, "FAILED_PRECONDITION")

    def revoked(self, standing: Callable[[str], str]) -> None:
        """End the sessions of nodes whose tokens are valid no more, as ``standing`` tells of each one."""
        for node in list(self.run.registry.nodes.values()):
            if node.token and (why := standing(node.token)):
                self.close_session(node, why)

    def _admitted(self, request: JoinRequest, address: str, former: str | None) -> Node:
        """A node under a new name, or under its ``former`` one, as it can tell the secret of its last
        session."""
        run = self.run
        if former is not None and (present := run.registry.get(former)) is not None:
            self.close_session(present, "it has joined again")
        name = former or run.registry.new_name()
        before = run.registry.last(name)
        work = (request.lease_round, request.lease_start, request.lease_count)
        return Node(
            node=name,
            name=request.name,
            address=address,
            secret=session_secret(request.former if former is not None else ""),
            weight=request.weight,
            claim=Claim(
                name,
                request.round,
                request.state_digest,
                request.samples,
                work if request.lease_count else None,
            ),
            seen_at=self._timer.now(),
            ranks=request.ranks or 1,
            batch=request.batch,
            known=former is not None,
            since=before.since if before is not None else None,
        )

    def node_of(self, session: str) -> Node:
        """The node of a session secret."""
        node = self._sessions.get(session)
        if node is None or node.state == "left":
            self._sessions.pop(session, None)
            self.count(BAD_SESSION)
            why = f" ({node.reason})" if node is not None else ""
            raise Refused(
                BAD_SESSION, f"{SESSION_UNKNOWN}this session is unknown or has ended{why}", "UNAUTHENTICATED"
            )
        return node

    # --------------------------------------------------------------------------------------------- sessions

    def open_session(self, node: Node) -> Outbox:
        """The node's session stream has begun; returns what is to be sent to it."""
        if node.outbox is not None:
            self.count(SECOND_SESSION)
            raise Refused(
                SECOND_SESSION,
                f"{node.node} ({node.name}) has a session already: one identity is used by two processes",
                "ALREADY_EXISTS",
            )
        outbox = node.outbox = Outbox()
        node.seen_at = self._timer.now()
        self.run.arrived(node)
        self.run.administration.arrived(node)
        return outbox

    def message(self, node: Node, data: bytes) -> None:
        """A message of the node on its session."""
        node.seen_at = self._timer.now()
        try:
            if len(data) > MAX_CONTROL_BYTES:
                raise DecodeError("too long")
            message = NodeMessage.FromString(data)
        except DecodeError:
            self.count(BAD_MESSAGE)
            return
        kind = message.WhichOneof("kind")
        if kind == "report":
            report = message.report
            if (
                len(report.state_digest) > MAX_DIGEST
                or report.tokens > MAX_TOKENS
                or report.round >= self.run.round
            ):
                self.count(BAD_MESSAGE)
            else:
                self.run.reports.take(node, report)
        elif kind == "ready":
            if self.run.ready(node, message.ready):
                self.count(BAD_MESSAGE)
        elif kind == "leave":
            self.close_session(node, message.leave.reason[:256] or "it left", cleanly=True)
        elif kind is None:
            self.count(BAD_MESSAGE)
        elif kind != "heartbeat":
            self._between_nodes(node, message, kind)

    def _between_nodes(self, node: Node, message: NodeMessage, kind: str) -> None:
        """What concerns rounds whose slices travel between nodes."""
        active = self.run.active
        if kind == "endpoint":
            self.run.mesh.announced(node, message.endpoint)
        elif kind == "detour":
            self.run.mesh.detour(node, message.detour.node)
        elif not isinstance(active, SlicedRound):
            return  # of a round that is over
        elif kind == "slice_news":
            active.news(node.node, message.slice_news)
        elif kind == "slice_trouble" and message.slice_trouble.round == active.round:
            trouble = message.slice_trouble
            active.trouble(node.node, trouble.slice, trouble.topology, trouble.reason)
        elif kind == "abstention" and message.abstention.round == active.round:
            active.abstain(node.node, message.abstention.reason)
        elif kind == "holding" and message.holding.round == active.round:
            active.holding(node.node, message.holding.digest)
        elif kind == "shown":
            active.shown(node.node, message.shown)

    def close_session(self, node: Node, reason: str, *, cleanly: bool = False) -> None:
        """The session is over, ``cleanly`` if the node said so; harmless when it already was."""
        self._sessions.pop(node.secret, None)
        self.run.departed(node, reason, cleanly=cleanly)
        self.tunnels.drop(node)

    # --------------------------------------------------------------------------------------------- exchanges

    def open_exchange(self, node: Node) -> Exchange:
        """A new Exchange stream of a node; its header will tell which older ones it replaces."""
        self.traffic.compose(self.tables.of(self.run.round))
        while len(node.exchanges) >= STREAMS_A_RANK * node.ranks:
            self._intake.replace(node.exchanges[0])
        discards = 2 * (self.tables.nbytes + MAX_MESSAGE_BYTES)  # frames around small chunks included
        exchange = Exchange(node, self._intake, discards=discards)
        node.exchanges.append(exchange)
        return exchange

    def tunnel(self, node: Node, *, to: str, key: str) -> TunnelEnd:
        """A node's end of the tunnel to which it was called by ``key``, or, without one, of a new one to the
        node ``to``."""
        try:
            if key:
                return self.tunnels.answer(node, key)
            return self.tunnels.call(node, self.run.registry.get(to), to)
        except Refused as refused:
            self.count(refused.kind)
            raise

    def count(self, kind: str) -> None:
        """Count a refused or ignored message."""
        self.run.count(kind)

    def received(self, nbytes: int, content: Content = "control", peer: str = OTHERS) -> None:
        """Count a message that has come."""
        self.bytes_in += nbytes
        self.traffic.add(peer, "received", content, nbytes)

    def sent(self, nbytes: int, content: Content = "control", peer: str = OTHERS) -> None:
        """Count a message that has been sent."""
        self.bytes_out += nbytes
        self.traffic.add(peer, "sent", content, nbytes)

    # ------------------------------------------------------------------------------------ states and results

    def upload(self, node: Node, first: bytes) -> Upload:
        """The part of a snapshot that a donor's first message announces."""
        return self.run.snapshots.upload(node.node, first)

    def chunks(self, node: Node, request: ChunksRequest) -> AsyncGenerator[bytes, None]:
        """Frames of a snapshot."""
        return self.run.snapshots.read(request)

    def results(self, node: Node, request: ResultsRequest) -> AsyncGenerator[bytes, None]:
        """Frames of the results of many rounds."""
        run = self.run
        return replay(
            request,
            node.node,
            tables=run.tables,
            ring=run.results,
            journal=run.journal,
            committed=run.round,
        )

    def moved(self, node: Node) -> None:
        """Bytes of a state or of results have moved between this side and a node."""
        node.progress_at = node.seen_at = self._timer.now()

    # --------------------------------------------------------------------------------------------- upkeep

    def status(self) -> StatusReply:
        """Everything that people ask for."""
        return status_of(self.run, self._timer.now(), self.bytes_in, self.bytes_out)

    def stop(self, reason: str) -> None:
        """End the run; nodes are told why."""
        self.run.stop(reason)

    def suspend(self, reason: str) -> None:
        """Go no further; nodes are told nothing and hold."""
        self.run.suspend(reason)

    def close(self) -> None:
        """Stop the sweeping."""
        self.run.mesh.close()
        if self._alarm is not None:
            self._alarm.cancel()

    def _schedule_sweep(self) -> None:
        self._sweep_due = self._timer.now() + self.plan.heartbeat
        self._alarm = self._timer.call_at(self._sweep_due, self._sweep)

    def _sweep(self) -> None:
        if self._timer.now() - self._sweep_due >= self.plan.heartbeat:
            # This process did not run for a while, so it could not hear anybody: silence proves nothing.
            for node in self.run.registry.nodes.values():
                node.seen_at = self._timer.now()
        sweep(self.run)
        for secret, node in list(self._sessions.items()):
            if node.state == "left" and node not in self.run.registry.left:
                del self._sessions[secret]
        self._schedule_sweep()
