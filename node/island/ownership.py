"""Who holds what in an island that takes part in rounds: every tensor whole on one rank, its owner.

A bucket is contributed by one rank, so all tensors of a bucket of any round have the same owner: mostly one
matrix or embedding, and the vectors of a group together. Owners are dealt out so that bytes (weights,
gradients, optimizer state) and Newton–Schulz work are level, and every block is spread over the ranks
(:mod:`node.island.planner_owner`). The buckets themselves do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from node.island.inventory import Weight
from node.island.layout import Plan, TensorMeta, owned
from node.island.planner_costs import price, rule_named
from node.island.planner_owner import deal
from protos.buckets import BucketTable


def owners_of(weights: Sequence[Weight], tables: Iterable[BucketTable], ranks: int) -> dict[str, int]:
    """The rank that owns each of ``weights``, by name; the same on every rank.

    Args:
        weights: the inventory of the model, frozen parameters included.
        tables: of all rounds; what they carry beside parameters (scales, bases) goes with these.
        ranks: of the island.

    Raises:
        LayoutError: for a model without parameters.
    """
    priced = price(weights, rule_named("muon"))
    bundles = _bundles([weight.name for weight in weights], tables)
    totals = np.stack([priced.resident, priced.flops], 1)
    cost = np.stack([totals[bundle].sum(0) for bundle in bundles]) / np.maximum(totals.sum(0) / ranks, 1.0)
    sizes = np.array([priced.numel[bundle].sum() for bundle in bundles], np.float64)
    several = len(priced.groups)  # a block of its own for bundles that reach over blocks
    group = np.array(
        [
            priced.group[bundle[0]] if (priced.group[bundle] == priced.group[bundle[0]]).all() else several
            for bundle in bundles
        ],
        np.int64,
    )
    owners = deal(cost, group, sizes, np.zeros((2, ranks)))
    return {
        weights[index].name: int(owner)
        for bundle, owner in zip(bundles, owners, strict=True)
        for index in bundle
    }


def _bundles(names: Sequence[str], tables: Iterable[BucketTable]) -> list[list[int]]:
    """The indices of the names that share an owner, in the order of their first."""
    index = {name: number for number, name in enumerate(names)}
    first = list(range(len(names)))

    def root(number: int) -> int:
        while first[number] != number:
            number = first[number]
        return number

    for table in tables:
        for bucket in table.buckets:
            members = [index[member.name] for member in bucket.members if member.name in index]
            for one, other in pairwise(members):
                low, high = sorted((root(one), root(other)))
                first[high] = low
    bundles: dict[int, list[int]] = {}
    for number in range(len(names)):
        bundles.setdefault(root(number), []).append(number)
    return list(bundles.values())


def plan_of(weights: Sequence[Weight], owners: dict[str, int], ranks: int) -> Plan:
    """The plan for ``fully_shard`` that gives each of ``weights`` to its owner: one group for each block, and
    another for what is frozen or of another dtype in it."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.group, []).append(weight)
    return Plan(
        tuple(
            owned(
                [TensorMeta(weight.name, weight.shape) for weight in members],
                [owners[weight.name] for weight in members],
                ranks,
            )
            for members in groups.values()
        )
    )
