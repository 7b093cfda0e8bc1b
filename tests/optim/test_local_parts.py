"""The parts of local steps by themselves: outer step, error feedback, anchor, fragments."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from optim.local.anchor import Anchor
from optim.local.error_feedback import ErrorFeedback
from optim.local.fragments import split
from optim.local.outer import OuterStep, decay_factor, outer_reference
from optim.roles import classify


@pytest.mark.parametrize("outer", ["average", "sgd", "nesterov"])
def test_the_outer_step_is_that_of_the_papers(outer) -> None:
    generator = torch.Generator().manual_seed(0)
    step = OuterStep(outer, 0.7, 0.9)
    step.add_bucket("w", 50)
    shared, momentum = torch.randn(50, generator=generator), torch.zeros(50)
    ours = shared.clone()
    for _ in range(4):
        mean = torch.randn(50, generator=generator)
        shared, momentum = outer_reference(shared, mean, momentum, outer=outer, lr=0.7, mu=0.9)
        ours -= step.update("w", mean.clone())
        assert torch.equal(ours, shared)
    assert bool(step.tensors()) == (outer == "nesterov")
    if outer == "nesterov":
        assert torch.equal(step.tensors()["optimizer/w/outer_momentum"], momentum)


def test_averaging_is_a_step_of_length_one() -> None:
    mean = torch.randn(9)
    assert torch.equal(OuterStep("average", 1.0, 0.5).update("w", mean.clone()), mean)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("adam", 1.0, 0.5), "outer step"), (("sgd", -1.0, 0.5), "outer_lr"), (("sgd", 1.0, 1.0), "momentum")],
)
def test_outer_steps_out_of_range_are_refused(arguments, word) -> None:
    with pytest.raises(ValueError, match=word):
        OuterStep(*arguments)


def test_decay_of_several_steps() -> None:
    assert decay_factor(0.1, 0.0, 10**6) == 1.0
    assert decay_factor(0.1, 0.5, 3) == 0.95 * 0.95 * 0.95


class TestErrorFeedback:
    def setup_method(self) -> None:
        self.feedback = ErrorFeedback()
        self.feedback.add_bucket("w", 3)
        self.error = self.feedback.errors["w"]

    def propose(self, *delta: float) -> torch.Tensor:
        corrected = self.feedback.correct("w", torch.tensor(delta))
        self.feedback.propose("w", corrected)
        return corrected.clone()

    def test_what_the_code_lost_stays(self) -> None:
        self.propose(1.0, 2.0, 3.0)
        self.feedback.settle("w", lambda: torch.tensor([1.0, 1.0, 4.0]))
        assert self.error.tolist() == [0.0, 1.0, -1.0]
        assert self.propose(1.0, 1.0, 1.0).tolist() == [1.0, 2.0, 0.0]

    def test_all_stays_of_what_was_not_counted(self) -> None:
        self.propose(1.0, 2.0, 3.0)
        self.feedback.settle("w", None)
        assert self.error.tolist() == [1.0, 2.0, 3.0]

    def test_nothing_changes_without_a_proposal(self) -> None:
        self.error.fill_(2.0)
        self.feedback.settle("w", None)
        self.feedback.settle("w", lambda: torch.ones(3))
        assert self.error.tolist() == [2.0, 2.0, 2.0]

    def test_the_last_of_two_proposals_counts_and_the_error_enters_once(self) -> None:
        self.error.fill_(1.0)
        self.propose(1.0, 1.0, 1.0)
        assert self.propose(5.0, 5.0, 5.0).tolist() == [6.0, 6.0, 6.0]
        self.feedback.settle("w", lambda: torch.tensor([4.0, 4.0, 4.0]))
        assert self.error.tolist() == [2.0, 2.0, 2.0]

    def test_a_proposal_that_was_dropped(self) -> None:
        self.propose(1.0, 1.0, 1.0)
        self.feedback.drop()
        self.feedback.settle("w", None)
        assert self.error.tolist() == [0.0, 0.0, 0.0]

    def test_buckets_without_feedback_pass_through(self) -> None:
        delta = torch.ones(2)
        assert self.feedback.correct("other", delta) is delta
        self.feedback.propose("other", delta)
        assert not self.feedback.sent
        assert list(self.feedback.tensors()) == ["optimizer/w/error"]


def test_the_anchor_is_a_copy_and_gives_differences() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    roles = classify(net)
    anchor = Anchor(roles)
    before = {role.name: role.parameter.detach().clone() for role in roles}
    vectors = tuple(role for role in roles if role.role == "vector")
    with torch.no_grad():
        for role in roles:
            role.parameter.sub_(0.5)
    assert all(torch.equal(anchor.tensors[name], value) for name, value in before.items())
    delta = anchor.delta(vectors)
    assert torch.equal(delta, torch.cat([before[role.name] - role.parameter.detach() for role in vectors]))
    anchor.merge(vectors[0], 0.25)
    live = before[vectors[0].name] - 0.5
    assert torch.equal(vectors[0].parameter, live * 0.75 + before[vectors[0].name] * 0.25)
    with torch.no_grad():
        vectors[1].parameter[0] = torch.nan
    anchor.merge(vectors[1], 0.25)
    anchor.restore(vectors[0])
    assert all(torch.equal(role.parameter, before[role.name]) for role in vectors)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.data())
def test_fragments_are_balanced_runs(sizes, data) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    runs = split(sizes, parts)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert len(runs) == parts and all(len(run) for run in runs)
    largest = max(sum(sizes[index] for index in run) for run in runs)
    every = itertools.combinations(range(1, len(sizes)), parts - 1)
    cuts = [[0, *inner, len(sizes)] for inner in every]
    assert largest == min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)


def test_more_fragments_than_buckets() -> None:
    with pytest.raises(ValueError, match="3 buckets cannot be cut in 4 fragments"):
        split([1, 1, 1], 4)
