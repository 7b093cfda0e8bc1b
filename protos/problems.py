"""Problems of a run file: where, what value, which rule it breaks and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from protos.toml_writer import to_toml_value

ABSENT: Final = object()  # a problem without a value: the key itself is wrong

# What other programs call a key of ours.
_SYNONYMS: Final = {
    "learning_rate": "lr",
    "step_size": "lr",
    "lr_embedding": "embedding_lr",
    "lr_vector": "vector_lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "betas": "beta1",
    "warmup_steps": "warmup",
    "lr_schedule": "schedule",
    "steps": "rounds",
    "max_steps": "rounds",
    "iterations": "rounds",
    "min_nodes": "nodes",
    "world_size": "nodes",
    "eval_every": "evaluate_every",
    "eval_interval": "evaluate_every",
    "batch_size": "batch",
    "dim": "d_model",
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "n_layers": "layers",
    "n_layer": "layers",
    "num_layers": "layers",
    "n_heads": "heads",
    "n_head": "heads",
    "num_heads": "heads",
    "d_ff": "ff",
    "intermediate_size": "ff",
    "seq_len": "context",
    "sequence_length": "context",
    "block_size": "context",
    "vocab_size": "vocab",
    "tie_embeddings": "tied",
    "dataset": "source",
    "path": "source",
    "method": "name",
    "timeout": "deadline",
    "address": "listen",
    "port": "listen",
    "k": "local_steps",
    "h": "local_steps",
    "inner_steps": "local_steps",
    "sync_every": "local_steps",
    "micro_steps": "local_steps",
    "inner_optimizer": "optimizer",
    "local_optimizer": "optimizer",
    "inner_lr": "lr",
    "compression": "codec",
    "quantization": "codec",
    "ef": "error_feedback",
    "outer_optimizer": "outer",
    "outer_beta": "outer_momentum",
    "r": "rank",
    "tau": "overlap",
    "delay": "overlap",
    "alpha": "mix",
    "num_fragments": "fragments",
    "trimmed": "trim",
    "update_proj_gap": "basis_every",
}


@dataclass(frozen=True)
class Unset:
    """Marks a field that may be left out: what then happens, and a value to show as an example."""

    meaning: str
    example: Any


@dataclass(frozen=True)
class Form:
    """Marks a field whose text form is richer than its type: what may be written."""

    text: str


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a run file. ``str()`` gives the line for the user."""

    section: str
    key: str
    rule: str
    fix: str = ""
    value: Any = ABSENT
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        name = f"[{self.section}] {self.key}".strip() if self.section else self.key
        value = "" if self.value is ABSENT else f" = {shown(self.value)}"
        fix = f"; {self.fix}" if self.fix else ""
        return f"{where}{name}{value}: {self.rule}{fix}"


def shown(value: Any, limit: int = 60) -> str:
    """``value`` as it stands in a run file, cut to ``limit`` characters."""
    try:
        text = to_toml_value(value)
    except TypeError:
        text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest(word: str, known: Collection[str]) -> str | None:
    """The name in ``known`` that ``word`` was probably meant to be, if any is close enough."""
    lower = word.lower().replace("-", "_")
    synonym = _SYNONYMS.get(lower)
    if synonym in known:
        return synonym
    spellings = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(lower, spellings, n=1, cutoff=0.55)
    return spellings[close[0]] if close else None


def allowed(info: FieldInfo) -> str:
    """What may be written for a field, in words: ``"a whole number from 1 to 64"``."""
    forms = [mark.text for mark in info.metadata if isinstance(mark, Form)]
    if forms:
        return forms[0]
    kinds = [kind for kind in (get_args(info.annotation) or (info.annotation,)) if kind is not type(None)]
    if get_origin(info.annotation) is Literal:
        return "one of " + ", ".join(to_toml_value(choice) for choice in kinds)
    if bool in kinds:
        return "true or false"
    if str in kinds:
        lengths = [mark for mark in info.metadata if hasattr(mark, "max_length")]
        return f"a text of 1 to {lengths[0].max_length:,} characters" if lengths else "a text"
    return ("a whole number" if int in kinds else "a number") + _limits(info)


def _limits(info: FieldInfo) -> str:
    """The bounds in words: ``" from 1 to 64"``, ``" greater than 0 and at most 1"``."""
    bounds: dict[str, Any] = {}
    for mark in info.metadata:
        for name in ("gt", "ge", "lt", "le"):
            if hasattr(mark, name):
                bounds[name] = getattr(mark, name)
    if bounds.keys() == {"ge", "le"}:
        return f" from {bounds['ge']:,} to {bounds['le']:,}"
    words = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "at most"}
    return " and".join(f" {words[name]} {bound:,}" for name, bound in bounds.items())


def problem_of(error: ErrorDetails, sections: Mapping[str, type[BaseModel]]) -> Iterable[Problem]:
    """Translate one of pydantic's errors about a run file with these sections."""
    location = [str(part) for part in error["loc"]]
    kind, value = error["type"], error.get("input", ABSENT)
    if kind == "broken_rules":
        yield from error["ctx"]["problems"]
        return
    if kind == "default_factory_not_called":  # follows from an error that is reported by itself
        return
    section = location[0] if location else ""
    if len(location) < 2:
        yield _section_problem(section, kind, value, sections)
        return
    key = location[1]
    fields = sections[section].model_fields
    if kind == "extra_forbidden":
        yield _unknown_key(section, key, value, sections)
    else:
        yield _value_problem(section, key, value, error, fields[key])


def _section_problem(section: str, kind: str, value: Any, sections: Mapping[str, type[BaseModel]]) -> Problem:
    if kind != "extra_forbidden":
        rule = f"must be a section; write [{section}] on a line of its own and its keys below"
        return Problem("", section, rule, value=value)
    homes = [name for name, model in sections.items() if section in model.model_fields]
    if homes and not isinstance(value, dict):
        return Problem("", section, f"stands outside a section; move it to {_sections(homes)}", value=value)
    close = nearest(section, sections)
    hint = f"did you mean [{close}]?" if close else f"the sections are {_sections(sections, ', ')}"
    return Problem("", f"[{section}]" if isinstance(value, dict) else section, "unknown section", hint)


def _unknown_key(section: str, key: str, value: Any, sections: Mapping[str, type[BaseModel]]) -> Problem:
    fields = sections[section].model_fields
    homes = [name for name, model in sections.items() if key in model.model_fields]
    if homes:
        return Problem(section, key, "unknown key", f"it belongs in {_sections(homes)}")
    close = nearest(key, fields)
    if close:
        return Problem(section, key, "unknown key", f"did you mean '{close}'?")
    for name, model in sections.items():
        elsewhere = nearest(key, model.model_fields)
        if elsewhere and _SYNONYMS.get(key.lower()) == elsewhere:
            return Problem(section, key, "unknown key", f"did you mean '{elsewhere}' in [{name}]?")
    return Problem(section, key, "unknown key", f"the keys of [{section}] are {', '.join(fields)}")


def _value_problem(section: str, key: str, value: Any, error: ErrorDetails, info: FieldInfo) -> Problem:
    kind = error["type"]
    if kind == "value_error":  # raised by one of our own parsers, whose text says it all
        return Problem(section, key, str(error["ctx"]["error"]), value=value)
    rule, fix = f"must be {allowed(info)}", ""
    if kind == "literal_error" and isinstance(value, str):
        close = nearest(value, get_args(info.annotation))
        fix = f"did you mean {to_toml_value(close)}?" if close else ""
    elif (
        isinstance(value, str)
        and kind.endswith("_type")
        and re.fullmatch(r"true|false|[-+]?[0-9][0-9.e+-]*", value)
    ):
        fix = "write it without quotes"
    elif kind == "int_type" and isinstance(value, float):
        fix = "write it without a decimal point" if value == int(value) else f"for example {round(value)}"
    elif kind == "string_type":
        fix = "write it in quotes"
    return Problem(section, key, rule, fix, value)


def _sections(names: Iterable[str], joint: str = " or ") -> str:
    return joint.join(f"[{name}]" for name in names)


def with_lines(problems: Iterable[Problem], text: str) -> list[Problem]:
    """Add line numbers, where ``text`` has a plain ``[section]`` and ``key =``, and sort by them."""
    lines = _key_lines(text)
    located = [replace(problem, line=lines.get((problem.section, problem.key))) for problem in problems]
    return sorted(located, key=lambda problem: (problem.line is None, problem.line or 0))


def _key_lines(text: str) -> dict[tuple[str, str], int]:
    lines: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([A-Za-z0-9_-]+)\s*(?:\.\s*([A-Za-z0-9_-]+)\s*)?\]+", line):
            # [section.key] is a key of [section] that is a table; what stands below are not its keys.
            section = header[1] if header[2] is None else f"{header[1]}.{header[2]}"
            lines.setdefault(("", f"[{section}]") if header[2] is None else (header[1], header[2]), number)
        elif key := re.match(r"\s*([A-Za-z0-9_-]+)\s*=", line):
            lines.setdefault((section, key[1]), number)
    return lines
