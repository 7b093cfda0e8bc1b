"""The run file for people: a commented example, the effective values with their meaning, and advice.

Everything here is derived from the schema, so that it cannot drift from what the schema checks.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from protos.methods import PRESETS
from protos.problems import Unset, allowed
from protos.runfile import RunFile
from protos.sections import SECTIONS, MethodConfig, Section, file_value, used_keys
from protos.toml_writer import to_toml_value

_WIDTH = 100


class Setting(NamedTuple):
    """One value in effect, as in a run file; ``None`` means that it follows from something else."""

    section: str
    key: str
    value: Any
    is_default: bool
    description: str

    @property
    def text(self) -> str:
        """The value for people: TOML, or in words what a value left out means."""
        if self.value is not None:
            return to_toml_value(self.value)
        return f"({_unset(SECTIONS[self.section], self.key).meaning})"


def describe(runfile: RunFile) -> list[Setting]:
    """Every value in effect, in the schema's order, without those that have no effect beside the others."""
    settings = []
    for name, section in runfile:
        for key, info in type(section).model_fields.items():
            if key not in section.unused():
                given = key in section.model_fields_set
                settings.append(
                    Setting(name, key, file_value(section, key), not given, info.description or "")
                )
    return settings


def example_toml() -> str:
    """A commented run file with every key, its meaning and what may be written; it parses to the defaults."""
    lines = _comment("A run of Atoll. Every key may be left out; what stands here is what it then is.", "##")
    for name, section in RunFile():
        lines += ["", *_comment(inspect.getdoc(type(section)) or "", "##"), f"[{name}]"]
        for key in type(section).model_fields:
            lines += ["", *_example_key(section, key)]
    return "\n".join(lines) + "\n"


def _example_key(section: Section, key: str) -> Iterator[str]:
    info = type(section).model_fields[key]
    words = [info.description or ""]
    if not allowed(info).startswith("a text of"):  # the description says which texts mean something
        words.append(f"Write {allowed(info)}.")
    words += _by_method(section, key)
    unused = section.unused().get(key)
    if unused:
        words.append(f"Has no effect here: {unused}.")
    value = file_value(section, key)
    if value is None:
        unset = _unset(type(section), key)
        words.append(f"Left out: {unset.meaning}.")
        value = unset.example
    yield from _comment(" ".join(words), "#")
    # What follows from other keys stays a comment, so that changing those is enough.
    fixed = key in used_keys(section) and not _follows(type(section), key)
    yield f"{'' if fixed else '# '}{key} = {to_toml_value(value)}"


def _follows(section: type[Section], key: str) -> bool:
    """Whether the default of ``key`` follows from the values of other keys."""
    return section.model_fields[key].default_factory is not None or (section.title, key) == (
        "method",
        "warmup",
    )


def _by_method(section: Section, key: str) -> Iterator[str]:
    """The default of ``key`` for each method, where it follows from the method alone."""
    if not isinstance(section, MethodConfig) or not _follows(MethodConfig, key):
        return
    if key not in ("embedding_lr", "vector_lr", "warmup"):  # these say it in their descriptions
        defaults = ", ".join(
            f"{name} {to_toml_value(MethodConfig(name=name).default(key))}" for name in PRESETS
        )
        yield f"Left out: {defaults}."


def _unset(section: type[Section], key: str) -> Unset:
    for mark in section.model_fields[key].metadata:
        if isinstance(mark, Unset):
            return mark
    raise KeyError(f"[{section.title}] {key} cannot be left without a value")


def _comment(text: str, mark: str) -> list[str]:
    return [f"{mark} {line}" for line in textwrap.wrap(text, _WIDTH - len(mark) - 1, break_on_hyphens=False)]


def advice(runfile: RunFile) -> list[str]:
    """What is allowed and probably not meant, a sentence each."""
    method, sentences = runfile.method, []
    if method.name == "sign-muon" and method.ns_steps < 3:
        sentences.append(
            f"[method] ns_steps = {method.ns_steps}: so few Newton-Schulz steps hardly change the signs of "
            "the momentum; the run will train like signum, clearly worse than with 5"
        )
    if method.name in ("sign-muon", "signum"):
        if runfile.run.nodes == 2:
            sentences.append(
                "[run] nodes = 2: two votes cannot outvote noise, every disagreement is a tie; three can"
            )
        if method.schedule == "constant":
            sentences.append(
                '[method] schedule = "constant": a voted step never shrinks by itself, so without a falling '
                "learning rate the loss stays on a plateau"
            )
    if runfile.round.quorum == 1:
        sentences.append(
            "[round] quorum = 1: one slow node holds every round up to its deadline and then voids it"
        )
    return sentences
