"""Saving on some ranks and loading on others, with other layouts; and what is said of broken checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

from node.island import CommPolicy, LayoutError, full_state_dict, fully_shard, sharded_parameters
from node.island.checkpoint import CheckpointError, load, save
from node.island.layout import boxes
from node.island.optimizers import IslandOptimizer, quantisation_units
from node.island.ragged_tensor import RaggedTensor
from node.island.storage import INDEX, Index, Reader, Writer
from tests.island.mixed_model import (
    BLOCKS,
    VOCAB,
    Case,
    Mixed,
    Shampoo,
    adamw,
    fresh,
    loss_of,
    parts,
    sharded,
    wide,
)
from tests.island.rig import Member, device, pool

State = dict[str, Tensor]


def go(model: Mixed, optimizer: IslandOptimizer, member: Member, steps: range) -> None:
    for step in steps:
        loss_of(model, parts(step, member.ranks)[member.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def saving(member: Member, folder: str, case: Case) -> State:
    """Three steps, a checkpoint with other options than the optimizers were built with, two more steps."""
    model, optimizer = sharded(case, member)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    go(model, optimizer, member, range(3))
    save(folder, model, [optimizer], extra={"step": torch.tensor(3)}, notes={"plan": "p"})
    go(model, optimizer, member, range(3, 5))
    return full_state_dict(model)


def loading(member: Member, folder: str, cases: list[Case], moved: bool) -> list[State]:
    """For each case: other weights, the checkpoint, and the two further steps."""
    results = []
    for case in cases:
        model, optimizer = sharded(case, member)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        if moved:  # states that the checkpoint must replace
            go(model, optimizer, member, range(1))
        extra = load(folder, model, [optimizer])
        assert extra["step"].item() == 3
        go(model, optimizer, member, range(3, 5))
        results.append(full_state_dict(model))
    return results


def apart(one: State, other: State) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("case", [Case("soap"), Case("shampoo", "ragged", "row"), Case("adamw", "ragged", 7)])
def test_saved_at_four_ranks_loads_at_any_number(tmp_path: Path, case: Case) -> None:
    folder = str(tmp_path / "four")
    wanted = pool().run(saving, 4, folder, case)[0]
    others = [replace(case, placement="owner"), replace(case, placement="ragged", granularity="element")]
    others.append(replace(case, placement="ragged", granularity=7))
    for ranks in (1, 2, 3, 4):
        for number, state in enumerate(pool().run(loading, ranks, folder, others, ranks == 3)[0]):
            assert apart(wanted, state) <= 1e-12, (ranks, others[number])
    index = Index.read(Path(folder))
    assert index.notes == {"plan": "p"}
    assert index.tensors["model.embed.weight"].size == torch.Size([VOCAB, 12])
    assert sorted(index.files) == [f"rank-{rank:05d}.safetensors" for rank in range(4)]


@pytest.mark.parametrize("rule", ["torch-muon", "sign-muon", "soap"])
def test_the_same_ranks_go_on_bit_for_bit(tmp_path: Path, rule: str) -> None:
    folder = str(tmp_path / "same")
    wanted = pool().run(saving, 2, folder, Case(rule))[0]
    assert apart(wanted, pool().run(loading, 2, folder, [Case(rule)], True)[0][0]) == 0.0


def test_hybrid_sharding_saves_every_box_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "hybrid")
    case = Case("shampoo", hybrid=True)
    wanted = pool().run(saving, 4, folder, case)[0]
    assert apart(wanted, pool().run(loading, 4, folder, [case], False)[0][0]) <= 1e-12
    assert apart(wanted, pool().run(loading, 3, folder, [Case("shampoo")], False)[0][0]) <= 1e-12


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_states_of_another_package(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pytorch_optimizer")
    folder = str(tmp_path / name)
    wanted = pool().run(saving, 4, folder, Case(name))[0]
    for ranks in (1, 3):
        states = pool().run(loading, ranks, folder, [Case(name), Case(name, "ragged", "row")], False)[0]
        assert max(apart(wanted, state) for state in states) <= 1e-12


def through_fsdp(member: Member, folder: str, other: str) -> tuple[float, float]:
    """Our files into FSDP2's DTensors, theirs into ours; differences of both."""
    torch.manual_seed(5)
    model = Mixed().double()
    fully_shard_of_torch(model, mesh=member.mesh)
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state_dict_loader.load(state, storage_reader=Reader(folder), process_group=member.group)
    theirs = {name.removeprefix("model."): tensor.full_tensor() for name, tensor in state.items()}
    ours = fresh()
    fully_shard(ours, mesh=member.mesh)
    load(folder, ours)
    state_dict_saver.save(state, storage_writer=Writer(other), process_group=member.group)
    again = fresh()
    fully_shard(again, mesh=member.mesh, placement="ragged", granularity=7)
    load(other, again)
    mine = full_state_dict(ours)
    return apart(mine, theirs), apart(mine, full_state_dict(again))


def test_the_files_are_those_of_any_layout_the_library_knows(tmp_path: Path) -> None:
    folder = str(tmp_path / "ours")
    pool().run(saving, 4, folder, Case("adamw"))
    assert pool().run(through_fsdp, 3, folder, str(tmp_path / "theirs")) == [(0.0, 0.0)] * 3


def complaint(member: Member, folder: str, case: Case) -> str:
    model, optimizer = sharded(case, member)
    try:
        load(folder, model, [optimizer])
    except CheckpointError as error:
        return str(error)
    return ""


def test_every_rank_names_the_file_that_is_missing_or_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    pool().run(saving, 4, str(folder), Case("soap"))
    path = folder / "rank-00002.safetensors"
    good = path.read_bytes()

    def everyone_says(*words: str) -> None:
        for said in pool().run(complaint, 3, str(folder), Case("soap")):
            assert all(word in said for word in words), said

    path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    everyone_says(str(path), "is damaged", "digest")
    path.write_bytes(good[:-9])
    everyone_says(str(path), "bytes", "cut or replaced")
    path.unlink()
    everyone_says(str(path), "is missing")
    path.write_bytes(good)
    index = folder / INDEX
    text = index.read_text()
    index.write_text(text.replace("[\n41,\n12\n]", "[\n40,\n12\n]", 1))
    everyone_says(str(index), "is damaged")
    index.unlink()
    everyone_says(str(index), "is missing")
    index.write_text(text)
    assert pool().run(complaint, 3, str(folder), Case("soap")) == [""] * 3


def one_rank_fails(member: Member, folder: str) -> str:
    model, optimizer = sharded(Case("soap"), member)
    go(model, optimizer, member, range(1))
    if member.rank == 1:
        slot = next(slot for slot in optimizer.slots() if slot.optimizer is optimizer.optimizers[0])
        slot.optimizer.state[slot.parameter]["object"] = object()
    with pytest.raises(CheckpointError) as caught:
        save(folder, model, [optimizer])
    return str(caught.value)


def test_all_ranks_fail_when_one_does(tmp_path: Path) -> None:
    said = pool().run(one_rank_fails, 2, str(tmp_path / "none"))
    assert "another rank failed in saving" in said[0]
    assert "is a object: Soap keeps what a checkpoint cannot hold" in said[1]
    assert not list(tmp_path.iterdir())


def eight_bit(member: Member, folder: str, save_first: bool) -> tuple[State, list[str]]:
    """Two steps and a checkpoint, or a checkpoint read; then two more steps."""
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")  # compiling takes a minute and changes nothing here
    try:
        model = wide()
        policy, units = CommPolicy(ordered=True), quantisation_units()
        fully_shard(model, mesh=member.mesh, placement="ragged", granularity=units, comm_policy=policy)
        optimizer = IslandOptimizer(model, None, lambda groups: AdamW8bit(groups, lr=1e-2))
        if not save_first:
            load(folder, model, [optimizer])
        for step in range(0 if save_first else 2, 4):
            if step == 2 and save_first:
                save(folder, model, [optimizer])
            x = torch.randn(12, 160, generator=torch.Generator().manual_seed(step)).to(device())
            model(x.chunk(member.ranks)[member.rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.optimizers[0].state.values()
        return full_state_dict(model), sorted({type(item).__name__ for s in states for item in s.values()})
    finally:
        torch.compiler.set_stance("default")


def test_quantised_states_move_block_by_block(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    folder = str(tmp_path / "c")
    wanted, _ = pool().run(eight_bit, 4, folder, True)[0]
    index = Index.read(Path(folder)).tensors
    assert index["optimizer.up.weight.exp_avg.codes"].size == torch.Size([128, 160])
    assert index["optimizer.up.weight.exp_avg.scale"].size == torch.Size([80])
    assert apart(wanted, pool().run(eight_bit, 4, folder, False)[0][0]) == 0.0
    for ranks in (1, 3):  # sums of fp32 gradients in another order may quantise an entry otherwise
        state, kinds = pool().run(eight_bit, ranks, folder, False)[0]
        assert apart(wanted, state) < 1e-3 and "OptimState8bit" in kinds


# ---- one process


def alone(build: Callable[[], nn.Module] = fresh) -> tuple[nn.Module, IslandOptimizer]:
    model = build()
    fully_shard(model)
    return model, IslandOptimizer(model, Shampoo, adamw, blocks=BLOCKS if build is fresh else None)


def step(model: nn.Module, optimizer: IslandOptimizer) -> None:
    loss_of(model, parts(0, 1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_one_process_without_a_group(tmp_path: Path) -> None:
    model, optimizer = alone()
    step(model, optimizer)
    save(tmp_path / "c", model, [optimizer])
    step(model, optimizer)
    wanted = full_state_dict(model)
    model, optimizer = alone()
    load(tmp_path / "c", model, [optimizer])
    step(model, optimizer)
    assert apart(full_state_dict(model), wanted) == 0.0
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "c", model)


class Other(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(13)


def test_other_models_and_optimizers_are_refused(tmp_path: Path) -> None:
    model, optimizer = alone()
    save(tmp_path / "weights", model)
    with pytest.raises(CheckpointError, match=r"lacks optimizer\.down\.bias: it was saved of another model"):
        load(tmp_path / "weights", model, [optimizer])
    other, _ = alone(lambda: Other().double())
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(12,\) in .*, here \(13,\)"):
        load(tmp_path / "weights", other)
    more = fresh()
    more.extra = nn.Linear(2, 2)
    fully_shard(more)
    with pytest.raises(CheckpointError, match=r"lacks model\.extra\.weight"):
        load(tmp_path / "weights", more)
    with pytest.raises(CheckpointError, match="no sharded parameters"):
        save(tmp_path / "plain", fresh())
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
    with pytest.raises(CheckpointError, match="is no sharded parameter of the model"):
        save(tmp_path / "stranger", model, [stranger])


def test_buffers_and_plain_optimizers_are_saved(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        fully_shard(model)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def one(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        model(torch.arange(15.0).view(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return full_state_dict(model)

    model, optimizer = build()
    one(model, optimizer)
    save(tmp_path / "c", model, [optimizer])
    wanted = one(model, optimizer)
    model, optimizer = build()
    load(tmp_path / "c", model, [optimizer])
    found = one(model, optimizer)
    assert found["1.num_batches_tracked"].item() == 2
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


class RowMean(torch.optim.Optimizer):
    """Keeps one number a row, which is wrong for a piece of a row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = (
                    parameter.grad.mean(-1, keepdim=True).expand(2, 1).contiguous()
                )


def divided(member: Member, folder: str) -> str:
    model, _ = sharded(Case("adamw", "ragged", 7), member)
    held = [entry.parameter for entry in sharded_parameters(model) if entry.piece is not None]
    optimizer = RowMean([p for p in held if p.ndim == 1])
    loss_of(model, parts(0, member.ranks)[member.rank]).backward()
    optimizer.step()
    with pytest.raises(CheckpointError) as caught:
        save(folder, model, [optimizer])
    return str(caught.value)


def test_states_that_a_division_makes_meaningless_are_refused(tmp_path: Path) -> None:
    said = pool().run(divided, 3, str(tmp_path / "c"))
    assert any("must be elementwise" in text for text in said)


def test_pieces_fit_their_tensors() -> None:
    flat = torch.arange(10.0)
    piece = RaggedTensor.of(flat, (4, 5), 3)
    assert piece.size() == torch.Size([4, 5]) and piece.size(1) == 5
    found = [
        piece.__get_tensor_shard__(item.index).tolist() for item in piece.__create_write_items__("w", piece)
    ]
    assert found == [[[0.0, 1.0]], [[2.0, 3.0, 4.0, 5.0, 6.0]], [[7.0, 8.0, 9.0]]]
    assert [tuple(chunk.offsets) for chunk in piece.__create_chunk_list__()] == [
        box.offsets for box in boxes((4, 5), 3, 10)
    ]
    piece.__get_tensor_shard__(piece.__create_write_items__("w", piece)[2].index).zero_()
    assert flat.tolist()[-3:] == [0.0] * 3
    with pytest.raises(LayoutError, match=r"outside of a tensor of \(4, 5\)"):
        RaggedTensor.of(flat, (4, 5), 11)
    with pytest.raises(LayoutError, match="not contiguous"):
        RaggedTensor.of(torch.zeros(4, 4).T, (4, 4), 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["files"].update({"../x": [1, ""]}),
        lambda body: body["tensors"]["model.down.bias"].update(dtype="object"),
        lambda body: body["tensors"]["model.down.bias"]["boxes"].clear(),
        lambda body: body["tensors"]["model.down.bias"]["boxes"][0].__setitem__(0, [1]),
        lambda body: body["tensors"]["model.down.bias"]["boxes"][0].__setitem__(2, "elsewhere"),
        lambda body: body.pop("notes"),
        lambda body: body.update(format=2),
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, change: Any) -> None:
    from node.island import storage

    model, _ = alone()
    save(tmp_path / "c", model)
    path = tmp_path / "c" / INDEX
    body = json.loads(path.read_text())
    body.pop("digest")
    change(body)
    path.write_text(json.dumps({**body, "digest": storage._body_digest(body)}))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        load(tmp_path / "c", model)
