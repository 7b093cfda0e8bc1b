"""What `atoll doctor` looks at: the status of a run, a coordinator's journal, logs of events."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coordinator.journal import RoundRecord
from coordinator.journal_errors import damaged
from coordinator.journal_folder import DATABASE
from coordinator.journal_tables import FORMAT, Tables
from deploy.errors import UserError
from deploy.invitation import FILE_MARK, given
from deploy.moments import Moment, read_moments
from deploy.status import TIMEOUT_SECONDS, StatusClient
from protos import atoll_pb2 as pb
from protos.invite import INSECURE, SCHEME, Invite
from protos.tls import PINNED, ClientTls

RECENT: Final = 64  # rounds of a journal that are looked at


@dataclass(frozen=True)
class JournalFacts:
    """What a journal tells without being used.

    Attributes:
        folder: of it.
        free, used: bytes on its disk, and in the folder.
        rounds: the last ones, oldest first.
        kept: first and one past the last of each range of rounds whose results are there.
        lost: rounds whose results were damaged.
        skips: (first, end) of rounds that the nodes had and this journal has not.
        ended: whether the run is done.
    """

    folder: Path
    free: int
    used: int
    rounds: tuple[RoundRecord, ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
    lost: tuple[int, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    ended: bool = False


@dataclass(frozen=True)
class Evidence:
    """All that is known of one run; empty where nothing was given."""

    status: pb.StatusReply | None = None
    moments: Sequence[Moment] = ()
    journals: Sequence[JournalFacts] = field(default_factory=tuple)


def invite_of(sources: Sequence[str]) -> tuple[Invite | None, list[str]]:
    """The invite among ``sources``, and the others.

    Raises:
        InviteError: it cannot be read.
        UserError: there are several, or a file that holds none.
    """
    invites = [
        text for text in sources if text.lower().startswith((f"{SCHEME}://", f"{INSECURE}://", FILE_MARK))
    ]
    if len(invites) > 1:
        raise UserError("one run at a time: give one invite")
    invite = given(invites[0]) if invites else None
    return invite, [text for text in sources if text not in invites]


def gather(
    sources: Sequence[str],
    note: Callable[[str], None],
    seconds: float = TIMEOUT_SECONDS,
    tls: ClientTls = PINNED,
) -> Evidence:
    """Look at invites (``atoll://…``, ``@FILE``), folders of journals, and logs of events.

    Args:
        sources: these.
        note: is told what is odd about a log.
        seconds: for the status of a run.
        tls: what this machine brings beside the invite.

    Raises:
        InviteError, StatusError: of an invite.
        JournalError: a journal is damaged.
        UserError: no such file, a folder is no journal, a file no log, or several runs are asked for.
        OSError: a file cannot be read.
    """
    invite, others = invite_of(sources)
    paths = [Path(text) for text in others]
    for text in others:
        if not os.path.exists(text):  # not Path.exists(), which fails where a text is too long for a path
            raise UserError(
                f"{text!r} is no invite ({SCHEME}://TOKEN@HOST:PORT/PIN, or {FILE_MARK} and a file with "
                "one), and there is no file or folder of that name"
            )
    status = None
    if invite is not None:
        with StatusClient(invite, tls) as client:
            status = client.fetch(seconds)
    journals = tuple(journal_facts(path) for path in paths if path.is_dir())
    logs = [path for path in paths if not path.is_dir()]
    return Evidence(status, read_moments(logs, note), journals)


def journal_facts(folder: Path) -> JournalFacts:
    """Read a journal, also one that a coordinator is using.

    Raises:
        JournalError: it is damaged.
        UserError: there is none, or it is of a newer version.
    """
    database = folder / DATABASE
    if not database.is_file():
        raise UserError(f"{folder} is no journal of a coordinator: there is no {DATABASE} in it")
    try:
        with closing(Tables(database, read_only=True)) as tables:
            return _read(folder, tables)
    except sqlite3.DatabaseError as error:
        raise damaged(folder, str(error)) from error


def _read(folder: Path, tables: Tables) -> JournalFacts:
    facts = tables.meta() if tables.created else {}
    if int(facts.get("format", 0)) > FORMAT:
        raise UserError(
            f"the journal in {folder} has format {facts['format']}, this Atoll knows format {FORMAT}: ask "
            "the version that wrote it"
        )
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    if not facts:
        return JournalFacts(folder, free, used)
    last = tables.last_round()
    recent = [] if last is None else [tables.round(i) for i in range(max(0, last + 1 - RECENT), last + 1)]
    return JournalFacts(
        folder,
        free,
        used,
        rounds=tuple(row.record for row in recent if row is not None),
        kept=tuple(tables.kept()),
        lost=tuple(row.record.round for row in recent if row is not None and row.lost),
        skips=tuple((first, end) for first, end, _ in tables.skips()),
        ended="ended" in facts,
    )
