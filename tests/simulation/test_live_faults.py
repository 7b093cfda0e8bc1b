"""A live run that is hit at any time: invariants hold all the time, and it goes on afterwards."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bench.virtual.generate import allowed
from bench.virtual.loop import VirtualLoop
from bench.virtual.machine import pooled
from bench.virtual.schedule import COORDINATOR, COORDINATOR_FAULTS, JOIN, NODE_FAULTS, Fault, Schedule
from bench.virtual.world import PATIENCE, World

NODES = 4
NAMES = st.sampled_from([f"n{index}" for index in range(NODES + 1)])
SECONDS = st.sampled_from((0.05, 0.5, 2.0, 8.0))


class LiveFaults(RuleBasedStateMachine):
    """One coordinator, four nodes and one that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.pooled = pooled()
        self.pooled.__enter__()
        self.world = World(Schedule(NODES, rounds=100_000, seed=1), self.loop)
        self.loop.run_until_complete(self.world.begin())

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(kind=st.sampled_from(sorted(NODE_FAULTS)), who=NAMES, seconds=SECONDS)
    def a_node_is_hit(self, kind: str, who: str, seconds: float) -> None:
        fault = Fault(kind, who, 1, "computing", seconds)
        if allowed(fault, NODES):
            self.world.strike(fault)

    @rule(kind=st.sampled_from(sorted(COORDINATOR_FAULTS)), seconds=SECONDS)
    def the_coordinator_is_hit(self, kind: str, seconds: float) -> None:
        self.world.strike(Fault(kind, COORDINATOR, 1, "open", seconds))

    @rule()
    def somebody_joins(self) -> None:
        self.world.strike(Fault(JOIN, f"n{NODES}"))

    @invariant()
    def nothing_is_broken(self) -> None:
        assert not self.world.checker.violations, "\n".join(
            [*map(str, self.world.checker.violations), *self.world.log[-30:]]
        )

    def teardown(self) -> None:
        """With all faults over it commits again."""
        try:
            committed = len(self.world.checker.payloads)
            end = self.loop.time() + 4 * PATIENCE
            while len(self.world.checker.payloads) < committed + 3 and not self.world.over:
                assert self.loop.time() < end, self.world.log[-30:]
                self.loop.run_until_complete(asyncio.sleep(5.0))
            self.nothing_is_broken()
            assert len(self.world.checker.payloads) >= committed + 3, self.world.log[-30:]
        finally:
            self.pooled.__exit__(None, None, None)
            self.loop.set_exception_handler(lambda _, context: None)
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0.1))
            self.loop.close()


TestLiveFaults = LiveFaults.TestCase
TestLiveFaults.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
