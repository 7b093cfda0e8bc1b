"""What travels with a method, from the names, roles and shapes of a model's tensors alone. Imports no torch.

:func:`optim.methods.build_method` makes an optimizer with the same tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from optim.layout import backward_order, packs_of
from optim.local.layout import LocalGroup, check_numbers, fragments_of, schedule, units_of
from optim.lordo.tables import gradient_tables, sync_buckets
from optim.lordo.tables import schedule as gradient_schedule
from optim.method_config import Choices, MethodLike, resolve
from optim.role import ParameterRole, by_role
from protos.buckets import Bucket, BucketTable, MeanRule, Reduce, TableSchedule
from protos.methods import Reduction

if TYPE_CHECKING:
    from optim.local.inner import Inner

_MEANS: Final = ("ddp-muon", "ddp-adamw")
_REDUCE: Final[dict[Reduction, Reduce]] = {"vote": "majority", "mean": "mean"}


def tables_of(config: MethodLike, roles: Sequence[ParameterRole]) -> TableSchedule:
    """The tables of a method that trains tensors of these roles.

    Raises:
        ValueError: choices that make no sense together, or that do not fit the tensors.
    """
    choices = resolve(config)
    if not roles:
        raise ValueError("there is nothing to train: the model has no trainable parameter")
    every = tuple(sorted(roles, key=lambda role: role.name))
    groups = [tuple(by_role(every, role)) for role in ("matrix", "embedding", "vector")]
    if choices.local:
        return _of_local_steps(config, choices, *groups)
    matrices, embeddings, vectors = groups
    rest = [("embeddings", _REDUCE[choices.embeddings], embeddings)]
    rest.append(("vectors", _REDUCE[choices.vectors], vectors))
    if config.name == "lowrank-ddp":
        return gradient_schedule(
            *gradient_tables(
                packs_of(group for group in rest if group[2]),
                matrices,
                config.rank,
                basis_every=config.basis_every,
                projected=choices.omega >= 1.0,
            )
        )
    how: Reduce = "mean" if config.name in _MEANS else "majority"
    numbered = packs_of(group for group in (("matrices", how, matrices), *rest) if group[2])
    packs = sorted(numbered, key=lambda pack: (pack.bucket.reduce != "majority", backward_order(pack.items)))
    numbers = {pack.name: number for number, pack in enumerate(numbered)}
    table = BucketTable(
        tuple(pack.bucket for pack in packs),
        MeanRule(config.clip, config.trim),
        tuple(numbers[pack.name] for pack in packs),
    )
    return TableSchedule((table,))


@dataclass(frozen=True)
class _Travelling:
    """As much of a local optimizer as decides what travels."""

    roles: tuple[ParameterRole, ...]
    config: MethodLike | None = None  # of LoRDO

    def buckets(self, role: ParameterRole) -> list[Bucket]:
        """Beside the role's pseudo-gradient."""
        config = self.config
        if config is None or config.basis == "local":
            return []
        return sync_buckets(role, config.rank, direction=config.direction, codec=config.moments_codec)


def _of_local_steps(
    config: MethodLike,
    choices: Choices,
    matrices: tuple[ParameterRole, ...],
    embeddings: tuple[ParameterRole, ...],
    vectors: tuple[ParameterRole, ...],
) -> TableSchedule:
    low_rank = choices.optimizer == "lordo"
    inner = cast("Inner", _Travelling(matrices, config if low_rank else None))
    groups = [
        LocalGroup("matrices", inner, 0.0, codec=choices.codec),
        LocalGroup("embeddings", cast("Inner", _Travelling(embeddings)), 0.0, codec=choices.embedding_codec),
        LocalGroup("vectors", cast("Inner", _Travelling(vectors)), 0.0, codec=choices.vector_codec),
    ]
    bootstrap = low_rank and config.basis == "global" and bool(matrices)
    check_numbers(choices.local_steps, config.fragments, config.overlap, config.mix, bootstrap=bootstrap)
    units = units_of([group for group in groups if group.inner.roles])
    return schedule(fragments_of(units, config.fragments, MeanRule(config.clip, config.trim)))
