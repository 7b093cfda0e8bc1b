"""Runs of two nodes and their coordinator, each process behind a link of its own, one run after another.

The processes stay alive between the runs. Every run is a real one: a coordinator that listens, and nodes that
join it as ``atoll join`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from bench.island_ranks import Member, Ranks
from bench.namespaces import address, linked
from bench.ports import free_port
from node.events import RoundDone
from protos.runfile import RunFile

NODES: Final = 2
NODE_LINK: Final = 100_000_000  # bits a second, both ways
COORDINATOR_LINK: Final = 1_000_000_000
TOKEN: Final = "bench"
FIRST_PORT: Final = 4600  # in a namespace of our own all are free
WARM_ROUNDS: Final = 2  # of a run: threads start, memory is taken
COMPUTE: Final = ("data", "compute", "propose")


@dataclass(frozen=True)
class Run:
    """One run: what its file says, and whether its nodes send while they compute."""

    values: dict[str, Any]
    overlap: bool

    @property
    def file(self) -> RunFile:
        """The whole run file."""
        run = {"name": "bench-overlap", "nodes": NODES, "evaluate_every": 0, "validation_windows": 1}
        waits = {"adaptive": False}  # measured are rounds with both votes
        return RunFile.model_validate({**self.values, "round": waits, "run": {**run, **self.values["run"]}})


@dataclass(frozen=True)
class Course:
    """The rounds of a run as each of its nodes saw them."""

    nodes: list[list[RoundDone]] = field(default_factory=list)

    @property
    def rounds(self) -> list[float]:
        """Seconds from the beginning of a round to that of the next, without the first ones; of one node, as
        both wait for each other in every round."""
        began = [done.began for done in self.nodes[0][WARM_ROUNDS:]]
        return [after - before for before, after in pairwise(began)]

    def seconds(self, *phases: str) -> list[float]:
        """What the slower node spent in these phases, round by round."""
        kept = zip(*(rounds[WARM_ROUNDS:] for rounds in self.nodes), strict=True)
        return [max(sum(done.seconds.get(p, 0.0) for p in phases) for done in of) for of in kept]

    @property
    def waits(self) -> list[float]:
        """The exchange as such, round by round: the wait of the node that was ready later."""
        kept = zip(*(rounds[WARM_ROUNDS:] for rounds in self.nodes), strict=True)
        return [min(done.seconds["exchange"] for done in of) for of in kept]


class Fleet:
    """The processes: nodes 0 and 1, and the coordinator.

    Args:
        namespaces: of the three; ``None`` for loopback, where no link is thin.
    """

    def __init__(self, namespaces: list[str] | None) -> None:
        self.shaped = namespaces is not None
        self._ranks = Ranks(NODES + 1, namespaces)
        self._runs = 0

    def course(self, run: Run) -> Course:
        """Carry out a run, from its first round to its last.

        Raises:
            RankFailed: a node or the coordinator failed.
        """
        host, port = self._free()
        answers = self._ranks.run(take_part, NODES + 1, run.file.to_toml(), run.overlap, host, port)
        return Course(answers[:NODES])

    def _free(self) -> tuple[str, int]:
        self._runs += 1
        if self.shaped:
            return address(NODES), FIRST_PORT + self._runs
        return "127.0.0.1", free_port()

    def close(self) -> None:
        """End the processes."""
        self._ranks.close()


@contextlib.contextmanager
def fleet(*, shaped: bool) -> Iterator[Fleet]:
    """A fleet behind thin links, or on loopback.

    Raises:
        NamespacesUnavailable: thin links cannot be made here.
    """
    with contextlib.ExitStack() as stack:
        rates = [NODE_LINK] * NODES + [COORDINATOR_LINK]
        spaces = stack.enter_context(linked(NODES + 1, rates)) if shaped else None
        processes = Fleet(spaces)
        stack.callback(processes.close)
        yield processes


def take_part(member: Member, text: str, overlap: bool, host: str, port: int) -> list[RoundDone]:
    """The work of one process: a node, whose rounds are returned, or the coordinator, if it is the last."""
    run = RunFile.parse(text)
    if member.rank == member.ranks - 1:
        coordinate(run, host, port)
        return []
    from node.launch import Options, join
    from protos.invite import Invite

    rounds: list[RoundDone] = []
    choices = Options(name=f"node {member.rank}", device="cpu", threads=1, wait=60.0, overlap=overlap)
    join(
        Invite(TOKEN, host, port),
        choices,
        lambda event: rounds.append(event) if isinstance(event, RoundDone) else None,
    )
    return rounds


def coordinate(run: RunFile, host: str, port: int) -> None:
    """Coordinate a run until it has ended."""
    from coordinator.service import run_coordinator
    from node.model import model_on_meta
    from optim.methods import build_method
    from protos.address import Address

    tables = build_method(run.method, model_on_meta(run.model)).tables
    outcome = run_coordinator(run, tables, TOKEN, listen=Address(host, port))
    if outcome.phase != "done":
        raise RuntimeError(f"the run ended early: {outcome.reason}")
