"""A short run file: what was chosen, and what is most often changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from protos.model_tensors import OWN
from protos.runfile import RunFile
from protos.runfile_text import LONG_LIST, comment, follows
from protos.sections import file_value, used_keys
from protos.toml_writer import to_toml_value

_USUAL: Final = (
    *(("run", key) for key in ("name", "rounds", "nodes")),
    *(("model", key) for key in ("name", "d_model", "layers", "heads", "context")),
    *(("data", key) for key in ("source", "batch")),
    ("method", "name"),
    ("exchange", "transport"),
)


def short_toml(runfile: RunFile, reasons: Mapping[tuple[str, str], str] | None = None) -> str:
    """A run file of what was chosen, and of what is most often changed; all else is as it is without being
    written.

    ``reasons`` are comments for some keys, instead of what they mean.
    """
    lines = comment(
        "A run of Atoll. What is not here follows from it; 'atoll run check' shows all values, 'atoll run "
        "init --all' writes every key.",
        "##",
    )
    own = runfile.model.name == OWN  # reads its own data
    for name, section in runfile:
        keys = [
            key
            for key in used_keys(section)
            if key in section.model_fields_set
            or ((name, key) in _USUAL and not follows(type(section), key) and (key, own) != ("source", True))
        ]
        if keys:
            lines += ["", f"[{name}]"]
        for key in keys:
            info = type(section).model_fields[key]
            text = (reasons or {}).get((name, key)) or (info.description or "").split(". ")[0]
            lines += [*comment(text, "#"), f"{key} = {_value(file_value(section, key))}"]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """As TOML; a list of many entries has one on each line."""
    if not isinstance(value, list) or len(value) <= LONG_LIST:
        return to_toml_value(value)
    return "\n".join(["[", *(f"    {to_toml_value(entry)}," for entry in value), "]"])
