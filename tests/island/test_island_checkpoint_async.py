"""Checkpoints that are written while training goes on: what they hold, and what is said when they fail."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from node.island import checkpoint, full_state_dict
from node.island.checkpoint import CheckpointError, async_save, save
from node.island.storage import Index
from tests.island.mixed_model import Case, sharded
from tests.island.rig import Member, pool
from tests.island.test_island_checkpoint import State, alone, apart, go, loading, step

DEADLINE = 60.0


class Gate:
    """Holds back the writing of files until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, tensors: Any, path: Path) -> None:
        self.reached.set()
        assert self.open.wait(DEADLINE)
        save_file(tensors, path)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def saving_meanwhile(member: Member, folder: str, case: Case) -> State:
    """Three steps, the call, and two steps before anything is written."""
    model, optimizer = sharded(case, member)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    go(model, optimizer, member, range(3))
    before, gate = threads(), Gate()
    with patch("node.island.storage.save_file", gate):
        pending = async_save(folder, model, [optimizer], extra={"step": torch.tensor(3)})
        go(model, optimizer, member, range(3, 5))
        assert gate.reached.wait(DEADLINE) and not pending.done and not Path(folder).exists()
        with pytest.raises(TimeoutError, match=r"is not complete after 0 s: wait again"):
            pending.wait(0)
        gate.open.set()
        assert pending.wait(DEADLINE) == Path(folder) and pending.done
    assert threads() <= before
    return full_state_dict(model)


@pytest.mark.parametrize("case", [Case("soap"), Case("shampoo", hybrid=True)])
def test_it_has_the_state_of_the_moment_of_the_call(tmp_path: Path, case: Case) -> None:
    folder = str(tmp_path / "c")
    wanted = pool().run(saving_meanwhile, 4, folder, case)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert apart(wanted, pool().run(loading, 3, folder, [Case(case.rule)], True)[0][0]) <= 1e-12


def full(tensors: Any, path: Path) -> None:
    """A disk that is full half-way."""
    path.write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def on_a_full_disk(member: Member, folder: str) -> str:
    """The second rank cannot write; the next checkpoint can be written again by all."""
    model, optimizer = sharded(Case("soap"), member)
    go(model, optimizer, member, range(1))
    with patch("node.island.storage.save_file", full if member.rank == 1 else save_file):
        pending = async_save(folder, model, [optimizer])
        with pytest.raises(CheckpointError) as caught:
            pending.wait(DEADLINE)
    with pytest.raises(CheckpointError):  # once more, for whoever asks later
        pending.wait()
    save(f"{folder} after all", model, [optimizer])
    return str(caught.value)


def test_a_full_disk_is_told_to_all_who_wait(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for said in pool().run(on_a_full_disk, 4, str(folder)):
        assert f"the checkpoint {folder} was not written" in said
        assert "rank-00001.safetensors cannot be written" in said and "No space left on device" in said
        assert said.endswith("(rank 1)")
    assert [path.name for path in tmp_path.iterdir()] == ["c after all"]


def two_at_once(member: Member, folder: str) -> bool:
    """A second save waits for the first, which waits for the second to be waiting."""
    model, optimizer = sharded(Case("soap"), member)
    settle, gate = checkpoint._settle, Gate()

    def settling() -> None:
        gate.open.set()
        settle()

    with patch("node.island.storage.save_file", gate):
        first = async_save(f"{folder}/1", model, [optimizer])
        with patch("node.island.checkpoint._settle", settling):
            go(model, optimizer, member, range(1))
            second = async_save(f"{folder}/2", model, [optimizer])
            in_turn = first.done
    save(f"{folder}/3", model, [optimizer])
    in_turn = in_turn and second.done
    first.wait(DEADLINE)
    second.wait(DEADLINE)
    return in_turn


def test_two_are_written_one_after_the_other(tmp_path: Path) -> None:
    assert pool().run(two_at_once, 4, str(tmp_path)) == [True] * 4
    sizes = [len(Index.read(tmp_path / name).tensors) for name in "123"]
    assert sizes[0] < sizes[1] == sizes[2]  # before the first step there was no state yet


def refused(member: Member, folder: str) -> str:
    model, optimizer = sharded(Case("soap"), member)
    go(model, optimizer, member, range(1))
    if member.rank == 0:
        slot = next(slot for slot in optimizer.slots() if slot.optimizer is optimizer.optimizers[0])
        slot.optimizer.state[slot.parameter]["object"] = object()
    before = threads()
    with pytest.raises(CheckpointError) as caught:
        async_save(folder, model, [optimizer])
    assert threads() <= before
    return str(caught.value)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    said = pool().run(refused, 4, str(tmp_path / "none"))
    assert "keeps what a checkpoint cannot hold" in said[0] and "another rank failed in saving" in said[1]
    said = pool().run(refused, 2, str(tmp_path / "none"))
    assert all("over 2 of 4 ranks: make a gloo group" in text for text in said)
    assert not list(tmp_path.iterdir())


def test_one_process_without_a_group(tmp_path: Path) -> None:
    model, optimizer = alone()
    step(model, optimizer)
    kept = {name: tensor.clone() for name, tensor in full_state_dict(model).items()}
    gate = Gate()
    with patch("node.island.storage.save_file", gate):
        pending = async_save(tmp_path / "c", model, [optimizer])
        step(model, optimizer)
        gate.open.set()
        pending.wait(DEADLINE)
    again, _ = alone()
    checkpoint.load(tmp_path / "c", again)
    assert apart(full_state_dict(again), kept) == 0.0
    late = async_save(tmp_path / "c", model, [optimizer])
    with pytest.raises(CheckpointError, match="exists already"):
        late.wait(DEADLINE)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    with patch("node.island.storage.save_file", full), pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path / "d", model, [optimizer])
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
