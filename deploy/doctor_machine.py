"""This machine as a node: its GPUs, memory, disk and versions, and what to do about them."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from deploy.accelerators import Accelerator
from deploy.finding import Finding
from protos import extras
from protos.units import format_bytes
from protos.version import version_of

LITTLE_DISK: Final = 2 << 30  # bytes
LITTLE_MEMORY: Final = 1 << 30
FULL_GPU: Final = 0.5  # of its memory that others use
PACKAGES: Final = ("torch", "grpcio", "protobuf", "numpy")


@dataclass(frozen=True)
class MachineFacts:
    """What was found out.

    Attributes:
        accelerators: that torch can use; ``None``: it is not known, and ``torch_problem`` says why.
        gpu: what the machine has by its driver, whether torch can use it or not; empty: no driver.
        folder: where ``disk_free`` bytes are free.
        memory_free: bytes; ``None``: this system does not tell.
        versions: of packages; empty where one is not installed.
        swarm: whether hivemind is installed.
    """

    accelerators: tuple[Accelerator, ...] | None
    torch_problem: str
    gpu: str
    folder: Path
    disk_free: int
    memory_free: int | None
    versions: tuple[tuple[str, str], ...]
    swarm: bool


class Question:
    """Asks torch, in a process of its own, while the block runs; the process ends with the block."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.accelerators"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def __enter__(self) -> Question:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def answer(self, seconds: float) -> tuple[tuple[Accelerator, ...] | None, str]:
        """The devices, or ``None`` and why they are not known, within ``seconds``."""
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, "importing it takes too long"
        if self._process.returncode:
            return None, (err.strip().splitlines() or [f"it ended with code {self._process.returncode}"])[-1]
        return tuple(Accelerator(**one) for one in json.loads(out)), ""


def look(folder: Path, devices: tuple[Accelerator, ...] | None, problem: str = "") -> MachineFacts:
    """Look around. ``devices`` and ``problem`` are the answer of a :class:`Question`."""
    return MachineFacts(
        devices,
        problem,
        gpu="an NVIDIA driver" if shutil.which("nvidia-smi") else "",
        folder=folder,
        disk_free=shutil.disk_usage(folder).free,
        memory_free=_memory_free(),
        versions=tuple((name, version_of(name)) for name in PACKAGES),
        swarm=importlib.util.find_spec("hivemind") is not None,
    )


def _memory_free() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return None
    except (OSError, ValueError):
        return None


def gpus(facts: MachineFacts) -> Iterator[Finding]:
    """What there is to compute on."""
    if facts.accelerators is None:
        yield Finding(
            "bad",
            f"torch does not tell what it can compute on: {facts.torch_problem}",
            "run \"python -c 'import torch; print(torch.cuda.device_count())'\" with this Python: a broken "
            "installation or driver shows there",
        )
    elif not facts.accelerators and facts.gpu:
        yield Finding(
            "bad",
            f"this machine has {facts.gpu}, but torch {_version(facts, 'torch')} cannot use a GPU",
            "install a torch built for CUDA that fits the driver (nvidia-smi tells which; "
            "https://pytorch.org/get-started has the command), and look at CUDA_VISIBLE_DEVICES",
        )
    elif not facts.accelerators:
        yield Finding("ok", "no GPU: a node computes on the CPU here")
    for index, one in enumerate(facts.accelerators or ()):
        text = f"cuda:{index} is {one.name}, {format_bytes(one.free)} of {format_bytes(one.total)} free"
        full = one.free < FULL_GPU * one.total
        yield Finding(
            "warn" if full else "ok",
            text,
            "another process uses it (nvidia-smi shows which): end that, or join with --device cuda:N of "
            "another one"
            if full
            else "",
        )


def room(facts: MachineFacts) -> Iterator[Finding]:
    """Disk and memory."""
    little = facts.disk_free < LITTLE_DISK
    yield Finding(
        "warn" if little else "ok",
        f"{format_bytes(facts.disk_free)} of disk are free in {facts.folder}",
        "free some, or put --save and --data on another disk: 'atoll plan' tells how large a checkpoint is"
        if little
        else "",
    )
    if facts.memory_free is not None:
        little = facts.memory_free < LITTLE_MEMORY
        yield Finding(
            "warn" if little else "ok",
            f"{format_bytes(facts.memory_free)} of memory are free",
            "end other programs, or join with a smaller --batch" if little else "",
        )


def versions(facts: MachineFacts) -> Iterator[Finding]:
    """What is installed."""
    packages = ", ".join(f"{name} {version or '(unknown)'}" for name, version in facts.versions)
    swarm = "with the swarm" if facts.swarm else f"without the swarm (to add it: {extras.hint('swarm')})"
    atoll = version_of("atoll") or "from a source tree"
    yield Finding("ok", f"Atoll {atoll} {swarm}, Python {platform.python_version()}, {packages}")


CHECKS: Final[tuple[Callable[[MachineFacts], Iterable[Finding]], ...]] = (gpus, room, versions)


def examine(facts: MachineFacts) -> list[Finding]:
    """What all checks find."""
    return [finding for check in CHECKS for finding in check(facts)]


def _version(facts: MachineFacts, package: str) -> str:
    return dict(facts.versions).get(package, "")
