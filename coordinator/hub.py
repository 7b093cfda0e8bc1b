"""The hub: everything that nodes can ask of the coordinator, without the transport.

Admission, sessions, exchanges, state transfers and the status. A transport (``server``) turns streams into
calls of this object and refusals into its own status codes.
"""

from __future__ import annotations

import secrets
from typing import Final

from google.protobuf.message import DecodeError

from coordinator.active_round import Pool
from coordinator.admission import RunFacts, refusal
from coordinator.exchange import Exchange
from coordinator.intake import Intake
from coordinator.nodes import Node, Outbox
from coordinator.plan import RunPlan
from coordinator.refusal import (
    BAD_MESSAGE,
    BAD_SESSION,
    BAD_TRANSFER,
    JOIN,
    SECOND_SESSION,
    Refused,
)
from coordinator.run import ENDED, Run
from coordinator.start import Claim, choose
from coordinator.status import status_of
from coordinator.sweeping import sweep
from coordinator.timer import Alarm, Timer
from coordinator.transfers import Lane, Transfer, parse_state_header
from optim.aggregate import TallyFunction
from protos.atoll_pb2 import (
    GetRunReply,
    GetRunRequest,
    JoinReply,
    JoinRequest,
    NodeMessage,
    StatusReply,
)
from protos.buckets import TableSchedule
from protos.wire import MAX_MESSAGE_BYTES, PROTOCOL, FrameError, decode_frame

MAX_NODES: Final = 4096
STREAMS_A_RANK: Final = 2  # exchanges: the one in use, and one that broke without this side knowing yet
MAX_CONTROL_BYTES: Final = 64 << 10  # of a node's message on its session
MAX_DIGEST: Final = 128  # characters in a report
MAX_TOKENS: Final = 1 << 40  # in a report: sums over a run stay within 64 bits


class Hub:
    """One run and the nodes that take part in it.

    Lives on one event loop; nothing here is thread-safe. All refusals are
    :class:`~coordinator.refusal.Refused`.

    Args:
        plan: the run.
        tables: layout of the payloads, round by round.
        timer: the only clock.
        pool: for CPU work.
        tally: the majority function, ``optim.bits.tally``.
    """

    def __init__(
        self, plan: RunPlan, tables: TableSchedule, *, timer: Timer, pool: Pool, tally: TallyFunction
    ) -> None:
        self.plan = plan
        self.tables = tables
        self.run = Run(plan, tables, timer=timer, pool=pool, tally=tally)
        self._intake = Intake(self.run)
        self.bytes_in = 0  # messages of all calls, as they travel
        self.bytes_out = 0
        self._timer = timer
        self._sessions: dict[str, Node] = {}  # by secret
        self._data_digest = plan.data_digest
        self._numbers = 0
        self._sweep_due = 0.0
        self._alarm: Alarm | None = None
        self._schedule_sweep()

    # --------------------------------------------------------------------------------------------- admission

    def get_run(self, request: GetRunRequest) -> GetRunReply:
        """What a newcomer needs before it can build the model."""
        if request.protocol != PROTOCOL:
            text = (
                f"this node speaks protocol {request.protocol}, the coordinator protocol {PROTOCOL}: "
                "install the same version of atoll on both sides"
            )
            self.count(JOIN)
            raise Refused(JOIN, text, "FAILED_PRECONDITION")
        return GetRunReply(
            protocol=PROTOCOL,
            run_file=self.plan.run_file,
            run_digest=self.plan.run_digest,
            table_digest=self.tables.digest,
            data_digest=self._data_digest,
            round=self.run.round,
        )

    def join(self, request: JoinRequest, address: str) -> JoinReply:
        """Admit a node; ``address`` is where it called from, for people."""
        run = self.run
        if not run.registry.nodes and not run.begun:  # nobody is left who could disagree
            self._data_digest = self.plan.data_digest
        facts = RunFacts(
            run_digest=self.plan.run_digest,
            table_digest=self.tables.digest,
            dtype=self.plan.dtype,
            data_digest=self._data_digest,
            rounds=self.plan.rounds,
            start=choose(node.claim for node in run.registry.nodes.values()),
            committed=run.round if run.begun else None,
        )
        problem = f"the run has ended: {run.reason}" if run.phase in ENDED else refusal(request, facts)
        if problem is None and len(run.registry.nodes) >= MAX_NODES:
            problem = f"the run has {MAX_NODES} nodes already"
        if problem is not None:
            self.count(JOIN)
            raise Refused(JOIN, problem, "FAILED_PRECONDITION")
        self._data_digest = self._data_digest or request.data_digest
        name = f"node-{self._numbers}"
        node = Node(
            node=name,
            name=request.name,
            address=address,
            secret=secrets.token_hex(16),
            weight=request.weight,
            claim=Claim(name, request.round, request.state_digest, request.samples),
            seen_at=self._timer.now(),
            ranks=request.ranks or 1,
            batch=request.batch,
        )
        self._numbers += 1
        run.registry.nodes[node.node] = node
        self._sessions[node.secret] = node
        return JoinReply(
            node=node.node,
            session=node.secret,
            heartbeat_seconds=self.plan.heartbeat,
            needs_state=not run.replays(node) if run.begun else request.round < facts.start.round,
        )

    def node_of(self, session: str) -> Node:
        """The node of a session secret."""
        node = self._sessions.get(session)
        if node is None or node.state == "left":
            self._sessions.pop(session, None)
            self.count(BAD_SESSION)
            why = f" ({node.reason})" if node is not None else ""
            raise Refused(
                BAD_SESSION, f"this session is unknown or has ended{why}: join again", "UNAUTHENTICATED"
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
                self.run.reported(node, report)
        elif kind == "ready":
            if self.run.syncing is None:
                self.count(BAD_MESSAGE)
            else:
                self.count(BAD_MESSAGE if self.run.syncing.ready(node.node, message.ready) else "")
        elif kind == "leave":
            self.close_session(node, message.leave.reason[:256] or "it left", cleanly=True)
        elif kind is None:
            self.count(BAD_MESSAGE)

    def close_session(self, node: Node, reason: str, *, cleanly: bool = False) -> None:
        """The session is over, ``cleanly`` if the node said so; harmless when it already was."""
        self._sessions.pop(node.secret, None)
        self.run.departed(node, reason, cleanly=cleanly)

    # --------------------------------------------------------------------------------------------- exchanges

    def open_exchange(self, node: Node) -> Exchange:
        """A new Exchange stream of a node; its header will tell which older ones it replaces."""
        while len(node.exchanges) >= STREAMS_A_RANK * node.ranks:
            self._intake.replace(node.exchanges[0])
        discards = 2 * (self.tables.nbytes + MAX_MESSAGE_BYTES)  # frames around small chunks included
        exchange = Exchange(node, self._intake, discards=discards)
        node.exchanges.append(exchange)
        return exchange

    def count(self, kind: str) -> None:
        """Count a refused or ignored message."""
        self.run.count(kind)

    # --------------------------------------------------------------------------------------------- transfers

    def upload(self, node: Node, first: bytes) -> Transfer:
        """The transfer that a donor's first message belongs to; the message is still to be fed."""
        try:
            header = parse_state_header(bytes(decode_frame(first).body))
        except FrameError as error:
            self.count(BAD_TRANSFER)
            raise Refused(BAD_TRANSFER, str(error)) from error
        transfer = self._transfer(header.transfer)
        if transfer.donor != node.node:
            self.count(BAD_TRANSFER)
            text = f"{node.node} is not the donor of transfer {transfer.id}"
            raise Refused(BAD_TRANSFER, text, "FAILED_PRECONDITION")
        if transfer.phase != "offered":
            self.count(BAD_TRANSFER)
            raise Refused(
                BAD_TRANSFER, f"transfer {transfer.id} is {transfer.phase} already", "ALREADY_EXISTS"
            )
        return transfer

    def download(self, node: Node, request: bytes) -> Lane:
        """The lane that a joiner reads a state from."""
        transfer = self._transfer(parse_state_header(request).transfer)
        try:
            return transfer.attach(node.node)
        except Refused as refused:
            self.count(refused.kind)
            raise

    def download_broke(self, node: Node, lane: Lane) -> None:
        """A joiner's download ended before its last message."""
        if self.run.syncing is not None and lane.error is None:
            self.run.syncing.failed(node.node, f"the download of {node.node} broke off")

    def _transfer(self, transfer_id: str) -> Transfer:
        transfer = self.run.syncing.transfer if self.run.syncing is not None else None
        if transfer is None or transfer.id != transfer_id:
            self.count(BAD_TRANSFER)
            raise Refused(BAD_TRANSFER, f"there is no transfer {transfer_id[:64]!r} (any more)", "NOT_FOUND")
        return transfer

    # --------------------------------------------------------------------------------------------- upkeep

    def status(self) -> StatusReply:
        """Everything that people ask for."""
        return status_of(self.run, self._timer.now(), self.bytes_in, self.bytes_out)

    def stop(self, reason: str) -> None:
        """End the run; nodes are told why."""
        self.run.stop(reason)

    def close(self) -> None:
        """Stop the sweeping."""
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
