"""The tensors of a script's model in a run file: written and read again, and what is wrong with them said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.model_tensors import ModelTensor, parse_all
from protos.runfile import RunFile, RunFileError
from protos.runfile_short import short_toml
from protos.runfile_text import describe, example_toml

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Z", "C")), min_size=1, max_size=12)
shapes = st.lists(st.integers(1, 1 << 20), min_size=2, max_size=5).map(tuple)
tensors = st.one_of(
    st.builds(ModelTensor, names, st.sampled_from(("matrix", "embedding", "vector")), shapes),
    st.builds(ModelTensor, names, st.just("vector"), st.sampled_from([(), (3,)])),
)


@given(tensors)
def test_what_is_written_is_read(tensor: ModelTensor) -> None:
    assert ModelTensor.parse(str(tensor)) == tensor


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a name, a role and a shape"),
        ("fc.weight", "is not a name, a role and a shape"),
        ("fc.weight matrix 64x", "is not a name, a role and a shape"),
        ("fc.weight matrix ６x4", "is not a name, a role and a shape"),
        ("fc.weight tensor 64x32", "a role is one of matrix, embedding, vector, not 'tensor'"),
        ("fc.weight matrix 64", "no matrix has the shape 64"),
        ("fc.weight vector 0", "no vector has the shape 0"),
        ("fc.weight embedding scalar", "no embedding has the shape scalar"),
    ],
)
def test_what_is_no_tensor(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelTensor.parse(text)


def test_a_name_is_listed_once() -> None:
    with pytest.raises(ValueError, match="'w' is listed twice"):
        list(parse_all(["w matrix 2x3", "w vector 3"]))


OWN = '[model]\nname = "own"\ntensors = ["w matrix 2x3", "b vector 2"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[model]\nname = "own"', r"\[model\] tensors: must be given with name = \"own\""),
        ('[model]\ntensors = ["w matrix 2x3"]', "has no effect: llama has tensors of its own"),
        (OWN + "layers = 3", r"layers = 3: has no effect: the script that trains brings its model along"),
        ('[model]\nname = "own"\ntensors = ["w matrix 2"]', "no matrix has the shape 2"),
        ('[model]\nname = "own"\ntensors = []', r"\[model\] tensors = \[\]"),
        ('[model]\nname = "own"\ntensors = [3]', r"\[model\] tensors"),
    ],
)
def test_what_is_wrong_in_a_run_file(text: str, message: str) -> None:
    with pytest.raises(RunFileError, match=message):
        RunFile.parse(text)


def test_a_run_file_with_tensors_is_written_short_and_whole() -> None:
    many = "".join(f'"layers.{index}.weight matrix 8x8", ' for index in range(6))
    for listed in ('"w matrix 2x3", "b vector 2"', many):
        run = RunFile.parse(f'[model]\nname = "own"\ntensors = [{listed}]\n')
        for text in (run.to_toml(), example_toml(run), short_toml(run)):
            assert RunFile.parse(text).digest == run.digest
        assert run.model.predicted == 1 and "source" not in short_toml(run)
    (shown,) = (setting for setting in describe(run) if setting.key == "tensors")
    assert shown.text == "(6 of them)"
