"""A test bed of real processes: a coordinator and nodes, started through the command line as by a user."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.bed import DEADLINE, ROOT
from bench.bed import Bed as AnyBed
from bench.forked import ForkedChildren
from deploy.processes import Children, Grace

__all__ = ["DEADLINE", "ROOT"]


class Bed(AnyBed):
    """A run whose rounds wait for every vote."""

    def lead(  # type: ignore[override]
        self,
        *,
        nodes: int,
        rounds: int,
        method: str = "sign-muon",
        settings: Mapping[str, Any] | None = None,
        deadline: str = "60s",
        listen: str = "127.0.0.1:0",
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the coordinator and wait for its invite; ``settings`` are the method's."""
        self.write(
            {
                "run": {"nodes": nodes, "rounds": rounds},
                "method": {"name": method, **(settings or {})},
                "round": {"deadline": deadline, "adaptive": False, "start_timeout": "100s"},
                "coordinator": {"listen": listen, "metrics": "off"},
                **({"limits": limits} if limits else {}),
            }
        )
        invite = self.folder / "invite"
        self.coordinator = self.start(
            "coordinator", "coordinator", str(self.folder / "run.toml"), "--invite-file", str(invite),
            "--journal", str(self.journal),
        )  # fmt: skip
        self.until(lambda: invite.exists() and invite.read_text().strip() != "", "the coordinator's invite")
        self.invite = invite.read_text().strip()

    def finished(self, *names: str) -> None:
        """The run is done: the coordinator and the named nodes end with exit code 0."""
        for child in [*(self.nodes[name] for name in names), self.coordinator]:
            assert child is not None
            assert self.ended(child) == 0, child.fate()

    def agree(self, *names: str) -> int:
        """All digests of the same round are equal; returns the rounds that at least two nodes have told."""
        digests: dict[int, dict[str, str]] = {}
        for name in names:
            for number, event in self.rounds(name).items():
                digests.setdefault(number, {})[name] = event["digest"]
        for number, of_nodes in digests.items():
            assert len(set(of_nodes.values())) == 1, f"round {number}: {of_nodes}"
        return sum(len(of_nodes) > 1 for of_nodes in digests.values())


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with Children(Grace(interrupt=3.0, terminate=2.0, kill=5.0)) as children:
        yield Bed(tmp_path, children)


@pytest.fixture
def forked_bed(tmp_path: Path) -> Iterator[Bed]:
    """Of processes that are forked, where it does not matter how they are started."""
    with ForkedChildren() as children:
        yield Bed(tmp_path, children, command=())


def alive(pid: int) -> bool:
    """Whether a process of that id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
