"""Fuzzing: inputs that are almost right go to everything that reads bytes of a peer.

A million of them, by default; every decoder, the coordinator behind its transport, what nodes take from each
other. None may raise what is not meant to be raised, take long, or make memory grow. Inputs are reproducible
(``--seed``); those that lead to a finding are written to ``--findings``.

With ``--guided`` the inputs are atheris' (``pip install atheris``), which follows the coverage of the code;
each target is a process of its own then.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench.fuzzing.engine import Finding, Outcome, fuzz
from bench.fuzzing.targets import TARGETS, Target
from bench.report import Report

INPUTS: Final = 1_000_000
QUICK: Final = 40_000
GROWTH: Final = 256 << 20  # bytes of one target: compiled kernels and caches included


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this bench alone."""
    parser.add_argument("--inputs", type=int, metavar="N", help=f"of all targets together ({INPUTS})")
    parser.add_argument("--target", metavar="NAME", help="this one alone")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--findings", type=Path, metavar="DIR", help="where inputs with a finding are kept")
    parser.add_argument("--guided", action="store_true", help="inputs of atheris, by coverage")


def shares(targets: tuple[Target, ...], inputs: int) -> list[int]:
    """How many inputs each target gets, at least one."""
    whole = sum(target.share for target in targets)
    counts = [max(1, int(inputs * target.share / whole)) for target in targets]
    counts[0] += max(0, inputs - sum(counts))
    return counts


def guided(target: Target, inputs: int, seed: int) -> Outcome:
    """Let atheris make the inputs, in a process of its own.

    Raises:
        RuntimeError: it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-fuzz-") as folder:
        for number, data in enumerate(target.seeds):
            (Path(folder) / f"seed-{number}").write_bytes(data)
        limits = (f"-runs={inputs}", f"-seed={seed + 1}", "-max_len=65535", "-rss_limit_mb=4096")
        command = [sys.executable, "-m", "bench.fuzzing.guided", target.name, folder, *limits]
        done = subprocess.run(command, capture_output=True, text=True)
    if "No module named 'atheris'" in done.stderr:
        raise RuntimeError("--guided needs atheris: pip install atheris")
    return read_guided(target.name, inputs, done.returncode, done.stderr)


def read_guided(name: str, inputs: int, code: int, said: str) -> Outcome:
    """What a guided process has come to, from its exit code and its words."""
    outcome = Outcome(name)
    for line in said.splitlines():
        if line.startswith("Done ") and " runs in " in line:
            outcome.inputs = int(line.split()[1])
    if code or not outcome.inputs:
        outcome.findings.append(Finding(b"", said[-2000:]))
    return outcome


def run(quick: bool, options: argparse.Namespace | None = None) -> Report:
    """The bench."""
    report = Report("fuzz")
    inputs = getattr(options, "inputs", None) or (QUICK if quick else INPUTS)
    name, seed = getattr(options, "target", None), getattr(options, "seed", 0)
    folder: Path | None = getattr(options, "findings", None)
    targets = tuple(target for target in TARGETS if name in (None, target.name))
    if not targets:
        raise SystemExit(f"there is no target {name!r}: {', '.join(target.name for target in TARGETS)}")
    work = guided if getattr(options, "guided", False) else fuzz
    outcomes = [
        work(target, count, seed) for target, count in zip(targets, shares(targets, inputs), strict=True)
    ]
    findings = sum(len(outcome.findings) for outcome in outcomes)
    report.add("findings", findings, ceiling=0)
    report.add("inputs", sum(outcome.inputs for outcome in outcomes), floor=inputs)
    report.add("targets", len(outcomes))
    report.add("memory_growth", max(outcome.growth for outcome in outcomes), ceiling=GROWTH)
    report.add("slowest_ms", 1e3 * max(outcome.slowest for outcome in outcomes))
    report.add("cpu_seconds", sum(outcome.seconds for outcome in outcomes))
    table = report.table(
        "Targets", "target", "inputs", "refused", "µs each", "slowest ms", "MB more", "findings"
    )
    for outcome in outcomes:
        table.row(
            outcome.name,
            outcome.inputs,
            outcome.refused,
            1e6 * outcome.seconds / max(1, outcome.inputs),
            1e3 * outcome.slowest,
            outcome.growth / 1e6,
            len(outcome.findings),
        )
        for finding in outcome.findings[:3]:
            report.note(f"{outcome.name}: {finding.what[:300]} (input {finding.data[:64].hex()})")
        if folder is not None:
            for finding in outcome.findings:
                folder.mkdir(parents=True, exist_ok=True)
                mark = hashlib.sha256(finding.data).hexdigest()[:16]
                (folder / f"{outcome.name.replace(' ', '-')}-{mark}").write_bytes(finding.data)
    report.note(f"seed {seed}; refused: inputs that ended in an error that their target may raise")
    return report
