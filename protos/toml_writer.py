"""Writing TOML: the part of it that a run file needs (the standard library only reads)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any


def to_toml_value(value: Any) -> str:
    """A text, number or boolean, or a list or a table of them, as TOML on one line; floats keep every bit.

    Raises:
        TypeError: any other type.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml_value, value))}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(name)} = {to_toml_value(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"cannot write {type(value).__name__} as TOML")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml_value(name)


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A TOML document of plain sections."""
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {to_toml_value(value)}" for key, value in section.items())])
        for name, section in sections.items()
    ]
    return "\n\n".join(blocks) + "\n"
