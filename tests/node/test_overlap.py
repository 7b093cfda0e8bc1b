"""Micro-steps during the exchange: what runs when, and interrupts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import Saving, find
from node.events import Notice, RoundDone, RoundMissed
from node.exchange.base import RoundOrder, RoundResult
from node.exchange.local import LocalExchange
from node.exchange.trouble import RoundLost
from tests.node.local_sgd import LocalSgd, local_node, optimizer_of
from tests.node.tiny import (
    BATCH,
    CONTEXT,
    STOP,
    Node,
    ScriptedExchange,
    TinyModel,
    alone,
    equal,
    opened,
    run_file,
)

STEPS = 4
DEADLINE = 100.0


class Watched(TinyModel):
    """Tells how many losses have been computed."""

    def __init__(self, at: int = -1, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.calls, self._at, self._then = 0, at, then

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self._at:
            self._then()
        return super().loss(tokens)


class InTheBackground:
    """An exchange whose reduction does not return before all micro-steps of its round are made."""

    def __init__(self, inner: LocalExchange, model: Watched) -> None:
        self._inner, self._model = inner, model
        self.started_after: list[int] = []
        self.threads: list[str] = []
        self.last = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reduce(self, order: RoundOrder, payload: torch.Tensor | None, *rest: Any) -> RoundResult:
        self.started_after.append(self._model.calls)
        self.threads.append(threading.current_thread().name)
        assert self.last.wait(DEADLINE)
        return self._inner.reduce(order, payload, *rest)


def test_last_micro_steps_run_while_the_exchange_is_on_its_way() -> None:
    gate: list[InTheBackground] = []
    model = Watched(STEPS, lambda: gate[0].last.set())
    optimizer = LocalSgd(model, STEPS, send_after=3, mix=0.5)
    run = run_file(1)
    exchange = InTheBackground(alone(run, optimizer), model)
    gate.append(exchange)
    node = Node(run, exchange, model=model, optimizer=optimizer)
    node.run()
    assert exchange.started_after == [3]
    assert exchange.threads == ["atoll-round-0"]
    names = [name for name, _, _ in optimizer.calls]
    assert names == ["step", "step", "step", "propose", "step", "counted"]
    (event,) = node.of(RoundDone)
    assert (event.micro_steps, event.tokens) == (STEPS, STEPS * BATCH * CONTEXT)
    assert not equal(node.parameters(), optimizer.shared_tensors())  # the last step is this node's own
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("atoll-round")]


def test_without_overlap_no_thread_is_started() -> None:
    model = Watched()
    optimizer = LocalSgd(model, STEPS)
    run = run_file(2)
    exchange = InTheBackground(alone(run, optimizer), model)
    exchange.last.set()
    Node(run, exchange, model=model, optimizer=optimizer).run()
    assert exchange.threads == [threading.current_thread().name] * 2
    assert exchange.started_after == [STEPS, 2 * STEPS]


def test_round_lost_during_the_overlap_is_told_as_missed() -> None:
    exchange = ScriptedExchange([opened(0, lease_count=STEPS), STOP], {0: RoundLost("cut off")})
    node = local_node(exchange=exchange, send_after=2)
    assert node.run().round == 0
    assert [(event.round, event.reason) for event in node.of(RoundMissed)] == [(0, "cut off")]
    assert [name for name, _, _ in optimizer_of(node).calls] == ["step", "step", "propose", "step", "step"]


@pytest.mark.parametrize("at", [1, 3])
def test_interrupt_ends_the_run_after_the_micro_step_before_and_during_the_overlap(
    tmp_path: Path, at: int
) -> None:
    model = Watched(at, lambda: node.worker.interrupt())
    node = local_node(9, model=model, send_after=2, saving=Saving(tmp_path))
    summary = node.run()
    assert (summary.round, summary.reason) == (0, "interrupted by its user")
    assert model.calls == at
    assert find(tmp_path).name == "round-00000000"


def test_interrupted_wait_of_an_overlap_ends_at_once_and_saves(tmp_path: Path) -> None:
    class Silent(ScriptedExchange):
        def reduce(self, order: RoundOrder, payload: torch.Tensor | None, *rest: Any) -> RoundResult:
            assert waiting.wait(DEADLINE)
            os.kill(os.getpid(), signal.SIGINT)
            assert release.wait(DEADLINE)
            raise RoundLost("closed")

    waiting, release = threading.Event(), threading.Event()
    node = local_node(
        exchange=Silent([opened(0, lease_count=STEPS * BATCH)], {}), send_after=3, saving=Saving(tmp_path)
    )
    interruptible = node.worker._interruptible

    def watched() -> Any:
        if optimizer_of(node).calls:
            waiting.set()
        return interruptible()

    node.worker._interruptible = watched  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            node.run()
    finally:
        release.set()
    assert not node.worker.waiting
    node.worker.save()
    assert find(tmp_path).name == "round-00000000"
    assert [event.text for event in node.of(Notice)] == [
        "the stop came within round 1: the saved momenta are 4 gradients ahead"
    ]
