"""``python -m bench planner``: how long a plan takes, and how well it balances bytes, FLOPs and traffic.

Seconds are CPU times of one thread, from the list of a model's tensors to the layouts of all its groups; the
hash, which is taken once, is timed apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from bench.report import Report, Table, median
from node.island.inventory import Weight, llama3_70b, moe_2t4
from node.island.planner import IslandPlan, PlacementName, Policy, plan_island
from node.island.planner_advice import largest_group

Result = TypeVar("Result")

SECONDS = 0.3
PADDING = 0.01
QUICK, FULL = 3, 7  # plans of each kind
PLACEMENTS: tuple[PlacementName, ...] = ("auto", "owner", "ragged")


def timed(work: Callable[[], Result], repeats: int) -> tuple[float, Result]:
    """Median CPU seconds of ``work``, and what it returned last."""
    seconds: list[float] = []
    while True:
        start = time.thread_time()
        result = work()
        seconds.append(time.thread_time() - start)
        if len(seconds) == repeats:
            return median(seconds), result


def _planned(weights: list[Weight], ranks: int, policy: Policy, repeats: int) -> tuple[float, IslandPlan]:
    return timed(lambda: plan_island(weights, ranks, policy=policy), repeats)


def _row(table: Table, label: str, seconds: float, plan: IslandPlan) -> None:
    table.row(
        label,
        seconds * 1e3,
        _balance(plan.resident.tolist()),
        _balance(plan.flops.tolist()),
        plan.spread,
        100 * plan.excess,
        100 * plan.padding_share,
        plan.step_bytes / 1e9,
        int((plan.elements == 0).sum()),
    )


def _balance(values: list[float]) -> float:
    return max(values) * len(values) / sum(values)


def run(quick: bool) -> Report:
    """Plan Llama-3-70B for up to 1,024 ranks and a 2.4-trillion mixture of experts for 1,000."""
    report, repeats = Report("planner"), QUICK if quick else FULL
    models = {"70b": (llama3_70b(), (64, 256, 1024)), "2t4": (moe_2t4(), (256, 1000))}
    table = report.table(
        "Plans for Muon; ratios are of the fullest rank to the average",
        "model, ranks, placement",
        "ms",
        "bytes",
        "FLOPs",
        "share of a block",
        "excess %",
        "padding %",
        "GB moved a step",
        "idle ranks",
    )
    times: dict[tuple[str, int, str], float] = {}
    plans: dict[tuple[str, int, str], IslandPlan] = {}
    for name, (weights, sizes) in models.items():
        for ranks in sizes:
            for placement in PLACEMENTS:
                key = name, ranks, placement
                policy = Policy(placement=placement)
                times[key], plans[key] = _planned(weights, ranks, policy, repeats)
                _row(table, f"{name}, {ranks:,}, {placement}", times[key], plans[key])

    seventy = models["70b"][0]
    finer = plan_island(seventy, 64, policy=Policy(placement="ragged", granularity="element"))
    padded = [plans["70b", 64, placement].padding_share for placement in PLACEMENTS]
    report.add("padding_70b_64", max(*padded, finer.padding_share), ceiling=PADDING)
    report.add("bytes_70b_64", _balance(plans["70b", 64, "auto"].resident.tolist()), ceiling=1.1)
    report.add("flops_70b_64", _balance(plans["70b", 64, "auto"].flops.tolist()))
    report.add("bytes_70b_1024", _balance(plans["70b", 1024, "auto"].resident.tolist()), ceiling=1.1)
    report.add("bytes_70b_1024_owner", _balance(plans["70b", 1024, "owner"].resident.tolist()))
    report.add("bytes_2t4_1000", _balance(plans["2t4", 1000, "auto"].resident.tolist()), ceiling=1.1)
    report.add("flops_2t4_1000", _balance(plans["2t4", 1000, "auto"].flops.tolist()))
    for name, ranks in (("70b", 64), ("2t4", 1000)):
        plan = plans[name, ranks, "auto"]
        report.add(f"spread_{name}_{ranks}_of_bound", plan.spread / plan.spread_bound, ceiling=1.1)
    report.add("largest_group_70b", largest_group(plans["70b", 64, "auto"]) or 0)
    for name, ranks in (("70b", 1024), ("2t4", 1000)):
        slowest = max(times[name, ranks, placement] for placement in ("auto", "owner"))
        report.add(f"seconds_{name}_{ranks}", slowest, ceiling=SECONDS)
        report.add(f"seconds_{name}_{ranks}_ragged", times[name, ranks, "ragged"], ceiling=SECONDS)
    for name, ranks in (("70b", 1024), ("2t4", 1000)):
        report.add(f"hash_seconds_{name}_{ranks}", timed(plans[name, ranks, "auto"].hash, 1)[0])
    report.note(
        "padding is the worst of the three placements and of element granularity, seconds that of auto and "
        "owner. Share of a block: what the fullest rank sends when a block is gathered, over the average; "
        "excess: what it sends beyond an equal share, of all that is sent."
    )
    return report
