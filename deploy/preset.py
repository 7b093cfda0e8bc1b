"""Run files from single values: options of a command, and assignments ``SECTION.KEY=VALUE``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from protos.problems import Problem, nearest
from protos.runfile import RunFile, RunFileError
from protos.runfile_text import example_toml
from protos.sections import SECTIONS
from protos.toml_writer import to_toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Key = tuple[str, str]  # section and key


def parse_assignment(text: str) -> tuple[Key, Any]:
    """Read ``SECTION.KEY=VALUE``; a value that is not TOML is a text (``method.name=signum``).

    Raises:
        RunFileError: not of that form, or no such key; names the nearest one.
    """
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot:
        raise RunFileError(
            "--set", [Problem("", text, "must be SECTION.KEY=VALUE", "for example run.nodes=4")]
        )
    if section not in SECTIONS:
        close = nearest(section, SECTIONS)
        hint = f"did you mean {close}.{key}?" if close else f"the sections are {', '.join(SECTIONS)}"
        raise RunFileError("--set", [Problem("", name.strip(), "unknown section", hint)])
    known = SECTIONS[section].model_fields
    if key not in known:
        close = nearest(key, known)
        hint = (
            f"did you mean {section}.{close}?" if close else f"the keys of [{section}] are {', '.join(known)}"
        )
        raise RunFileError("--set", [Problem(section, key, "unknown key", hint)])
    try:
        return (section, key), tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return (section, key), value.strip()


def run_text(values: Mapping[Key, Any], name: str = "run file") -> str:
    """A commented run file with these values and every other key, being what follows from them.

    Raises:
        RunFileError: the values break a rule; ``name`` is what the text calls the file.
    """
    return example_toml(run_of(values, name))


def run_of(values: Mapping[Key, Any], name: str = "run file") -> RunFile:
    """A run with these values.

    Raises:
        RunFileError: they break a rule; ``name`` is what the text calls the file.
    """
    sections: dict[str, dict[str, Any]] = {}
    for (section, key), value in values.items():
        sections.setdefault(section, {})[key] = value
    return RunFile.parse(to_toml(sections), name)


def with_rounds(values: Mapping[Key, Any], name: str = "run file") -> dict[Key, Any]:
    """``values`` with rounds that make as many steps as the default run, where they leave these open.

    A method with many local steps has fewer rounds, and measures the validation loss more often in them.

    Raises:
        RunFileError: the values break a rule; ``name`` is what the text calls the file.
    """
    if ("run", "rounds") in values:
        return dict(values)
    run = run_of(values, name)
    steps = run.method.micro_steps(1)
    if steps == 1:
        return dict(values)
    rounds = max(2, run.method.fragments, _about(run.run.rounds / steps))
    every = max(1, run.run.evaluate_every * rounds // run.run.rounds)
    return {("run", "evaluate_every"): every, **values, ("run", "rounds"): rounds}


def _about(count: float) -> int:
    """A clean number near ``count``, or itself if it is whole: from 20 on a multiple of 5, from 100 of 10."""
    unit = 1 if count < 20 or count == int(count) else 5 if count < 100 else 10
    return unit * round(count / unit)


def merged(options: Mapping[Key, Any], assignments: Iterable[str]) -> dict[Key, Any]:
    """Values of the named options (``None`` = not given), then those of ``--set``, which win."""
    values = {key: value for key, value in options.items() if value is not None}
    values.update(parse_assignment(text) for text in assignments)
    return values
