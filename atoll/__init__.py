"""Atoll in one import: the names that a training script needs. Each loads its module when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.island import (
        CommPolicy,
        IslandOptimizer,
        MixedPrecisionPolicy,
        fully_shard,
        plan_island,
    )
    from node.launch import Options, train
    from node.model import build_model
    from node.own_loop import join, local, tensors_of
    from optim.methods import MethodConfig, build_method
    from optim.process_group import MajorityAllReduce, broadcast_shared_tensors
    from optim.round_optimizer import RoundOptimizer
    from optim.sign_muon import SignMuon, Signum
    from protos.invite import Invite
    from protos.runfile import RunFile

_HOMES = {
    "CommPolicy": "node.island",
    "IslandOptimizer": "node.island",
    "MixedPrecisionPolicy": "node.island",
    "fully_shard": "node.island",
    "plan_island": "node.island",
    "Options": "node.launch",
    "train": "node.launch",
    "build_model": "node.model",
    "join": "node.own_loop",
    "local": "node.own_loop",
    "tensors_of": "node.own_loop",
    "MethodConfig": "optim.methods",
    "build_method": "optim.methods",
    "MajorityAllReduce": "optim.process_group",
    "broadcast_shared_tensors": "optim.process_group",
    "RoundOptimizer": "optim.round_optimizer",
    "SignMuon": "optim.sign_muon",
    "Signum": "optim.sign_muon",
    "Invite": "protos.invite",
    "RunFile": "protos.runfile",
}

__all__ = [
    "CommPolicy",
    "Invite",
    "IslandOptimizer",
    "MajorityAllReduce",
    "MethodConfig",
    "MixedPrecisionPolicy",
    "Options",
    "RoundOptimizer",
    "RunFile",
    "SignMuon",
    "Signum",
    "broadcast_shared_tensors",
    "build_method",
    "build_model",
    "fully_shard",
    "join",
    "local",
    "plan_island",
    "tensors_of",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
