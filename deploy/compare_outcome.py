"""What a simulated run came to: its losses, bytes and digest, as an object and as JSON."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protos.runfile import RunFile

if TYPE_CHECKING:
    from deploy.simulation import Build

FORMAT: Final = "atoll outcome 1"
CURVE: Final = 256  # points kept of a run's training loss, at most

Progress = Callable[[float, float], None]  # share of the run that is done, latest loss


@dataclass(frozen=True)
class Point:
    """A run after some of its rounds; bytes are one node's payload since the start, losses nats per token.

    ``loss`` is the mean training loss since the previous point, ``validation_loss`` NaN where it was not
    measured.
    """

    steps: int
    tokens: int
    bytes_up: int
    bytes_down: int
    loss: float
    validation_loss: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        label: of the compared run.
        seed: of its weights and its data.
        run_digest: of the run file, seed and rounds included.
        method, nodes, rounds, steps, tokens: what was trained; steps are batches of a node, tokens of all.
        parameters: of the model.
        state_bytes: that the optimizer of a node keeps beside the model, its host copies included.
        bytes_up, bytes_down: payload of a node over the run.
        validation_loss: at the end, nats per token; NaN if the run has diverged.
        bits_per_byte: the same loss.
        state_digest: of the shared state at the end.
        cpu_seconds: of the simulation.
        points: its course.
    """

    label: str
    seed: int
    run_digest: str
    method: str
    nodes: int
    rounds: int
    steps: int
    tokens: int
    parameters: int
    state_bytes: int
    bytes_up: int
    bytes_down: int
    validation_loss: float
    bits_per_byte: float
    state_digest: str
    cpu_seconds: float
    points: tuple[Point, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All values; NaN and infinities are null."""
        return {"format": FORMAT, **finite(asdict(self))}

    @property
    def name(self) -> str:
        """For people."""
        return run_name(self.label, self.seed)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """What :meth:`to_json` returned.

        Raises:
            ValueError: it is something else.
        """
        values = dict(values)
        if values.pop("format", None) != FORMAT:
            raise ValueError(f"this is not an outcome of the format {FORMAT!r}")
        try:
            points = tuple(Point(**_with_nan(point)) for point in values.pop("points"))
            return cls(**_with_nan(values), points=points)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this outcome is incomplete: {error}") from error


def run_name(label: str, seed: int) -> str:
    """One seed of a compared run, for people."""
    return f"{label}, seed {seed}"


def simulate(
    label: str,
    runfile: RunFile,
    progress: Progress = lambda share, loss: None,
    *,
    build: Build | None = None,
) -> Outcome:
    """Simulate a run on the calling thread and return what it came to.

    ``progress`` may raise, to end it; ``build`` is as in :class:`deploy.simulation.Simulation`.
    """
    from deploy.compare import steps_of
    from deploy.simulation import Simulation

    started = time.process_time()
    done, batches = 0, steps_of(runfile) * runfile.run.nodes
    loss = math.nan

    def on_step() -> None:
        nonlocal done
        done += 1
        progress(done / batches, loss)

    simulation = Simulation(runfile, build=build, on_step=on_step)
    points: list[Point] = []
    waiting: list[float] = []
    every = -(-runfile.run.rounds // CURVE)
    measured = None
    for record in simulation.rounds():
        loss = record.loss
        waiting.append(loss)
        measured = record.validation or measured
        last = record.round == runfile.run.rounds - 1
        if record.validation is None and not last and (record.round + 1) % every:
            continue
        points.append(
            Point(
                record.steps,
                record.tokens,
                record.bytes_up,
                record.bytes_down,
                sum(waiting) / len(waiting),
                record.validation.loss if record.validation else math.nan,
            )
        )
        waiting.clear()
    assert measured is not None, "the last round of a run is always measured"
    return Outcome(
        label=label,
        seed=runfile.run.seed,
        run_digest=runfile.digest,
        method=runfile.method.name,
        nodes=runfile.run.nodes,
        rounds=runfile.run.rounds,
        steps=points[-1].steps,
        tokens=points[-1].tokens,
        parameters=simulation.parameters,
        state_bytes=simulation.state_bytes,
        bytes_up=points[-1].bytes_up,
        bytes_down=points[-1].bytes_down,
        validation_loss=measured.loss,
        bits_per_byte=measured.bits_per_byte,
        state_digest=simulation.digest(),
        cpu_seconds=time.process_time() - started,
        points=tuple(points),
    )


def store(path: Path, outcome: Outcome) -> None:
    """Write an outcome to ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(outcome.to_json(), allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def stored(path: Path, run_digest: str) -> Outcome | None:
    """The outcome in ``path`` if it is one of the run with that digest."""
    try:
        outcome = Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    return outcome if outcome.run_digest == run_digest else None


def finite(value: Any) -> Any:
    """``value`` for JSON: numbers that are not finite become ``None``, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _with_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in values.items()}
