"""The rounds of a whole run as a CSV file, from the events of its coordinator."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Final

from coordinator.events import NodeReported, RoundCommitted
from deploy.event_log import Event
from deploy.writers import CsvWriter, Feed

COLUMNS: Final = (
    *("loss", "validation_loss", "bits_per_byte", "reports", "voters", "silent", "agreement", "margin"),
    *("seconds", "nbytes"),
)


class RunTable:
    """A listener that writes one line a round, as soon as the next one is committed: until then nodes report.

    ``loss`` is the mean over the nodes that have reported one by then, in nats per token. Also a context
    manager that writes the last line and closes the file.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._feed = Feed(CsvWriter(path, COLUMNS), str(path))
        self._round = -1
        self._values: dict[str, float] = {}
        self._losses: list[float] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self._write()
            self._round, self._losses = event.round, []
            self._values = {
                "voters": len(event.voters),
                "silent": len(event.silent),
                "agreement": event.agreement,
                "margin": event.margin,
                "seconds": event.seconds,
                "nbytes": event.nbytes,
            }
        elif isinstance(event, NodeReported) and event.round == self._round:
            self._losses += [event.loss] if math.isfinite(event.loss) else []
            if event.validation_loss is not None:
                self._values["validation_loss"] = event.validation_loss
            if event.bits_per_byte is not None:
                self._values["bits_per_byte"] = event.bits_per_byte

    def _write(self) -> None:
        if self._round < 0:
            return
        values = {**self._values, "reports": len(self._losses)}
        if self._losses:
            values["loss"] = sum(self._losses) / len(self._losses)
        self._feed.add(
            self._round + 1, {name: value for name, value in values.items() if math.isfinite(value)}
        )

    def __enter__(self) -> RunTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()
        self._feed.__exit__(kind, error, trace)
