"""Setting values in the commented example of a run file, so that its comments stay."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from protos.problems import Problem, nearest
from protos.runfile import RunFile, RunFileError
from protos.sections import SECTIONS
from protos.toml_writer import to_toml_value

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


def with_values(example: str, values: Mapping[Key, Any], name: str = "run file") -> str:
    """The example with some values replaced, checked as a whole.

    Raises:
        RunFileError: the values break a rule; ``name`` is what the text calls the file.
    """
    lines, section, left = [], "", dict(values)
    for line in example.splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            section = header[1]
        # The example comments a key out when its value follows from others; one that is set stands.
        key = re.match(r"(?:# )?(\w+) = ", line)
        if key and (section, key[1]) in left:
            line = f"{key[1]} = {to_toml_value(left.pop((section, key[1])))}"
        lines.append(line)
    if left:
        raise KeyError(f"the example lacks {', '.join('.'.join(key) for key in left)}")
    text = "\n".join(lines) + "\n"
    RunFile.parse(text, name)
    return text


def merged(options: Mapping[Key, Any], assignments: Iterable[str]) -> dict[Key, Any]:
    """Values of the named options (``None`` = not given), then those of ``--set``, which win."""
    values = {key: value for key, value in options.items() if value is not None}
    values.update(parse_assignment(text) for text in assignments)
    return values
