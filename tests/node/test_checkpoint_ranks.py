"""Checkpoints of nodes of several ranks: written together, and loaded by any other number of ranks."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node import checkpoint_files
from node.checkpoint import CheckpointError, Meta, find, load, save
from node.ranks import Ranks
from protos.digests import state_digest
from tests.node.virtual_ranks import on_all

Tensors = Mapping[str, torch.Tensor]


def tensors(seed: int, names: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return {
        f"t{index}": torch.randn(index, 3, generator=generator).to(dtypes[index % 3])
        for index in range(names)
    } | {"scalar": torch.tensor(seed)}


def part(whole: Tensors, owners: Mapping[str, int], rank: int) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in whole.items() if owners[name] == rank}


def write(folder: Path, size: int, owners: Mapping[str, int], seed: int = 1, round_index: int = 3) -> Any:
    shared, local = tensors(seed), tensors(seed + 100)

    def action(ranks: Ranks) -> Path:
        return save(
            folder,
            round_index=round_index,
            run_name="test",
            run_toml="[run]\n",
            run_digest="abc",
            shared=part(shared, owners, ranks.rank),
            shared_digest=state_digest(shared) if ranks.rank == 0 else "only the leader's counts",
            local=part(local, owners, ranks.rank),
            samples=512,
            ranks=ranks,
        )

    return on_all(size, action)


def read(path: Path, size: int, owners: Mapping[str, int], into: tuple[Tensors, Tensors]) -> Any:
    shared, local = into

    def action(ranks: Ranks) -> Meta:
        mine = part(shared, owners, ranks.rank), part(local, owners, ranks.rank)
        return load(path, run_digest="abc", shared=mine[0], local=mine[1], ranks=ranks)

    return on_all(size, action)


NAMES = sorted(tensors(0))
TWO = {name: index % 2 for index, name in enumerate(NAMES)}


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, dict[str, int]]:
    size = draw(st.integers(1, 5))
    return size, {name: draw(st.integers(0, size - 1)) for name in NAMES}


@settings(max_examples=12, deadline=None)
@given(partitions(), partitions())
def test_any_ranks_load_what_any_others_saved(
    writers: tuple[int, dict[str, int]], readers: tuple[int, dict[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        paths = write(Path(name), *writers)
        assert paths == [Path(name) / "round-00000003"] * writers[0]
        mine = tensors(2), tensors(102)
        metas = read(paths[0], *readers, into=mine)
        assert {(meta.round, meta.samples) for meta in metas} == {(3, 512)}
        assert metas[0].state_digest == state_digest(mine[0]) == state_digest(tensors(1))
        assert state_digest(mine[1]) == state_digest(tensors(101))


def test_each_rank_writes_files_of_its_own(tmp_path: Path) -> None:
    owners = {name: 1 if name == "t5" else 3 for name in NAMES}  # ranks 0 and 2 hold nothing
    (path, *_) = write(tmp_path, 4, owners)
    assert sorted(file.name for file in path.iterdir()) == [
        "local-00002-of-00004.safetensors",
        "local-00004-of-00004.safetensors",
        "meta.json",
        "model-00002-of-00004.safetensors",
        "model-00004-of-00004.safetensors",
        "run.toml",
    ]
    assert Meta.read(path).model["model-00002-of-00004.safetensors"].keys() == {"t5"}


@pytest.mark.parametrize("failing", [0, 1])
def test_full_disk_of_one_rank_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    write(tmp_path, 2, TWO)
    sync = checkpoint_files.sync

    def full(path: Path) -> None:
        if path.name == f"local-0000{failing + 1}-of-00002.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync(path)

    monkeypatch.setattr(checkpoint_files, "sync", full)
    errors = write(tmp_path, 2, TWO, round_index=4)
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], CheckpointError)
    assert f"round 4 could not be written to {tmp_path}: rank {failing}: No space left" in str(errors[0])
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000003"]


def test_rank_that_is_gone_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "sync", killed)
        with pytest.raises(SystemExit):
            write(tmp_path, 2, TWO)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_ranks_are_no_checkpoint_and_vanish(tmp_path: Path) -> None:
    write(tmp_path, 2, TWO)
    leftover = tmp_path / ".round-00000004.77.tmp"
    (tmp_path / "round-00000003").rename(leftover)  # killed just before the end
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        find(tmp_path)
    (leftover / "meta.json").unlink()
    write(tmp_path, 2, TWO, round_index=5)
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000005"]


def test_tensor_of_two_ranks_is_refused(tmp_path: Path) -> None:
    shared = tensors(1)

    def action(ranks: Ranks) -> Path:
        return save(
            tmp_path,
            round_index=0,
            run_name="test",
            run_toml="",
            run_digest="abc",
            shared=shared if ranks.rank else {"t1": shared["t1"]},
            shared_digest=state_digest(shared),
            local={},
            ranks=ranks,
        )

    for error in on_all(2, action):
        assert "rank 0: two ranks hold 't1'" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_see_the_same_folder(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> Path:
        return save(
            tmp_path / str(ranks.rank),
            round_index=0,
            run_name="test",
            run_toml="",
            run_digest="abc",
            shared={},
            shared_digest="",
            local={},
            ranks=ranks,
        )

    for error in on_all(2, action):
        assert "rank 1: " in str(error) and "all ranks of a node save to one folder" in str(error)


@pytest.mark.parametrize("victim", ["model-00001-of-00002.safetensors", "local-00002-of-00002.safetensors"])
def test_damaged_file_stops_all_ranks_and_is_named(tmp_path: Path, victim: str) -> None:
    (path, _) = write(tmp_path, 2, TWO)
    data = (path / victim).read_bytes()
    three = {name: index % 3 for index, name in enumerate(NAMES)}

    def errors() -> str:
        found = read(path, 3, three, (tensors(2), tensors(102)))
        assert {type(error) for error in found} == {CheckpointError}
        assert len({str(error) for error in found}) == 1
        return str(found[0])

    (path / victim).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{path / victim} is damaged: the digest of" in errors()
    (path / victim).write_bytes(data[: len(data) // 2])
    assert f"{path / victim} is damaged: " in errors()
    (path / victim).unlink()
    assert f"{path / victim} is missing" in errors()


def test_tensor_that_no_rank_takes_is_an_error_on_all(tmp_path: Path) -> None:
    (path, _) = write(tmp_path, 2, TWO)
    mine = tensors(2), tensors(102)
    found = read(path, 2, {**TWO, "t4": 7}, into=mine)
    assert all("shared state, holds 1 tensors" in str(error) and "'t4'" in str(error) for error in found)
    assert state_digest(mine[0]) == state_digest(tensors(2)), "nothing was changed"


def test_tensor_that_the_checkpoint_lacks_is_an_error_on_all(tmp_path: Path) -> None:
    (path, _) = write(tmp_path, 2, TWO)
    mine = tensors(2), {**tensors(102), "optimizer/t0/error": torch.zeros(1)}
    found = read(path, 2, {**TWO, "optimizer/t0/error": 1}, into=mine)
    for error in found:
        assert str(error).startswith("rank 1: ") and "lacks 1 tensors" in str(error)
        assert "'optimizer/t0/error'" in str(error)
    assert state_digest(mine[0]) == state_digest(tensors(2)), "nothing was changed"


def test_ranks_that_read_different_checkpoints(tmp_path: Path) -> None:
    paths = [write(tmp_path, 2, TWO, round_index=index)[0] for index in (3, 4)]
    mine = tensors(2), tensors(102)

    def action(ranks: Ranks) -> Meta:
        shared, local = part(mine[0], TWO, ranks.rank), part(mine[1], TWO, ranks.rank)
        return load(paths[ranks.rank], run_digest="abc", shared=shared, local=local, ranks=ranks)

    for error in on_all(2, action):
        assert f"rank 0 has read {paths[0]}, rank 1 another state from {paths[1]}" in str(error)
    assert state_digest(mine[0]) == state_digest(tensors(2)), "nothing was changed"
