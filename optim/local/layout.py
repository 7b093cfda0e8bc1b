"""What a round of a method with local steps carries: pseudo-gradients as buckets, fragment by fragment.

Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optim.layout import backward_order, places_of
from optim.local.fragments import split
from optim.role import ParameterRole, held
from protos.buckets import SCALE, Bucket, BucketTable, MeanRule, TableSchedule
from protos.codecs import CodecSpec, matrix_shape
from protos.methods import BASIS_OF_A_VOTE, VOTE

if TYPE_CHECKING:
    from optim.local.inner import Inner


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
        held: whether its parameters are here.
    """

    group: int
    items: tuple[ParameterRole, ...]
    bucket: Bucket
    scales: int
    feedback: bool
    extras: tuple[Bucket, ...]
    held: bool = True

    @property
    def name(self) -> str:
        """That of the bucket."""
        return self.bucket.name

    @property
    def scale_bucket(self) -> Bucket | None:
        """The mean magnitudes of a vote; ``None`` for a mean."""
        if not self.scales:
            return None
        name = self.name + SCALE
        return Bucket.of(name, "mean", [(name, (self.scales,))], padded=False)

    @property
    def buckets(self) -> list[str]:
        """The names of all its buckets."""
        found = (self.bucket, self.scale_bucket, *self.extras)
        return [bucket.name for bucket in found if bucket is not None]

    @property
    def nbytes(self) -> int:
        """Bytes up and down in a round."""
        buckets = (self.bucket, *self.extras)
        return 8 * self.scales + sum(bucket.nbytes + bucket.result_nbytes for bucket in buckets)


class Fragment:
    """The units that are exchanged in one round, and its table.

    Majorities come first, then the means, each with the buckets of its local optimizer, and the scales of
    the majorities, single numbers without padding, at the end. Each time, units come from the end of the
    model to its beginning, as a backward pass makes their gradients. Buckets are numbered by name: votes,
    what their local optimizers add, means, and scales, which are exact and need no seed.

    Attributes:
        table: what travels.
        units: those that are held here, in the order of the table.
        lane: their part of the table.
        places: of the buckets in the lane, by name.
    """

    def __init__(self, units: Sequence[Unit], rule: MeanRule) -> None:
        named = sorted(units, key=lambda unit: (not unit.scales, unit.name))
        votes = [unit.bucket for unit in named if unit.scales]
        others = [bucket for unit in named for bucket in _behind_votes(unit)]
        scales = [bucket for unit in named if (bucket := unit.scale_bucket)]
        numbers = {bucket.name: number for number, bucket in enumerate([*votes, *others, *scales])}

        ordered = sorted(named, key=lambda unit: (not unit.scales, backward_order(unit.items)))
        buckets = [unit.bucket for unit in ordered if unit.scales]
        buckets += [bucket for unit in ordered for bucket in _behind_votes(unit)]
        buckets += [scale for unit in ordered if (scale := unit.scale_bucket)]
        self.table = BucketTable(tuple(buckets), rule, tuple(numbers[bucket.name] for bucket in buckets))
        self.units = tuple(unit for unit in ordered if unit.held)
        self.lane = self.table.part({name for unit in self.units for name in unit.buckets})
        self.places = places_of(self.lane)


def _behind_votes(unit: Unit) -> tuple[Bucket, ...]:
    """The buckets of a unit but its vote and the scales of that."""
    return unit.extras if unit.scales else (unit.bucket, *unit.extras)


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
            here = bool(held(items, name))
            units.append(Unit(index, items, bucket, scales, group.feedback, extras, here))
    return units


def fragments_of(units: Sequence[Unit], count: int, rule: MeanRule) -> list[Fragment]:
    """Cut a model into ``count`` fragments of about equal bytes that are exchanged in turn.

    Each holds neighbours in the model; vectors that travel together count as the last.

    Raises:
        ValueError: if there are fewer units than fragments.
    """
    ranked = sorted(units, key=lambda unit: max(item.position for item in unit.items))
    ranked.sort(key=lambda unit: len(unit.items) > 1)
    runs = split([unit.nbytes for unit in ranked], count)
    return [Fragment([ranked[index] for index in run], rule) for run in runs]


def schedule(fragments: Sequence[Fragment]) -> TableSchedule:
    """What travels, of fragments that take turns."""
    return TableSchedule(tuple(fragment.table for fragment in fragments), tuple(range(len(fragments))))


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
