from __future__ import annotations

import pytest

from deploy.preset import merged, parse_assignment, run_text, with_rounds
from protos.methods import PRESETS
from protos.runfile import RunFile, RunFileError
from protos.runfile_text import example_toml


def _body(text: str) -> list[str]:
    """Without the comment at the top."""
    return text.splitlines()[1:]


def test_without_values_the_example_stays() -> None:
    assert _body(run_text({})) == _body(example_toml())


DEFAULTS = [
    (section, key, value)
    for section, values in RunFile()
    for key, value in values
    if value is not None  # else it follows from other values
]


@pytest.mark.parametrize(("section", "key", "default"), DEFAULTS)
def test_every_key_can_be_set_to_its_default(section: str, key: str, default: object) -> None:
    text = run_text({(section, key): default})
    assert RunFile.parse(text).digest == RunFile().digest
    assert text.count("\n") == example_toml().count("\n")


def test_values_take_effect_and_comments_stay() -> None:
    values = {("run", "nodes"): 4, ("method", "name"): "ddp-adamw", ("method", "lr"): 0.003}
    text = run_text(values)
    run = RunFile.parse(text)
    assert (run.run.nodes, run.method.name, run.method.lr) == (4, "ddp-adamw", 0.003)
    assert sum(line.startswith("#") for line in text.splitlines()) >= 60


def test_a_broken_rule_is_reported() -> None:
    with pytest.raises(RunFileError, match="heads"):
        run_text({("model", "heads"): 7})


@pytest.mark.parametrize("name", PRESETS)
def test_comments_are_about_the_chosen_method(name: str) -> None:
    text = run_text({("method", "name"): name, ("run", "rounds"): 40})
    assert RunFile.parse(text).digest == RunFile.model_validate(
        {"method": {"name": name}, "run": {"rounds": 40}}
    ).digest  # fmt: skip
    assert f"not {name}" in text or f"with {name}" in text, "what has no effect says why"
    other = "sign-muon" if name != "sign-muon" else "signum"
    assert f"not {other}." not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run.nodes=4", (("run", "nodes"), 4)),
        ("method.lr = 2e-2", (("method", "lr"), 0.02)),
        ("method.name=signum", (("method", "name"), "signum")),
        ('run.name="a=b"', (("run", "name"), "a=b")),
        ("model.tied=false", (("model", "tied"), False)),
        ("round.deadline=2 min", (("round", "deadline"), "2 min")),
    ],
)
def test_assignments(text: str, expected: object) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes=4", "SECTION.KEY=VALUE"),
        ("run.nodes", "SECTION.KEY=VALUE"),
        ("rum.nodes=4", "did you mean run.nodes"),
        ("run.node=4", "did you mean run.nodes"),
        ("method.learning_rate=1", "did you mean method.lr"),
    ],
)
def test_wrong_assignments_name_the_nearest(text: str, expected: str) -> None:
    with pytest.raises(RunFileError, match=expected):
        parse_assignment(text)


def test_assignments_win_over_options() -> None:
    options = {("run", "nodes"): 4, ("run", "rounds"): None}
    assert merged(options, ["run.nodes=5", "data.batch=2"]) == {("run", "nodes"): 5, ("data", "batch"): 2}


@pytest.mark.parametrize(
    ("values", "rounds", "every"),
    [
        ({}, 512, 32),
        ({"name": "lordo"}, 16, 1),
        ({"name": "muloco-1bit"}, 32, 2),
        ({"name": "diloco"}, 5, 1),
        ({"name": "diloco", "local_steps": 1000}, 2, 1),
        ({"name": "diloco", "fragments": 4}, 20, 1),
        ({"name": "local-adamw", "local_steps": 3}, 170, 10),
        ({"local_steps": 10}, 50, 3),
    ],
)
def test_rounds_left_open_make_about_as_many_steps_for_every_method(
    values: dict[str, object], rounds: int, every: int
) -> None:
    text = run_text(with_rounds({("method", key): value for key, value in values.items()}))
    run = RunFile.parse(text).run
    assert (run.rounds, run.evaluate_every) == (rounds, every)


def test_rounds_that_are_given_stay() -> None:
    given = {("method", "name"): "diloco", ("run", "rounds"): 512}
    assert with_rounds(given) == given
    chosen = with_rounds({("method", "name"): "diloco", ("run", "evaluate_every"): 3})
    assert (chosen["run", "rounds"], chosen["run", "evaluate_every"]) == (5, 3)
