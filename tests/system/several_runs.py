"""A node process that takes part in several runs, one after the other: NAME FOLDER CASE=INVITE ..."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.event_log import EventLog
from node.launch import Options, join
from protos.invite import Invite


def main() -> None:
    name, folder, *runs = sys.argv[1:]
    for run in runs:
        case, _, invite = run.partition("=")
        with EventLog(Path(folder) / f"{case}-{name}.jsonl", name) as log:
            join(Invite.parse(invite), Options(name=name, device="cpu", threads=1), log)


if __name__ == "__main__":
    main()
