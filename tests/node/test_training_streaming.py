"""Contributions that are sent while they are being computed, and batches that are read in several passes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from node.clocks import Clocks
from node.events import Abstained, RoundDone
from node.exchange.base import RoundOrder, RoundResult
from node.exchange.filling import Filling
from node.exchange.local import LocalExchange
from optim.methods import build_method
from protos.runfile import RunFile
from tests.node.tiny import BATCH, CONTEXT, Node, TinyModel, alone, equal, run_file

METHODS: dict[str, dict[str, Any]] = {
    "sign-muon": {},
    "signum": {},
    "ddp-adamw": {},
    "muloco": {"local_steps": 4},
    "lordo": {"local_steps": 4},
}


def run_of(method: str, rounds: int = 4) -> RunFile:
    return run_file(rounds, method, METHODS[method])


class Watching:
    """A local exchange that keeps how far each contribution was when it was handed over."""

    def __init__(self, inner: LocalExchange) -> None:
        self._inner = inner
        self.fillings: list[Filling] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reduce(
        self,
        order: RoundOrder,
        payload: torch.Tensor | None,
        abstain_reason: str = "",
        filling: Filling | None = None,
    ) -> RoundResult:
        if filling is not None:
            self.fillings.append(filling)
        return self._inner.reduce(order, payload, abstain_reason, filling)


@pytest.mark.parametrize("method", METHODS)
def test_a_contribution_that_is_sent_as_it_is_computed_is_the_same(method: str) -> None:
    run = run_of(method)
    plain, streamed = Node(run), Node(run, overlap=True)
    first, second = plain.run(), streamed.run()
    assert [event.digest for event in streamed.of(RoundDone)] == [
        event.digest for event in plain.of(RoundDone)
    ]
    assert equal(streamed.optimizer.local_tensors(), plain.optimizer.local_tensors())
    assert (first.loss, first.tokens) == (second.loss, second.tokens)


def test_first_bytes_are_final_before_the_backward_pass_is_over() -> None:
    run, model = run_of("sign-muon"), TinyModel()
    optimizer = build_method(run.method, model)
    exchange = Watching(alone(run, optimizer))
    final: list[int] = []

    def last_gradient(parameter: torch.Tensor) -> None:
        if len(exchange.fillings) > len(final):
            final.append(exchange.fillings[-1].final)

    model.inner.weight.register_post_accumulate_grad_hook(last_gradient)
    Node(run, exchange, model=model, optimizer=optimizer, overlap=True).run()
    assert len(final) >= run.run.rounds - 1  # the thread may come to its first contribution late
    assert optimizer.tables.of(0).buckets[0].name == "outer.weight"
    assert max(final) >= optimizer.tables.of(0).buckets[0].nbytes
    assert all(filling.finished and filling.final == filling.nbytes for filling in exchange.fillings)


def test_gradients_that_are_only_noted_are_no_phase() -> None:
    ticks = itertools.count()  # a second a look: no two spans are so close that they become one
    node = Node(run_of("sign-muon"), overlap=True, clocks=Clocks(wall=lambda: float(next(ticks))))
    node.run()
    spans = [[name for name, *_ in event.spans] for event in node.of(RoundDone)]
    stacks, parameters = 3, 6  # two matrices, and all vectors together
    assert len(node.parameters()) == parameters
    assert {names.count("propose") for names in spans} == {stacks + 1}, "the last is that of the end"


class Poisoned(TinyModel):
    """The gradient of the first layer, which comes last, is not finite in the given call."""

    def __init__(self, poisoned: int) -> None:
        super().__init__()
        self.calls, self._poisoned = 0, poisoned
        self.inner.weight.register_hook(self._spoil)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient * (math.inf if self.calls - 1 == self._poisoned else 1.0)


@pytest.mark.parametrize("method", ["sign-muon", "ddp-adamw"])
def test_bytes_on_their_way_are_withdrawn_when_a_later_gradient_is_not_finite(method: str) -> None:
    run = run_of(method)
    plain, streamed = Node(run, model=Poisoned(1)), Node(run, model=Poisoned(1), overlap=True)
    plain.run()
    streamed.run()
    for node in (plain, streamed):
        assert [event.round for event in node.of(Abstained)] == [1]
        assert [event.counted for event in node.of(RoundDone)] == [True, False, True, True]
        assert all(tensor.isfinite().all() for tensor in node.optimizer.local_tensors().values())
    digests = [[event.digest for event in node.of(RoundDone)] for node in (plain, streamed)]
    # momenta of votes that were on their way have taken their gradients in: what follows may differ
    same = 2 if streamed.optimizer.local_tensors() else 4
    assert digests[0][:same] == digests[1][:same]
    assert digests[1][0] == digests[1][1] != digests[1][2]


def test_a_failure_in_the_backward_pass_leaves_nobody_waiting() -> None:
    class Failing(TinyModel):
        def loss(self, tokens: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    run, model = run_of("sign-muon"), Failing()
    optimizer = build_method(run.method, model)
    exchange = Watching(alone(run, optimizer))
    with pytest.raises(RuntimeError, match="out of memory"):
        Node(run, exchange, model=model, optimizer=optimizer, overlap=True).run()
    for filling in exchange.fillings:
        assert not filling.wait(30.0)


@pytest.mark.parametrize("accumulate", [2, 3, 50])
def test_a_batch_in_several_passes_is_the_batch(accumulate: int) -> None:
    run = run_of("ddp-adamw")
    whole, parts = Node(run), Node(run, accumulate=accumulate)
    first, second = whole.run(), parts.run()
    assert second.tokens == first.tokens == 4 * BATCH * CONTEXT
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    for name, tensor in whole.parameters().items():
        torch.testing.assert_close(parts.parameters()[name], tensor, rtol=0, atol=2e-4)
    passes = min(accumulate, BATCH)
    assert len(parts.data.read) == 4 * passes
    assert sum(count for _, count, _ in parts.data.read) == 4 * BATCH
