"""The example, the description and the advice: derived from the schema, and true to it."""

from __future__ import annotations

import re

import pytest

from protos.methods import PRESETS
from protos.problems import Unset, allowed
from protos.runfile import MethodConfig, RunFile
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


def test_the_example_s_keys_in_comments_may_be_uncommented_where_they_have_an_effect() -> None:
    lines = []
    for line in example_toml().splitlines():
        match = ASSIGNMENT.fullmatch(line)
        lines.append(line.removeprefix("# ") if match else line)
    runfile = RunFile.parse("\n".join(lines))
    assert (runfile.model.ff, runfile.model.vocab) == (176, 256)
    assert runfile.method == RunFile().method


@pytest.mark.parametrize("name", PRESETS)
def test_changing_the_method_in_the_example_is_enough(name: str) -> None:
    text = example_toml().replace('name = "sign-muon"', f'name = "{name}"')
    assert RunFile.parse(text).method == MethodConfig.model_validate({"name": name})


def test_the_example_tells_the_presets() -> None:
    assert "sign-muon 0.032, signum 0.001, ddp-muon 0.01, ddp-adamw 0.006" in example_toml().replace(
        "\n# ", " "
    )


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
    ],
)
def test_what_is_allowed_and_probably_not_meant_gets_a_sentence(text: str, about: str) -> None:
    (sentence,) = advice(RunFile.parse(text))
    assert about in sentence
