"""Running a coordinator from the command line: addresses, invite, log, and the exit code of its end."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from coordinator.service import Outcome, Started, run_coordinator
from deploy.costs import Costs, run_costs
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
    """What the command line says beside the run file; ``None`` leaves it to the run file or to chance."""

    listen: Address | None = None
    advertise: str | None = None
    metrics: str | None = None
    token: str | None = None
    invite_file: Path | None = None
    stay: bool = False
    nodes: int | None = None


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
    """0 for a run that is done, 128 + signal for one that was stopped by a signal, 1 for one that failed."""
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
        ListenError, MetricsError: an address that is taken or not this machine's.
        ModelError, RoleError, UserError: a run file whose model cannot be built.
    """
    listen = choices.listen or runfile.coordinator.address
    token = new_token() if choices.token is None else choices.token
    check_token(token)
    host = advertised_host(listen, choices.advertise)
    Invite(token, host, listen.port or 1)  # a host that no invite can name is found before the wait for torch
    costs = run_costs(runfile)
    stack = ExitStack()

    def started(where: Started) -> None:
        invite = Invite(token, host, where.address.port)
        stack.enter_context(handed_over(invite, choices.invite_file))
        say(f"run {runfile.run.name}: {runfile.method.name}, {runfile.run.rounds:,} rounds, "
            f"{costs.parameters:,} parameters, {each_round(costs)}")  # fmt: skip
        say(f"listening on {where.address}")
        if where.metrics is not None:
            say(f"metrics at http://{where.metrics}/metrics")
        nodes = runfile.run.nodes if choices.nodes is None else choices.nodes
        say(f"waiting for {nodes} node{'s' * (nodes != 1)}; on each machine:")
        say(f"  atoll join {invite}")
        dialled = Invite(token, _own_host(where.address), where.address.port)
        client = stack.enter_context(StatusClient(dialled))
        stack.enter_context(Narrator(client, log.info))
        if invite.reach:
            log.warning("%s; give --advertise HOST with the name or address that they reach", invite.reach)

    with stack:
        outcome = run_coordinator(
            runfile,
            costs.tables,
            token,
            listen=listen,
            metrics_listen=metrics_address(runfile, choices, listen),
            on_started=started,
            stay=choices.stay,
            nodes=choices.nodes,
        )
    say(f"{outcome.phase} after {outcome.round:,} rounds: {outcome.reason}")
    return exit_code(outcome)


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time (UTC), level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        values = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
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
