"""Checkpoints: round trips, and every way in which one can be wrong."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from node import checkpoint_files
from node.checkpoint import CheckpointError, Meta, find, load, load_parameters, load_reducer, save
from protos.digests import state_digest


def shared(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(17, 3, generator=generator),
        "optimizer/layer.weight/step": torch.tensor(seed),
        "half": torch.randn(5, generator=generator).bfloat16(),
    }


def local(seed: int) -> dict[str, torch.Tensor]:
    return {"optimizer/layer.weight/momentum_buffer": torch.full((17, 3), float(seed))}


def write(folder: Path, round_index: int, seed: int = 1, run_digest: str = "abc") -> Path:
    return save(
        folder,
        round_index=round_index,
        run_name="test",
        run_toml="[run]\n",
        run_digest=run_digest,
        shared=shared(seed),
        shared_digest=state_digest(shared(seed)),
        local=local(seed),
    )


def test_round_trip_restores_every_bit_in_place(tmp_path: Path) -> None:
    path = write(tmp_path / "deep" / "folder", 12)
    assert path.name == "round-00000012"
    assert sorted(file.name for file in path.iterdir()) == [
        "local.safetensors",
        "meta.json",
        "model.safetensors",
        "run.toml",
    ]
    mine, momenta = shared(2), local(2)
    addresses = [tensor.data_ptr() for tensor in mine.values()]
    meta = load(find(tmp_path / "deep" / "folder"), run_digest="abc", shared=mine, local=momenta)
    assert (meta.round, meta.run, meta.state_digest) == (12, "test", state_digest(shared(1)))
    assert state_digest(mine) == state_digest(shared(1))
    assert state_digest(momenta) == state_digest(local(1))
    assert [tensor.data_ptr() for tensor in mine.values()] == addresses
    assert (path / "run.toml").read_text() == "[run]\n"


def test_method_without_local_state(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        round_index=0,
        run_name="test",
        run_toml="",
        run_digest="abc",
        shared=shared(1),
        shared_digest=state_digest(shared(1)),
        local={},
    )
    assert load(path, run_digest="abc", shared=shared(2), local={}).round == 0


def test_shared_state_is_announced_before_the_local_state_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    mine, momenta = shared(2), local(2)
    seen: list[tuple[str, str]] = []
    load(
        path,
        run_digest="abc",
        shared=mine,
        local=momenta,
        loaded=lambda: seen.append((state_digest(mine), state_digest(momenta))),
    )
    assert seen == [(state_digest(shared(1)), state_digest(local(2)))]
    assert state_digest(momenta) == state_digest(local(1))


def test_memory_of_the_reduction_comes_back_as_it_was(tmp_path: Path) -> None:
    memory = {"residual/w": torch.randn(7), "basis/w/basis": torch.randn(4, 2)}
    path = save(
        tmp_path,
        round_index=4,
        run_name="test",
        run_toml="",
        run_digest="abc",
        shared=shared(1),
        shared_digest=state_digest(shared(1)),
        local=local(1),
        reducer=memory,
    )
    meta = load(path, run_digest="abc", shared=shared(2), local=local(2))
    found = load_reducer(path, meta)
    assert found.keys() == memory.keys() and state_digest(found) == state_digest(memory)

    (path / "reducer.safetensors").write_bytes((write(tmp_path, 5) / "local.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"reducer\.safetensors is damaged: it lacks 'basis/w/basis'"):
        load_reducer(path, meta)
    (path / "reducer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"reducer\.safetensors is missing"):
        load_reducer(path, meta)


def test_the_model_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    mine = {"half": torch.zeros(5, dtype=torch.bfloat16)}
    assert load_parameters(path, mine).round == 3
    assert torch.equal(mine["half"], shared(1)["half"])
    with pytest.raises(CheckpointError, match="lacks 1 tensors of this model, first 'more'"):
        load_parameters(path, {"more": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"'half' as bfloat16\[5\], this model as float32\[5\]"):
        load_parameters(path, {"half": torch.zeros(5)})


def test_state_that_is_not_the_agreed_one_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the shared state has the digest .*, and should have 0123"):
        save(
            tmp_path,
            round_index=4,
            run_name="test",
            run_toml="",
            run_digest="abc",
            shared=shared(1),
            shared_digest="0123",
            local=local(1),
        )
    assert list(tmp_path.iterdir()) == []


def test_newest_two_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    for round_index in (2, 10, 9):
        write(tmp_path, round_index)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000009", "round-00000010"]
    assert find(tmp_path).name == "round-00000010"
    assert find(tmp_path / "round-00000009").name == "round-00000009"


def test_same_round_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 5, seed=1)
    write(tmp_path, 5, seed=2)
    mine = shared(0)
    load(find(tmp_path), run_digest="abc", shared=mine, local=local(0))
    assert state_digest(mine) == state_digest(shared(2))
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000005"]


def test_leftovers_of_a_killed_writer_are_not_checkpoints_and_vanish(tmp_path: Path) -> None:
    (tmp_path / ".round-00000007.1.tmp").mkdir()
    (tmp_path / "round-00000008").mkdir()  # never made by us: it has no meta.json
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint in .*--save-every rounds and when it stops"
    ):
        find(tmp_path)
    write(tmp_path, 9)
    assert find(tmp_path).name == "round-00000009"
    assert not (tmp_path / ".round-00000007.1.tmp").exists()


@pytest.mark.parametrize("failing", ["model.safetensors", "local.safetensors", "run.toml", "meta.json"])
def test_full_disk_leaves_the_earlier_checkpoint_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    write(tmp_path, 3)
    sync = checkpoint_files.sync

    def full(path: Path) -> None:
        if path.name == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync(path)

    monkeypatch.setattr(checkpoint_files, "sync", full)
    with pytest.raises(
        CheckpointError, match=r"checkpoint of round 4 could not be written .* No space left on device"
    ):
        write(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000003"]
    assert find(tmp_path).name == "round-00000003"


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        write(tmp_path / "file" / "inside", 1)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere: name the folder"):
        find(tmp_path / "nowhere")


def test_checkpoint_of_another_run_is_refused_with_both_digests(tmp_path: Path) -> None:
    path = write(tmp_path, 1, run_digest="abc")
    with pytest.raises(CheckpointError, match="another run: its run file has the digest abc, this one xyz"):
        load(path, run_digest="xyz", shared=shared(2), local=local(2))


@pytest.mark.parametrize(
    ("shared_change", "local_change", "text"),
    [
        (
            {"layer.weight": torch.zeros(3, 17)},
            {},
            r"'layer.weight' as float32\[17, 3\], this model as float32\[3, 17\]",
        ),
        ({"more": torch.zeros(1)}, {}, "lacks 1 tensors of this model, first 'more'"),
        ({"half": torch.zeros(5)}, {}, r"'half' as bfloat16\[5\], this model as float32\[5\]"),
        (
            {},
            {"optimizer/more/momentum_buffer": torch.zeros(1)},
            "local state, lacks 1 tensors of this model, first 'optimizer/more/momentum_buffer'",
        ),
    ],
)
def test_checkpoint_of_another_model_is_refused_before_anything_changes(
    tmp_path: Path, shared_change: dict[str, torch.Tensor], local_change: dict[str, torch.Tensor], text: str
) -> None:
    path = write(tmp_path, 1)
    mine, momenta = {**shared(2), **shared_change}, {**local(2), **local_change}
    before = state_digest(mine), state_digest(momenta)
    with pytest.raises(CheckpointError, match=text):
        load(path, run_digest="abc", shared=mine, local=momenta)
    assert (state_digest(mine), state_digest(momenta)) == before


def test_tensors_that_this_model_does_not_have_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"local state, holds 1 tensors .* first 'optimizer/layer.weight/"
    ):
        load(path, run_digest="abc", shared=shared(2), local={})
    mine = shared(2)
    del mine["half"]
    with pytest.raises(CheckpointError, match=r"shared state, holds 1 tensors .* do not have, first 'half'"):
        load(path, run_digest="abc", shared=mine, local=local(2))


@pytest.mark.parametrize("name", ["model.safetensors", "local.safetensors"])
def test_damage_is_noticed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 1)
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: the digest of '.*' is .*, meta.json says"):
        load(path, run_digest="abc", shared=shared(2), local=local(2))
    (path / name).write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match=f"{name} is damaged: .*; use an earlier checkpoint"):
        load(path, run_digest="abc", shared=shared(2), local=local(2))
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load(path, run_digest="abc", shared=shared(2), local=local(2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 1}, "its format is 1, this version of Atoll reads 2"),
        ({"round": -1}, "round is -1"),
        ({"round": "3"}, "round is '3'"),
        ({"round": True}, "round is True"),
        ({"samples": 1.5}, "samples is 1.5"),
        ({"state_digest": 5}, "not a text"),
        ({"state_digest": "0"}, "the digests of its tensors make"),
        ({"run_digest": None}, "not a text"),
        ({"local": []}, "local does not list files"),
        ({"local": {"a.safetensors": 1}}, "local does not list files"),
        ({"local": {"../a.safetensors": {}}}, "is not the name of a file"),
        ({"local": {"a.safetensors": {"w": 1}}}, "a digest of a.safetensors is not a text"),
        ({"local": {"a.safetensors": {"w": ""}, "b.safetensors": {"w": ""}}}, "'w' lies in two files"),
    ],
)
def test_description_that_makes_no_sense_is_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    path = write(tmp_path, 1)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, **change}))
    with pytest.raises(
        CheckpointError, match=rf"meta.json is not the description of a checkpoint \(.*{text}"
    ):
        Meta.read(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', "\x00"])
def test_description_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"meta\.json (is not the description|says nothing of 'round')"):
        Meta.read(tmp_path)
