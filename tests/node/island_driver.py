"""One rank of an island in a process of its own, which takes part in one run after another.

Every line of stdin is a JSON object (``environment`` as torchrun sets it, ``invite``, ``options``); the
environment may make the same processes ranks of another island. stdout tells in JSON, a line each, that the
node has joined, what a round came to, and the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deploy.processes import follow_parent
from node.events import Event, Joined, RoundDone, RoundMissed, Saved, StateLoaded, StateSent, Summary
from node.island.collectives import Collectives
from node.launch import Options, join
from node.worker import Worker
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
    elif isinstance(event, (RoundMissed, StateLoaded, StateSent, Saved)):
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


def main() -> None:
    follow_parent()
    counted = Counted()
    for line in sys.stdin:
        order = json.loads(line)
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


if __name__ == "__main__":
    main()
