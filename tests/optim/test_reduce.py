"""Reductions in one memory: of simulated nodes, and of a single one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.aggregate import ReducerMemory
from optim.codecs import codec_of
from optim.packs import PayloadError
from optim.reduce import SingleNode, identity, reduce_payloads
from optim.round_optimizer import RoundOptimizer
from protos.buckets import Bucket, BucketTable, MeanRule, TableSchedule
from tests.optim.aggregate_rig import CODECS, Reference, contribution, mixed


def payloads_of(table: BucketTable, count: int, seed: int = 0) -> list[torch.Tensor]:
    return [torch.from_numpy(contribution(seed + i, table)) for i in range(count)]


@pytest.mark.parametrize("codec", CODECS)
def test_rounds_with_a_memory(codec: str) -> None:
    table, memory = mixed(codec), ReducerMemory()
    reference = Reference(table)
    for round_index in range(3):
        payloads = payloads_of(table, 3, 10 * round_index)
        result = reduce_payloads(table, payloads, round_index=round_index, weights=[1, 2, 1], memory=memory)
        assert result is not None and result.shape == (table.result_nbytes,)
        expected = reference.reduce([p.numpy() for p in payloads], round_index, [1, 2, 1])
        assert result.numpy().tobytes() == expected


def test_without_a_memory_every_round_is_the_first() -> None:
    table = mixed("2bit")
    payloads = payloads_of(table, 2)
    results = [reduce_payloads(table, payloads, round_index=4) for _ in range(2)]
    assert torch.equal(results[0], results[1])
    expected = Reference(table).reduce([p.numpy() for p in payloads], 4)
    assert results[0].numpy().tobytes() == expected


def test_votes_and_means_have_weights_of_their_own() -> None:
    """A member's vote counts once, its mean as often as it read samples."""
    table = BucketTable((Bucket.of("v", "majority", [("v", (512,))]), Bucket.of("m", "mean", [("m", (2,))])))
    payloads = torch.zeros(3, table.nbytes, dtype=torch.uint8)
    payloads[0, :64] = 255
    payloads[:, 64:72] = torch.tensor([[1.0, 8.0], [3.0, 0.0], [3.0, 0.0]]).view(torch.uint8)
    result = reduce_payloads(table, list(payloads), round_index=0, weights=[1, 1, 1], mean_weights=[6, 1, 1])
    assert not result[:64].any()
    assert result[64:72].view(torch.float32).tolist() == [1.5, 6.0]


def test_nobody_contributes() -> None:
    memory = ReducerMemory()
    assert reduce_payloads(mixed(), [], round_index=0, memory=memory) is None
    assert memory.arrays() == {}


def test_a_contribution_of_another_size() -> None:
    table = mixed()
    short = torch.zeros(table.nbytes - 64, dtype=torch.uint8)
    with pytest.raises(PayloadError, match="contribution 1 has"):
        reduce_payloads(table, [*payloads_of(table, 1), short], round_index=0)


@pytest.mark.parametrize("codec", CODECS)
def test_a_single_node_gets_what_a_coordinator_would_send_it(codec: str) -> None:
    table, alone = mixed(codec), SingleNode()
    reference = Reference(table)
    for round_index in range(3):
        payload = payloads_of(table, 1, round_index)[0]
        result = alone(payload, round_index=round_index, table=table)
        assert result is not None
        assert result.numpy().tobytes() == reference.reduce([payload.numpy()], round_index)
        assert alone(None, round_index=round_index, table=table) is None


def test_a_single_node_keeps_its_payload_where_nothing_is_decoded() -> None:
    table = BucketTable((Bucket.of("v", "majority", [("v", (9,))]), Bucket.of("m", "mean", [("m", (9,))])))
    payload = payloads_of(table, 1)[0]
    alone = SingleNode()
    assert alone(payload, round_index=0, table=table) is payload
    assert identity(payload, round_index=0, table=table) is payload
    assert alone.memory.arrays() == {}


def test_a_rule_for_outliers_does_not_change_a_single_node() -> None:
    buckets = (Bucket.of("m", "mean", [("m", (9,))]),)
    payload = payloads_of(BucketTable(buckets), 1)[0]
    result = SingleNode()(payload, round_index=0, table=BucketTable(buckets, MeanRule(clip=2.0, trim=2)))
    assert torch.equal(result, payload)


class Coarse(RoundOptimizer):
    """Gradient descent by a mean that travels in 2 bits."""

    def __init__(self, parameter: torch.Tensor) -> None:
        bucket = Bucket.of("w", "mean", [("w", tuple(parameter.shape))], codec="fp32", result="2bit")
        self.tables = self.lane = TableSchedule((BucketTable((bucket,)),))
        self.codec = codec_of("2bit", bucket.shape)
        super().__init__([parameter])

    def propose(self, round_index: int, out: torch.Tensor) -> bool:
        gradient = self.param_groups[0]["params"][0].grad
        out.zero_()
        out[: 4 * gradient.numel()] = gradient.reshape(-1).view(torch.uint8)
        return True

    def apply(self, round_index: int, payload: torch.Tensor | None, *, counted: bool = True) -> None:
        parameter = self.param_groups[0]["params"][0]
        assert payload is not None
        parameter -= torch.from_numpy(self.codec.decode(payload.numpy()[: self.codec.nbytes]))

    def shared_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return {}


def test_an_optimizer_by_itself_carries_residuals() -> None:
    """The default reduction remembers what earlier results lost, so that steps add up to the gradients."""
    parameter = torch.nn.Parameter(torch.zeros(16, 16))
    optimizer = Coarse(parameter)
    gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    assert isinstance(optimizer.reduce, SingleNode)
    for _ in range(50):
        parameter.grad = gradient.clone()
        optimizer.step()
        optimizer.round_index += 1
    moved = -parameter.detach().numpy() / 50
    assert np.linalg.norm(moved - gradient.numpy()) < 0.06 * np.linalg.norm(gradient.numpy())
