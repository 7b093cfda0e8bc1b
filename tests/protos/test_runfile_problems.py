"""The run file: what it refuses, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.runfile import RunFile, RunFileError


def refused(text: str) -> str:
    """The error text for a run file that has to be refused."""
    with pytest.raises(RunFileError) as caught:
        RunFile.parse(text, name="run.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[method]\nlrate = 0.01", "line 2: [method] lrate: unknown key; did you mean 'lr'?"),
        ("[method]\nlearning_rate = 1", "[method] learning_rate: unknown key; did you mean 'lr'?"),
        ("[model]\nwd = 1", "[model] wd: unknown key; did you mean 'weight_decay' in [method]?"),
        ("[data]\ndeadline = 4", "[data] deadline: unknown key; it belongs in [round]"),
        ("[data]\nbogus = 4", "[data] bogus: unknown key; the keys of [data] are source, tokenizer, batch"),
        ("[modle]\nheads = 2", "line 1: [modle]: unknown section; did you mean [model]?"),
        ("[x]\n", "[x]: unknown section; the sections are [run], [model], "),
        ("rounds = 5", "line 1: rounds = 5: stands outside a section; move it to [run]"),
        ("model = 3", "model = 3: must be a section; write [model] on a line of its own"),
        ("[[model]]", "must be a section"),
        ('[method]\nname = "sgn-muon"', '"muloco", "muloco-1bit"; did you mean "sign-muon"?'),
        (
            "[method]\nmomentum = 1.5",
            "[method] momentum = 1.5: must be a number of at least 0 and less than 1",
        ),
        ("[method]\nlr = nan", "[method] lr = nan: must be a number greater than 0 and at most 100"),
        ("[method]\nlr = true", "[method] lr = true: must be a number greater than 0"),
        (
            '[model]\nd_model = "64"',
            'd_model = "64": must be a whole number from 2 to 65,536; write it without quotes',
        ),
        (
            "[model]\nlayers = 2.0",
            "layers = 2.0: must be a whole number from 1 to 4,096; write it without a decimal",
        ),
        ("[model]\nlayers = 2.7", "for example 3"),
        ("[model]\ntied = 1", "[model] tied = 1: must be true or false"),
        ("[model]\ncontext = 1", "[model] context = 1: must be a whole number from 2 to 1,048,576"),
        ('[model]\nname = "gpt"', '[model] name = "gpt": must be "llama", "own", or "hf:" and'),
        (
            "[run]\nname = 5",
            "[run] name = 5: must be 1 to 64 letters, digits, '.', '_' and '-', beginning with",
        ),
        (
            "[data]\nsource = 5",
            "[data] source = 5: must be a text of 1 to 4,096 characters; write it in quotes",
        ),
        ('[data]\nsource = ""', '[data] source = "": must be a text of 1 to 4,096 characters'),
        ("[round]\nquorum = 0.5", "[round] quorum = 0.5: must be a number greater than 0.5 and at most 1"),
        (
            '[round]\ndeadline = "soon"',
            "[round] deadline = \"soon\": 'soon' is not a duration; write for example '60s'",
        ),
        ("[round]\ndeadline = 0", "[round] deadline = 0: must be a duration of at most 30 days"),
        ('[coordinator]\nlisten = "::1:80"', "write an IPv6 address in brackets, for example '[::1]:4600'"),
        ('[coordinator]\nlisten = "host"', "'host' has no port"),
        (
            "[coordinator]\nmetrics = 70000",
            "metrics = 70000: must be a port from 0 (takes a free one) to",
        ),
        ("[run]\nseed = -1", "[run] seed = -1: must be a whole number from 0 to 2^63 - 1"),
        ("[run]\nseed = 9223372036854775808", "must be a whole number from 0 to 2^63 - 1"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_rule(text: str, message: str) -> None:
    assert message in refused(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[model]\nheads = 3",
            "[model] heads = 3: d_model = 64 must be a multiple of 2 x heads (rotary positions need even "
            "heads); heads can be 1 or 2 or 4",
        ),
        ("[model]\nd_model = 63\nheads = 1", "make d_model even"),
        (
            '[model]\nname = "hf:gpt2"\nlayers = 5',
            "[model] layers = 5: has no effect: hf:gpt2 brings its own sizes",
        ),
        ("[model]\nvocab = 255", 'vocab = 255: must be at least 256 with [data] tokenizer = "bytes"'),
        ('[data]\ntokenizer = "t.json"', "[model] vocab: must be given unless the data are bytes"),
        ('[data]\nsource = "tokens.bin"', "[model] vocab: must be given unless the data are bytes"),
        (
            "[run]\nrounds = 10\n[method]\nwarmup = 10",
            "warmup = 10: must be less than [run] rounds = 10, or the learning",
        ),
        ("[round]\ndeadline = 700", "deadline = 700.0: must not be longer than start_timeout = 600 s; raise"),
        (
            '[method]\nname = "signum"\nns_steps = 3',
            "only methods with a polar factor use it (sign-muon, ddp-muon, muloco",
        ),
        (
            '[method]\nname = "ddp-muon"\nvectors = "vote"',
            "only methods that vote in every step have the choice (sign-muon, signum)",
        ),
        ('[method]\nname = "ddp-adamw"\nscaling = "unit-gain"', "only methods with a momentum use it"),
        ("[method]\neps = 1e-6", 'AdamW runs only where embeddings or vectors are "mean"; remove it'),
        ('[method]\nschedule = "constant"\nfinal = 0.5', "a constant schedule ends at the peak"),
    ],
)
def test_a_broken_rule_between_values_is_explained(text: str, message: str) -> None:
    assert message in refused(text)


def test_all_problems_are_listed_at_once_in_the_order_of_the_file() -> None:
    text = refused(
        "[method]\nlr = -1.0\nns_steps = 0\n[round]\nquorum = 2\ndeadline = 700\nbogus = 1\n"
        "[model]\nheads = 3\n[run]\nrounds = 0"
    )
    assert text.splitlines()[0] == "run.toml: 7 problems"
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == [
        f"line {number}" for number in (2, 3, 5, 6, 7, 9, 11)
    ]


def test_rules_between_sections_are_checked_beside_a_problem_elsewhere() -> None:
    text = refused("[run]\nrounds = 10\n[method]\nwarmup = 20\n[model]\nvocab = 100\n[round]\nquorum = 2")
    assert "3 problems" in text
    assert "must be less than [run] rounds = 10" in text
    assert "must be at least 256" in text


def test_each_problem_carries_its_parts() -> None:
    with pytest.raises(RunFileError) as caught:
        RunFile.parse("[run]\nrounds = 0")
    (problem,) = caught.value.problems
    assert (problem.section, problem.key, problem.value, problem.line) == ("run", "rounds", 0, 2)


@pytest.mark.parametrize(
    "text", ["[run", "a = ", "[run]\nseed = 1\nseed = 2", "a = " + "[" * 5000, "a = " + "9" * 5000]
)
def test_what_is_not_toml_is_refused(text: str) -> None:
    assert "is not valid TOML" in refused(text)


def test_a_text_of_unreasonable_length_is_refused_before_it_is_parsed() -> None:
    assert "at most 1048576 are read" in refused("#" * ((1 << 20) + 1))


def test_files_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "missing.toml", "No such file"), (tmp_path, "cannot be read")):
        with pytest.raises(RunFileError, match=reason) as caught:
            RunFile.load(path)
        assert str(path) in str(caught.value)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"name = '\xff'")
    with pytest.raises(RunFileError, match="not UTF-8 text; byte 8"):
        RunFile.load(binary)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expel = 0.5", "[byzantine] expel = 0.5: must not be less than warn = 0.8"),
        ("warn = 0\nexpel = 1", "[byzantine] expel = 1.0: cannot be done with warn = 0"),
        ("downweight = 3", "[byzantine] downweight = 3"),
        ("retally = 257", "[byzantine] retally = 257"),
        ("retally_cost = 0", "[byzantine] retally_cost = 0"),
    ],
)
def test_thresholds_of_suspicion_stand_in_order(text: str, words: str) -> None:
    assert words in refused(f"[byzantine]\n{text}")


@settings(max_examples=60)
@given(st.text(st.sampled_from("[]runmodel=\"' \n.#{}0123456789-_,\\"), max_size=60))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        RunFile.parse(text)
    except RunFileError as error:
        assert str(error).startswith("run file: ")
