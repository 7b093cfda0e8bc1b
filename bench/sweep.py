"""``python -m bench sweep``: tokens per second and utilisation of the methods behind links from 10 Mbit/s to
10 Gbit/s, beside what ``atoll plan`` predicts.

Each method trains in a test bed of two sites (:mod:`deploy.testbed`) whose links change their rate while it
runs; the coordinator's link is unlimited. The time of a step, which the plan is given, is measured in the
same rounds, under the same load: what is predicted is what the links do to them.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.report import Report, median
from deploy.costs import Costs, costs_of
from deploy.errors import UserError
from deploy.plan import DECISION_SECONDS, Estimate, Offer, Situation, estimate
from deploy.preset import Key
from deploy.processes import Children
from deploy.testbed.layout import site_names
from deploy.testbed.namespace import why_not
from deploy.testbed.network import Network
from deploy.testbed.probing import Probes, probe_links
from deploy.testbed.results import EXCHANGE, utilisation
from deploy.testbed.setting import Options, layout_of, run_file
from deploy.testbed.verdict import REACH
from node.shapes import roles_of
from protos.runfile import RunFile
from protos.units import format_rate

ROOT: Final = Path(__file__).resolve().parents[1]
SITES: Final = 2  # as many as there are cores on a small machine
DELAY: Final = "5ms"
ROUND_TRIP: Final = 0.01  # that comes of it
RATES: Final = ("10gbit", "1gbit", "100mbit", "10mbit")
QUICK_RATES: Final = ("1gbit", "10mbit")
SPEED: Final = {"10gbit": 10**10, "1gbit": 10**9, "100mbit": 10**8, "10mbit": 10**7}
UNLIMITED: Final = 1e12  # of the coordinator's link
STEPS: Final = 16  # local ones of a round, fewer than the presets', so that several rounds fit into a bench
METHODS: Final[dict[str, dict[Key, Any]]] = {
    "ddp-muon": {},
    "diloco": {("method", "local_steps"): STEPS},
    "sign-muon": {},
    "lordo": {("method", "local_steps"): STEPS},
    "muloco": {("method", "local_steps"): STEPS},
}
QUICK_METHODS: Final = ("ddp-muon", "sign-muon")
SIZE: Final = "1M"
QUICK_SIZE: Final = "200k"
BATCH: Final[dict[Key, Any]] = {("data", "batch"): 8, ("model", "context"): 64}
PHASE_SECONDS: Final = 8.0  # at one rate, about
QUICK_SECONDS: Final = 3.0
FEWEST, MOST = 5, 30  # rounds at one rate that count; a snapshot on its way disturbs two at most
SKIPPED: Final = 2  # rounds at the start, and after each change: links change within a round
STEP_SECONDS: Final = 0.15  # of a step, to reckon with before it is measured
NEAR: Final = 0.2  # share by which the plan may be off
RATE_NEAR: Final = 0.05
DEADLINE: Final = 400.0
WAITING: Final = (EXCHANGE, "evaluate")  # phases of a round that are no step


@dataclass(frozen=True)
class Point:
    """A method at one rate: what was measured, and what the plan says.

    Attributes:
        tokens: per second, of all nodes.
        busy: share of the time in which nodes do not wait.
        rounds: that were measured.
        plan: the prediction; ``planned`` its tokens per second.
    """

    method: str
    rate: str
    tokens: float
    busy: float
    rounds: int
    plan: Estimate
    planned: float

    @property
    def off(self) -> float:
        """Share by which the plan is off."""
        return self.planned / self.tokens - 1


def options_of(method: str, quick: bool, out: Path) -> Options:
    """Of the test bed for a method, at the first rate."""
    values = {
        **BATCH,
        **METHODS[method],
        ("run", "evaluate_every"): 0,
        ("run", "validation_windows"): 1,
        ("round", "adaptive"): False,  # all share one machine: who is late is its scheduler's choice
    }
    size = QUICK_SIZE if quick else SIZE
    return Options(out, sites=SITES, rate=RATES[0], delay=DELAY, method=method, size=size, values=values)


def costs_for(options: Options) -> tuple[RunFile, Costs]:
    """The run file and what its rounds cost."""
    run = RunFile.parse(run_file(Options(**{**vars(options), "rounds": 1000})))
    return run, costs_of(run.method, roles_of(run.model))


def situation(rate: str, step_seconds: float) -> Situation:
    """Of the bed's nodes at a rate."""
    speed = SPEED[rate]
    latency = ROUND_TRIP + DECISION_SECONDS
    return Situation(SITES, speed, speed, UNLIMITED, UNLIMITED, step_seconds, latency)


def schedule(run: RunFile, costs: Costs, rates: Sequence[str], seconds: float) -> list[int]:
    """Rounds at each rate: about so many seconds of them, and what is skipped."""
    offer = Offer(run.method.name, costs, run.method.overlap)
    rounds = [seconds / estimate(offer, situation(rate, STEP_SECONDS)).round_seconds for rate in rates]
    return [SKIPPED + min(MOST, max(FEWEST, math.ceil(count))) for count in rounds]


def script_of(rates: Sequence[str], rounds: Sequence[int]) -> str:
    """The script that changes all links from rate to rate."""
    actions, after = [], 0
    for rate, count in zip(rates[1:], rounds, strict=False):
        after += count
        for site in site_names(SITES):
            actions.append(f'[[action]]\nround = {after}\nlink = "{site}"\nrate = "{rate}"\n')
    return "\n".join(actions)


def phases_of(results: Mapping[str, Any], rates: Sequence[str]) -> list[list[Mapping[str, Any]]]:
    """The rounds that went on at each rate from their beginning to their end, without the first of them."""
    changes = [event["seconds"] for event in results["events"]]
    marks = [0.0, *(changes[index + SITES - 1] for index in range(0, len(changes), SITES)), math.inf]
    firsts = [0.0, *(changes[index] for index in range(0, len(changes), SITES)), math.inf]
    rounds = results["rounds"][SKIPPED:]
    phases = []
    for index in range(len(rates)):
        begin, end = marks[index], firsts[index + 1]
        phases.append(
            [one for one in rounds if one["ended"] - one["seconds"] >= begin and one["ended"] <= end]
        )
    return phases


def step_seconds(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Of a step at the slower node, a median over rounds: all of it but the wait for the exchange."""
    slower = []
    for one in rounds:
        steps = []
        for node in one["nodes"].values():
            phases = node["seconds"].items()
            steps.append(sum(seconds for name, seconds in phases if name not in WAITING) / node["steps"])
        if steps:
            slower.append(max(steps))
    return median(slower)


def point(method: str, rate: str, rounds: Sequence[Mapping[str, Any]], run: RunFile, costs: Costs) -> Point:
    """What was measured at one rate, and the plan for it."""
    plan = estimate(Offer(method, costs, run.method.overlap), situation(rate, step_seconds(rounds)))
    tokens = median([one["tokens"] for one in rounds])
    return Point(
        method=method,
        rate=rate,
        tokens=tokens / median([one["seconds"] for one in rounds]),
        busy=utilisation([node["seconds"] for one in rounds for node in one["nodes"].values()]),
        rounds=len(rounds),
        plan=plan,
        planned=tokens / plan.round_seconds,
    )


def trained(children: Children, options: Options) -> dict[str, Any]:
    """The results of a test bed, which runs as a user's would."""
    texts = [
        f"--set={section}.{key}={str(value).lower()}" for (section, key), value in options.values.items()
    ]
    child = children.start(
        options.method,
        [
            sys.executable, "-m", "deploy.cli", "testbed", "--sites", str(options.sites), "--no-probe",
            "--rate", options.rate, "--delay", options.delay, "--method", options.method,
            "--size", options.size, "--rounds", str(options.rounds), "--script", str(options.script),
            "--out", str(options.out), *texts,
        ],
        log=options.out / "testbed.log",
        directory=ROOT,
    )  # fmt: skip
    if children.wait(child, DEADLINE):
        raise RuntimeError(child.fate())
    values: dict[str, Any] = json.loads((options.out / "results.json").read_text())
    return values


def measured(children: Children, method: str, rates: Sequence[str], quick: bool, folder: Path) -> list[Point]:
    """One method at all rates."""
    options = options_of(method, quick, folder / method)
    run, costs = costs_for(options)
    rounds = schedule(run, costs, rates, QUICK_SECONDS if quick else PHASE_SECONDS)
    script = folder / f"{method}.toml"
    script.write_text(script_of(rates, rounds))
    values = trained(children, replace(options, rate=rates[0], rounds=sum(rounds), script=script))
    phases = phases_of(values, rates)
    for rate, phase in zip(rates, phases, strict=True):
        if not phase:
            raise RuntimeError(f"{method} has no whole round at {rate}: the machine is too busy")
    return [point(method, rate, phase, run, costs) for rate, phase in zip(rates, phases, strict=True)]


def probed(rate: str) -> Probes:
    """What the links of a bed carry at a rate."""
    options = Options(Path(), sites=SITES, rate=rate, delay=DELAY)
    with Network(layout_of(options)) as network:
        return probe_links(network, lambda text: None)


def run(quick: bool) -> Report:
    """Probe the links, train every method at every rate, and compare with the plan."""
    reason = why_not()
    if reason is not None:
        raise UserError(f"the sweep needs links: {reason}")
    report = Report("sweep")
    rates = QUICK_RATES if quick else RATES
    probes = {rate: probed(rate) for rate in rates}
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="atoll-sweep-") as folder, Children() as children:
        for method in QUICK_METHODS if quick else METHODS:
            points += measured(children, method, rates, quick, Path(folder))
    _links(report, probes)
    _methods(report, points)
    report.picture("methods", lambda path: draw(points, path))
    return report


def _links(report: Report, probes: Mapping[str, Probes]) -> None:
    table = report.table("Links, before the runs", "rate", "up Mbit/s", "down Mbit/s", "round trip ms")
    for rate, found in probes.items():
        readings = found.readings.values()
        up, down = (median([getattr(one, way) for one in readings]) for way in ("up", "down"))
        table.row(rate, up / 1e6, down / 1e6, 1e3 * median([one.rtt.least for one in readings]))
        share = max((up, down), key=lambda value: abs(math.log(value / SPEED[rate]))) / SPEED[rate]
        within = SPEED[rate] * REACH <= found.machine  # else this machine is the limit, which is no fault
        bar = {"floor": 1 - RATE_NEAR, "ceiling": 1 + RATE_NEAR} if within else {}
        report.add(f"link_{rate}_of_asked", share, **bar)
    machine = median([found.machine for found in probes.values()])
    report.add("unshaped_gbit", machine / 1e9)


def _methods(report: Report, points: Sequence[Point]) -> None:
    table = report.table(
        f"{SITES} sites, {points[0].plan.parameters:,} parameters, {DELAY} one way",
        "method, rate", "tokens/s", "planned", "off %", "busy %", "planned", "rounds",
    )  # fmt: skip
    for one in points:
        table.row(
            f"{one.method}, {one.rate}", one.tokens, one.planned, 100 * one.off,
            100 * one.busy, 100 * one.plan.utilisation, one.rounds,
        )  # fmt: skip
    worst = max(points, key=lambda one: abs(math.log1p(one.off)))
    report.add("plan_furthest_off", abs(worst.off), ceiling=NEAR)
    report.add("plan_median_off", median([abs(one.off) for one in points]))
    report.add("plan_share_within", sum(abs(one.off) <= NEAR for one in points) / len(points), floor=1.0)
    for one in points:
        name = f"{one.method}_{one.rate}"
        report.add(f"{name}_of_plan", one.tokens / one.planned)
        report.add(f"{name}_busy", one.busy)
        report.add(f"{name}_busy_planned", one.plan.utilisation)
        report.add(f"{name}_tokens_per_second", one.tokens)
    report.note(
        "tokens/s of all nodes, from medians over rounds; planned: 'atoll plan' with the time of a step as "
        "it was in the same rounds. Local steps are 16 a round with diloco, lordo and muloco."
    )


def draw(points: Sequence[Point], path: Path) -> None:
    """Tokens per second and utilisation over the rate: dots as measured, lines as planned."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for index, method in enumerate(dict.fromkeys(one.method for one in points)):
        own = sorted((one for one in points if one.method == method), key=lambda one: SPEED[one.rate])
        rates, colour = [SPEED[one.rate] for one in own], f"C{index}"
        left.plot(rates, [one.planned for one in own], color=colour, linewidth=1)
        left.plot(rates, [one.tokens for one in own], "o", color=colour, label=method)
        right.plot(rates, [100 * one.plan.utilisation for one in own], color=colour, linewidth=1)
        right.plot(rates, [100 * one.busy for one in own], "o", color=colour)
    for axes, name in ((left, "tokens/s, all nodes"), (right, "time in which nodes compute, %")):
        axes.set_xscale("log")
        axes.set_xticks([SPEED[rate] for rate in RATES], [format_rate(SPEED[rate]) for rate in RATES])
        axes.set_xlabel("each site's link, both ways")
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    title = "dots measured, lines planned"
    figure.legend(loc="outside lower center", ncols=len(METHODS), title=title, frameon=False)
    figure.savefig(path, dpi=150)
