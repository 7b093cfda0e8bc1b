"""What a node holds of its run: the shared state before a round, and every way in which it changes or leaves.

Everything here is done by all ranks of a node together; only the leader speaks with the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from typing import Final

from torch import Tensor

from node import checkpoint
from node.checkpoint import Saving
from node.events import Listener, Notice, Saved, StateLoaded, StateSent, TransferFailed
from node.exchange.base import DonateOrder, Exchange, LoadOrder, ReplayOrder, RoundResult
from node.exchange.trouble import RoundLost, TransferError
from node.handover import Handover
from node.ranks import Ranks
from node.replay_progress import ReplayProgress
from node.state import SharedState
from node.whole_state import WholeState
from optim.round_optimizer import RoundOptimizer
from protos.runfile import RunFile
from protos.snapshots import chunk_range

Results = Generator[RoundResult, None, None]

OPTIMIZER: Final = "optimizer/"  # what the names of its shared tensors begin with


class HeldState:
    """The shared state of a node, or a rank's part of it.

    Args:
        runfile: of the run.
        optimizer: over what this rank holds of the model's parameters.
        ranks: of the node.
        exchange: the leader's; ``None`` on other ranks.
        round_index: the state is that before this round.
        samples: first global sample index behind all that the run has leased, as far as this node knows.
        saving: where checkpoints go.
        clock: seconds.
        on_event: told about everything that happens.

    Attributes:
        round, samples: see above.
        tensors: this rank's part of the state.
        consistent: it is that before ``round``, not half of a result or of a snapshot.
    """

    def __init__(
        self,
        runfile: RunFile,
        optimizer: RoundOptimizer,
        ranks: Ranks,
        exchange: Exchange | None,
        *,
        round_index: int,
        samples: int,
        saving: Saving | None,
        clock: Callable[[], float],
        on_event: Listener,
    ) -> None:
        self.round, self.samples, self.consistent = round_index, samples, True
        self.tensors = SharedState(optimizer.shared_tensors())
        self._runfile, self._optimizer, self._ranks, self._exchange = runfile, optimizer, ranks, exchange
        self._saving, self._clock, self._on_event = saving, clock, on_event
        self._all = WholeState(self.tensors, ranks)
        self._handover = Handover(self._all, ranks, exchange)
        self._digest = ""  # of the present state, once it is known
        self._saved = -1  # the round of the last checkpoint of this state
        self._load_began = 0.0

    def digest(self) -> str:
        """Of the whole state."""
        self._digest = self._digest or self._all.digest()
        return self._digest

    def know_digest(self, digest: str) -> None:
        """It has been computed elsewhere."""
        self._digest = digest

    def weights(self) -> dict[str, Tensor]:
        """This rank's part of the model, without what is the optimizer's."""
        return {n: tensor for n, tensor in self.tensors.tensors.items() if not n.startswith(OPTIMIZER)}

    def leased(self, frontier: int) -> None:
        """The run has leased all samples before ``frontier``."""
        self.samples = max(self.samples, frontier)

    def apply(self, result: RoundResult) -> None:
        """Step over a round; the learning rate has been set."""
        self.consistent, self._digest = False, ""
        self._optimizer.apply(result.round, result.payload, counted=result.counted)
        self.round, self.consistent = result.round + 1, True

    # ---------------------------------------------------------------------------------- to disk

    def save(self, ahead: int) -> None:
        """Write a checkpoint, if there is a place for it, the state is consistent, and not saved already.

        Args:
            ahead: gradients of the round that the momenta have taken in.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is None or self._saved == self.round:
            return
        if not self._ranks.agree(self.consistent):
            self._on_event(Notice(f"nothing is saved: the state of round {self.round} is incomplete"))
            return
        if ahead:
            gradients = "one gradient" if ahead == 1 else f"{ahead} gradients"
            self._on_event(
                Notice(
                    f"the stop came within round {self.round + 1}: the saved momenta are {gradients} ahead"
                )
            )
        path = checkpoint.save(
            self._saving.folder,
            round_index=self.round,
            run_name=self._runfile.run.name,
            run_toml=self._runfile.to_toml(),
            run_digest=self._runfile.digest,
            shared=self.tensors.tensors,
            shared_digest=self.digest(),
            local=self._optimizer.local_tensors(),
            reducer=None if self._exchange is None else self._exchange.reducer_tensors(),
            samples=self.samples,
            ranks=self._ranks,
        )
        self._saved = self.round
        self._on_event(Saved(self.round, path))

    def save_regularly(self, ahead: int) -> None:
        """:meth:`save`, as often as is wanted."""
        if self._saving is not None and self._saving.every and self.round % self._saving.every == 0:
            self.save(ahead)

    # --------------------------------------------------------------------- from and to other nodes

    def donate(self, order: DonateOrder) -> None:
        """Keep a part of the state for a snapshot; it goes up while rounds go on."""
        start = self._clock()

        def done(trouble: str) -> None:
            if trouble:
                self._on_event(TransferFailed(order.round, trouble))
                return
            first, last = chunk_range(self._all.nbytes, order.first, order.count)
            self._on_event(StateSent(order.round, last - first, self._clock() - start))

        if order.round != self.round:
            done(f"asked for the state of round {order.round}, this node holds that of round {self.round}")
            return
        try:
            self._handover.donate(order, self.digest(), done)
        except TransferError as error:
            done(str(error))

    def download(self, order: LoadOrder) -> None:
        """The leader's part of :meth:`load`, before other ranks know of the order. Changes nothing."""
        self._load_began = self._clock()
        self._handover.download(order)

    def load(self, order: LoadOrder) -> None:
        """Replace the state by the snapshot that was downloaded, if it was. Momenta and error feedback stay:
        they are this node's own."""
        before, self.consistent = self.consistent, False
        try:
            digest = self._handover.load(order)
        except TransferError as error:
            self.consistent = before
            self._on_event(TransferFailed(order.round, str(error)))
        else:
            self._optimizer.loaded()
            self.consistent, self._saved = True, -1
            self._digest, self.round = digest, order.round
            self.leased(order.frontier)
            seconds = self._clock() - self._load_began
            self._on_event(StateLoaded(order.round, self._all.nbytes, digest, seconds))
        self._tell()

    def replay(
        self,
        order: ReplayOrder,
        results: Callable[[ReplayOrder], Results],
        settled: Callable[[int, Results], RoundResult],
        apply: Callable[[RoundResult], None],
    ) -> None:
        """Step over rounds that were committed without this node, as far as their results can be had.

        Args:
            order: which.
            results: asks for them.
            settled: takes the next of them, once every rank has its part of it.
            apply: :meth:`apply`, and what belongs to it.
        """
        first, end = self.round, order.first + order.count
        self.leased(order.frontier)
        progress = ReplayProgress(first, end, self._clock, self._on_event)
        try:
            if order.first > first:
                raise TransferError(
                    f"asked to catch up from round {order.first + 1} on, this node lacks rounds before it"
                )
            with closing(results(replace(order, first=first, count=max(0, end - first)))) as stream:
                while self.round < end:
                    result = settled(self.round, stream)
                    apply(result)
                    table = self._optimizer.tables.of(result.round)
                    progress.applied(table.result_nbytes if result.voters else 0)
            progress.end()
        except (RoundLost, TransferError) as error:
            self._on_event(TransferFailed(self.round, str(error)))
        self._tell()

    def _tell(self) -> None:
        """The coordinator goes by what this node holds, after a transfer that broke off as well."""
        digest = self.digest()
        if self._exchange is not None:
            self._exchange.ready(self.round, digest)

    def close(self) -> None:
        """Drop a snapshot that has come and was not loaded."""
        self._handover.close()
