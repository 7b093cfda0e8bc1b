"""What a comparison runs: run files and methods by name, all brought to the same number of tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.errors import UserError
from deploy.preset import Key
from protos.methods import PRESETS
from protos.problems import nearest
from protos.runfile import RunFile
from protos.toml_writer import to_toml

Values = dict[str, dict[str, Any]]

POINTS: Final = 8  # validation losses of a run, for its curve
TOLERANCE: Final = 0.05  # of the tokens: what the last whole round may be too short or too long
# What methods given by name are compared on, when no run file comes first.
STANDARD: Final[Values] = {
    "run": {"nodes": 4, "rounds": 512, "validation_windows": 384},
    "model": {"d_model": 64, "layers": 2, "heads": 2, "context": 64},
    "data": {"batch": 4},
    "method": {"name": "ddp-adamw"},
}


@dataclass(frozen=True)
class Entry:
    """One of the compared runs.

    Attributes:
        label: unique within the comparison.
        values: the run file's sections and keys, as written; :meth:`runfile` adds the seed.
    """

    label: str
    values: Values

    def runfile(self, seed: int) -> RunFile:
        """The run with a seed.

        Raises:
            RunFileError: the values break a rule.
        """
        return _parsed(_with(self.values, {("run", "seed"): seed}), self.label)


def entries(
    names: Sequence[str], *, tokens: int | None = None, values: Mapping[Key, Any] | None = None
) -> list[Entry]:
    """The runs that ``names`` mean, with as many rounds as give equal tokens.

    Args:
        names: paths of run files, or names of methods; a method takes everything else from the first file.
        tokens: that all nodes of a run read together; ``None``: those of the first file, or half a million.
        values: set in every run.

    Raises:
        RunFileError: a file cannot be used.
        UserError: no such file or method, or runs that cannot be compared.
    """
    written = [None if _is_method(name) else _written(RunFile.load(_file(name))) for name in names]
    base = next((item for item in written if item is not None), STANDARD)
    labels = _labels(names)
    chosen = []
    for name, label, item in zip(names, labels, written, strict=True):
        run = copy.deepcopy(item) if item is not None else {**copy.deepcopy(base), "method": {"name": name}}
        run.pop("coordinator", None)
        chosen.append(Entry(label, _with(run, values or {})))
    runs = [_parsed(entry.values, entry.label) for entry in chosen]
    _check_comparable(labels, runs)
    wanted = (
        trained_tokens(_parsed(_with(base, values or {}), "the first file")) if tokens is None else tokens
    )
    return [at_tokens(entry, wanted) for entry in chosen]


def at_tokens(entry: Entry, tokens: int, *, points: int = POINTS) -> Entry:
    """``entry`` with the rounds that come closest to ``tokens``, measured about ``points`` times.

    ``points`` 0 measures at the end only.

    Raises:
        RunFileError: the values break a rule.
        UserError: its rounds are too long to come close.
    """
    run = entry.runfile(0)
    rounds = rounds_for(run, tokens)
    changes: dict[Key, Any] = {
        ("run", "rounds"): rounds,
        ("run", "evaluate_every"): max(1, round(rounds / points)) if points else 0,
    }
    changed = Entry(entry.label, _with(entry.values, changes))
    trained = trained_tokens(changed.runfile(0))
    if abs(trained - tokens) > TOLERANCE * tokens:
        steps = run.method.micro_steps(1)
        each = steps * _step_tokens(run)
        enough = round(each / (2 * TOLERANCE))  # half a round too many or too few is within the tolerance
        fewer = ", or the run fewer local steps" if steps > 1 else ""
        raise UserError(
            f"{entry.label}: {_count(rounds, 'round')} of {_count(steps, 'batch')} {_be(rounds)} "
            f"{trained:,} tokens, too far from {tokens:,} to be compared: a round of it takes {each:,}; "
            f"give --tokens another number, from {enough:,} on any will do{fewer}"
        )
    return changed


def steps_of(run: RunFile) -> int:
    """Batches that a node trains in the whole run."""
    return run.method.micro_steps(0) + (run.run.rounds - 1) * run.method.micro_steps(1)


def trained_tokens(run: RunFile) -> int:
    """Tokens that all nodes predict in the whole run."""
    return steps_of(run) * _step_tokens(run)


def rounds_for(run: RunFile, tokens: int) -> int:
    """The number of rounds that comes closest to ``tokens``, at least 1."""
    steps = tokens / _step_tokens(run)
    return max(1, 1 + round((steps - run.method.micro_steps(0)) / run.method.micro_steps(1)))


def describe(entry: Entry, tokens: int) -> str:
    """How long an entry trains, and how far that is from ``tokens``, in words."""
    run = entry.runfile(0)
    text = f"{entry.label}: {_count(run.run.rounds, 'round')} of {_count(run.method.micro_steps(1), 'batch')}"
    trained = trained_tokens(run)
    off = trained / tokens - 1
    exact = "" if trained == tokens else f" ({abs(off):.1%} {'more' if off > 0 else 'fewer'})"
    return f"{text} on {_count(run.run.nodes, 'node')}, {trained:,} tokens{exact}"


def _step_tokens(run: RunFile) -> int:
    return run.run.nodes * run.data.batch * run.model.predicted


def _is_method(name: str) -> bool:
    return name in PRESETS and not Path(name).exists()


def _file(name: str) -> Path:
    path = Path(name)
    if not path.exists() and path.suffix != ".toml":
        close = nearest(name, PRESETS)
        hint = f"did you mean {close}?" if close else f"the methods are {', '.join(PRESETS)}"
        raise UserError(f"{name!r} is neither a run file nor a method: {hint}")
    return path


def _labels(names: Sequence[str]) -> list[str]:
    """File names without suffix and methods as they are; numbered where that is not unique."""
    plain = [name if _is_method(name) else Path(name).stem for name in names]
    return [
        label if plain.count(label) == 1 else f"{label}-{plain[: index + 1].count(label)}"
        for index, label in enumerate(plain)
    ]


def _check_comparable(labels: Sequence[str], runs: Sequence[RunFile]) -> None:
    """Losses on different validation data mean nothing beside each other."""

    def measured(run: RunFile) -> dict[str, Any]:
        return {
            "[data] source": run.data.source,
            "[data] tokenizer": run.data.tokenizer,
            "[model] context": run.model.context,
            "[run] validation_windows": run.run.validation_windows,
        }

    first = measured(runs[0])
    for label, run in zip(labels[1:], runs[1:], strict=True):
        for key, value in measured(run).items():
            if value != first[key]:
                raise UserError(
                    f"{labels[0]} and {label} would be measured on different data: {key} is {first[key]!r} "
                    f"in one and {value!r} in the other; make them equal"
                )


def _written(run: RunFile) -> Values:
    """The keys that the file gives; what follows from others is left to follow."""
    return {
        name: {
            key: getattr(section, key)
            for key in type(section).model_fields
            if key in section.model_fields_set
        }
        for name, section in run
        if name != "coordinator"
    }


def _with(values: Values, changes: Mapping[Key, Any]) -> Values:
    changed = {name: dict(section) for name, section in values.items()}
    for (section, key), value in changes.items():
        changed.setdefault(section, {})[key] = value
    return changed


def _parsed(values: Values, label: str) -> RunFile:
    return RunFile.parse(to_toml(values), label)


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number:,} {what if number == 1 else plural}"
