"""The exchange as a library: a training script with its own model, data and loop takes part in a run.

::

    with atoll.join(invite) as run:
        torch.manual_seed(run.seed)
        model = Net()
        optimizer = run.optimizer(model)
        for batch in run.batches(len(images)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            run.report(loss)
            optimizer.step()

``optimizer.step()`` contributes, waits for the result and applies it, whenever the method has it so; it also
lets this node catch up, hand its state over to newcomers, and save checkpoints.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, SupportsFloat

import torch

from node import launch
from node.events import Event, Listener, Notice, Summary
from node.exchange.base import ExchangeError
from node.own_data import OwnSamples
from node.ranks import Ranks
from node.setting import LaunchError, Make, Options, Setting, assemble
from node.signals import reason_of
from node.turns import LEAVE_SECONDS, End, Made, OwnModel, Parts, ScriptLeft, Turns
from optim.methods import build_method
from optim.roles import classify
from optim.round_optimizer import RoundOptimizer
from protos.invite import Invite
from protos.model_tensors import OWN, ModelTensor
from protos.runfile import RunFile

log = logging.getLogger("atoll")


def join(invite: str | Invite, options: Options | None = None, on_event: Listener | None = None) -> OwnRun:
    """Take part in the run of a coordinator, inside a ``with`` statement.

    Args:
        invite: what the coordinator printed.
        options: of this node; where its batches go, and what of the script is sent, are the script's affair.
        on_event: is told about everything that happens, in another thread; notices are logged if ``None``.

    Raises:
        InviteError: it is no invite.
    """
    where = Invite.parse(invite) if isinstance(invite, str) else invite
    return OwnRun(lambda options, tell, make: launch.join(where, options, tell, make=make), options, on_event)


def local(
    runfile: str | os.PathLike[str] | RunFile,
    options: Options | None = None,
    on_event: Listener | None = None,
) -> OwnRun:
    """The same without a coordinator: one node alone, by a run file.

    Raises:
        RunFileError: it cannot be used.
    """
    run = runfile if isinstance(runfile, RunFile) else RunFile.load(runfile)
    return OwnRun(lambda options, tell, make: launch.train(run, options, tell, make=make), options, on_event)


def tensors_of(model: torch.nn.Module) -> list[str]:
    """The trainable tensors of a model, for ``[model] tensors`` of a run file.

    Raises:
        RoleError: a parameter that fits no rule.
    """
    roles = sorted(classify(model), key=lambda role: role.position)
    return [str(ModelTensor(role.name, role.role, role.shape)) for role in roles]


class OwnRun:
    """A run in which a script takes part; a context manager, to be entered once.

    Leaving it before the run's end, by an exception or Ctrl-C too, saves a checkpoint, if there is a place
    for it, and tells the coordinator why.

    Attributes:
        summary: what this node did, once the run is over.
    """

    def __init__(
        self,
        start: Callable[[Options, Listener, Make], Summary],
        options: Options | None,
        on_event: Listener | None,
    ) -> None:
        self.summary: Summary | None = None
        self._file: RunFile | None = None
        self._start = start
        # Gradients are the script's until step(): it may add several up, or clip them.
        self._options = replace(options or Options(), overlap=False, accumulate=1)
        self._on_event = on_event or _log
        self._turns = Turns()
        self._thread = threading.Thread(target=self._follow, name="atoll-node", daemon=True)
        self._optimizer: RoundOptimizer | None = None
        self._model: torch.nn.Module | None = None
        self._begun = False  # batches() was called
        self._rows: torch.Tensor | None = None  # of the batch whose gradients are to be made
        self._said: RunFile | torch.Tensor | End | None = None  # and has not been looked at
        self._loss = math.nan
        self._before: Any = None  # what SIGTERM did

    @property
    def file(self) -> RunFile:
        """The run file, with every value in effect.

        Raises:
            LaunchError: the run was not entered.
        """
        if self._file is None:
            raise LaunchError("a run is entered before it is used: with atoll.join(...) as run:")
        return self._file

    @property
    def seed(self) -> int:
        """Of the run. All nodes begin with the same weights: seed torch with it before the model is made."""
        return self.file.run.seed

    def __enter__(self) -> OwnRun:
        """Ask what run it is.

        Raises:
            ExchangeError: the coordinator is not there, or refuses.
        """
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            self._before = signal.signal(signal.SIGTERM, _terminated)
        try:
            self._thread.start()
            said = self._wait()
            assert isinstance(said, RunFile), "the run file comes first"
            self._file = said
        except BaseException:
            self._turns.give_up("its script has gone")
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rows = None
        try:
            if self._thread.is_alive() and not isinstance(self._said, End):
                self._leave(error)
            else:
                self._thread.join(LEAVE_SECONDS)
        finally:
            self._restore()

    def optimizer(self, model: torch.nn.Module) -> RoundOptimizer:
        """The optimizer of the run's method over all trainable parameters of ``model``, which are fp32.

        Buffers, such as the statistics of a batch norm, stay this node's own.

        Raises:
            LaunchError: the method cannot train this model, or it is another model than the run's.
        """
        expected = self.file.model.tensors
        if self.file.model.name == OWN and expected is not None:
            _compare(expected, tensors_of(model))
        try:
            optimizer = build_method(self.file.method, model)
        except ValueError as error:
            raise LaunchError(f"[method] {self.file.method.name} cannot train this model: {error}") from error
        optimizer.driver = self._step
        self._model, self._optimizer = model, optimizer
        return optimizer

    def batches(
        self, samples: int, *, validate: Callable[[], float] | None = None, data: str = ""
    ) -> Iterator[torch.Tensor]:
        """Join, and go through the batches that this node is to train: ``int64[n]``, indices on the CPU.

        Every sample comes once in an epoch, at one node; those of a node that has left come to another one.
        For every batch, ``optimizer.step()`` is called once. The iterator goes over as many epochs as the run
        has, and ends with it: it is gone through once.

        Args:
            samples: of the data; indices are from 0 to ``samples - 1``.
            validate: measures a validation loss, with the shared parameters in the model, in evaluation mode
                and without gradients; called from ``optimizer.step()``, in another thread.
            data: names the data; nodes with other names or numbers of samples are refused.

        Raises:
            LaunchError: there is no optimizer yet; or this is the second time.
            ExchangeError: the run cannot go on with this node; the text says why.
            CheckpointError: a checkpoint cannot be read or written.
        """
        if self._optimizer is None or self._model is None:
            raise LaunchError("run.optimizer(model) comes before run.batches(...)")
        if self._begun:
            raise LaunchError(
                "run.batches(...) is gone through once: it goes over all epochs and ends with the run"
            )
        self._begun = True
        self._turns.say(Parts(self._model, self._optimizer, samples, data, validate))
        while isinstance(rows := self._next(), torch.Tensor):
            self._rows, self._loss = rows, math.nan
            yield rows[:, 0].cpu()
            if self._rows is not None:
                raise LaunchError("optimizer.step() was not called for the last batch")

    def report(self, loss: SupportsFloat) -> None:
        """Tell the mean loss of the present batch, for all who watch the run; before ``optimizer.step()``."""
        self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def _step(self, loss: float | None) -> None:
        """What ``optimizer.step()`` does; ``loss`` is what a closure has returned."""
        if loss is not None:
            self.report(loss)
        if self._rows is None:
            raise LaunchError("optimizer.step() is called once for each batch of run.batches(...)")
        self._rows = self._said = None  # what follows is asked for again if Ctrl-C ends the wait for it
        self._turns.say(Made(self._loss))
        self._said = self._wait()

    def _next(self) -> RunFile | torch.Tensor | End:
        return self._wait() if self._said is None else self._said

    def _wait(self) -> RunFile | torch.Tensor | End:
        said = self._turns.wait()
        if isinstance(said, End):
            self._said, self.summary = said, said.summary
            if said.error is not None:
                raise said.error
        return said

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            reason = reason_of(error)
        else:
            reason = "its script has left" if error is None else f"{type(error).__name__}: {error}"[:200]
        end = self._turns.leave(self._thread, reason)
        if end is None:
            log.warning("the node did not end in time: it is left to the end of the process")
        elif end.error is not None and not isinstance(
            end.error, (ScriptLeft, KeyboardInterrupt, ExchangeError)
        ):
            if error is None:
                raise end.error
            log.warning("while leaving: %s", end.error)

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    # ------------------------------------------------------------------ in the worker's thread

    def _follow(self) -> None:
        try:
            self._turns.end(End(self._start(self._options, self._on_event, self._setting)))
        except BaseException as error:
            self._turns.end(End(error=error))

    def _setting(self, runfile: RunFile, options: Options, emit: Listener, ranks: Ranks) -> Setting:
        if ranks.size > 1:
            raise LaunchError("a script with its own loop is one process: start it without torchrun")
        parts = self._turns.parts(runfile)
        trained = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
        return assemble(
            runfile,
            options,
            emit,
            ranks,
            device=trained[0].device,
            data=OwnSamples(parts.samples, parts.data),
            model=OwnModel(parts, self._turns),
            optimizer=parts.optimizer,
            parameters=sum(parameter.numel() for parameter in trained),
            evaluates=parts.validate is not None,
            begins=self._turns.begins,
        )


def _compare(expected: list[str], found: list[str]) -> None:
    if expected == found:
        return
    pairs = zip(expected, found, strict=False)
    first = next(((a, b) for a, b in pairs if a != b), None)
    what = (
        f"the run has {len(expected)} tensors, this model {len(found)}"
        if first is None
        else f"where the run has {first[0]!r}, this model has {first[1]!r}"
    )
    raise LaunchError(
        f"this is not the model of the run: {what}; 'atoll run init --model FILE.py:FUNCTION' writes the run "
        "file of another model"
    )


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _log(event: Event) -> None:
    if isinstance(event, Notice):
        log.warning("%s", event.text)
