"""``state_dict`` of a method with local steps, between two of its micro-steps too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim.reduce import SingleNode

if TYPE_CHECKING:
    from optim.round_optimizer import RoundOptimizer


def state_dict(
    optimizer: RoundOptimizer, tensors: Mapping[str, Tensor], progress: dict[str, Any]
) -> dict[str, Any]:
    """The state as tensors, numbers and plain containers.

    Args:
        optimizer: whose groups and place in a round are taken.
        tensors: its state, by name.
        progress: what else is open in the middle of a round.
    """
    memory = optimizer.reduce.memory.arrays() if isinstance(optimizer.reduce, SingleNode) else {}
    return {
        "state": dict(tensors),
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "round": optimizer.round_index,
        "done": optimizer._done,
        "held": optimizer._held,
        "progress": progress,
        "reduce": {key: torch.tensor(array) for key, array in memory.items()},
    }


def check(optimizer: RoundOptimizer, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if groups, names, dtypes or shapes in what :func:`state_dict` returned are not
    those of ``optimizer`` and its ``tensors``."""
    ours = [(group["name"], list(group["param_names"])) for group in optimizer.param_groups]
    theirs = [(g.get("name"), list(g.get("param_names", ()))) for g in saved.get("param_groups", ())]
    if ours != theirs:
        raise ValueError("this state was saved by an optimizer with other groups or parameter names")
    values = saved.get("state", {})
    if odd := sorted(set(values) ^ set(tensors)):
        raise ValueError(f"this state was saved by another method: only one of them has {odd[0]!r}")
    for name, tensor in tensors.items():
        if values[name].shape != tensor.shape or values[name].dtype != tensor.dtype:
            raise ValueError(
                f"the saved {name} is {values[name].dtype} {tuple(values[name].shape)}, not {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )


@torch.no_grad()
def copy(tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Overwrite ``tensors`` with the saved ones."""
    for name, tensor in tensors.items():
        tensor.copy_(saved["state"][name])


def restore(optimizer: RoundOptimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Take over everything but the tensors; returns ``progress`` as it was saved, its tensors copied."""
    for group, row in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in row.items() if key != "params"})
    optimizer.round_index, optimizer._done = int(saved["round"]), int(saved["done"])
    optimizer._held = _copied(saved["held"])
    if isinstance(optimizer.reduce, SingleNode):
        optimizer.reduce.memory.load({key: value.numpy() for key, value in saved["reduce"].items()})
    progress: dict[str, Any] = _copied(saved["progress"])
    return progress


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return tuple(_copied(item) for item in value) if isinstance(value, tuple) else value
