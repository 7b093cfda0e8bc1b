from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.ring import Traffic
from protos.allreduce import BF16_BYTES, ring_bytes


def _play_ring(parameters: int, nodes: int) -> list[int]:
    """Run the two phases of a ring all-reduce on real arrays and count what each node sends, in bytes."""
    rng = np.random.default_rng(parameters + nodes)
    held = [rng.integers(-9, 9, parameters).astype(np.float32) for _ in range(nodes)]
    expected = np.sum(held, axis=0)
    parts = [np.array_split(values, nodes) for values in held]
    sent = [0] * nodes
    for phase in (0, 1):
        for step in range(nodes - 1):
            moving = [(rank + phase - step) % nodes for rank in range(nodes)]
            messages = [parts[rank][part].copy() for rank, part in enumerate(moving)]
            for rank, part in enumerate(moving):
                sent[rank] += messages[rank].nbytes
                receiver = parts[(rank + 1) % nodes]
                receiver[part] = messages[rank] if phase else receiver[part] + messages[rank]
    for rank in range(nodes):
        np.testing.assert_array_equal(np.concatenate(parts[rank]), expected)
    return sent


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7])
def test_the_formula_counts_what_a_ring_sends(nodes: int) -> None:
    parameters = 84 * nodes
    assert _play_ring(parameters, nodes) == [ring_bytes(parameters, nodes)] * nodes


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_fp32_is_8_p_m_minus_1_over_m(parameters: int, nodes: int) -> None:
    assert ring_bytes(parameters, nodes) == pytest.approx(8 * parameters * (nodes - 1) / nodes)
    assert ring_bytes(parameters, nodes, element_bytes=BF16_BYTES) * 2 == pytest.approx(
        ring_bytes(parameters, nodes)
    )
    assert ring_bytes(parameters, nodes) < 8 * parameters or parameters == 0


def test_votes_against_the_ring() -> None:
    votes = Traffic(parameters=8 * 512 * 100, nodes=3, up=512 * 100, down=512 * 100)
    assert votes.bits_per_parameter == 2
    assert votes.ratio == pytest.approx(64 * 2 / 3)
    assert votes.hub_ratio == pytest.approx(32)
    assert Traffic(parameters=10, nodes=1, up=0, down=0).ratio == float("inf")


@pytest.mark.parametrize(("parameters", "nodes", "size"), [(-1, 2, 4), (1, 0, 4), (1, 2, 0)])
def test_nonsense_is_refused(parameters: int, nodes: int, size: int) -> None:
    with pytest.raises(ValueError, match="a ring needs"):
        ring_bytes(parameters, nodes, element_bytes=size)
