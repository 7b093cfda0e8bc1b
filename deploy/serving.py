"""Running a coordinator from the command line: addresses, invite, log, and the exit code of its end."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coordinator.events import ignore
from coordinator.journal_file import FileJournal
from coordinator.journal_folder import KEEP_BYTES, JournalFolder
from coordinator.service import Outcome, Started, run_coordinator
from deploy.costs import Costs, run_costs
from deploy.dashboard import announce, watching
from deploy.event_log import EventLog
from deploy.invitation import advertised_host, handed_over
from deploy.narration import Narrator
from deploy.status import StatusClient
from deploy.table import ways
from protos.address import Address
from protos.invite import Invite, check_token, new_token
from protos.runfile import RunFile

log = logging.getLogger("atoll.coordinator")

OFF = "off"


@dataclass(frozen=True)
class Choices:
    """What the command line says beside the run file; ``None`` leaves it to the run file or to chance.

    ``journal`` is the folder of the journal, that of the run's name by default, and ``keep_bytes`` what it
    keeps of results; ``snapshot_every`` 0 leaves the rounds between two snapshots to the coordinator.
    """

    listen: Address | None = None
    advertise: str | None = None
    metrics: str | None = None
    token: str | None = None
    invite_file: Path | None = None
    stay: bool = False
    nodes: int | None = None
    journal: Path | None = None
    keep_bytes: int = KEEP_BYTES
    snapshot_every: int = 0
    events: Path | None = None
    dashboard: str | None = None
    admin_token: str | None = field(default=None, repr=False)


def metrics_address(runfile: RunFile, choices: Choices, listen: Address) -> Address | None:
    """Where metrics are served, ``None`` for nowhere. The run file's port is on the host listened on."""
    if choices.metrics is not None:
        return None if choices.metrics == OFF else Address.parse(choices.metrics)
    port = runfile.coordinator.metrics
    return None if port is None else Address(listen.host, port)


def _own_host(address: Address) -> str:
    """Where this machine reaches what listens on ``address``."""
    if not address.is_unspecified:
        return address.host
    return "::1" if ":" in address.host else "127.0.0.1"


def exit_code(outcome: Outcome) -> int:
    """0 for a run that is done, 128 + signal for one that a signal has ended or suspended, else 1."""
    if outcome.phase == "done":
        return 0
    if "SIGINT" in outcome.reason:
        return 130
    return 143 if "SIGTERM" in outcome.reason else 1


def each_round(costs: Costs) -> str:
    """Steps and bytes of a round at a node, in words."""
    text = ways(costs.bytes_up, costs.bytes_down)
    return f"{text} a round" + (f" of {costs.steps:,} steps" if costs.steps > 1 else "")


def coordinate(runfile: RunFile, choices: Choices, say: Callable[[str], None]) -> int:
    """Coordinate the run until its end and return the exit code. ``say`` gets the lines meant for the user.

    Raises:
        InviteError, AddressError, UserError: a choice that cannot be used.
        JournalError: the folder of the journal cannot be used.
        ListenError, MetricsError, DashboardError: an address that is taken or not this machine's.
        ModelError, RoleError, UserError: a run file whose model cannot be built.
    """
    listen = choices.listen or runfile.coordinator.address
    host = advertised_host(listen, choices.advertise)
    # A host or a token that no invite can hold is found before the wait for torch.
    Invite(new_token() if choices.token is None else choices.token, host, listen.port or 1)
    costs = run_costs(runfile)
    with ExitStack() as stack:
        folder = stack.enter_context(opened(runfile, costs, choices))
        say(beginning(folder))
        if folder.ended and not choices.stay:
            say(
                f"all {runfile.run.rounds:,} rounds are committed and every node has left; for another run "
                "of this file give another folder with --journal"
            )
            return 0
        token = choices.token or folder.token or new_token()
        check_token(token)
        folder.keep_token(token)
        shown = watching(choices.dashboard, choices.admin_token, folder)
        log_of_events = (
            ignore if choices.events is None else stack.enter_context(EventLog(choices.events, "coordinator"))
        )

        def started(where: Started) -> None:
            invite = Invite(token, host, where.address.port)
            stack.enter_context(handed_over(invite, choices.invite_file))
            say(f"run {runfile.run.name}: {runfile.method.name}, {runfile.run.rounds:,} rounds, "
                f"{costs.parameters:,} parameters, {each_round(costs)}")  # fmt: skip
            say(f"listening on {where.address}")
            if where.metrics is not None:
                say(f"metrics at http://{where.metrics}/metrics")
            if where.dashboard is not None:
                announce(where.dashboard, choices.admin_token, folder, say)
            nodes = runfile.run.nodes if choices.nodes is None else choices.nodes
            say(f"waiting for {nodes} node{'s' * (nodes != 1)}; on each machine:")
            say(f"  atoll join {invite}")
            dialled = Invite(token, _own_host(where.address), where.address.port)
            client = stack.enter_context(StatusClient(dialled))
            stack.enter_context(Narrator(client, log.info))
            if invite.reach:
                log.warning(
                    "%s; give --advertise HOST with the name or address that they reach", invite.reach
                )

        outcome = run_coordinator(
            runfile,
            costs.tables,
            token,
            listen=listen,
            metrics_listen=metrics_address(runfile, choices, listen),
            on_started=started,
            stay=choices.stay,
            nodes=choices.nodes,
            journal=lambda post: FileJournal(folder, post),
            snapshots=folder.snapshots,
            snapshot_every=choices.snapshot_every,
            on_event=log_of_events,
            watching=shown,
        )
        if outcome.phase == "done":
            folder.mark_ended()
    say(f"{outcome.phase} after {outcome.round:,} rounds: {outcome.reason}")
    return exit_code(outcome)


def opened(runfile: RunFile, costs: Costs, choices: Choices) -> JournalFolder:
    """Open the journal of a run; see :meth:`JournalFolder.open`."""
    return JournalFolder.open(
        choices.journal or Path(f"{runfile.run.name}.journal"),
        run_digest=runfile.digest,
        table_digest=costs.tables.digest,
        run_toml=runfile.to_toml(),
        keep_bytes=choices.keep_bytes,
    )


def beginning(folder: JournalFolder) -> str:
    """With what a coordinator begins, in words."""
    found = folder.recovered
    if found is None:
        return f"journal in {folder.path}"
    notes = f" ({'; '.join(found.notes)})" if found.notes else ""
    return f"going on from round {found.round + 1:,} of the journal in {folder.path}{notes}"


# Not logging's own names: libraries change those for the whole process (hivemind says WARN).
_LEVELS: Final = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time (UTC), level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        values = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": _LEVELS.get(record.levelno, f"level {record.levelno}"),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["error"] = self.formatException(record.exc_info)
        return json.dumps(values)


def log_as_json() -> None:
    """Switch the root logger's handlers to JSON lines."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
