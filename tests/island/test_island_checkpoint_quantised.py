"""8-bit states of an optimizer that quantises large pieces only, moved to pieces of other sizes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader

from node.island import CommPolicy, full_state_dict, fully_shard
from node.island.checkpoint import CheckpointError, load, save
from node.island.optimizer_state import PLAIN
from node.island.optimizers import IslandOptimizer, quantisation_units
from node.island.storage import Index, Reader
from tests.island.rig import Member, device, pool
from tests.island.test_island_checkpoint import apart

Pieces = dict[str, list[tuple[int, Tensor]]]  # of a state: first element and values of what a rank holds
Answer = tuple[dict[str, Tensor], Pieces, set[str]]


class Uneven(nn.Module):
    """Of 16,896 entries four ranks hold 4,224 each, in pieces of both matrices on either side of 4,096."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(96, 112, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def built(member: Member, granularity: Any) -> tuple[nn.Module, IslandOptimizer]:
    from torchao.optim import AdamW8bit

    torch.manual_seed(2)
    model = Uneven().to(device())
    policy = CommPolicy(ordered=True)
    fully_shard(model, mesh=member.mesh, placement="ragged", granularity=granularity, comm_policy=policy)
    return model, IslandOptimizer(model, None, lambda groups: AdamW8bit(groups, lr=1e-2))


def go(model: nn.Module, optimizer: IslandOptimizer, member: Member, steps: range) -> None:
    for number in steps:
        x = torch.randn(12, 64, generator=torch.Generator().manual_seed(number)).to(device())
        model(x.chunk(member.ranks)[member.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(optimizer: IslandOptimizer) -> tuple[Pieces, set[str]]:
    """Values of the moments on this rank, and the types of the tensors that hold them."""
    pieces: Pieces = {}
    kinds = set()
    for slot in optimizer.slots():
        for key, value in slot.optimizer.state[slot.parameter].items():
            if value.numel() > 1:
                kinds.add(type(value).__name__)
                values = value.dequantize() if hasattr(value, "codes") else value
                pieces.setdefault(f"{slot.name}.{key}", []).append((slot.start, values.reshape(-1).clone()))
    return pieces, kinds


def saving(member: Member, folder: str) -> Answer:
    torch.compiler.set_stance("force_eager")  # compiling takes a minute and changes nothing here
    try:
        model, optimizer = built(member, quantisation_units())
        go(model, optimizer, member, range(2))
        save(folder, model, [optimizer])
        pieces, kinds = held(optimizer)
        go(model, optimizer, member, range(2, 4))
        return full_state_dict(model), pieces, kinds
    finally:
        torch.compiler.set_stance("default")


def loading(member: Member, folders: list[str]) -> list[Answer]:
    """Of each checkpoint: what it holds here, also after another save and load, and two steps."""
    torch.compiler.set_stance("force_eager")
    answers = []
    try:
        for folder in folders:
            model, optimizer = built(member, quantisation_units())
            load(folder, model, [optimizer])
            again = f"{folder} again at {member.ranks}"
            save(again, model, [optimizer])
            model, optimizer = built(member, quantisation_units())
            load(again, model, [optimizer])
            pieces, kinds = held(optimizer)
            go(model, optimizer, member, range(2, 4))
            answers.append((full_state_dict(model), pieces, kinds))
        return answers
    finally:
        torch.compiler.set_stance("default")


def whole(answers: list[Answer]) -> dict[str, Tensor]:
    """The moments of all ranks together."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for _, pieces, _ in answers:
        for name, parts in pieces.items():
            found.setdefault(name, []).extend(parts)
    return {
        name: torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])])
        for name, parts in found.items()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_value_changes_whatever_the_pieces(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    folders = [str(tmp_path / "four"), str(tmp_path / "one")]
    saved = [pool().run(saving, 4, folders[0]), pool().run(saving, 1, folders[1])]
    both = {"Tensor", "OptimState8bit"}
    assert set().union(*(kinds for _, _, kinds in saved[0])) == both and saved[1][0][2] == {"OptimState8bit"}
    values, index = [whole(answers) for answers in saved], Index.read(Path(folders[0])).tensors
    assert {name: tensor.numel() for name, tensor in values[0].items()} == {
        f"{name}.weight.{key}": size
        for name, size in (("up", 64 * 96), ("down", 96 * 112))
        for key in ("exp_avg", "exp_avg_sq")
    }
    assert prod(index["optimizer.down.weight.exp_avg.scale"].size) == 42
    scales = {"optimizer.down.weight.exp_avg.scale": torch.zeros(42)}
    state_dict_loader.load(scales, storage_reader=Reader(folders[0]), no_dist=True)
    plain = scales["optimizer.down.weight.exp_avg.scale"] == PLAIN
    assert plain.any() and not plain.all()
    for ranks in (1, 2, 3, 4):
        answers = pool().run(loading, ranks, folders)
        for number, (state, _, _) in enumerate(answers[0]):
            of_all = [answer[number] for answer in answers]
            found = whole(of_all)
            for name, wanted in values[number].items():
                assert torch.equal(found[name], wanted), (ranks, name)
            same = ranks == (4, 1)[number]
            assert apart(saved[number][0][0], state) <= (0.0 if same else 1e-3)
            if same:  # bit for bit, and as many of them in 8 bits
                assert [kinds for _, _, kinds in of_all] == [kinds for _, _, kinds in saved[number]]


def cut_inside(member: Member, folder: str) -> str:
    """The second of three ranks holds 17 · 256 entries that begin inside of a block."""
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")
    try:
        model = nn.Linear(64, 143, bias=False).to(device())
        fully_shard(model, mesh=member.mesh, placement="ragged", granularity=17 * 128)
        optimizer = IslandOptimizer(model, None, lambda groups: AdamW8bit(groups, lr=1e-2))
        model(torch.ones(2, 64, device=device())).square().mean().backward()
        optimizer.step()
        with pytest.raises(CheckpointError) as caught:
            save(folder, model, [optimizer])
        return str(caught.value)
    finally:
        torch.compiler.set_stance("default")


def test_a_block_that_two_ranks_share_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    said = pool().run(cut_inside, 3, str(tmp_path / "c"))
    assert "weight is cut inside a quantisation block of 256: give fully_shard" in said[1]
    assert not list(tmp_path.iterdir())
