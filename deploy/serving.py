"""Running a coordinator from the command line: addresses, invite, log, and the exit code of its end."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from coordinator.access import Access
from coordinator.events import Event
from coordinator.journal_file import FileJournal
from coordinator.journal_folder import CERTIFICATE, KEEP_BYTES, JournalFolder
from coordinator.service import Outcome, Started, run_coordinator
from deploy.costs import Costs, run_costs
from deploy.dashboard import announce, watching
from deploy.errors import UserError
from deploy.event_log import EventLog
from deploy.invitation import advertised_host, handed_over
from deploy.logs import KeptLogs, LogFolder
from deploy.narration import Narrator
from deploy.options import OFF
from deploy.run_table import RunTable
from deploy.status import StatusClient
from deploy.table import ways
from deploy.tokens import keep_where, prepared
from protos import certificate
from protos.address import Address
from protos.certificate import CertificateError, Credential
from protos.invite import Invite, new_token
from protos.model_tensors import OWN
from protos.runfile import RunFile
from protos.tls import remember

log = logging.getLogger("atoll.coordinator")

WHO: Final = "coordinator"  # in logs
UNKNOWN: Final = "TOKEN"  # where the secret of an invite is not known
INSECURE_WORDS: Final = (
    "INSECURE (--insecure): everybody on the way can read and change what nodes send, join with the token "
    "that they show, and take this coordinator's place"
)


@dataclass(frozen=True)
class Choices:
    """What the command line says beside the run file; ``None`` leaves it to the run file or to chance.

    ``journal`` is the folder of the journal, that of the run's name by default, and ``keep_bytes`` what it
    keeps of results; ``snapshot_every`` 0 leaves the rounds between two snapshots to the coordinator. Without
    ``tls_cert`` and ``tls_key`` it makes a certificate of its own; ``insecure`` does without any.
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
    log_dir: str | None = None
    dashboard: str | None = None
    admin_token: str | None = field(default=None, repr=False)
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None


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


def join_command(runfile: RunFile) -> str:
    """What a node is started with, before the invite: a model of its own comes with a script."""
    return "python SCRIPT" if runfile.model.name == OWN else "atoll join"


def coordinate(runfile: RunFile, choices: Choices, say: Callable[[str], None]) -> int:
    """Coordinate the run until its end and return the exit code. ``say`` gets the lines meant for the user.

    Raises:
        InviteError, AddressError, UserError: a choice that cannot be used.
        TokenError: the book of tokens cannot be used.
        JournalError: the folder of the journal cannot be used.
        ListenError, MetricsError, DashboardError: an address that is taken or not this machine's.
        ModelError, RoleError, UserError: a run file whose model cannot be built.
    """
    listen = choices.listen or runfile.coordinator.address
    host = advertised_host(listen, choices.advertise)
    # A host or a token that no invite can hold is found before the wait for torch.
    Invite(new_token() if choices.token is None else choices.token, host, listen.port or 1)
    given = given_credential(choices)
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
        tokens, token = prepared(
            folder.path,
            token=choices.token,
            admin_token=choices.admin_token,
            invite=choices.invite_file is not None,
        )
        access = Access(tokens)
        credential = None if choices.insecure else given or certificate.kept(folder.path / CERTIFICATE)
        pin = ""
        if credential is not None:
            pin = credential.pin
            remember(credential.der)
        shown = watching(choices.dashboard, choices.admin_token)
        logs = stack.enter_context(kept_logs(folder, choices, say))
        events = None
        if choices.events is not None:
            events = stack.enter_context(EventLog(choices.events, WHO))

        def observe(event: Event) -> None:
            logs(event)
            if events is not None:
                events(event)

        def started(where: Started) -> None:
            invite = Invite(token or UNKNOWN, host, where.address.port, pin)
            logs.open(runfile.run.name)
            keep_where(folder.path, invite)
            stack.enter_context(handed_over(invite, choices.invite_file))
            say(f"run {runfile.run.name}: {runfile.method.name}, {runfile.run.rounds:,} rounds, "
                f"{costs.parameters:,} parameters, {each_round(costs)}")  # fmt: skip
            say(f"listening on {where.address}{security(credential)}")
            if where.metrics is not None:
                say(f"metrics at http://{where.metrics}/metrics")
            if where.dashboard is not None:
                announce(where.dashboard, tokens.book, folder, say)
            nodes = runfile.run.nodes if choices.nodes is None else choices.nodes
            say(f"waiting for {nodes} node{'s' * (nodes != 1)}; on each machine:")
            command = join_command(runfile)
            if token:
                say(f"  {command} {invite}")
            else:
                say(f"  {command} INVITE, made before or by 'atoll invite create {folder.path}'")
            if (
                credential is None or not credential.client_ca
            ):  # who asks for certificates, has none for itself
                dialled = Invite(access.own, _own_host(where.address), where.address.port, pin)
                client = stack.enter_context(StatusClient(dialled))
                stack.enter_context(Narrator(client, log.info))
            if credential is None:
                log.warning(INSECURE_WORDS)
            if invite.reach:
                log.warning(
                    "%s; give --advertise HOST with the name or address that they reach", invite.reach
                )

        outcome = run_coordinator(
            runfile,
            costs.tables,
            access,
            listen=listen,
            metrics_listen=metrics_address(runfile, choices, listen),
            on_started=started,
            stay=choices.stay,
            nodes=choices.nodes,
            journal=lambda post: FileJournal(folder, post),
            snapshots=folder.snapshots,
            snapshot_every=choices.snapshot_every,
            on_event=observe,
            watching=shown,
            credential=credential,
            swarm_secret=folder.swarm_secret(),
        )
        if outcome.phase == "done":
            folder.mark_ended()
    say(f"{outcome.phase} after {outcome.round:,} rounds: {outcome.reason}")
    return exit_code(outcome)


def given_credential(choices: Choices) -> Credential | None:
    """The certificate that the user gives, if any.

    Raises:
        CertificateError: it cannot be used.
        UserError: the choices do not go together.
    """
    files = (choices.tls_cert, choices.tls_key, choices.tls_client_ca)
    if choices.insecure and any(files):
        raise UserError("--insecure and the options --tls-… exclude each other")
    if choices.tls_cert is None or choices.tls_key is None:
        if any(files):
            raise UserError("give --tls-cert and --tls-key, a certificate and its key, with --tls-client-ca")
        return None
    credential = certificate.loaded(choices.tls_cert, choices.tls_key)
    try:
        certificate.name_in(credential.der)  # callers will ask for it
    except CertificateError as error:
        raise CertificateError(f"{choices.tls_cert}: {error}") from None
    if choices.tls_client_ca is not None:
        credential = replace(credential, client_ca=certificate.authority(choices.tls_client_ca))
    return credential


def security(credential: Credential | None) -> str:
    """How its connections are protected, in words, to go behind the address."""
    if credential is None:
        return ", INSECURE: not encrypted, and nothing proves to nodes who this is (--insecure)"
    if credential.client_ca:
        return " with TLS; nodes have to show a certificate"
    return " with TLS"


def opened(runfile: RunFile, costs: Costs, choices: Choices) -> JournalFolder:
    """Open the journal of a run; see :meth:`JournalFolder.open`."""
    return JournalFolder.open(
        choices.journal or Path(f"{runfile.run.name}.journal"),
        run_digest=runfile.digest,
        table_digest=costs.tables.digest,
        run_toml=runfile.to_toml(),
        keep_bytes=choices.keep_bytes,
    )


def kept_logs(folder: JournalFolder, choices: Choices, say: Callable[[str], None]) -> KeptLogs:
    """What the coordinator keeps of the run by itself, in the folder of its journal if not told another."""
    own = LogFolder(folder.path, choices.log_dir)
    return KeptLogs(own, WHO, say, rounds=RunTable, events=choices.events is None)


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
