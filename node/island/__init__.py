"""Inside an island: matrix-owner and ragged ZeRO-3 sharding of one model over the ranks of one site.

``fully_shard`` is used like that of ``torch.distributed.fsdp``; whole matrices stay with one rank, so that
optimizers such as Muon, Shampoo and SOAP run unchanged and without communication on what the rank owns.

Checkpoints are in ``node.island.checkpoint``, files in the model's own names in ``node.island.export``: both
import torch's distributed checkpoints, a second that training and planning need not wait for.
"""

from node.island.api import fully_shard
from node.island.collectives import CommPolicy
from node.island.costs import Link
from node.island.hooks import register_fsdp_forward_method
from node.island.inventory import blocks_of, inventory_of
from node.island.layout import GroupLayout, LayoutError, Plan, TensorMeta
from node.island.module import FSDPModule, IslandModule, UnshardHandle
from node.island.optimizers import IslandOptimizer
from node.island.param_group import ShardedParameter
from node.island.placement import BoundPlan
from node.island.planner import IslandPlan, Policy, plan_island
from node.island.policies import MixedPrecisionPolicy, Schedule
from node.island.routing import route
from node.island.state import (
    clip_grad_norm_,
    full_state_dict,
    init_parameters,
    load_full_state_dict,
    sharded_parameters,
)
from node.island.transfer import IslandError

__all__ = [
    "BoundPlan",
    "CommPolicy",
    "FSDPModule",
    "GroupLayout",
    "IslandError",
    "IslandModule",
    "IslandOptimizer",
    "IslandPlan",
    "LayoutError",
    "Link",
    "MixedPrecisionPolicy",
    "Plan",
    "Policy",
    "Schedule",
    "ShardedParameter",
    "TensorMeta",
    "UnshardHandle",
    "blocks_of",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
    "init_parameters",
    "inventory_of",
    "load_full_state_dict",
    "plan_island",
    "register_fsdp_forward_method",
    "route",
    "sharded_parameters",
]
