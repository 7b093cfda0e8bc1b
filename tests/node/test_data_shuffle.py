"""The permutation without a table, and the split into training and validation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.shuffle import ROUNDS, draw, permute, permute_one
from node.split import Split

keys_of = st.lists(st.integers(0, 2**64 - 1), min_size=ROUNDS, max_size=ROUNDS)


@given(size=st.integers(1, 3000), keys=keys_of)
@settings(deadline=None, max_examples=60)
def test_every_index_comes_once(size: int, keys: list[int]) -> None:
    images = permute(np.arange(size), size, keys)
    assert np.array_equal(np.sort(images), np.arange(size))


@given(size=st.integers(1, 2**62 - 1), keys=keys_of, data=st.data())
@settings(deadline=None, max_examples=60)
def test_array_form_equals_the_reference(size: int, keys: list[int], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    images = permute(np.array(indices, dtype=np.int64), size, keys)
    assert images.tolist() == [permute_one(index, size, keys) for index in indices]
    assert all(0 <= image < size for image in images.tolist())


def test_orders_differ_and_look_random() -> None:
    size = 10_000
    first = permute(np.arange(size), size, draw(ROUNDS, 0, 0))
    second = permute(np.arange(size), size, draw(ROUNDS, 0, 1))
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    assert np.count_nonzero(first == second) < 10


@given(tokens=st.integers(11, 700_000), data=st.data())
@settings(deadline=None, max_examples=60)
def test_split_gives_each_token_to_one_side_by_its_block(tokens: int, data: st.DataObject) -> None:
    split = Split(tokens)
    held_out = np.arange(tokens) // split.block % 20 == 10
    assert split.block == (8192 if tokens >= 11 * 8192 else tokens // 11)
    assert split.validation_tokens == np.count_nonzero(held_out) > 0
    for ranges, total, positions in (
        (split.train_ranges, split.train_tokens, np.flatnonzero(~held_out)),
        (split.validation_ranges, split.validation_tokens, np.flatnonzero(held_out)),
    ):
        start = data.draw(st.integers(0, total - 1))
        length = data.draw(st.integers(1, total - start))
        read = np.concatenate([np.arange(*piece) for piece in ranges(start, length)])
        assert np.array_equal(read, positions[start : start + length])


def test_the_stated_rule_on_the_embedded_length() -> None:
    split = Split(5_057_320)
    blocks = 5_057_320 // 8192
    assert split.validation_tokens == 8192 * sum(block % 20 == 10 for block in range(blocks + 1))


def test_too_few_tokens_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="at least 11"):
        Split(10)
