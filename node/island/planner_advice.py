"""How large a shard group should be, and what a plan means for the memory of a rank, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from node.island.layout import Verdict
from node.island.planner import IslandPlan
from node.island.planner_costs import FP32, Cost
from protos.units import format_bytes


class Group(NamedTuple):
    """A size of the shard group, and how often it is replicated (HSDP)."""

    ranks: int
    replicas: int


@dataclass(frozen=True)
class Advice:
    """What to make of a plan.

    Attributes:
        largest: the largest sensible shard group: with more ranks, one that owns the largest matrix has more
            bytes or FLOPs than the average and the slack allow. None where nothing has to stay whole.
        proposal: another division of the ranks; None where the plan's is sensible.
        reason: both in words.
        memory: whether the plan fits the memory of a rank, and by how much; ok where that is not known.
    """

    largest: int | None
    proposal: Group | None
    reason: str
    memory: Verdict


def advise(plan: IslandPlan) -> Advice:
    """Judge ``plan`` by its own policy."""
    largest = largest_group(plan)
    if largest is None:
        reason = f"{plan.rule.name} works on single entries: any number of ranks is sensible"
        return Advice(None, None, reason, _fits(plan))
    slack = f" and {100 * plan.policy.slack:g} %" if plan.policy.slack else ""
    bound = f"beyond {largest:,} ranks the owner of the largest matrix has more than the average{slack}"
    if plan.ranks <= largest:
        return Advice(largest, None, f"{plan.ranks:,} ranks are sensible: {bound}", _fits(plan))
    proposal = propose(plan, largest)
    if proposal is None:
        reason = f"{bound}, but no smaller group divides {plan.ranks:,} and has the memory: {_here(plan)}"
        return Advice(largest, None, reason, _fits(plan))
    each = format_bytes(resident_of(plan, proposal.ranks))
    reason = (
        f"{bound}: shard over {proposal.ranks:,} ranks and replicate {proposal.replicas:,} times (HSDP),"
        f" {each} at rest on a rank; {_here(plan)}"
    )
    return Advice(largest, proposal, reason, _fits(plan))


def largest_group(plan: IslandPlan) -> int | None:
    """N*: the ranks at which the largest matrix alone is as much as a rank should have, in bytes or FLOPs."""
    known: dict[int, tuple[Cost, float]] = {}
    for cost, entry in zip(plan.priced.costs, plan.priced.entry.tolist(), strict=True):
        if len(cost.parts):
            known.setdefault(id(cost), (cost, entry))
    if not known:
        return None
    parts = [cost.parts for cost, _ in known.values()]
    bytes_ = max(
        float((part[:, 0] * entry + part[:, 1]).max())
        for part, (_, entry) in zip(parts, known.values(), strict=True)
    )
    flops = max(float(part[:, 2].max()) for part in parts)
    room = 1 + plan.policy.slack
    sizes = [room * float(plan.resident.sum()) / bytes_]
    if flops:
        sizes.append(room * float(plan.flops.sum()) / flops)
    return max(1, int(min(sizes)))


def propose(plan: IslandPlan, largest: int) -> Group | None:
    """The largest shard group of at most ``largest`` ranks that divides the plan's; None if that is one rank,
    or has not the memory (smaller ones need more)."""
    for ranks in range(min(largest, plan.ranks - 1), 1, -1):
        if plan.ranks % ranks == 0:
            need = resident_of(plan, ranks) * (1 + plan.policy.slack) + plan.gathered
            if plan.policy.memory is None or need <= plan.policy.memory:
                return Group(ranks, plan.ranks // ranks)
            return None
    return None


def resident_of(plan: IslandPlan, ranks: int) -> float:
    """Bytes at rest on the average rank of a shard group of ``ranks``."""
    return float(np.sum(plan.resident)) / ranks


def _here(plan: IslandPlan) -> str:
    if plan.step_bytes:
        return f"with {plan.ranks:,} in one group {_traffic(plan)}"
    ratio = float(plan.resident.max()) / resident_of(plan, plan.ranks)
    idle = int((plan.elements == 0).sum())
    text = f"with {plan.ranks:,} in one group a rank has {ratio:.2f} times the average"
    return text + (f" and {idle:,} have nothing" if idle else "")


def _traffic(plan: IslandPlan) -> str:
    entries = plan.step_bytes // FP32
    return (
        f"{len(plan.step_owners):,} cut tensors move in every step:"
        f" {format_bytes(FP32 * entries)} to the ranks that work on them, and back"
    )


def _fits(plan: IslandPlan) -> Verdict:
    need = float(plan.resident.max()) + plan.gathered
    text = f"{format_bytes(plan.resident.max())} at rest and {format_bytes(plan.gathered)} gathered"
    memory = plan.policy.memory
    if memory is None:
        return Verdict(True, f"the fullest rank needs {text}; activations come on top")
    left = memory - need
    if left >= 0:
        return Verdict(True, f"the fullest rank needs {text}; {format_bytes(left)} are left for activations")
    enough = memory - plan.gathered
    more = "wrap smaller blocks, or divide the experts of a block among groups of ranks"
    if enough > 0:
        ranks = int(-(-float(plan.resident.sum()) * (1 + plan.policy.slack) // enough))
        more = f"take {ranks:,} ranks" if ranks > plan.ranks else "take placement auto or ragged"
    return Verdict(False, f"the fullest rank needs {text}, {format_bytes(-left)} more than it has: {more}")
