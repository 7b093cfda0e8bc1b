"""docs/events.md: what stands in a log of events, taken from the events themselves.

``python -m deploy.event_table > docs/events.md`` writes it anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
from collections.abc import Iterable
from typing import Any, Final, get_args

from coordinator import events as of_coordinator
from deploy.event_log import EventsLost
from node import events as of_node

_HEAD: Final = """# Events

`atoll coordinator`, `atoll join` and `atoll train` append a line to `events.jsonl` for every event: a JSON
object in UTF-8, flushed at once. `atoll replay FILE...` shows a run from the files of any of its processes,
`atoll timeline` draws where its time went, `atoll doctor FILE...` explains what went wrong. Beside it lies
`rounds.csv`, a line a round, for a spreadsheet or a plot: a coordinator's has the mean of the losses that its
nodes report, a node's its own.

* Where: a coordinator's are in the folder of its journal; a node's in that of `--save`, or else in
  `atoll-logs/RUN-NODE`, with a number behind it if that folder is there already. `--log-dir DIR` puts such a
  folder into DIR, `--log-dir off` (or `ATOLL_LOG_DIR=off`) keeps no logs; the last line of a process says
  where they are. `--events FILE` writes the events to FILE instead, `--log csv:FILE` the rounds of a node.
* Size: `events.jsonl` is renamed to `events.1.jsonl` at 64 MiB, in place of the one before, and begun anew;
  the FILE of `--events` grows without limit. A line of a node's `rounds.csv` has about 220 bytes.
* `time`: UTC, ISO 8601 with milliseconds, by the clock of the machine that wrote the line. `who`:
  `coordinator`, or the node, by its identity within the run as soon as it has joined. `event`: a name from
  the tables below.
* Rounds count from 0, times are in seconds, losses in nats per token; digests are lower-case hex. `null`
  stands for a number that was not measured. The state "of a round" is that before it.
* A folder that cannot be written, a full disk or a closed pipe stops nothing: the process warns once, and the
  next line that can be written follows an `EventsLost`; `rounds.csv` gets no more lines. A killed process may
  leave a line unfinished; the next one begins a new line. Readers skip such lines, and events and fields that
  they do not know.
"""


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, kinds in (
        ("Of the coordinator", get_args(of_coordinator.Event)),
        ("Of a node", get_args(of_node.Event)),
        ("Of any process", (EventsLost,)),
    ):
        parts.append(f"## {title}\n\n{_table(kinds)}\n")
    return "\n".join(parts)


def _table(kinds: Iterable[type[Any]]) -> str:
    rows = ["| event | meaning | fields |", "|---|---|---|"]
    for kind in kinds:
        said, comments = " ".join((inspect.getdoc(kind) or "").split()), _comments(kind)
        fields = [
            f"`{field.name}`{f' {comments[field.name]}' if field.name in comments else ''}"
            for field in dataclasses.fields(kind)
        ]
        rows.append(f"| `{kind.__name__}` | {_cell(said)} | {_cell('; '.join(fields))} |")
    return "\n".join(rows)


def _comments(kind: type[Any]) -> dict[str, str]:
    """The comments behind the fields of a dataclass, in brackets."""
    comments, name = {}, ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(kind)).readline):
        if token.type == tokenize.NAME and not token.line[: token.start[1]].strip():
            name = token.string
        elif token.type == tokenize.COMMENT:
            comments[name] = f"({token.string.lstrip('# ')})"
    return comments


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
