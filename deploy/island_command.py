"""The command `atoll island plan`: a model's inventory, its plan for so many ranks, and a table of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.errors import UserError
from deploy.table import facts, percent
from protos.units import format_bytes, format_count, parse_bytes

if TYPE_CHECKING:
    from node.island.inventory import Weight
    from node.island.planner import IslandPlan, PlacementName
    from node.island.planner_advice import Advice

SHOWN_RANKS = 16  # a row for each of so many ranks, or fewer


@dataclass(frozen=True)
class Question:
    """A user's choices as texts; see the command's help."""

    model: str
    ranks: int
    optimizer: str = "muon"
    placement: str = "auto"
    granularity: str = "row"
    slack: float = 0.1
    memory: str | None = None
    split: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What was asked, the plan, and what to make of it."""

    model: str
    plan: IslandPlan
    advice: Advice
    digest: str


@dataclass(frozen=True)
class Kind:
    """Tensors of one shape that are placed alike."""

    shape: tuple[int, ...]
    count: int
    placed: str
    elements: int


def answer(question: Question) -> Answer:
    """Plan it. Imports torch, and `transformers` for a model of that kind.

    Raises:
        UserError: a value that cannot be; the text says what to write.
        ModelError, RoleError, RunFileError: a model that cannot be built.
    """
    from node.island.layout import LayoutError
    from node.island.planner import Policy, plan_island
    from node.island.planner_advice import advise

    granularity: str | int = question.granularity
    if question.granularity.isdigit():
        granularity = int(question.granularity)
    memory = None if question.memory is None else parse_bytes(question.memory)
    try:
        policy = Policy(
            placement=cast("PlacementName", question.placement),
            granularity=granularity,
            slack=question.slack,
            memory=memory,
        )
        weights = _inventory(question)
        plan = plan_island(weights, question.ranks, rule=question.optimizer, policy=policy)
    except LayoutError as error:
        raise UserError(str(error)) from error
    return Answer(question.model, plan, advise(plan), plan.hash())


def _inventory(question: Question) -> list[Weight]:
    from node.island.inventory import BUILT_IN, inventory_of

    split = _split(question.split)
    name = question.model
    if name in BUILT_IN:
        if split:
            raise UserError(f"--split: the matrices of {name} are not fused")
        return BUILT_IN[name]()
    from node.model import model_on_meta
    from protos.runfile import RunFile
    from protos.sections import ModelConfig

    if name.startswith("hf:"):
        if not name[3:].strip():
            raise UserError("'hf:' lacks a folder, a config.json or a hub id behind the colon")
        model = model_on_meta(ModelConfig(name=name, context=2), vocab=1)
        # under the names that the model has in its own library
        return inventory_of(cast(Any, model).inner, split=split)
    if name.endswith(".toml"):
        return inventory_of(model_on_meta(RunFile.load(name).model), split=split)
    raise UserError(f"no model {name!r}: write hf:NAME, a run file (.toml), {' or '.join(BUILT_IN)}")


def _split(texts: Sequence[str]) -> dict[str, int | tuple[int, ...]]:
    found: dict[str, int | tuple[int, ...]] = {}
    for text in texts:
        pattern, separator, rows = text.rpartition("=")
        numbers = rows.split(",")
        if not separator or not pattern or not all(number.strip().isdigit() for number in numbers):
            raise UserError(f"--split {text}: write NAME=3 for equal parts, or NAME=4096,1024,1024 for rows")
        parts = tuple(int(number) for number in numbers)
        found[pattern] = parts[0] if len(parts) == 1 else parts
    return found


def kinds(plan: IslandPlan) -> list[Kind]:
    """The tensors by shape and placement, the largest share of the model first."""
    from node.island.planner_costs import STACK

    found: dict[tuple[tuple[int, ...], str], list[int]] = {}
    priced = plan.priced
    moved = set(plan.step_owners)
    for meta, owner, kind in zip(priced.metas, plan.owners.tolist(), priced.kind.tolist(), strict=True):
        if owner >= 0:
            placed = "whole, on its owner" if meta.flops else "packed, on one rank of the block"
        elif meta.name in moved:
            placed = f"cut every {meta.granularity:,}, gathered in the step"
        elif kind == STACK:
            placed = "matrix by matrix, whole on their owners"
        elif meta.whole:
            placed = "whole, among what is cut"
        else:
            placed = f"cut every {meta.granularity:,}"
        entry = found.setdefault((meta.shape, placed), [0, 0])
        entry[0] += 1
        entry[1] += meta.numel
    listed = [Kind(shape, count, placed, numel) for (shape, placed), (count, numel) in found.items()]
    return sorted(listed, key=lambda one: (-one.elements, one.shape, one.placed))


def view(found: Answer) -> RenderableType:
    """The tables and what to make of them."""
    plan, advice = found.plan, found.advice
    total = int(plan.priced.numel.sum())
    rows: list[tuple[str, RenderableType]] = [
        ("model", f"{total:,} parameters in {len(plan.priced.metas):,} tensors ({found.model})"),
        (
            "plan",
            f"{plan.policy.placement} for {plan.ranks:,} ranks, {plan.rule.name}; hash {found.digest[:16]}",
        ),
        ("padding", f"{plan.padding:,} elements ({100 * plan.padding_share:.3g} %)"),
        ("a gather", f"the fullest ranks of the blocks send {percent(plan.excess)} beyond equal shares"),
        ("a step", _step(plan)),
    ]
    sentences = [
        Text(advice.reason, style="bold"),
        Text(advice.memory.reason, style="" if advice.memory.ok else "bold red"),
    ]
    return Group(facts(rows), _kind_table(plan), _balance_table(plan), *_rank_table(plan), *sentences)


def _step(plan: IslandPlan) -> str:
    if not plan.flops.any():
        return "the optimizer needs no whole matrix and no communication"
    if not plan.step_bytes:
        return "every matrix is whole on one rank: the optimizer needs no communication"
    return (
        f"{len(plan.step_owners):,} tensors are gathered to the ranks that work on them:"
        f" {format_bytes(plan.step_bytes)}, and back"
    )


def _kind_table(plan: IslandPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("shape", no_wrap=True)
    for name in ("tensors", "entries", "of all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("placed")
    total = max(1, int(plan.priced.numel.sum()))
    for one in kinds(plan):
        table.add_row(
            " x ".join(map(str, one.shape)) or "scalar",
            f"{one.count:,}",
            format_count(one.elements),
            percent(one.elements / total),
            one.placed,
        )
    return table


def _balance_table(plan: IslandPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("all ranks", "average", "fullest", "of average", "emptiest"):
        table.add_column(name, justify="right", no_wrap=True)
    flops = plan.flops / 1e12
    for label, values, text in (
        ("entries", plan.elements, format_count),
        ("bytes at rest", plan.resident, format_bytes),
        ("optimizer TFLOP a step", flops, lambda value: f"{value:,.3g}"),
    ):
        total, average = float(values.sum()), float(values.sum()) / plan.ranks
        if not total:
            continue
        table.add_row(
            label,
            text(total),
            text(average),
            text(float(values.max())),
            f"{float(values.max()) / average:.3f}",
            text(float(values.min())),
        )
    return table


def _rank_table(plan: IslandPlan) -> list[Table]:
    """One row a rank, for few of them."""
    if plan.ranks > SHOWN_RANKS:
        return []
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "entries", "at rest", "with what is gathered", "TFLOP a step"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in range(plan.ranks):
        table.add_row(
            str(rank),
            f"{int(plan.elements[rank]):,}",
            format_bytes(plan.resident[rank]),
            format_bytes(plan.resident[rank] + plan.gathered),
            f"{plan.flops[rank] / 1e12:,.3g}",
        )
    return [table]


def as_json(found: Answer) -> dict[str, Any]:
    """The same for programs."""
    plan, advice = found.plan, found.advice
    return {
        "model": found.model,
        "parameters": int(plan.priced.numel.sum()),
        "tensors": len(plan.priced.metas),
        "ranks": plan.ranks,
        "optimizer": plan.rule.name,
        "policy": asdict(plan.policy),
        "hash": found.digest,
        "padding": plan.padding,
        "spread": plan.spread,
        "spread_bound": plan.spread_bound,
        "excess": plan.excess,
        "step_bytes": plan.step_bytes,
        "gathered_bytes": plan.gathered,
        "kinds": [asdict(one) for one in kinds(plan)],
        "per_rank": {
            "entries": plan.elements.tolist(),
            "resident_bytes": [round(value) for value in plan.resident.tolist()],
            "flops": plan.flops.tolist(),
        },
        "largest_group": advice.largest,
        "proposal": None if advice.proposal is None else advice.proposal._asdict(),
        "advice": advice.reason,
        "fits": advice.memory.ok,
        "memory": advice.memory.reason,
    }
