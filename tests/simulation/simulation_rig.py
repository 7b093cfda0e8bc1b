"""What the tests of the simulation share: schedules for hypothesis, and coordinators broken on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from bench.virtual.generate import allowed
from bench.virtual.schedule import (
    COORDINATOR,
    COORDINATOR_FAULTS,
    COORDINATOR_PHASES,
    JOIN,
    NODE_FAULTS,
    NODE_PHASES,
    Fault,
    Schedule,
)
from bench.virtual.simulate import Outcome
from coordinator.journal import Done, RoundRecord
from coordinator.run import Run
from optim.mean import F32

SECONDS = st.sampled_from((0.0, 1.0, 3.0, 8.0, 20.0, 40.0))
ROUNDS = st.integers(-1, 6)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Schedules that somebody can finish."""
    nodes = draw(st.integers(1, 5))
    names = st.integers(0, nodes).map(lambda index: f"n{index}")
    coordinators = st.builds(
        Fault,
        st.sampled_from(list(COORDINATOR_FAULTS)),
        st.just(COORDINATOR),
        ROUNDS,
        st.sampled_from(COORDINATOR_PHASES),
        SECONDS,
    )
    kinds, phases = st.sampled_from(list(NODE_FAULTS)), st.sampled_from(NODE_PHASES)
    of_nodes = st.builds(Fault, kinds, names, ROUNDS, phases, SECONDS)
    joins = st.builds(Fault, st.just(JOIN), st.just(f"n{nodes}"), st.integers(0, 5))
    faults = draw(
        st.lists(
            st.one_of(coordinators, of_nodes, joins).filter(lambda fault: allowed(fault, nodes)), max_size=6
        )
    )
    return Schedule(nodes, 7, draw(st.integers(0, 1 << 16)), draw(st.integers(0, 3)), tuple(faults))


def told(schedule: Schedule, outcome: Outcome) -> str:
    """A failure, as people want to see it."""
    return "\n".join(["", schedule.script(), *map(str, outcome.violations), *outcome.log[-30:]])


class HastyJournal:
    """Says that a round is kept before it is."""

    def __init__(self, journal: Any) -> None:
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    def commit(
        self, record: RoundRecord, payload: Sequence[memoryview], memory: Mapping[str, F32] | None, done: Done
    ) -> None:
        done(None)
        self._journal.commit(record, payload, memory, lambda error: None)


def hasty_run(*args: Any, journal: Any, **options: Any) -> Run:
    """A run that is announced before the journal has it."""
    return Run(*args, journal=HastyJournal(journal), **options)
