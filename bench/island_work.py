"""What the ranks of the island bench do: timed steps, counted collectives, peak memory, losses."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.island_methods import Method, Size, Trainer, build
from bench.island_ranks import Member
from bench.namespaces import bytes_sent
from node.island.transfer import reduce_scatter_single
from node.llama import Llama

STATUS: Final = Path("/proc/self/status")
RESET_PEAK: Final = Path("/proc/self/clear_refs")
NO_COLLECTIVES: Final = ("wait_tensor", "_wrap_tensor_autograd")  # in the same namespace
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt


@dataclass
class Steps:
    """What one rank measured of one method, step by step.

    Attributes:
        training: seconds of forward and backward.
        stepping: seconds of the optimizers' step; it begins when all ranks are done with backward.
        cpu: of them, CPU seconds of this process.
        sent: bytes that left by the rank's interface in the whole step; on loopback those of all ranks.
    """

    training: list[float] = field(default_factory=list)
    stepping: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what goes to a process group."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and func.name().split("::")[1] not in NO_COLLECTIVES
        ):
            self.calls += 1
        return func(*args, **(kwargs or {}))


def mine(tokens: Tensor, member: Member) -> Tensor:
    """The sequences of this rank."""
    return tokens.chunk(member.ranks)[member.rank]


def timed_steps(
    member: Member, methods: Sequence[Method], size: Size, warmup: int, rounds: int, bandwidth: float | None
) -> tuple[dict[Method, Steps], dict[Method, int]]:
    """Train with all methods in turn, one step each a round.

    Args:
        member: this rank.
        methods: all of them are kept in memory.
        size: what is trained.
        warmup: rounds before those that are timed; at least one.
        rounds: rounds that are timed.
        bandwidth: of a rank's link, bytes a second; None: not limited.

    Returns:
        The measurements of each method, and the collectives that one step of its optimizers issues.
    """
    trainers = {method: build(method, size, member, bandwidth=bandwidth) for method in methods}
    results = {method: Steps() for method in methods}
    counters = {method: Counter() for method in methods}
    for number in range(warmup + rounds):
        tokens = mine(size.tokens(number), member)
        for method, trainer in trainers.items():
            into = results[method] if number >= warmup else Steps()
            # counting costs time, so that a round of warming up does it
            _step(member, trainer, tokens, into, counters[method] if number == 0 else nullcontext())
    return results, {method: counter.calls for method, counter in counters.items()}


def _step(
    member: Member, trainer: Trainer, tokens: Tensor, into: Steps, counting: AbstractContextManager[object]
) -> None:
    member.barrier()
    sent, begin = bytes_sent(member.interface), time.perf_counter()
    trainer.backward(tokens)
    into.training.append(time.perf_counter() - begin)
    member.barrier()  # whoever is late with backward is not to lengthen the others' step
    begin, cpu = time.perf_counter(), time.process_time()
    with counting:
        trainer.step()
    into.stepping.append(time.perf_counter() - begin)
    into.cpu.append(time.process_time() - cpu)
    member.barrier()
    into.sent.append(bytes_sent(member.interface) - sent)


def reduce_seconds(member: Member, size: Size, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of the reduce-scatters of one FSDP2 backward, and of the same sums by the least traffic.

    The latter is an all-to-all of equal chunks and a sum, which sends (N - 1)/N of every buffer.
    """
    model = build("single", size).model
    assert isinstance(model, Llama)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    counts = [*layers, sum(p.numel() for p in model.parameters()) - sum(layers)]
    buffers = [torch.ones(-(-count // member.ranks) * member.ranks) for count in counts]

    def scatter(buffer: Tensor) -> None:
        target = buffer.new_empty(len(buffer) // member.ranks)
        reduce_scatter_single(target, buffer, group=member.group)

    def exchange(buffer: Tensor) -> None:
        received = torch.empty_like(buffer)
        dist.all_to_all_single(received, buffer, group=member.group)
        received.view(member.ranks, -1).sum(0)

    ways: tuple[Callable[[Tensor], None], ...] = (scatter, exchange)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for way, times in zip(ways, seconds, strict=True):
            member.barrier()
            begin = time.perf_counter()
            for buffer in buffers:
                way(buffer)
            times.append(time.perf_counter() - begin)
    return seconds


def peak_memory(
    member: Member, methods: Sequence[Method], size: Size, bandwidth: float | None
) -> dict[Method, int] | None:
    """Bytes by which the second step of each method lifts the process above what it had before the model.

    For a process of its own: its allocator is tuned so that the system sees what is freed.

    Args:
        member: this rank.
        methods: one after the other, alone in memory.
        size: what is trained.
        bandwidth: see :func:`timed_steps`.

    Returns:
        None where the system does not tell.
    """
    if not (RESET_PEAK.exists() and STATUS.exists()):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library than glibc
        return None
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(TRIM_THRESHOLD, 0)
    for method in methods:  # for what torch and gloo allocate once
        _peak(member, method, size, 1, bandwidth)
    return {method: _peak(member, method, size, 2, bandwidth) for method in methods}


def _peak(member: Member, method: Method, size: Size, steps: int, bandwidth: float | None) -> int:
    """Bytes at the worst moment of the last of ``steps`` steps, above those before the model."""
    before = _resident("VmRSS")
    trainer = build(method, size, member, bandwidth=bandwidth)
    for number in range(steps):
        _resident("VmRSS")
        RESET_PEAK.write_text("5")
        trainer.backward(mine(size.tokens(number), member))
        trainer.step()
    peak = _resident("VmHWM", collect=False)
    del trainer
    gc.collect()
    return peak - before


def _resident(field_name: str, *, collect: bool = True) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since the reset."""
    if collect:
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no line {field_name}")


def losses(member: Member, method: Method, size: Size, steps: int, bandwidth: float | None) -> list[float]:
    """The mean loss over all ranks of each of ``steps`` steps in fp64."""
    trainer = build(method, size, member, bandwidth=bandwidth, dtype=torch.float64)
    found = []
    for number in range(steps):
        loss = trainer.backward(mine(size.tokens(number), member))
        trainer.step()
        dist.all_reduce(loss, group=member.group)
        found.append(loss.item() / member.ranks)
    return found


def reference_losses(size: Size, steps: int) -> list[float]:
    """The same of one process that has the whole model and the whole batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = build("single", size, dtype=torch.float64)
        found = []
        for number in range(steps):
            found.append(trainer.backward(size.tokens(number)).item())
            trainer.step()
        return found
    finally:
        torch.set_num_threads(threads)
