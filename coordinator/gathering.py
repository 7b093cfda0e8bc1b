"""Before rounds can go on: who is waited for, and for how long.

Three cases: the nodes of a fresh run; the members of a run whose coordinator was started again; anybody who
holds, or can make up, the shared state after every node has left.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from coordinator.leases import Lease
from coordinator.nodes import Node
from coordinator.start import choose
from coordinator.timer import Alarm

if TYPE_CHECKING:
    from coordinator.run import Run

log = logging.getLogger(__name__)

RETURN_SECONDS: Final = 120.0  # for a node that was cut off to come back when nobody else is left
BACK_SECONDS: Final = 15.0  # for the other members after a restart; nodes try again at least every ten


class Gathering:
    """The waiting of a run between rounds.

    Args:
        run: whose phase is ``"gathering"`` meanwhile.

    Attributes:
        awaited: members of the last roster that a restarted coordinator waits for; empty in other cases.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._alarm: Alarm | None = None
        self.awaited: tuple[str, ...] = ()

    def restore(self, members: tuple[str, ...]) -> None:
        """The coordinator was started again."""
        self.awaited = members
        self._tell_awaited(0)
        if self._run.round >= self._run.plan.rounds:  # somebody may lack the last results
            self._set_alarm(min(self._run.plan.policy.start_timeout, BACK_SECONDS))

    def changed(self) -> None:
        """A node has come, gone, or caught up."""
        if not self._run.begun:
            self._fresh()
        elif self.awaited:
            self._returning()
        else:
            self.regroup()

    def end(self) -> None:
        """Nothing is waited for any more."""
        self.awaited = ()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    # ------------------------------------------------------------------------------------------- a fresh run

    def _fresh(self) -> None:
        run = self._run
        present = run.registry.in_session()
        run.reason = f"{len(present)} of {run.plan.nodes} nodes"
        if len(present) >= run.plan.nodes:
            self.end()
            run.begin(choose(node.claim for node in present))
        elif not present:
            self.end()
        else:
            self._set_alarm(run.plan.policy.start_timeout)

    # -------------------------------------------------------------------------------------- after a restart

    def _returning(self) -> None:
        run = self._run
        back = [name for name in self.awaited if self._back(run.registry.get(name))]
        self._tell_awaited(len(back))
        if len(back) == len(self.awaited) or (
            back and all(map(self._said_goodbye, {*self.awaited} - {*back}))
        ):
            self._go_on()
        elif run.registry.in_session():
            self._set_alarm(min(run.plan.policy.start_timeout, BACK_SECONDS))

    def _waited(self) -> None:
        """Go on with those who are back, if there is anybody."""
        run = self._run
        if run.registry.in_session() or run.round >= run.plan.rounds:
            if not any(run.newcomers.ready(node) for node in run.registry.joiners()):
                run.newcomers.believe()
            self._go_on()

    def _tell_awaited(self, back: int) -> None:
        run = self._run
        run.reason = f"going on after {run.round} rounds: {back} of {len(self.awaited)} members are back"

    def _back(self, node: Node | None) -> bool:
        if node is None or not node.in_session:
            return False
        return self._run.newcomers.ready(node) or node.claim.round > self._run.round

    def _said_goodbye(self, name: str) -> bool:
        node = self._run.registry.last(name)
        return node is not None and node.state == "left" and node.left_cleanly

    def _go_on(self) -> None:
        run, names = self._run, self.awaited
        self.end()
        back = [node for node in map(run.registry.get, names) if node is not None and node.in_session]
        ahead = [node.claim for node in back if node.claim.round > run.round]
        if ahead:
            run.skip(choose(ahead))
        log.info("%s", run.reason)
        self._resume()

    def _resume(self) -> None:
        """Open the round in which the nodes are; each that is back gets the samples that it works on."""
        run = self._run
        back = [
            node
            for node in run.registry.joiners()
            if run.newcomers.ready(node) and node.held == run.round and node.claim.work is not None
        ]
        batch = max((node.batch for node in run.registry.in_session()), default=0)
        most = max(run.plan.samples(run.round), run.plan.samples(run.round, batch))
        limit = run.leases.frontier + most * (len(run.registry.roster) + len(back))
        for node in back:
            assert node.claim.work is not None
            round_index, start, count = node.claim.work
            usual = run.plan.samples(run.round, node.batch)
            if round_index == run.round and count <= usual and start + count <= limit:
                run.leases.reclaim(node.node, run.round, Lease(start, count))
        self._lease_the_rest()
        run.between_rounds()

    def _lease_the_rest(self) -> None:
        """Members that are back without work get samples in slot order, as at any opening. Some of them have
        to fetch the last result first, and would come later, to samples that another had before."""
        run = self._run
        if run.round >= run.plan.rounds:
            return
        for name in run.registry.roster.members:
            node = run.registry.get(name)
            if node is not None and run.newcomers.ready(node) and not run.leases.held_by(name, run.round):
                run.leases.take(name, run.round, run.plan.samples(run.round, node.batch))

    # ---------------------------------------------------------------------------------------- nobody is left

    def regroup(self) -> None:
        """Nobody is left who holds the shared state: wait for a node that was cut off to come back; before
        the first commit anybody will do."""
        run = self._run
        run.phase = "gathering"
        if run.history.newest < 0 and not run.restarted:
            run.begun, run.round, run.started_at = False, 0, None
            self._fresh()
            return
        run.reason = f"every node left before round {run.round + 1}: nobody holds the shared state any more"
        joiners = run.registry.joiners()
        if joiners:
            run.reason += "; to go on from an older one, start the coordinator with another --journal"
        if any(run.newcomers.ready(node) for node in joiners):
            self.end()
            self._resume()
        elif any(node.goal >= 0 for node in joiners):
            self.end()  # it catches up with what is kept
            run.reason = f"every node left before round {run.round + 1}; {len(joiners)} catching up"
        elif run.registry.left and all(node.left_cleanly for node in run.registry.left) and not joiners:
            run.stop(run.reason)
        else:
            self._set_alarm(RETURN_SECONDS)

    # ------------------------------------------------------------------------------------------------ alarms

    def _set_alarm(self, seconds: float) -> None:
        if self._alarm is None:
            self._alarm = self._run.timer.call_at(self._run.now() + seconds, self._rang)

    def _rang(self) -> None:
        run = self._run
        self._alarm = None
        if self.awaited:
            self._waited()
            return
        if run.begun and run.newcomers.believe():
            self._resume()
            return
        if not run.begun:
            run.reason = (
                f"only {run.reason} came within {run.plan.policy.start_timeout:g} s of the first: "
                "start the others earlier, raise [round] start_timeout or lower [run] nodes"
            )
        run.stop(run.reason)
