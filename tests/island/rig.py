"""The processes that all tests of the island share, and the device that their tensors are on.

``pool().run(work, ranks, *arguments)`` calls ``work(member, *arguments)`` on the first ``ranks`` of four
processes (:class:`bench.island_ranks.Ranks`). They run on gloo and CPUs, or where a GPU is seen on NCCL with
one GPU a rank: tests that need more ranks than there are GPUs are then skipped.
``ATOLL_ISLAND_BACKEND=gloo`` (or ``nccl``) forces the one or the other.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.island_ranks import PATIENCE, Member, Transport, choose_transport
from bench.island_ranks import Ranks as BenchRanks

__all__ = ["SIZE", "Member", "Ranks", "device", "pool"]

SIZE = 4


def transport(ranks: int = SIZE) -> Transport:
    """What the tests run on, in this process and in those of the pool."""
    return choose_transport(os.environ.get("ATOLL_ISLAND_BACKEND", ""), torch.cuda.device_count(), ranks)


def device() -> torch.device:
    """Where models, data and references of the tests are."""
    return transport().device


class Ranks(BenchRanks):
    """``size`` processes, or as many as there are GPUs. ``timeout`` (seconds) is the process group's."""

    def __init__(self, size: int = SIZE, timeout: float = 120.0) -> None:
        by = transport(size)
        super().__init__(by.ranks, timeout=timeout, transport=by, strict=True)

    def answers_of(
        self, work: Callable[..., Any], ranks: int, *arguments: object, patience: float = PATIENCE
    ) -> list[tuple[bool, Any]]:
        """Skips the test where the world has too few ranks for it."""
        if ranks > self.size:
            pytest.skip(f"{ranks} ranks: {self.transport.reason}")
        return super().answers_of(work, ranks, *arguments, patience=patience)


_pool: Ranks | None = None


def pool() -> Ranks:
    """The processes that all tests share; started when first asked for, and after a failure."""
    global _pool
    if _pool is None or not _pool.alive:
        if _pool is None:
            atexit.register(_close)
        else:
            _pool.close()
        _pool = Ranks()
    return _pool


def _close() -> None:
    if _pool is not None:
        _pool.close()
