"""docs/run-file.md: every key of a run file, taken from its schema.

``python -m deploy.runfile_table > docs/run-file.md`` writes it anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Final

from protos.method_section import MethodConfig
from protos.methods import PRESETS
from protos.problems import allowed
from protos.runfile import RunFile
from protos.runfile_text import BY_ROUNDS, follows, left_out
from protos.section import Section
from protos.sections import SECTIONS, file_value
from protos.toml_writer import to_toml_value

_HEAD: Final = """# Run file

One TOML file says everything that a run is. Every section and every key may be left out: an empty file is a
run of a small model on Shakespeare by Sign-Muon. It is checked as a whole before anything starts; unknown
keys are refused, with the nearest one that exists, and so are values that have no effect beside the others.

```toml
[run]
name = "reef"
rounds = 1000
nodes = 4

[model]
d_model = 256
layers = 6
heads = 4
context = 256

[data]
source = "texts"
batch = 8

[method]
name = "muloco-1bit"
```

```sh
atoll run init run.toml --method muloco-1bit --nodes 4    # what is most often changed
atoll run init run.toml --force --all                     # every key, with its meaning
atoll run check run.toml                                  # the values in effect, the bytes of a round
```

Nodes compare the digest of the effective values with that of the run when they join. Sections that decide
how rather than what is computed are no part of it, and can be changed between two starts of the coordinator;
their text says so. Durations are seconds, or texts such as `"90s"` and `"2 min"`.
"""
_BY_METHOD: Final = """### Defaults that follow from the method

`–`: the key has no effect with this method, and is refused if it is given another value.
"""


def markdown() -> str:
    """The whole page."""
    parts, defaults = [_HEAD], RunFile()
    for title, section in SECTIONS.items():
        parts.append(f"## [{title}]\n\n{_sentence(section)}\n\n{_table(getattr(defaults, title))}\n")
        if section is MethodConfig:
            parts.append(f"{_BY_METHOD}\n{_presets()}\n")
    return "\n".join(parts)


def _sentence(section: type[Section]) -> str:
    return _cell(inspect.getdoc(section) or "")


def _table(section: Section) -> str:
    rows = ["| key | default | what may be written | meaning |", "|---|---|---|---|"]
    for key, info in type(section).model_fields.items():
        form = allowed(info)
        may_be = "" if form.startswith("a text of") else form
        cells = (f"`{key}`", _default(section, key), _cell(may_be), _cell(info.description or ""))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _default(section: Section, key: str) -> str:
    if isinstance(section, MethodConfig) and follows(MethodConfig, key):
        return "by rounds" if (section.title, key) in BY_ROUNDS else "by method"
    value = file_value(section, key)
    return _cell(left_out(type(section), key).meaning) if value is None else f"`{to_toml_value(value)}`"


def _presets() -> str:
    """One row for each key whose default, or whose effect, depends on the method."""
    rows = [f"| | {' | '.join(f'`{name}`' for name in PRESETS)} |", "|---" * (len(PRESETS) + 1) + "|"]
    for key in MethodConfig.model_fields:
        values = list(_values(key))
        if key != "name" and len(set(values)) > 1 and (MethodConfig.title, key) not in BY_ROUNDS:
            rows.append(f"| `{key}` | {' | '.join(values)} |")
    return "\n".join(rows)


def _values(key: str) -> Iterator[str]:
    """The default of ``key`` with each method."""
    for name in PRESETS:
        preset = MethodConfig(name=name)
        value = preset.default(key)
        used = key not in preset.unused() and value is not None
        yield f"`{to_toml_value(value)}`" if used else "–"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
