"""What a run costs a node: the bytes of its rounds, from the very tables it will exchange, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from deploy.errors import UserError
from deploy.memory import StateBytes, state_bytes
from protos.buckets import Bucket, TableSchedule
from protos.methods import TORCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optim.role import ParameterRole
    from protos.method_section import MethodConfig
    from protos.runfile import RunFile


@dataclass(frozen=True)
class Kind:
    """Buckets that are reduced and encoded alike. Entries and bytes are means over the rounds of a cycle."""

    reduce: str
    codec: str
    result: str
    entries: float
    bytes_up: float
    bytes_down: float

    @property
    def text(self) -> str:
        """What it is, in words."""
        if self.reduce == "majority":
            return "1-bit votes, majority"
        if self.reduce == "basis":
            return "fp32 bases, from the reducer"
        return f"{self.codec}, mean" + (f", back as {self.result}" if self.result != self.codec else "")


@dataclass(frozen=True)
class Costs:
    """What a method costs with a model.

    Attributes:
        parameters: trained, all of which travel in some form.
        tables: what travels, round by round.
        steps: batches a node trains in a round (the first of lordo has only one).
        state: memory of the optimizer.
    """

    parameters: int
    tables: TableSchedule
    steps: int
    state: StateBytes

    @property
    def bytes_up(self) -> float:
        """Of a contribution, as a mean over the rounds."""
        return self.tables.mean_nbytes[0]

    @property
    def bytes_down(self) -> float:
        """Of a result, as a mean over the rounds."""
        return self.tables.mean_nbytes[1]

    @cached_property
    def kinds(self) -> list[Kind]:
        """What the tables consist of."""
        groups: dict[tuple[str, str, str], list[tuple[Bucket, int]]] = {}
        tables = self.tables
        for index, table in enumerate(tables.tables):
            for bucket in table.buckets:
                mean = bucket.reduce == "mean"
                key = (bucket.reduce, bucket.codec if mean else "", bucket.result if mean else "")
                groups.setdefault(key, []).append((bucket, tables.cycle.count(index)))
        cycle = len(tables.cycle)
        return [
            Kind(
                *key,
                entries=sum(bucket.elements * times for bucket, times in buckets) / cycle,
                bytes_up=sum(bucket.nbytes * times for bucket, times in buckets) / cycle,
                bytes_down=sum(bucket.result_nbytes * times for bucket, times in buckets) / cycle,
            )
            for key, buckets in sorted(groups.items())
        ]


def costs_of(method: MethodConfig, roles: Sequence[ParameterRole]) -> Costs:
    """Costs of a method with a model's tensors. Imports torch to look an optimizer of torch up, if one is
    chosen.

    Raises:
        UserError: the method cannot train them.
    """
    from optim.tables import tables_of

    try:
        if method.has_local_steps and method.optimizer.startswith(TORCH):
            from optim.local.torch_class import TorchInner

            TorchInner((), method.optimizer[len(TORCH) :], method.optimizer_options)
        tables = tables_of(method, roles)
    except ValueError as error:
        raise UserError(f"[method] {method.name} cannot train this model: {error}") from error
    return Costs(
        parameters=sum(prod(role.shape) for role in roles),
        tables=tables,
        steps=method.micro_steps(1),
        state=state_bytes(method, [(role.role, role.shape) for role in roles]),
    )


def run_costs(runfile: RunFile) -> Costs:
    """Costs of a run, from shapes alone. Imports torch for models of transformers, and optimizers of torch.

    Raises:
        ModelError, RoleError, UserError: a model or method that cannot be built.
    """
    from node.shapes import roles_of

    return costs_of(runfile.method, roles_of(runfile.model))
