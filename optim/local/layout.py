"""What a round of a method with local steps carries: pseudo-gradients as buckets, fragment by fragment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from optim.local.fragments import split
from optim.local.inner import Inner
from optim.roles import ParameterRole
from protos.buckets import Bucket, BucketTable, MeanRule, TableSchedule
from protos.codecs import CodecSpec, matrix_shape
from protos.methods import BASIS_OF_A_VOTE, VOTE

SCALES: Final = "[scales]"  # the bucket with the mean magnitudes of what is voted on


@dataclass(frozen=True)
class LocalGroup:
    """Parameters that share a local optimizer and the way their pseudo-gradients travel.

    Attributes:
        name: of the group; vectors travel together in the bucket ``[name]``.
        inner: trains them.
        lr: its learning rate.
        weight_decay: decoupled; once a round the shared parameters are multiplied by ``1 - lr *
            weight_decay`` for each of its steps. Vectors should have none.
        codec: a name of :mod:`protos.codecs` for a mean, or ``"vote"`` / ``"vote-row"``: the majority of the
            signs times the mean magnitude of the matrix / of each row.
        error_feedback: whether what the codec lost is added to the next pseudo-gradient; ``None``: for a
            lossy mean, and not for votes, which are better without (1.916 against 1.934 nats).
    """

    name: str
    inner: Inner
    lr: float
    weight_decay: float = 0.0
    codec: str = "fp32"
    error_feedback: bool | None = None

    @property
    def feedback(self) -> bool:
        """:attr:`error_feedback` with its default."""
        if self.error_feedback is not None:
            return self.error_feedback
        return self.codec not in VOTE and not CodecSpec.parse(self.codec).exact


@dataclass(frozen=True)
class Unit:
    """One pseudo-gradient and what belongs to it: always exchanged together.

    Attributes:
        group: index of its group.
        items: the parameters in it: one matrix, one embedding, or the vectors of a group.
        bucket: the pseudo-gradient.
        scales: how many mean magnitudes travel for it: 0 for a mean, 1 for a vote, one a row for a vote by
            rows.
        feedback: whether the error of its codec is kept.
        extras: buckets of its local optimizer.
    """

    group: int
    items: tuple[ParameterRole, ...]
    bucket: Bucket
    scales: int
    feedback: bool
    extras: tuple[Bucket, ...]

    @property
    def name(self) -> str:
        """That of the bucket."""
        return self.bucket.name

    @property
    def nbytes(self) -> int:
        """Bytes up and down in a round, without those of the scales' padding."""
        buckets = (self.bucket, *self.extras)
        return 8 * self.scales + sum(bucket.nbytes + bucket.result_nbytes for bucket in buckets)


@dataclass(frozen=True)
class Place:
    """Where a bucket lies: its index in the table, its first byte in a contribution and in a result."""

    index: int
    bucket: Bucket
    offset: int
    result_offset: int


class Fragment:
    """The units that are exchanged in one round, and its table.

    Majorities come first, then the scales, then the means, each followed by the buckets of its local
    optimizer; within each kind by name.

    Attributes:
        units: in the order of the table.
        table: what travels.
        places: of the buckets, by name.
        scales: first index of each voted unit in the bucket of scales, by the name of the unit.
    """

    def __init__(self, units: Sequence[Unit], rule: MeanRule) -> None:
        voted = sorted((unit for unit in units if unit.scales), key=lambda unit: unit.name)
        means = sorted((unit for unit in units if not unit.scales), key=lambda unit: unit.name)
        buckets = [unit.bucket for unit in voted]
        self.scales: dict[str, int] = {}
        if voted:
            sizes = [(f"{unit.name}/scale", (unit.scales,)) for unit in voted]
            scales = Bucket.of(SCALES, "mean", sizes)
            self.scales = {
                unit.name: member.start for unit, member in zip(voted, scales.members, strict=True)
            }
            buckets.append(scales)
            buckets += [extra for unit in voted for extra in unit.extras]
        for unit in means:
            buckets += [unit.bucket, *unit.extras]
        self.units = (*voted, *means)
        self.table = BucketTable(tuple(buckets), rule)
        rows = zip(self.table.buckets, self.table.offsets, self.table.result_offsets, strict=True)
        self.places = {row[0].name: Place(index, *row) for index, row in enumerate(rows)}


def units_of(groups: Sequence[LocalGroup]) -> list[Unit]:
    """Each matrix and each embedding by itself, the vectors of a group together.

    Raises:
        ValueError: for a codec that means nothing, or does not fit the tensors or their local optimizer.
    """
    units = []
    for index, group in enumerate(groups):
        roles = group.inner.roles
        bundles: list[tuple[str, tuple[ParameterRole, ...]]] = [
            (role.name, (role,)) for role in roles if role.role != "vector"
        ]
        vectors = tuple(role for role in roles if role.role == "vector")
        if vectors:
            bundles.append((f"[{group.name}]", vectors))
        for name, items in bundles:
            tensors = [(item.name, item.shape) for item in items]
            if group.codec in VOTE:
                bucket = Bucket.of(name, "majority", tensors)
                scales = matrix_shape(bucket.shape)[0] if group.codec == "vote-row" else 1
            else:
                if CodecSpec.parse(group.codec).kind == "lowrank" and items[0].role == "vector":
                    raise ValueError(
                        f"{name}: a vector has no low rank: use another codec than {group.codec!r}, "
                        "such as fp32"
                    )
                bucket, scales = Bucket.of(name, "mean", tensors, codec=group.codec), 0
            extras = tuple(extra for item in items for extra in group.inner.buckets(item))
            if scales and any(extra.reduce == "basis" for extra in extras):
                raise ValueError(
                    f"{name}: codec = {group.codec!r} does not go with a global basis: {BASIS_OF_A_VOTE}; "
                    'use "1bit" for as few bytes, or basis = "local"'
                )
            units.append(Unit(index, items, bucket, scales, group.feedback, extras))
    return units


def fragments_of(
    units: Sequence[Unit], count: int, order: Mapping[str, int], rule: MeanRule
) -> tuple[list[Fragment], TableSchedule]:
    """Cut a model into ``count`` fragments of about equal bytes that are exchanged in turn.

    Each holds neighbours in the ``order`` of the model (the position of a parameter by its name); vectors
    that travel together count as the last.

    Raises:
        ValueError: if there are fewer units than fragments.
    """
    ranked = sorted(units, key=lambda unit: max(order[item.name] for item in unit.items))
    ranked.sort(key=lambda unit: len(unit.items) > 1)
    runs = split([unit.nbytes for unit in ranked], count)
    fragments = [Fragment([ranked[index] for index in run], rule) for run in runs]
    tables = tuple(fragment.table for fragment in fragments)
    return fragments, TableSchedule(tables, tuple(range(count)))


def check_numbers(steps: int, fragments: int, overlap: int, mix: float | None, *, bootstrap: bool) -> None:
    """Raise ``ValueError`` for numbers of a run of local steps that do not go together."""
    if steps < 1 or fragments < 1:
        raise ValueError(f"local_steps and fragments must be at least 1, not {steps} and {fragments}")
    if steps % fragments:
        raise ValueError(
            f"local_steps = {steps} cannot be shared out to {fragments} fragments: make it a multiple of them"
        )
    if not 0 <= overlap < steps // fragments:
        raise ValueError(
            f"overlap must be from 0 to {steps // fragments - 1}, less than the {steps // fragments} steps "
            f"of a round, not {overlap}"
        )
    if mix is not None and not 0.0 < mix <= 1.0:
        raise ValueError(f"mix must be above 0 and at most 1, not {mix}")
    if bootstrap and fragments > 1:
        raise ValueError(
            "the first round of lordo finds the bases of the whole model: it needs fragments = 1"
        )
