"""The example, the description and the advice: derived from the schema, and true to it."""

from __future__ import annotations

import re

import pytest

from protos.methods import PRESETS, MethodName
from protos.problems import Unset, allowed
from protos.runfile import MethodConfig, RunConfig, RunFile
from protos.runfile_text import advice, describe, example_toml
from protos.sections import SECTIONS

FIELDS = [(name, key) for name, section in SECTIONS.items() for key in section.model_fields]
ASSIGNMENT = re.compile(r"(# )?([a-z0-9_]+) = (.+)")


def test_the_example_parses_to_the_defaults() -> None:
    assert RunFile.parse(example_toml()) == RunFile()


def test_the_example_shows_every_key_once_in_order_with_a_comment_above() -> None:
    shown, section, previous = [], "", ""
    for line in example_toml().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif match := ASSIGNMENT.fullmatch(line):
            shown.append((section, match[2]))
            assert previous.startswith("# ")
        previous = line
    assert shown == FIELDS
    assert max(map(len, example_toml().splitlines())) <= 100


def _with_keys_in_comments(text: str) -> str:
    """Every key that is a comment made a key, unless the comment above it says that it has no effect."""
    lines: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if ASSIGNMENT.fullmatch(line):
            if "Has no effect here" not in " ".join(comment):
                line = line.removeprefix("# ")
            comment = []
        elif line.startswith("# "):
            comment.append(line.removeprefix("# "))
        lines.append(line)
    return "\n".join(lines)


def test_the_example_s_keys_in_comments_may_be_uncommented_where_they_have_an_effect() -> None:
    runfile = RunFile.parse(_with_keys_in_comments(example_toml()))
    assert (runfile.model.ff, runfile.model.vocab) == (176, 256)
    assert runfile.method == RunFile().method


@pytest.mark.parametrize("name", PRESETS)
def test_the_example_of_a_run_is_that_run(name: MethodName) -> None:
    runfile = RunFile(run=RunConfig(rounds=40), method=MethodConfig(name=name, lr=0.5))
    text = example_toml(runfile)
    assert RunFile.parse(text) == runfile
    assert f'name = "{name}"' in text and "\nlr = 0.5\n" in text
    again = RunFile.parse(_with_keys_in_comments(text))
    assert again.method.model_copy(update={"error_feedback": None}) == runfile.method


@pytest.mark.parametrize("name", PRESETS)
def test_changing_the_method_in_the_example_is_enough(name: str) -> None:
    text = example_toml().replace('name = "sign-muon"', f'name = "{name}"')
    assert RunFile.parse(text).method == RunFile.model_validate({"method": {"name": name}}).method


def test_the_example_tells_the_presets() -> None:
    text = example_toml().replace("\n# ", " ")
    assert "Left out: 0.032 (sign-muon); 0.001 (signum); 0.01 (ddp-muon, muloco, muloco-1bit);" in text
    assert 'Left out: "int4" (lordo); "fp32" (local-adamw); "int8" (diloco);' in text


@pytest.mark.parametrize(("section", "key"), FIELDS)
def test_every_field_says_what_it_is_and_what_may_be_written(section: str, key: str) -> None:
    info = SECTIONS[section].model_fields[key]
    assert info.description and info.description.endswith(".")
    assert allowed(info)
    optional = getattr(SECTIONS[section](), key) is None
    assert optional == any(isinstance(mark, Unset) for mark in info.metadata)


def test_the_description_lists_what_has_an_effect_and_marks_defaults() -> None:
    runfile = RunFile.parse(
        '[method]\nname = "ddp-adamw"\n[coordinator]\nmetrics = "off"\n[model]\nd_model = 64'
    )
    settings = {(item.section, item.key): item for item in describe(runfile)}
    assert settings["method", "lr"].value == 0.006
    assert settings["method", "lr"].is_default
    assert not settings["method", "name"].is_default
    assert not settings["model", "d_model"].is_default  # written, even though it is the default's value
    assert settings["coordinator", "metrics"].text == '"off"'
    assert settings["model", "ff"].text == "(8/3 of d_model, rounded to a multiple of 16)"
    assert ("method", "ns_steps") not in settings
    assert settings["run", "rounds"].description == SECTIONS["run"].model_fields["rounds"].description


def test_the_default_run_gets_no_advice() -> None:
    assert advice(RunFile()) == []


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("[method]\nns_steps = 1", "ns_steps = 1"),
        ("[run]\nnodes = 2", "nodes = 2"),
        ('[method]\nschedule = "constant"', "never shrinks"),
        ("[round]\nquorum = 1", "quorum = 1"),
        (
            '[run]\nrounds = 99\n[method]\nname = "diloco"\nouter_momentum = 0.9',
            "outer_momentum = 0.9 with [run] rounds = 99: so long a memory cost 0.42 nats in a run of 32",
        ),
        (
            '[method]\nname = "muloco-1bit"\nerror_feedback = true',
            'error_feedback = true with codec = "vote"',
        ),
        ('[method]\nname = "muloco"\nerror_feedback = false', "is lost for good"),
        ('[method]\nname = "lordo"\nomega = 1.0', "never leave the span"),
        ('[method]\nname = "ddp-muon"\ntrim = 2', "a trimmed mean needs more than 4 nodes"),
        ('[run]\nnodes = 2\n[method]\nname = "muloco-1bit"', "nodes = 2"),
    ],
)
def test_what_is_allowed_and_probably_not_meant_gets_a_sentence(text: str, about: str) -> None:
    (sentence,) = advice(RunFile.parse(text))
    assert about in sentence


@pytest.mark.parametrize(
    "text",
    [
        '[run]\nrounds = 99\n[method]\nname = "diloco"',  # the default follows from the rounds
        '[run]\nrounds = 99\n[method]\nname = "diloco"\nouter_momentum = 0.8',
        '[method]\nname = "diloco"\nouter_momentum = 0.9',
        '[run]\nnodes = 2\n[method]\nname = "muloco"\nschedule = "constant"',
        *(f'[method]\nname = "{name}"' for name in PRESETS),
    ],
)
def test_what_is_sound_gets_no_advice(text: str) -> None:
    assert advice(RunFile.parse(text)) == []
