"""What a command of `atoll` costs before it does anything: seconds from its start to its end, and imports.

Every command is started anew each time, in turns with two floors: an interpreter that does nothing, and one
that imports torch, which is what a command would cost that needs it. The bars are on CPU time, which on an
idle machine is nearly all that a start takes; other processes make the wall's longer.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.report import Report, median, median_ratio

ROOT: Final = Path(__file__).resolve().parents[1]
PLAN: Final = ("plan", "--params", "20M", "--nodes", "4", "--uplink", "1gbit", "--step-time", "1s")
COMMANDS: Final[
    dict[str, tuple[str, ...]]
] = {  # the port is one at which nobody listens: it is asked, in vain
    "help": ("--help",),
    "status": ("status", "atoll+insecure://x@127.0.0.1:1"),
    "plan": PLAN,
}
FLOORS: Final[dict[str, tuple[str, ...]]] = {"python": ("-c", "pass"), "torch": ("-c", "import torch")}
HEAVY: Final = ("torch", "numba", "matplotlib", "scipy", "transformers")
BAR: Final = 0.5  # seconds
_IMPORTED: Final = re.compile(r"^import time:.*\| +(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """Seconds of one process, from its start to its end."""

    wall: float
    cpu: float  # its own and the kernel's for it


def cost(arguments: Sequence[str]) -> Cost:
    """Run python with ``arguments`` to its end; what that took."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    _python(arguments)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def imported(arguments: Sequence[str]) -> set[str]:
    """The modules that python with ``arguments`` imports until its end."""
    return set(_IMPORTED.findall(_python(("-X", "importtime", *arguments))))


def _python(arguments: Sequence[str]) -> str:
    """What python with ``arguments`` writes to its standard error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stderr


def run(quick: bool) -> Report:
    """The bench."""
    report, repeats = Report("cli"), 5 if quick else 15
    atoll = {name: ("-m", "deploy.cli", *words) for name, words in COMMANDS.items()}
    cases = {**FLOORS, **atoll}
    costs: dict[str, list[Cost]] = {name: [] for name in cases}
    modules = {name: imported(words) for name, words in atoll.items()}  # and the file cache is warm
    for _ in range(repeats):
        for name, words in cases.items():
            costs[name].append(cost(words))
    wall = {name: [each.wall for each in of] for name, of in costs.items()}
    cpu = {name: [each.cpu for each in of] for name, of in costs.items()}
    for name in COMMANDS:
        heavy = sorted(module for module in HEAVY if module in modules[name])
        report.add(f"{name}_heavy_modules", len(heavy), ceiling=0)
        if heavy:
            report.note(f"{name} imports {', '.join(heavy)}")
    for name in COMMANDS:
        report.add(f"{name}_of_torch", median_ratio(cpu[name], cpu["torch"]))
    for name in COMMANDS:
        report.add(f"{name}_cpu_seconds", median(cpu[name]), ceiling=BAR)
    for name in FLOORS:
        report.add(f"{name}_cpu_seconds", median(cpu[name]))
    for name in cases:
        report.add(f"{name}_seconds", median(wall[name]))
    table = report.table(f"Medians of {repeats}", "command", "seconds", "CPU seconds", "modules")
    for name, words in FLOORS.items():
        table.row(f"python {' '.join(words)}", median(wall[name]), median(cpu[name]), "")
    for name, words in COMMANDS.items():
        shown = f"atoll {' '.join(words)}"
        table.row(shown, median(wall[name]), median(cpu[name]), len(modules[name]))
    report.note(f"heavy modules: {', '.join(HEAVY)}; of_torch: CPU time ÷ that of `import torch` alone")
    return report
