"""The run file for people: a commented example, the effective values with their meaning, and advice.

Everything here is derived from the schema, so that it cannot drift from what the schema checks.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from protos import waits
from protos.buckets import MEDIAN
from protos.codecs import CodecSpec
from protos.method_section import MethodConfig
from protos.methods import LONG_MOMENTUM, LONG_RUN, PRESETS, SHORT_MOMENTUM, VOTE
from protos.problems import Unset, allowed
from protos.runfile import RunFile
from protos.section import Section
from protos.sections import SECTIONS, file_value, used_keys
from protos.toml_writer import to_toml_value

LONG_LIST = 4  # entries from which on a list is counted, not shown
_WIDTH = 100
BY_ROUNDS = (("method", "warmup"), ("method", "outer_momentum"))  # RunFile takes [run] rounds into account
_TOLD = ("embedding_lr", "vector_lr", "warmup", "outer_lr", "outer_momentum", "mix")  # by their descriptions


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
        if isinstance(self.value, list) and len(self.value) > LONG_LIST:
            return f"({len(self.value):,} of them)"
        if self.value is not None:
            return to_toml_value(self.value)
        return f"({left_out(SECTIONS[self.section], self.key).meaning})"


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


def example_toml(runfile: RunFile | None = None) -> str:
    """A commented run file with every key, its meaning and what may be written.

    It parses to ``runfile``, or to the defaults. What follows from other keys, and what has no effect beside
    them, stays a comment.
    """
    lines = comment("A run of Atoll. Every key may be left out; what stands here is what it then is.", "##")
    if runfile is not None:
        lines = comment("A run of Atoll. Keys in comments follow from the others.", "##")
    for name, section in RunFile() if runfile is None else runfile:
        lines += ["", *comment(inspect.getdoc(type(section)) or "", "##"), f"[{name}]"]
        for key in type(section).model_fields:
            lines += ["", *_example_key(section, key)]
    return "\n".join(lines) + "\n"


def _example_key(section: Section, key: str) -> Iterator[str]:
    info = type(section).model_fields[key]
    words = [info.description or ""]
    if not allowed(info).startswith("a text of"):  # the description says which texts mean something
        words.append(f"Write {allowed(info)}.")
    words += _by_method(section, key)
    value = file_value(section, key)
    if value is None:
        unset = left_out(type(section), key)
        words.append(f"Left out: {unset.meaning}.")
        value = unset.example
    unused = section.unused().get(key)
    if unused:
        words.append(f"Has no effect here: {unused}.")
    yield from comment(" ".join(words), "#")
    # What follows from other keys stays a comment, so that changing those is enough.
    given = key in section.model_fields_set or not follows(type(section), key)
    fixed = key in used_keys(section) and given
    yield f"{'' if fixed else '# '}{key} = {to_toml_value(value)}"


def follows(section: type[Section], key: str) -> bool:
    """Whether the default of ``key`` follows from the values of other keys."""
    return section.model_fields[key].default_factory not in (None, dict) or (section.title, key) in BY_ROUNDS


def _by_method(section: Section, key: str) -> Iterator[str]:
    """The defaults of ``key`` and the methods that have them, where they follow from the method alone."""
    if not isinstance(section, MethodConfig) or not follows(MethodConfig, key) or key in _TOLD:
        return
    methods: dict[str, list[str]] = {}
    for name in PRESETS:
        preset = MethodConfig(name=name)
        if key not in preset.unused():
            methods.setdefault(to_toml_value(preset.default(key)), []).append(name)
    if methods:
        defaults = [f"{value} ({', '.join(names)})" for value, names in methods.items()]
        yield f"Left out: {'; '.join(defaults)}."


def left_out(section: type[Section], key: str) -> Unset:
    """What it means to leave out ``key``, which has no value of its own then.

    Raises:
        KeyError: it always has one.
    """
    for mark in section.model_fields[key].metadata:
        if isinstance(mark, Unset):
            return mark
    raise KeyError(f"[{section.title}] {key} cannot be left without a value")


def comment(text: str, mark: str) -> list[str]:
    """A text as lines of a comment that begin with ``mark``."""
    return [f"{mark} {line}" for line in textwrap.wrap(text, _WIDTH - len(mark) - 1, break_on_hyphens=False)]


def advice(runfile: RunFile) -> list[str]:
    """What is allowed and probably not meant, a sentence each."""
    method, sentences = runfile.method, []
    if method.name == "sign-muon" and method.ns_steps < 3:
        sentences.append(
            f"[method] ns_steps = {method.ns_steps}: so few Newton-Schulz steps hardly change the signs of "
            "the momentum; the run will train like signum, clearly worse than with 5"
        )
    if method.votes and runfile.run.nodes == 2:
        sentences.append(
            "[run] nodes = 2: two votes cannot outvote noise, every disagreement is a tie; three can"
        )
    if method.votes and method.schedule == "constant":
        sentences.append(
            '[method] schedule = "constant": a voted step never shrinks by itself, so without a falling '
            "learning rate the loss stays on a plateau"
        )
    sentences += _local_advice(runfile)
    if runfile.round.quorum == 1:
        sentences.append(
            "[round] quorum = 1: one slow node holds every round up to its deadline and then voids it"
        )
    sentences += waits.advice(runfile.round.deadline, runfile.round.start_timeout)
    return sentences


def _local_advice(runfile: RunFile) -> Iterator[str]:
    """The same about local steps, codecs and means."""
    method, rounds = runfile.method, runfile.run.rounds
    unused = method.unused()
    if "outer_momentum" not in unused and method.outer_momentum >= LONG_MOMENTUM and rounds < LONG_RUN:
        yield (
            f"[method] outer_momentum = {method.outer_momentum:g} with [run] rounds = {rounds}: so long a "
            f"memory cost 0.42 nats in a run of 32 rounds; leave it out for {SHORT_MOMENTUM:g}, or train "
            f"{LONG_RUN} rounds"
        )
    if "error_feedback" not in unused and method.error_feedback and method.codec in VOTE:
        yield (
            f'[method] error_feedback = true with codec = "{method.codec}": votes of pseudo-gradients ended '
            "worse with it (1.934 nats against 1.916); leave it out"
        )
    if method.error_feedback is False and "error_feedback" not in unused and _few_bits(method.codec):
        yield (
            f'[method] error_feedback = false with codec = "{method.codec}": what the codec loses is lost '
            "for good, and so few bits lose much; leave it out"
        )
    if "omega" not in unused and method.name == "lordo" and method.omega == 1.0 and method.basis == "global":
        yield (
            "[method] omega = 1: without the step along the whole gradient the weights never leave the span "
            "of the first basis, and the loss stagnates; leave it out for 0.9"
        )
    if 0 < method.trim < MEDIAN and "trim" not in unused and 2 * method.trim >= runfile.run.nodes:
        yield (
            f"[method] trim = {method.trim} with [run] nodes = {runfile.run.nodes}: a trimmed mean needs "
            f"more than {2 * method.trim} nodes; with fewer less is left out"
        )


def _few_bits(codec: str) -> bool:
    return codec not in VOTE and CodecSpec.parse(codec).kind in (
        "2bit",
        "ternary",
        "1bit",
        "1bit-row",
        "lowrank",
    )
