"""One rank of an island in a process of its own, which takes part in one run after another.

Orders come as lines of JSON (``environment`` as torchrun sets it, ``invite``, ``options``); the environment
may make the same processes ranks of another island. What is told comes in JSON, a line each: that the node
has joined, what a round came to, and the end.

An order may have the process end with the run, with code 1 if that failed (``once``), or kill it in the n-th
round that it trains, when it comes to a certain phase (``dies``: phase and n).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deploy.processes import PARENT_KEY, follow_parent
from node import checkpoint
from node.events import (
    Event,
    Joined,
    Replayed,
    Resumed,
    RoundDone,
    RoundMissed,
    Saved,
    StateLoaded,
    StateSent,
    Summary,
)
from node.exchange.base import RoundOrder
from node.exchange.contributor import Contributor
from node.island.collectives import Collectives
from node.island.ranks import IslandRanks
from node.island.rounds import Loss
from node.launch import Options, join
from node.training import Training
from node.worker import Worker
from optim.exchanged import ExchangedOptimizer
from protos.invite import Invite


def tell(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def hear(event: Event) -> None:
    if isinstance(event, Joined):
        tell(joined=event.node)
    elif isinstance(event, RoundDone):
        tell(
            round=event.round,
            digest=event.digest,
            loss=event.loss,
            validation=event.validation_loss,
            tokens=event.tokens,
        )
    elif isinstance(event, Replayed):
        tell(event="Replayed", round=event.first)
    elif isinstance(event, (Resumed, RoundMissed, StateLoaded, StateSent, Saved)):
        tell(event=type(event).__name__, round=event.round)


class Counted:
    """Counts the transfers of weights and gradients, in all and outside of the passes over the model."""

    def __init__(self) -> None:
        self.within = self.outside = 0
        gather, reduce = Collectives.gather, Collectives.reduce
        for name, transfer in (("gather", gather), ("reduce", reduce)):
            setattr(Collectives, name, self._counting(transfer))
        for name in ("_reduce", "_fly"):
            setattr(Worker, name, self._outside(getattr(Worker, name)))
        self.worker: Any = None
        run = Worker.run

        def running(worker: Worker) -> Summary:
            self.worker = worker
            return run(worker)

        Worker.run = running  # type: ignore[method-assign]

    def _counting(self, transfer: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.within += 1
            return transfer(*args, **kwargs)

        return counting

    def _outside(self, step: Any) -> Any:
        def watching(*args: Any, **kwargs: Any) -> Any:
            before = self.within
            result = step(*args, **kwargs)
            self.outside += self.within - before
            return result

        return watching


class Death:
    """Ends this process by SIGKILL when it comes to a phase of a certain round."""

    def __init__(self) -> None:
        self._phase, self._left = "", 0
        work = Worker._round

        def working(worker: Worker, order: RoundOrder) -> None:
            self._left -= not order.result_ready
            work(worker, order)

        Worker._round = working  # type: ignore[method-assign]
        self._upon("forward", Loss, "forward")  # some weights are gathered
        self._upon("backward", Collectives, "reduce")  # of the first gradient
        self._upon("encode", Training, "_propose")
        self._upon("exchange", Contributor, "_mark_sent")  # the payload is under way, without its end
        self._upon("apply", ExchangedOptimizer, "apply")
        self._upon("checkpoint", checkpoint, "write_tensors", second=True)  # one of its two files is there
        self._upon("publish", checkpoint, "write_text")  # all of them are, but not what says so

    def come(self, phase: str, rounds: int) -> None:
        """In so many rounds."""
        self._phase, self._left = phase, rounds

    def _upon(self, phase: str, owner: Any, name: str, *, second: bool = False) -> None:
        go_on, seen = getattr(owner, name), [0]

        def come(*args: Any, **kwargs: Any) -> Any:
            if self._phase == phase and self._left <= 0:
                seen[0] += 1
                if not second or seen[0] == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            return go_on(*args, **kwargs)

        setattr(owner, name, come)


def serve(ends: Connection) -> None:
    """As :func:`main`, in a process that multiprocessing has forked."""
    os.environ |= {PARENT_KEY: str(os.getppid()), "GLOO_SOCKET_IFNAME": "lo"}
    sys.stdin, sys.stdout = os.fdopen(os.dup(ends.fileno())), os.fdopen(os.dup(ends.fileno()), "w")
    ends.close()
    main()


def main() -> None:
    follow_parent()
    counted, death = Counted(), Death()
    for line in sys.stdin:
        order = json.loads(line)
        if "dies" in order:
            death.come(*order["dies"])
        if "silence" in order:
            assert IslandRanks.__init__.__kwdefaults__ is not None
            IslandRanks.__init__.__kwdefaults__["silence"] = order["silence"]
        if os.environ.get("MASTER_PORT") not in (None, order["environment"]["MASTER_PORT"]):
            dist.destroy_process_group()
        os.environ.update(order["environment"])
        options = dict(order["options"])
        for name in ("save", "resume"):
            if name in options:
                options[name] = Path(options[name])
        counted.within = counted.outside = 0
        try:
            summary = join(Invite.parse(order["invite"]), Options(device="cpu", threads=1, **options), hear)
        except Exception as error:
            tell(failed=f"{type(error).__name__}: {error}")
            if order.get("once"):
                sys.exit(1)
        else:
            lane = counted.worker._optimizer.lane
            tell(
                payload=sum(lane.of(index).nbytes for index in range(summary.round)),
                lane=counted.worker._lane.bytes_counted()[0],
                done=summary.done,
                reason=summary.reason,
                digest=summary.digest,
                up=summary.bytes_up,
                transfers=counted.within,
                outside=counted.outside,
            )
            if order.get("once"):
                return
