"""The run file: what it accepts, what it refuses and in which words, and what its digest stands for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from protos.buckets import MEDIAN
from protos.methods import LOCAL, LOW_RANK, PRESETS, VOTED
from protos.runfile import (
    CoordinatorConfig,
    DataConfig,
    MethodConfig,
    ModelConfig,
    RoundConfig,
    RunConfig,
    RunFile,
    RunFileError,
)


def refused(text: str) -> str:
    """The error text for a run file that has to be refused."""
    with pytest.raises(RunFileError) as caught:
        RunFile.parse(text, name="run.toml")
    return str(caught.value)


def test_an_empty_file_is_the_default_run() -> None:
    runfile = RunFile.parse("")
    assert runfile == RunFile()
    assert (runfile.method.name, runfile.method.scaling, runfile.method.lr) == (
        "sign-muon",
        "unit-gain",
        0.032,
    )


@pytest.mark.parametrize(
    ("name", "scaling", "lr", "other_lr", "reduced"),
    [
        ("sign-muon", "unit-gain", 0.032, 2e-3, "vote"),
        ("signum", "none", 1e-3, 2e-3, "vote"),
        ("ddp-muon", "match-rms", 1e-2, 6e-3, "mean"),
        ("ddp-adamw", "none", 6e-3, 6e-3, "mean"),
    ],
)
def test_a_method_brings_its_preset(
    name: Any, scaling: str, lr: float, other_lr: float, reduced: str
) -> None:
    method = MethodConfig(name=name)
    assert (method.scaling, method.lr) == (scaling, lr)
    assert (method.embedding_lr, method.vector_lr) == (other_lr, other_lr)
    assert (method.embeddings, method.vectors) == (reduced, reduced)


def test_a_mean_of_embeddings_brings_the_rate_of_adamw_for_them_alone() -> None:
    method = RunFile.parse('[method]\nembeddings = "mean"\nbeta1 = 0.8').method
    assert (method.embedding_lr, method.vector_lr, method.beta1) == (6e-3, 2e-3, 0.8)


def test_the_default_warmup_shrinks_with_the_run_and_a_given_one_does_not() -> None:
    assert RunFile.parse("[run]\nrounds = 1000").method.warmup == 50
    assert RunFile.parse("[run]\nrounds = 20").method.warmup == 2
    assert RunFile.parse("[run]\nrounds = 1").method.warmup == 0
    assert RunFile.parse("[run]\nrounds = 20\n[method]\nwarmup = 19").method.warmup == 19
    assert "warmup" not in RunFile.parse("[run]\nrounds = 20").method.model_fields_set
    shortened = RunFile(run=RunConfig(rounds=20), method=MethodConfig(name="ddp-adamw", lr=0.5)).method
    assert (shortened.name, shortened.lr, shortened.warmup) == ("ddp-adamw", 0.5, 2)


def test_durations_addresses_and_off_are_read() -> None:
    runfile = RunFile.parse(
        '[round]\ndeadline = "1 min 30 s"\nstart_timeout = 300\n'
        '[coordinator]\nlisten = "[::1]:0"\nmetrics = "off"'
    )
    assert (runfile.round.deadline, runfile.round.start_timeout) == (90.0, 300.0)
    assert (runfile.coordinator.address.host, runfile.coordinator.address.port) == ("::1", 0)
    assert runfile.coordinator.metrics is None


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


def test_a_value_without_effect_is_tolerated_where_it_is_the_default() -> None:
    assert RunFile.parse('[method]\nname = "ddp-adamw"\nns_steps = 5\nmomentum = 0.95\nembeddings = "mean"')


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


def test_a_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nrounds = 7\n")
    assert RunFile.load(path) == RunFile(run=RunConfig(rounds=7))


def test_sections_check_their_rules_when_built_in_code_and_are_immutable() -> None:
    with pytest.raises(ValidationError, match="multiple of 2 x heads"):
        ModelConfig(heads=3)
    with pytest.raises(ValidationError, match="has no effect"):
        MethodConfig(name="ddp-adamw", ns_steps=3)
    with pytest.raises(ValidationError, match="frozen"):
        RunFile().run.rounds = 3  # type: ignore[misc]


def test_the_digest_ignores_form_and_the_coordinator_s_addresses() -> None:
    plain = RunFile.parse("[run]\nrounds = 600\n[method]\nlr = 1.0").digest
    assert len(plain) == 64
    for same in (
        "# a comment\n[method]\nlr = 1   # peak\n\n[run]\nrounds = 6_00",
        'run = { rounds = 600, name = "atoll" }\nmethod.lr = 1.0e0',
        '[run]\nrounds = 600\n[method]\nlr = 1\n[coordinator]\nlisten = "127.0.0.1:0"\nmetrics = "off"',
        '[run]\nrounds = 600\n[method]\nlr = 1\nwarmup = 50\n[round]\ndeadline = "1 min"',
    ):
        assert RunFile.parse(same).digest == plain


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("run", {"name": "other"}),
    ("run", {"seed": 1}),
    ("run", {"rounds": 513}),
    ("run", {"nodes": 4}),
    ("run", {"evaluate_every": 33}),
    ("run", {"validation_windows": 129}),
    ("model", {"name": "hf:gpt2"}),
    ("model", {"name": "own", "tensors": ["w matrix 2x3"]}),
    ("model", {"d_model": 128}),
    ("model", {"layers": 3}),
    ("model", {"heads": 4}),
    ("model", {"ff": 176}),
    ("model", {"context": 65}),
    ("model", {"vocab": 256}),
    ("model", {"tied": False}),
    ("data", {"source": "text.txt"}),
    ("data", {"tokenizer": "tokenizer.json"}),
    ("data", {"batch": 5}),
    ("method", {"name": "signum"}),
    ("method", {"embeddings": "mean"}),
    ("method", {"vectors": "mean"}),
    ("method", {"lr": 0.5}),
    ("method", {"embedding_lr": 0.5}),
    ("method", {"vector_lr": 0.5}),
    ("method", {"momentum": 0.9}),
    ("method", {"nesterov": False}),
    ("method", {"weight_decay": 0.1}),
    ("method", {"ns_steps": 6}),
    ("method", {"ns_coefficients": "quintic"}),
    ("method", {"scaling": "none"}),
    ("method", {"name": "ddp-adamw", "beta1": 0.8}),
    ("method", {"name": "ddp-adamw", "beta2": 0.8}),
    ("method", {"name": "ddp-adamw", "eps": 1e-6}),
    ("method", {"name": "sign-muon", "local_steps": 4}),
    ("method", {"name": "diloco", "optimizer": "muon"}),
    (
        "method",
        {"name": "diloco", "optimizer": "torch:SGD", "lr": 0.1, "optimizer_options": {"momentum": 0.5}},
    ),
    ("method", {"name": "diloco", "codec": "int4"}),
    ("method", {"name": "diloco", "embedding_codec": "int4"}),
    ("method", {"name": "diloco", "vector_codec": "bf16"}),
    ("method", {"name": "diloco", "error_feedback": False}),
    ("method", {"name": "diloco", "outer": "sgd"}),
    ("method", {"name": "diloco", "outer_lr": 0.6}),
    ("method", {"name": "diloco", "outer_momentum": 0.8}),
    ("method", {"name": "lordo", "rank": 4}),
    ("method", {"name": "lordo", "omega": 0.8}),
    ("method", {"name": "lordo", "mu": 0.1}),
    ("method", {"name": "lordo", "basis": "local"}),
    ("method", {"name": "lordo", "direction": "muon"}),
    ("method", {"name": "lordo", "moments_codec": "bf16"}),
    ("method", {"name": "lowrank-ddp", "basis_every": 8}),
    ("method", {"name": "muloco", "fragments": 4}),
    ("method", {"name": "muloco", "overlap": 4}),
    ("method", {"name": "muloco", "mix": 0.7}),
    ("method", {"delay": 1}),
    ("method", {"name": "muloco", "clip": 2.0}),
    ("method", {"name": "muloco", "trim": 1}),
    ("method", {"warmup": 49}),
    ("method", {"schedule": "linear"}),
    ("method", {"final": 0.06}),
    ("round", {"deadline": 61}),
    ("round", {"adaptive": False}),
    ("round", {"start_timeout": 601}),
    ("round", {"quorum": 0.7}),
]


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


def test_thresholds_of_suspicion_are_off_but_for_the_warning() -> None:
    run = RunFile.parse('[byzantine]\nwarn = 1\nexpel = 0\n[method]\nname = "diloco"\ntrim = "median"')
    assert (run.byzantine.warn, run.byzantine.expel, run.method.trim) == (1.0, 0.0, MEDIAN)
    assert RunFile.parse(run.to_toml()) == run
    assert run.digest == RunFile.model_validate({"method": {"name": "diloco", "trim": MEDIAN}}).digest


def test_every_other_value_changes_the_digest() -> None:
    covered = {(section, key) for section, change in CHANGES for key in change}
    fields = {(name, key) for name, section in RunFile() for key in type(section).model_fields}
    ways = ("byzantine", "exchange", "coordinator", "limits")  # they decide nothing that is computed
    assert covered == {(section, key) for section, key in fields if section not in ways}
    needs: dict[str, Any] = {"tokenizer": {"model": {"vocab": 300}}}
    digests = {
        RunFile.model_validate({section: change, **needs.get(next(iter(change)), {})}).digest
        for section, change in CHANGES
    }
    assert len(digests) == len(CHANGES)
    assert RunFile().digest not in digests


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20)
rates = st.floats(1e-9, 100)
betas = st.floats(0, 1, exclude_max=True)


CODECS = ("fp32", "bf16", "int8", "int8:64", "int4", "2bit", "ternary", "1bit", "1bit-row")
MATRIX_CODECS = (*CODECS, "lowrank:4", "lowrank:8+1bit")
OPTIONS = st.dictionaries(
    st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True).filter(
        lambda name: name not in ("lr", "params", "weight_decay")
    ),
    st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.lists(st.floats(0, 1), min_size=1, max_size=2),
    max_size=3,
)


@st.composite
def methods(draw: st.DrawFn) -> dict[str, Any]:
    """Values of [method] that agree with each other."""
    name = draw(st.sampled_from(list(PRESETS)))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "lr": rates,
        "embedding_lr": rates,
        "vector_lr": rates,
        "weight_decay": st.floats(0, 10),
        "schedule": st.sampled_from(["cosine", "linear", "constant"]),
    }
    method: dict[str, Any] = {"name": name}
    if name in VOTED:
        optional["vectors"] = st.sampled_from(["vote", "mean"])
    if name in ("sign-muon", "signum", "ddp-muon"):
        optional |= {"momentum": betas, "nesterov": st.booleans()}
        optional["scaling"] = st.sampled_from(["unit-gain", "match-rms", "none"])
    else:
        optional |= {"beta1": betas, "beta2": betas, "eps": st.floats(1e-30, 1)}
    if name in LOW_RANK:
        optional |= {"rank": st.integers(1, 99), "omega": st.floats(0, 1)}
    if name in LOCAL:
        fragments = 1 if name == "lordo" else draw(st.integers(1, 6))
        each = draw(st.integers(1, 50))
        method |= {"local_steps": fragments * each, "fragments": fragments}
        method["overlap"] = draw(st.integers(0, each - 1))
        votes = () if name == "lordo" else ("vote", "vote-row")
        optional |= {
            "codec": st.sampled_from(MATRIX_CODECS + votes),
            "embedding_codec": st.sampled_from(MATRIX_CODECS),
            "vector_codec": st.sampled_from(CODECS[:5]),
            "outer": st.sampled_from(["average", "sgd", "nesterov"]),
            "outer_lr": rates,
            "mix": st.floats(0, 1, exclude_min=True),
            "clip": st.floats(0, 100),
            "trim": st.integers(0, 9),
        }
        if name != "lordo" and draw(st.booleans()):
            method |= {"optimizer": "torch:SGD", "lr": draw(rates), "optimizer_options": draw(OPTIONS)}
    return method | draw(st.fixed_dictionaries({}, optional=optional))


@st.composite
def run_files(draw: st.DrawFn) -> RunFile:
    method = draw(methods())
    heads = draw(st.integers(1, 8))
    rounds = draw(st.integers(max(2, method.get("fragments", 1)), 10**9))
    return RunFile(
        run=RunConfig(seed=draw(st.integers(0, 2**63 - 1)), rounds=rounds),
        model=ModelConfig(
            d_model=2 * heads * draw(st.integers(1, 64)),
            heads=heads,
            ff=draw(st.none() | st.integers(1, 4096)),
            tied=draw(st.booleans()),
            vocab=draw(st.integers(256, 4096)),
        ),
        data=DataConfig(source=draw(names), tokenizer=draw(names)),
        method=MethodConfig(**method),
        round=RoundConfig(
            deadline=draw(st.floats(1e-3, 600)), quorum=draw(st.floats(0.5, 1, exclude_min=True))
        ),
        coordinator=CoordinatorConfig(metrics=draw(st.none() | st.integers(0, 65535))),
    )


@settings(max_examples=60)
@given(run_files())
def test_the_written_run_file_reads_as_the_same_run(runfile: RunFile) -> None:
    again = RunFile.parse(runfile.to_toml())
    assert again == runfile
    assert again.digest == runfile.digest
    assert again.to_toml() == runfile.to_toml()


@settings(max_examples=60)
@given(st.text(st.sampled_from("[]runmodel=\"' \n.#{}0123456789-_,\\"), max_size=60))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        RunFile.parse(text)
    except RunFileError as error:
        assert str(error).startswith("run file: ")


def test_reading_a_run_file_does_not_import_torch() -> None:
    code = "import sys, protos.runfile_text; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
