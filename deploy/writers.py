"""Figures of a node's rounds for other programs to draw: a CSV file, TensorBoard, Weights & Biases.

They listen to the node's events. Whatever goes wrong with one of them is told once and does not touch the
training.
"""

from __future__ import annotations

import csv
import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from deploy.errors import UserError
from deploy.event_log import Event
from node.events import Evaluated, RoundDone, Started

log = logging.getLogger(__name__)

_PHASES: Final = ("data", "compute", "propose", "exchange", "apply", "digest", "evaluate")
COLUMNS: Final = (
    *("loss", "validation_loss", "bits_per_byte", "tokens", "voters", "counted", "agreement"),
    *("bytes_up", "bytes_down", "update_norm"),
    *(f"seconds_{phase}" for phase in _PHASES),
)
CSV: Final = "csv:"
KINDS: Final = "csv:FILE, tensorboard:DIR or wandb:PROJECT"


def figures(event: Event) -> tuple[int, dict[str, float]] | None:
    """The rounds trained so far, and what is finite of :data:`COLUMNS`; ``None`` for other events."""
    if isinstance(event, Evaluated):
        found: dict[str, float | None] = {
            "validation_loss": event.validation_loss,
            "bits_per_byte": event.bits_per_byte,
        }
    elif isinstance(event, RoundDone):
        found = {name: getattr(event, name, None) for name in COLUMNS if name not in ("voters", "counted")}
        found |= {"voters": len(event.voters), "counted": int(event.counted)}
        found |= {f"seconds_{phase}": seconds for phase, seconds in event.seconds.items()}
    else:
        return None
    finite = {n: v for n, v in found.items() if n in COLUMNS and v is not None and math.isfinite(v)}
    return event.round + 1, finite


class Writer(Protocol):
    """Where figures go."""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """The node has started: its run, method, parameters and so on."""
        ...

    def add(self, rounds: int, values: Mapping[str, float]) -> None:
        """Figures after so many rounds."""
        ...

    def close(self) -> None:
        """There are no more."""
        ...


class CsvWriter:
    """One line a round, appended; a column that has no figure stays empty.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._file, ("round", *columns))
        if not self._file.tell():
            self._rows.writeheader()

    def begin(self, facts: Mapping[str, Any]) -> None:
        """They are not part of the table."""

    def add(self, rounds: int, values: Mapping[str, float]) -> None:
        """See :class:`Writer`."""
        self._rows.writerow({"round": rounds, **values})
        self._file.flush()

    def close(self) -> None:
        """See :class:`Writer`."""
        self._file.close()


class TensorBoardWriter:
    """Scalars in a folder that ``tensorboard --logdir`` reads (extra ``tensorboard``)."""

    def __init__(self, folder: str) -> None:
        writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(log_dir=folder)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """See :class:`Writer`."""
        self._writer.add_text("node", "  \n".join(f"{key}: {value}" for key, value in facts.items()))

    def add(self, rounds: int, values: Mapping[str, float]) -> None:
        """See :class:`Writer`."""
        for name, value in values.items():
            self._writer.add_scalar(name.replace("seconds_", "seconds/"), value, rounds)

    def close(self) -> None:
        """See :class:`Writer`."""
        self._writer.close()


class WandbWriter:
    """A run of a Weights & Biases project (extra ``wandb``)."""

    def __init__(self, project: str, name: str = "") -> None:
        self._run = _module("wandb", "wandb").init(project=project, name=name or None)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """See :class:`Writer`."""
        self._run.config.update(dict(facts), allow_val_change=True)

    def add(self, rounds: int, values: Mapping[str, float]) -> None:
        """See :class:`Writer`."""
        self._run.log(dict(values), step=rounds)

    def close(self) -> None:
        """See :class:`Writer`."""
        self._run.finish()


class Feed:
    """A listener that hands figures to a writer, and a context manager that closes it."""

    def __init__(self, writer: Writer, what: str, warn: Callable[[str], None] = log.warning) -> None:
        self._writer, self._what, self._warn, self._broken = writer, what, warn, False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._do(lambda: self._writer.begin(dict(vars(event))))
        elif (found := figures(event)) is not None:
            self.add(*found)

    def add(self, rounds: int, values: Mapping[str, float]) -> None:
        """Hand figures after so many rounds over."""
        self._do(lambda: self._writer.add(rounds, values))

    def _do(self, act: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            act()
        except Exception as error:
            self._broken = True
            self._warn(f"{self._what} gets no more figures, the training goes on: {error}")

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._writer.close)


def opened(text: str, name: str = "") -> Feed:
    """The writer that ``KIND:PLACE`` names; ``name`` is that of the node.

    Raises:
        UserError: there is no such kind, its package is missing, or its place cannot be used.
    """
    kind, colon, place = text.partition(":")
    if not colon or not place or kind not in ("csv", "tensorboard", "wandb"):
        raise UserError(f"--log {text}: write {KINDS}")
    try:
        if kind == "csv":
            return Feed(CsvWriter(Path(place)), text)
        return Feed(TensorBoardWriter(place) if kind == "tensorboard" else WandbWriter(place, name), text)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"--log {text}: it cannot be written: {error.strerror or error}") from error
    except Exception as error:  # each service has errors of its own: no login, no network, a bad name
        cure = "; 'wandb login' signs in, WANDB_MODE=offline does without" if kind == "wandb" else ""
        raise UserError(f"--log {text}: it cannot be used: {error}{cure}") from error


def _module(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"--log {extra}:… needs the package {extra}: pip install {extra} ({error})"
        ) from error
