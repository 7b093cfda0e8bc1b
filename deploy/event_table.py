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

`--events FILE` of `atoll coordinator`, `atoll join` and `atoll train` appends a line to FILE for every event:
a JSON object in UTF-8, flushed at once. `atoll replay FILE...` shows a run from the files of any of its
processes, `atoll timeline` draws where its time went, `atoll doctor FILE...` explains what went wrong.

* `time`: UTC, ISO 8601 with milliseconds, by the clock of the machine that wrote the line. `who`:
  `coordinator`, or the node, by its identity within the run as soon as it has joined. `event`: a name from
  the tables below.
* Rounds count from 0, times are in seconds, losses in nats per token; digests are lower-case hex. `null`
  stands for a number that was not measured. The state "of a round" is that before it.
* A full disk or a closed pipe stops nothing: the process warns once, and the next line that can be written
  follows an `EventsLost`. A killed process may leave a line unfinished; the next one begins a new line.
  Readers skip such lines, and events and fields that they do not know.
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
