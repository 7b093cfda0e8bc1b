"""``python -m bench NAME [--quick] [--json FILE] [--check]``: run one bench; without a name, list them."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.report import Report
from deploy.processes import unwinding_signals
from deploy.terminal import PIPE_COLUMNS

BENCHES: dict[str, tuple[str, str]] = {
    "votes": (
        "bench.votes",
        "pack, tally and apply of 1-bit votes against reading and copying the same bytes",
    ),
    "round": ("bench.round", "one vote of 124 M parameters by four processes, split into its phases"),
    "wire": ("bench.wire", "bits per parameter and step, counted at the transport"),
    "exchange": (
        "bench.exchange",
        "one vote by hub, direct and swarm, beside hivemind's averager and gloo's all-reduce, on thin links",
    ),
    "tls": ("bench.tls", "CPU seconds of a vote by hub and direct, with TLS and without"),
    "bytes": ("bench.bytes", "bytes of every method for a step, counted between real nodes, and by formula"),
    "methods": ("bench.methods", "loss of every method against its bytes on the embedded text, paired seeds"),
    "lordo": ("bench.lordo", "what LoRDO's full-rank term, basis and rare exchanges are worth"),
    "muloco": ("bench.muloco", "one bit a parameter every 16 steps against exact pseudo-gradients and AdamW"),
    "variants": ("bench.variants", "what else was tried on one-bit pseudo-gradients, most of it in vain"),
    "overlap": (
        "bench.overlap",
        "rounds that exchange while they compute against rounds that take turns, behind 100 Mbit/s",
    ),
    "sweep": (
        "bench.sweep",
        "tokens per second of the methods behind links of 10 Mbit/s to 10 Gbit/s, beside what is planned",
    ),
    "planner": (
        "bench.planner",
        "time, balance and padding of sharding plans for 70 billion to 2.4 trillion parameters",
    ),
    "island": (
        "bench.island",
        "optimizer step, whole step, bytes and memory of owner-sharded ranks against FSDP2, on thin links",
    ),
    "memory": ("bench.memory", "memory of each rank of an island with every method, counted, and by formula"),
    "simulation": (
        "bench.simulation",
        "random schedules of faults against coordinator and nodes on a virtual clock: invariants that broke",
    ),
    "load": (
        "bench.load",
        "two hundred nodes on one coordinator, alone and beside uploads of 64 MB: rounds, memory, silence",
    ),
    "fuzz": (
        "bench.fuzz",
        "a million damaged inputs for everything that reads bytes of a peer: what raises, hangs or grows",
    ),
    "demo": (
        "bench.demo",
        "how much of the CPU time of `atoll demo` is neither forward nor backward",
    ),
    "cli": ("bench.cli", "seconds and imports of `atoll --help`, `status` and `plan`"),
    "soak": (
        "bench.soak",
        "a long run in which three of ten contributions fail: memory and open files of its processes",
    ),
    "joiners": (
        "bench.joiners",
        "rounds of three nodes before and while eight others join, and the memory of joining",
    ),
    "matrix": (
        "bench.matrix",
        "nodes, donors, joiners and coordinator killed, frozen or cut off in every phase: nothing is lost",
    ),
    "restarts": (
        "bench.restarts",
        "a run whose coordinator is killed 50 times against one without: equal states after each round",
    ),
    "churn": (
        "bench.churn",
        "minutes in which nodes and the coordinator die and come at random: rounds, loss, a picture",
    ),
    "byzantine": (
        "bench.byzantine",
        "eight nodes of which three are not honest: who is named, losses of votes and of robust means",
    ),
    "links": (
        "bench.links",
        "rates of 1 Mbit/s to 10 Gbit/s, delays, jitter and losses as asked for and as measured",
    ),
}


def list_benches(console: Console) -> None:
    """Print every bench with one line about it."""
    width = max(map(len, BENCHES))
    for name, (_, summary) in BENCHES.items():
        console.print(f"{name:<{width}}  {summary}", markup=False, highlight=False, soft_wrap=True)


def run_bench(name: str, quick: bool, arguments: Sequence[str] = ()) -> Report:
    """Import the module of bench ``name`` and run it; ``arguments`` are for options of its own."""
    module = importlib.import_module(BENCHES[name][0])
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", add_help=False)
    if hasattr(module, "add_options"):
        module.add_options(parser)
        report = module.run(quick, parser.parse_args(arguments))
    else:
        parser.parse_args(arguments)
        report = module.run(quick)
    if not isinstance(report, Report):
        raise TypeError(f"{BENCHES[name][0]}.run returned {type(report).__name__}, not a bench.report.Report")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status (0; 1: a bar was missed under ``--check``; 2: unknown bench)."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Side-by-side measurements. Without a name, lists the benches."
    )
    parser.add_argument("name", nargs="?", help="the bench to run")
    parser.add_argument("--quick", action="store_true", help="smaller sizes; ends within 45 s on two cores")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures to FILE, pictures beside it"
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a figure misses its bar")
    options, rest = parser.parse_known_args(arguments)

    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    if options.name is None:
        list_benches(console)
        return 0
    if options.name not in BENCHES:
        close = difflib.get_close_matches(options.name, BENCHES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the benches are {', '.join(BENCHES)}"
        print(f"unknown bench {options.name!r}: {hint}", file=sys.stderr)
        return 2

    report = run_bench(options.name, options.quick, rest)
    report.print(console)
    line = report.to_json()
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(line + "\n")
        report.write_pictures(options.json)
    missed = report.missed()
    for sentence in missed:
        print(f"bench {report.bench}: {sentence}", file=sys.stderr)
    print(line, flush=True)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    try:
        with unwinding_signals():  # a bench that is told to end takes its processes and files along
            sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
