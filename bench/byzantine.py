"""Eight nodes, three of which are not honest: who is named, and what becomes of the loss.

Adversaries train like the others, on their share of the data, and then send something else. From a suspicion
of 0.8 on a node counts one sixteenth, unless the row says that it is only named: the majority alone has to
hold then.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from bench.adversaries import ADVERSARIES, Attacked
from bench.report import Report
from deploy.compare import STANDARD
from protos.runfile import RunFile
from protos.toml_writer import to_toml

NODES, FALSE, BATCH = 8, 3, 2  # sequences of a node in a step
ROUNDS, QUICK_ROUNDS = 128, 12
LORDO_STEPS: Final = 8
LORDO_ROUNDS, QUICK_LORDO_ROUNDS = 16, 2
WITHIN: Final = 50  # rounds in which an adversary has to be named
GAP: Final = 0.1  # nats per byte that three adversaries may cost
FAILS: Final = 0.5  # nats that they cost a plain mean at least, and a trimmed one at most
PROCESSES: Final = 2

SIGN_MUON: Final = {"name": "sign-muon"}
LORDO: Final = {
    **{"name": "lordo", "rank": 8, "local_steps": LORDO_STEPS, "lr": 2e-2},
    **{"codec": "fp32", "embedding_codec": "fp32"},
}


@dataclass(frozen=True)
class Case:
    """One run."""

    label: str
    adversaries: Sequence[str] = ()
    method: Mapping[str, Any] = field(default_factory=lambda: SIGN_MUON)
    byzantine: Mapping[str, Any] = field(default_factory=dict)

    def runfile(self, rounds: int, nodes: int = NODES) -> RunFile:
        """Its run file."""
        values = {
            **STANDARD,
            "run": {"nodes": nodes, "rounds": rounds, "evaluate_every": 0, "validation_windows": 128},
            "data": {"batch": BATCH},
            "method": dict(self.method),
            "byzantine": dict(self.byzantine),
        }
        return RunFile.parse(to_toml(values), self.label)


@dataclass(frozen=True)
class Found:
    """What a run has come to."""

    loss: float
    named: int  # adversaries
    last: int  # round, from 1, after which the last of them was named; 0: not all were
    wrongly: int  # honest nodes that were named, at any time
    causes: tuple[str, ...]


def play(case: Case, rounds: int) -> Found:
    """Simulate a run, on this thread alone."""
    torch.set_num_threads(1)
    print(f"{case.label}: {rounds} rounds", file=sys.stderr, flush=True)
    run = Attacked(case.runfile(rounds), case.adversaries)
    *_, record = run.rounds()
    assert record.validation is not None, "the last round of a run is always measured"
    false = range(NODES - len(case.adversaries), NODES)
    named = [place for place in false if place in run.named]
    return Found(
        loss=record.validation.loss,
        named=len(named),
        last=1 + max(map(run.named.__getitem__, named)) if len(named) == len(false) > 0 else 0,
        wrongly=len(set(run.named) & set(run.honest)),
        causes=tuple(sorted({run.causes[place] for place in named})),
    )


HONEST: Final = Case("honest")
LESS: Final = {"downweight": 0.8}
ATTACKS: Final = tuple(Case(name, (name,) * FALSE, byzantine=LESS) for name in ADVERSARIES)
MIXED: Final = Case("mixed", ("flip", "random", "replay"), byzantine=LESS)
OUT: Final = Case("flip, expel", ("flip",) * FALSE, byzantine={"expel": 0.8})
NAMED: Final = tuple(Case(f"{name}, named", (name,) * FALSE) for name in ("flip", "zeros"))
LORDO_HONEST: Final = Case("lordo honest", method=LORDO)
RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "mean": {},
    "trimmed": {"trim": FALSE},
    "median": {"trim": "median"},
    "norm": {"clip": 1.0},
}
MEANS: Final = tuple(
    Case(f"lordo {name}", ("flip",) * FALSE, {**LORDO, **rule}) for name, rule in RULES.items()
)


def run(quick: bool) -> Report:
    """Every attack; quick: two of them and two means, for too few rounds to have bars on losses."""
    report = Report("byzantine")
    rounds = QUICK_ROUNDS if quick else ROUNDS
    cases = (ATTACKS[0], MIXED) if quick else (*ATTACKS, MIXED, OUT, *NAMED)
    means = MEANS[:2] if quick else MEANS
    lordo_rounds = QUICK_LORDO_ROUNDS if quick else LORDO_ROUNDS
    jobs = [(case, rounds) for case in (HONEST, *cases)]
    jobs += [(case, lordo_rounds) for case in (LORDO_HONEST, *means)]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(play, *zip(*jobs, strict=True)))
    honest, found = outcomes[0], list(zip(cases, outcomes[1:], strict=False))
    lordo, *rest = outcomes[1 + len(cases) :]
    losses = [(case, outcome.loss) for case, outcome in zip(means, rest, strict=True)]

    title = f"sign-muon, {NODES} nodes of which {FALSE} are false, {rounds} rounds"
    table = report.table(title, "attack", "loss", "gap", "named", "after round", "honest named", "as")
    table.row("none", f"{honest.loss:.4f}", "", "", "", honest.wrongly, "")
    for case, one in found:
        gap, name, causes = one.loss - honest.loss, figure(case.label), ", ".join(one.causes)
        report.add(f"gap_{name}", gap, **({} if quick or case in NAMED else {"ceiling": GAP}))
        report.add(f"named_{name}", one.named, floor=FALSE)
        report.add(f"named_after_{name}", one.last, floor=1, ceiling=WITHIN)
        table.row(
            case.label,
            f"{one.loss:.4f}",
            f"{gap:+.4f}",
            one.named,
            one.last,
            one.wrongly,
            causes,
        )
    wrongly = honest.wrongly + sum(one.wrongly for case, one in found if case not in NAMED)
    report.add("honest_named", wrongly, ceiling=0)
    title = f"LoRDO, the same with -10 times their own, {lordo_rounds} rounds of {LORDO_STEPS} steps"
    table = report.table(title, "mean", "loss", "gap")
    table.row("plain, all honest", f"{lordo.loss:.4f}", "")
    bars = {"lordo_mean": {"floor": FAILS}, "lordo_trimmed": {"ceiling": FAILS}}
    for case, loss in losses:
        name = figure(case.label)
        report.add(f"gap_{name}", loss - lordo.loss, **({} if quick else bars.get(name, {})))
        table.row(case.label, f"{loss:.4f}", f"{loss - lordo.loss:+.4f}")
    report.add("loss_honest", honest.loss)
    report.add("loss_lordo_honest", lordo.loss)
    report.note("loss: nats per held-out byte at the end; gap: to the run of eight honest nodes, same data")
    report.note("named: adversaries under suspicion; after round: until the last of them was. From then on")
    report.note("they count 1/16, but where the row says expel, or that they are only named")
    return report


def figure(label: str) -> str:
    """``"flip, expel"`` as ``"flip_expel"``."""
    return label.replace(", ", "_").replace(" ", "_")
