"""Shared state: digests straight from memory, loading in place."""

from __future__ import annotations

import pytest
import torch

from node.exchange.tensor_bytes import LayoutError
from node.state import SharedState
from protos.digests import state_digest


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(5, 7, generator=generator),
        "b": torch.randn(7, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
        "none": torch.empty(0, 3),
    }


def test_digest_is_the_one_that_all_nodes_compare() -> None:
    live = tensors()
    state = SharedState(live)
    assert state.digest() == state_digest(live)
    assert state.nbytes == 5 * 7 * 4 + 7 * 4 + 3 * 2 + 8
    assert state.dtype == "float32"


def test_digest_follows_updates_in_place_and_sees_every_bit() -> None:
    live = tensors()
    state = SharedState(live)
    seen = {state.digest()}
    for name in ("w", "b", "half", "count"):
        flat = live[name].view(-1).view(torch.uint8).numpy()
        flat[-1] ^= 1
        seen.add(state.digest())
        assert state.digest() == state_digest(live)
    assert len(seen) == 5


def test_digest_of_tensors_that_are_not_contiguous_equals_that_of_a_copy() -> None:
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert SharedState({"t": base.t()}).digest() == SharedState({"t": base.t().contiguous()}).digest()


def test_minus_zero_is_not_plus_zero() -> None:
    assert (
        SharedState({"x": torch.tensor([0.0])}).digest() != SharedState({"x": torch.tensor([-0.0])}).digest()
    )


def test_parameter_whose_storage_was_replaced_is_noticed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    state = SharedState({"p": parameter.detach()})
    digest = state.digest()
    with torch.no_grad():
        parameter.add_(1)
    assert state.digest() != digest
    state.tensors["p"].set_(torch.ones(4))
    with pytest.raises(RuntimeError, match="storage of shared tensor 'p' was replaced"):
        state.digest()


def test_copy_takes_every_value_in_place() -> None:
    live = tensors(0)
    state = SharedState(live)
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    state.copy_from(tensors(1), "a checkpoint")
    assert state.digest() == state_digest(tensors(1))
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"b": None}, "a checkpoint lacks 1 tensors of this model, first 'b'"),
        (
            {"extra": torch.zeros(1)},
            "a checkpoint holds 1 tensors that this model does not have, first 'extra'",
        ),
        ({"w": torch.zeros(7, 5)}, r"holds 'w' as float32\[7, 5\], this model as float32\[5, 7\]"),
        ({"w": torch.zeros(5, 7, dtype=torch.float64)}, r"holds 'w' as float64\[5, 7\]"),
    ],
)
def test_copy_of_what_does_not_fit_changes_nothing(change: dict[str, torch.Tensor | None], text: str) -> None:
    live = tensors(0)
    state = SharedState(live)
    before = state.digest()
    others = {name: tensor for name, tensor in {**tensors(1), **change}.items() if tensor is not None}
    with pytest.raises(LayoutError, match=text):
        state.copy_from(others, "a checkpoint")
    assert state.digest() == before
