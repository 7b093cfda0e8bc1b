"""What the ranks of an island hold while they train: the formula's bytes, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.island_ranks import world
from bench.memory import RANKS, Islands, formula, run_file

SMALL = {"d_model": 128, "layers": 4, "heads": 2, "context": 8}


@pytest.fixture(scope="module")
def islands() -> Iterator[Islands]:
    with world(RANKS) as pool:
        yield Islands(pool)


@pytest.mark.parametrize("method", ["sign-muon", "lordo", "muloco"])
def test_each_rank_holds_what_the_formula_says(method: str, islands: Islands) -> None:
    run = run_file(method, SMALL)
    held, expected = islands.measure(run, RANKS), formula(run, RANKS)
    for one, formal in zip(held, expected, strict=True):
        assert one.weights == one.gradients == formal.weights
        # int64 counters of steps come on top
        assert one.state == pytest.approx(formal.state.device + formal.state.host, rel=1e-3)
        assert one.resting == pytest.approx(formal.resting, rel=0.01), "something else is kept"
        assert 0.8 * formal.peak <= one.peak <= formal.peak
    (alone,) = formula(run, 1)
    assert sum(one.weights for one in held) == alone.weights
    assert max(one.resting for one in held) < 1.1 * sum(one.resting for one in held) / RANKS
