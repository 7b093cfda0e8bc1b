"""[method] with local steps: presets, what has no effect, rules between values, options for torch."""

from __future__ import annotations

from typing import Any

import pytest

from protos.methods import LOCAL, PRESETS, betas, merge_share, micro_steps, outer_momentum
from protos.runfile import MethodConfig, RunFile, RunFileError


def method(text: str, run: str = "") -> MethodConfig:
    return RunFile.parse(f"[run]\n{run}\n[method]\n{text}").method


def refused(text: str, run: str = "") -> str:
    with pytest.raises(RunFileError) as caught:
        method(text, run)
    return str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_stands_where_nothing_is_said(name: Any) -> None:
    preset, chosen = PRESETS[name], MethodConfig(name=name)
    for key in (
        "lr",
        "scaling",
        "optimizer",
        "local_steps",
        "codec",
        "embedding_codec",
        "vector_codec",
        "outer",
    ):
        assert getattr(chosen, key) == getattr(preset, key), key
    assert (chosen.beta1, chosen.beta2) == betas(name)
    assert chosen.outer_lr == (0.7 if preset.outer == "nesterov" else 1.0)
    assert chosen.has_local_steps == (name in LOCAL)


def test_lordo_has_the_betas_of_ldadam() -> None:
    lordo = MethodConfig(name="lordo")
    assert (lordo.beta1, lordo.beta2) == (0.908, 0.99)
    assert (MethodConfig(name="diloco").beta1, MethodConfig(name="diloco").beta2) == (0.9, 0.95)


def test_only_lordo_steps_along_the_whole_gradient_by_itself() -> None:
    assert (MethodConfig(name="lordo").omega, MethodConfig(name="lowrank-ddp").omega) == (0.9, 1.0)


def test_another_local_optimizer_brings_its_rate_and_scaling() -> None:
    chosen = method('name = "diloco"\noptimizer = "muon"')
    assert (chosen.lr, chosen.scaling, chosen.codec) == (0.01, "match-rms", "int8")
    assert method('name = "muloco"\noptimizer = "adamw"').lr == 6e-3
    assert method('name = "muloco"\noptimizer = "adamw"\nlr = 0.5').lr == 0.5


def test_the_outer_momentum_follows_from_the_rounds() -> None:
    assert [outer_momentum(rounds) for rounds in (1, 99, 100, 1000)] == [0.5, 0.5, 0.9, 0.9]
    assert method('name = "diloco"', "rounds = 99").outer_momentum == 0.5
    assert method('name = "diloco"', "rounds = 100").outer_momentum == 0.9
    assert method('name = "diloco"\nouter_momentum = 0.3', "rounds = 100").outer_momentum == 0.3
    assert method('name = "lordo"', "rounds = 100").outer_momentum == 0.5, "it has no effect there"
    both = method('name = "diloco"', "rounds = 120")
    assert (both.warmup, both.outer_momentum, both.model_fields_set) == (12, 0.9, {"name"})


def test_the_share_of_the_agreed_weights_follows_from_the_overlap() -> None:
    assert MethodConfig(name="muloco").mix == merge_share(0) == 1.0
    assert MethodConfig(name="muloco", overlap=4).mix == merge_share(4) == 0.5
    assert MethodConfig(name="muloco", overlap=4, mix=0.9).mix == 0.9


def test_sign_muon_with_local_steps_votes_on_pseudo_gradients() -> None:
    chosen = method("local_steps = 4")
    assert chosen.has_local_steps and chosen.votes
    assert (chosen.codec, chosen.embeddings, chosen.embedding_lr) == ("vote", "mean", 6e-3)
    assert method("local_steps = 4\nbeta1 = 0.8").beta1 == 0.8, "embeddings take AdamW then"
    assert "codec and embedding_codec say what travels" in refused('local_steps = 4\nembeddings = "vote"')


def test_what_a_majority_decides() -> None:
    votes = [name for name in PRESETS if MethodConfig(name=name).votes]
    assert votes == ["sign-muon", "signum", "muloco-1bit"]
    assert MethodConfig(name="muloco", codec="vote-row").votes
    assert MethodConfig(name="muloco", embedding_codec="vote").votes
    assert not MethodConfig(name="muloco-1bit", codec="1bit").votes


def test_steps_of_a_round() -> None:
    lordo = MethodConfig(name="lordo")
    assert [lordo.micro_steps(index) for index in (0, 1, 2)] == [1, 32, 32]
    assert MethodConfig(name="muloco", fragments=4).micro_steps(0) == 8
    assert micro_steps("diloco", 100, 0, fragments=20) == 5
    assert MethodConfig().micro_steps(0) == 1


def test_spellings_of_a_codec_are_one_run() -> None:
    texts = ('codec = "int8:256"', 'codec = "int8"', "")
    digests = {RunFile.parse(f'[method]\nname = "diloco"\n{text}').digest for text in texts}
    assert len(digests) == 1
    assert method('name = "diloco"\ncodec = "int8:64"').codec == "int8:64"


@pytest.mark.parametrize(
    "text", ["betas = [0.9, 0.99]", "momentum = 0.9, nesterov = true", "eps = 1, x = -2"]
)
def test_options_of_a_torch_optimizer(text: str) -> None:
    runfile = RunFile.parse(
        f'[method]\nname = "diloco"\noptimizer = "torch:SGD"\nlr = 0.1\noptimizer_options = {{ {text} }}'
    )
    again = RunFile.parse(runfile.to_toml())
    assert again == runfile and again.digest == runfile.digest
    assert f"optimizer_options = {{ {text} }}" in runfile.to_toml()


def test_options_may_be_a_table_of_their_own() -> None:
    text = '[method]\nname = "diloco"\noptimizer = "torch:SGD"\nlr = 0.1\n[method.optimizer_options]\n'
    assert RunFile.parse(text + "momentum = 0.5").method.optimizer_options == {"momentum": 0.5}
    with pytest.raises(RunFileError) as caught:
        RunFile.parse(text + 'momentum = "0.5"\n[run]\nrounds = 0')
    assert [(p.key, p.line) for p in caught.value.problems] == [("optimizer_options", 5), ("rounds", 8)]


TORCH = 'name = "diloco"\noptimizer = "torch:SGD"\nlr = 0.1\noptimizer_options = '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name = "signum"\nlocal_steps = 4',
            "local_steps = 4: signum exchanges in every step, so this is 1; for local steps use sign-muon",
        ),
        ('name = "ddp-muon"\nlocal_steps = 2', "for local steps use muloco"),
        ('name = "ddp-adamw"\nlocal_steps = 2', "for local steps use local-adamw or diloco"),
        ('name = "lowrank-ddp"\nlocal_steps = 2', "for local steps use lordo"),
        ('name = "diloco"\nlocal_steps = 0', "must be a whole number from 1 to 1,048,576"),
        (
            'name = "muloco"\nfragments = 5',
            "fragments = 5: must divide local_steps = 32, so that all rounds are equally long; for example "
            "local_steps = 30 or 35",
        ),
        ('name = "muloco"\nfragments = 64', "for example local_steps = 64"),
        (
            'name = "muloco"\nfragments = 4\noverlap = 8',
            "overlap = 8: must be less than the 8 steps of a round (local_steps / fragments = 32 / 4); at "
            "most 7",
        ),
        (
            'name = "muloco"\noverlap = 32',
            "overlap = 32: must be less than the 32 steps of a round; at most 31",
        ),
        ('name = "muloco"\nlocal_steps = 1\noverlap = 1', "leaves nothing to overlap: remove it"),
        (
            'name = "muloco"\ndelay = 1',
            "delay = 1: only methods that exchange in every step can be late by a round, so this is 0; to "
            "train during the exchange use overlap, for example overlap = 1",
        ),
        ('name = "sign-muon"\nlocal_steps = 4\ndelay = 1', "use overlap"),
        ("delay = 2", "delay = 2"),
        ('name = "lordo"\nfragments = 2', "for fragments use muloco or diloco"),
        ('name = "lordo"\ncodec = "vote"', 'a vote has none; use "1bit" for as few bytes'),
        ('name = "diloco"\ncodec = "int9"', "codec = \"int9\": unknown codec 'int9': use fp32, bf16, int8"),
        ('name = "diloco"\ncodec = "lowrank"', "write the rank, at least 1, as in lowrank:8"),
        ('name = "diloco"\ncodec = 8', 'must be "vote", "vote-row", or a codec: fp32, bf16'),
        ('name = "diloco"\nvector_codec = "lowrank:2"', "a vector has no low rank; use fp32"),
        ('name = "diloco"\nvector_codec = "vote"', "is a vote of pseudo-gradients, not possible here"),
        ('name = "lordo"\nmoments_codec = "1bit"', "moments need their magnitudes, which 1bit does not keep"),
        (
            'name = "diloco"\noptimizer = "adam"',
            "optimizer = \"adam\": unknown local optimizer: did you mean 'adamw'?",
        ),
        ('name = "diloco"\noptimizer = "torch:"', "a class of torch.optim is written 'torch:Adagrad'"),
        ('name = "diloco"\noptimizer = "torch:os.system"', "a class of torch.optim is written"),
        ('name = "diloco"\noptimizer = "lordo"', 'write name = "lordo"'),
        ('name = "diloco"\noptimizer = "torch:SGD"', "lr: must be given with optimizer = 'torch:SGD'"),
        (
            TORCH + '{ momentum = "0.9" }',
            "momentum must be a finite number, true or false, or a list of numbers",
        ),
        (TORCH + "{ x = inf }", "x must be a finite number"),
        (TORCH + "{ x = [] }", "x must be a finite number"),
        (TORCH + "{ x = [true] }", "a list of numbers, without true and false"),
        (TORCH + "{ x = { y = 1 } }", "x must be a finite number"),
        (TORCH + "{ lr = 1 }", "lr has a key of its own; write [method] lr"),
        (TORCH + "{ weight_decay = 1 }", "weight_decay has a key of its own"),
        (TORCH + "{ params = 1 }", "the parameters are those of the model"),
        (TORCH + "{ 'a b' = 1 }", "'a b' is not the name of an option"),
        (TORCH + "3", "must be a table"),
        ('name = "diloco"\noptimizer_options = { x = 1 }', "adamw is not a class of torch.optim; remove it"),
        (
            'optimizer = "muon"',
            "only these methods have the choice of a local optimizer (local-adamw, diloco",
        ),
        ('name = "lordo"\noptimizer = "adamw"', "only these methods have the choice"),
        (
            'name = "diloco"\nmomentum = 0.5',
            "the local optimizer adamw has none: only muon and sign-muon have",
        ),
        ('name = "diloco"\nembeddings = "vote"', "only methods that vote in every step have the choice"),
        ('name = "local-adamw"\nouter_momentum = 0.8', 'outer = "average" has no momentum'),
        ('name = "local-adamw"\nerror_feedback = true', "all codecs are exact, nothing is lost"),
        ('codec = "int8"', "sign-muon makes no local steps unless local_steps is above 1"),
        ('name = "ddp-muon"\noverlap = 1', "ddp-muon makes no local steps"),
        ("clip = 2.0", "everything is voted on, nothing averaged"),
        ('name = "diloco"\nrank = 4', "only low-rank methods use it (lordo, lowrank-ddp), not diloco"),
        ('name = "lowrank-ddp"\nmoments_codec = "bf16"', "only lordo uses it, not lowrank-ddp"),
        ('name = "lordo"\nbasis = "local"\nmoments_codec = "bf16"', "the moments stay at home"),
        ('name = "lowrank-ddp"\ndirection = "muon"', "only lordo uses it, not lowrank-ddp"),
        ('name = "lowrank-ddp"\ntrim = 1', "lowrank-ddp takes plain means"),
        ('name = "lordo"\nbasis_every = 4', "only lowrank-ddp uses it"),
        ('name = "lordo"\nomega = 1\nmu = 0.5', "with omega = 1 there is no step along the whole gradient"),
        ('name = "diloco"\nbetas = 1', "did you mean 'beta1'?"),
        ('name = "diloco"\ninner_steps = 1', "did you mean 'local_steps'?"),
        ('name = "diloco"\nouter_optimizer = "nesterov"', "did you mean 'outer'?"),
    ],
)
def test_a_broken_rule_is_explained(text: str, message: str) -> None:
    assert message in refused(text)


def test_rules_with_the_length_of_the_run() -> None:
    assert "must be at least 2 with lordo" in refused('name = "lordo"', "rounds = 1")
    assert method('name = "lordo"', "rounds = 2").name == "lordo"
    assert "not be more than [run] rounds = 3" in refused('name = "muloco"\nfragments = 4', "rounds = 3")


def test_every_problem_of_a_method_is_listed() -> None:
    text = refused('name = "muloco"\nfragments = 5\nrank = 3\ncodec = "x"')
    assert "unknown codec" in text
    text = refused('name = "muloco"\nfragments = 5\nrank = 3')
    assert "2 problems" in text and "must divide" in text and "low-rank methods" in text


def test_rules_between_keys_are_listed_beside_wrong_values() -> None:
    text = refused(
        'name = "lordo"\nlr = -1\ncodec = "vote"\nfragments = 2\nmomentum = 0.5\nlocal_steps = 0\nwarmup = 9',
        "rounds = 5",
    )
    assert text.splitlines()[0] == "run file: 6 problems"
    for part in (
        "lr = -1: must be",
        "a vote has none",
        "lordo finds its first bases",
        "momentum = 0.5: has no effect",
        "local_steps = 0: must be",
        "must be less than [run] rounds = 5",
    ):
        assert part in text


def test_what_depends_on_a_wrong_value_is_not_judged() -> None:
    for steps in ("local_steps = 0", "local_step = 32", 'local_steps = "many"'):
        text = refused(f'name = "muloco"\n{steps}\nfragments = 5\noverlap = 40\nrank = 4')
        assert text.splitlines()[0] == "run file: 2 problems", text
        assert "only low-rank methods use it" in text
    text = refused(
        'name = "mulocco"\nmomentum = 0.5\nrank = 4\ncodec = "vote"\nschedule = "constant"\nfinal = 0.5'
    )
    assert text.splitlines()[0] == "run file: 2 problems", (
        "what the method is decides of all but the schedule"
    )
    assert "did you mean" in text and "a constant schedule ends at the peak" in text
    text = refused('name = "diloco"\noptimizer = "torch:SGD"\nlr = -0.1')
    assert text.splitlines()[0] == "run file: 1 problem", "lr is given"
