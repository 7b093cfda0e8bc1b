"""tally and Tally: the weighted majority equals integer sums of +-1, on every backend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from optim import bits
from optim.bits import backends, reference

Bytes = NDArray[np.uint8]

COUNTS = [*range(1, 34), 64, 100, 256]


def available() -> list[str]:
    """The CPU backends of this environment: numpy always, numba where it is installed."""
    try:
        backends.load("numba")
    except ImportError:
        return ["numpy"]
    return ["numpy", "numba"]


@pytest.fixture(params=["numpy", "numba"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each CPU backend in turn, as the one of the process."""
    if request.param not in available():
        pytest.skip("numba is not installed")
    monkeypatch.setattr(backends, "_chosen", backends.load(request.param))
    return str(request.param)


def random_votes(count: int, nbytes: int, rng: np.random.Generator, p: float = 0.5) -> list[Bytes]:
    """Packed votes whose bits are 1 with probability ``p``."""
    return list(np.packbits(rng.random((count, nbytes * 8)) < p, axis=1, bitorder="little"))


def signs(vote: Bytes) -> NDArray[np.int8]:
    """A packed vote as +-1."""
    return np.where(np.unpackbits(vote, bitorder="little") == 1, 1, -1).astype(np.int8)


def by_definition(votes: list[Bytes], weights: list[int] | None, casting: int) -> Bytes:
    """The packed result of the reference form."""
    return reference.pack(reference.majority([signs(vote) for vote in votes], weights, casting=casting))


def streamed(votes: list[Bytes], weights: list[int] | None, casting: int, group: int) -> Bytes:
    """The result of a streaming tally that takes ``group`` votes at a time."""
    of_row = [1] * len(votes) if weights is None else weights
    tally = bits.Tally(votes[0].size, sum(of_row))
    for i in range(0, len(votes), group):
        if group == 1:
            tally.add(votes[i], of_row[i])
        else:
            tally.add_group(votes[i : i + group], of_row[i : i + group])
    assert tally.total_weight == sum(of_row)
    return tally.finish(votes[casting])


@pytest.mark.parametrize("count", COUNTS)
def test_majority_equals_integer_sums(count: int, backend: str) -> None:
    rng = np.random.default_rng(count)
    for p in (0.5, 0.3):
        votes, casting = random_votes(count, 128, rng, p), int(rng.integers(count))
        result = bits.tally(votes, casting=casting)
        np.testing.assert_array_equal(result, by_definition(votes, None, casting))
        if count <= 127:
            narrow = np.sum([signs(vote) for vote in votes], axis=0, dtype=np.int8)
            decided = np.where(narrow == 0, signs(votes[casting]), np.sign(narrow))
            np.testing.assert_array_equal(signs(result), decided)


@pytest.mark.parametrize("highest", [2, 3, 19, 255, 65535])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 100])
def test_weighted_majority_equals_integer_sums(count: int, highest: int, backend: str) -> None:
    rng = np.random.default_rng(count * highest)
    votes = random_votes(count, 128, rng)
    weights = [int(weight) for weight in rng.integers(1, highest + 1, count)]
    casting = int(rng.integers(count))
    wanted = by_definition(votes, weights, casting)
    np.testing.assert_array_equal(bits.tally(votes, weights, casting=casting), wanted)
    for group in (1, 3, 16):
        np.testing.assert_array_equal(streamed(votes, weights, casting, group), wanted)


@pytest.mark.parametrize("nbytes", [64, 4032, 4096, 4160, 65536, 65600, 140032])
@pytest.mark.parametrize("count", [2, 3, 8, 20])
def test_tiles_and_chunks_are_seamless(count: int, nbytes: int, backend: str) -> None:
    votes = random_votes(count, nbytes, np.random.default_rng(nbytes))
    wanted = by_definition_fast(votes, 1)
    np.testing.assert_array_equal(bits.tally(votes, casting=1), wanted)
    np.testing.assert_array_equal(streamed(votes, None, 1, 8), wanted)


def by_definition_fast(votes: list[Bytes], casting: int) -> Bytes:
    """Majority by numpy sums, for votes too long for the reference form."""
    total = np.sum([signs(vote) for vote in votes], axis=0, dtype=np.int64)
    return np.packbits((total > 0) | ((total == 0) & (signs(votes[casting]) > 0)), bitorder="little")


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("count", [3, 18])
def test_results_larger_than_the_cache(count: int, offset: int, backend: str) -> None:
    rng, nbytes = np.random.default_rng(1), (2 << 20) + 192
    votes = [np.frombuffer(rng.bytes(nbytes), np.uint8) for _ in range(count)]
    memory = np.full(nbytes + 192, 0xAA, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    out = memory[start : start + nbytes]
    assert bits.tally(votes, casting=1, out=out) is out
    ends = slice(0, 8192), slice(nbytes - 8192, nbytes), slice(1 << 20, (1 << 20) + 8192)
    for part in ends:
        wanted = by_definition_fast([vote[part] for vote in votes], 1)
        np.testing.assert_array_equal(out[part], wanted)
    assert (memory[:start] == 0xAA).all() and (memory[start + nbytes :] == 0xAA).all()
    if count == 3:
        np.testing.assert_array_equal(streamed(votes, None, 1, 3), out)


def test_many_heavy_votes(backend: str) -> None:
    rng = np.random.default_rng(3)
    votes = random_votes(1024, 64, rng)
    for weights in (None, [65535] * 1024, [int(w) for w in rng.integers(1, 65536, 1024)]):
        wanted = by_definition(votes, weights, 1000)
        np.testing.assert_array_equal(bits.tally(votes, weights, casting=1000), wanted)
        np.testing.assert_array_equal(streamed(votes, weights, 1000, 300), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 33])
def test_votes_of_tensors_with_zeros_and_nan(count: int, dtype: torch.dtype, backend: str) -> None:
    generator = torch.Generator().manual_seed(count)
    specials = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 1.0])
    seed, n = bits.zero_seed(4, count), 700
    packed, voted = [], []
    for _ in range(count):
        x = torch.randn(n, generator=generator)
        chosen = torch.rand(n, generator=generator) < 0.3
        x = torch.where(chosen, specials[torch.randint(8, (n,), generator=generator)], x).to(dtype)
        x[100:300] = 0.0  # an untouched row: all voters agree on its hash bits
        packed.append(bits.pack(x, seed=seed)[0].numpy())
        integers, name = (np.uint32, "float32") if dtype == torch.float32 else (np.uint16, "bfloat16")
        view = x.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy().view(integers)
        voted.append(reference.signs(view, name, seed)[0])
    result = bits.tally(packed, casting=count - 1)
    wanted = reference.majority(voted, casting=count - 1)
    np.testing.assert_array_equal(result, reference.pack(wanted))
    assert not np.unpackbits(result, bitorder="little")[n:].any(), "a pad bit was voted"
    hashed, _ = bits.pack(torch.zeros(n), seed=seed)
    unpacked = bits.unpack(torch.from_numpy(result), n)
    assert torch.equal(unpacked[100:300], bits.unpack(hashed, n)[100:300])


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_properties_of_the_majority(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40), "count")
    weights = data.draw(st.none() | st.lists(st.integers(1, 300), min_size=count, max_size=count), "weights")
    casting = data.draw(st.integers(0, count - 1), "casting")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    order = data.draw(st.permutations(range(count)), "order")
    votes = random_votes(count, 64, rng, data.draw(st.sampled_from([0.2, 0.5, 0.6]), "p"))
    of_row = [1] * count if weights is None else weights
    wanted = by_definition(votes, weights, casting)
    margin = np.abs(
        np.sum([w * signs(v).astype(np.int64) for v, w in zip(votes, of_row, strict=True)], axis=0)
    )
    flipped = set(order[: data.draw(st.integers(0, count), "flips")])
    attacked = [~vote if i in flipped else vote for i, vote in enumerate(votes)]
    influence = sum(of_row[i] for i in flipped)
    for name in available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends, "_chosen", backends.load(name))
            result = bits.tally(votes, weights, casting=casting)
            np.testing.assert_array_equal(result, wanted)
            # the order of the voters is of no account, but for who breaks a tie
            shuffled = [votes[i] for i in order], [of_row[i] for i in order]
            np.testing.assert_array_equal(bits.tally(*shuffled, casting=order.index(casting)), wanted)
            if sum(of_row) % 2:
                np.testing.assert_array_equal(bits.tally(*shuffled, casting=0), wanted)
            # voters of weight f that turn their votes move the sum by at most 2f
            safe = np.packbits(margin > 2 * influence, bitorder="little")
            moved = bits.tally(attacked, weights, casting=casting) ^ result
            assert not (moved & safe).any()
            # opposite votes, opposite result
            opposite = bits.tally([~vote for vote in votes], weights, casting=casting)
            np.testing.assert_array_equal(opposite, ~result)
            # a weight is that many votes
            if sum(of_row) <= 1000:
                repeated = [v for v, w in zip(votes, of_row, strict=True) for _ in range(w)]
                first = sum(of_row[:casting])
                np.testing.assert_array_equal(bits.tally(repeated, casting=first), wanted)
            for group in (1, 5, 16):
                np.testing.assert_array_equal(streamed(votes, weights, casting, group), wanted)


@pytest.mark.parametrize("count", [1, 2, 4, 9, 64])
def test_identical_votes_are_the_result(count: int, backend: str) -> None:
    (vote,) = random_votes(1, 256, np.random.default_rng(count))
    np.testing.assert_array_equal(bits.tally([vote] * count, casting=0), vote)
    np.testing.assert_array_equal(bits.tally([vote] * count, [7] * count, casting=0), vote)


def test_two_voters_agree_or_follow_the_casting_vote(backend: str) -> None:
    a, b = random_votes(2, 64, np.random.default_rng(0))
    np.testing.assert_array_equal(bits.tally([a, b], casting=0), a)
    np.testing.assert_array_equal(bits.tally([a, b], casting=1), b)
    np.testing.assert_array_equal(bits.tally([a, b], [1, 2], casting=0), b)


def test_counters_hold_their_full_weight(backend: str) -> None:
    ones = np.full(128, 0xFF, np.uint8)
    for most in (1, 2, 3, 4, 7, 8, 9, 65535, 131070):
        tally = bits.Tally(128, most)
        left = most
        while left:
            weight = min(left, 65535)
            tally.add(ones, weight)
            left -= weight
        np.testing.assert_array_equal(tally.finish(~ones), ones)
        with pytest.raises(ValueError, match="more than max_weight"):
            tally.add(ones)


def test_a_streaming_tally_may_go_on_or_start_over(backend: str) -> None:
    rng = np.random.default_rng(8)
    votes = random_votes(6, 8256, rng)
    tally, out = bits.Tally(8256, 1000), np.empty(8256, np.uint8)
    for _ in range(2):
        for i, vote in enumerate(votes):
            reused = vote.copy()
            tally.add(reused)
            reused[:] = 0  # the tally must not look at it again
            assert tally.finish(votes[0], out) is out
            np.testing.assert_array_equal(out, bits.tally(votes[: i + 1], casting=0))
        tally.reset()
        assert tally.total_weight == 0
    with pytest.raises(ValueError, match="no vote was added"):
        tally.finish(votes[0])


def test_a_refused_group_adds_nothing(backend: str) -> None:
    votes = random_votes(3, 64, np.random.default_rng(8))
    tally = bits.Tally(64, 3)
    tally.add(votes[0])
    with pytest.raises(ValueError, match="total weight would be 4"):
        tally.add_group(votes)
    with pytest.raises(ValueError, match=r"votes\[1\] has 128 bytes where 64"):
        tally.add_group([votes[0], np.zeros(128, np.uint8)])
    np.testing.assert_array_equal(tally.finish(votes[1]), votes[0])


def test_rows_of_any_kind_and_address(tmp_path: Path, backend: str) -> None:
    votes = random_votes(20, 4160, np.random.default_rng(5))
    wanted = by_definition_fast(votes, 2)
    slab = np.zeros((20, 4160 + 64), np.uint8)
    slab[:, 7 : 7 + 4160] = votes
    rows = slab[:, 7 : 7 + 4160]
    np.testing.assert_array_equal(bits.tally(rows, casting=2), wanted)
    np.testing.assert_array_equal(bits.tally(rows[::-1], casting=17), wanted)
    np.testing.assert_array_equal(bits.tally(rows[:1], casting=0), votes[0])

    messages = [np.frombuffer(b"header" + vote.tobytes(), np.uint8)[6:] for vote in votes]
    assert not messages[0].flags.writeable
    np.testing.assert_array_equal(bits.tally(messages, casting=2), wanted)
    buffers = [np.frombuffer(bytearray(3) + vote.tobytes(), np.uint8, offset=3) for vote in votes]
    np.testing.assert_array_equal(bits.tally(tuple(buffers), casting=2), wanted)

    (tmp_path / "votes").write_bytes(b"".join(vote.tobytes() for vote in votes))
    mapped = np.memmap(tmp_path / "votes", np.uint8, "r", shape=(20, 4160))
    np.testing.assert_array_equal(bits.tally(mapped, casting=2), wanted)
    np.testing.assert_array_equal(bits.tally(list(mapped), casting=2), wanted)
    weights = np.arange(1, 21, dtype=np.uint16)
    by_row = bits.tally(votes, [int(w) for w in weights], casting=2)
    np.testing.assert_array_equal(bits.tally(mapped, weights, casting=2), by_row)  # type: ignore[arg-type]


def test_threads_share_nothing(backend: str) -> None:
    rng = np.random.default_rng(6)
    votes = random_votes(12, 16384, rng)
    chunks = [slice(start, start + 1024) for start in range(0, 16384, 1024)]
    whole = bits.tally(votes, casting=3)
    out = np.zeros_like(whole)

    def count(chunk: slice) -> None:
        bits.tally([vote[chunk] for vote in votes], casting=3, out=out[chunk])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(count, chunk) for chunk in chunks * 4]:
            future.result(timeout=60)
    np.testing.assert_array_equal(out, whole)


def frozen() -> Bytes:
    """A read-only array."""
    array = np.zeros(64, np.uint8)
    array.flags.writeable = False
    return array


V = np.zeros(64, np.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(votes=[], casting=0), ValueError, "at least one vote"),
        (dict(votes=[V, V], casting=2), ValueError, "casting vote 2"),
        (dict(votes=[V, V], casting=-1), ValueError, "casting vote -1"),
        (dict(votes=[V, np.zeros(128, np.uint8)], casting=0), ValueError, r"votes\[1\] has 128 bytes"),
        (dict(votes=[np.zeros(63, np.uint8)], casting=0), ValueError, "multiple of 64"),
        (dict(votes=[np.zeros(0, np.uint8)], casting=0), ValueError, "multiple of 64"),
        (dict(votes=[V.astype(np.int8)], casting=0), TypeError, "int8"),
        (dict(votes=[np.zeros(128, np.uint8)[::2]], casting=0), TypeError, "contiguous"),
        (dict(votes=[V, b"x" * 64], casting=0), TypeError, "bytes"),
        (dict(votes=[b"x" * 64], casting=0), TypeError, "bytes"),
        (dict(votes=V, casting=0), TypeError, "two-dimensional"),
        (dict(votes=np.zeros((2, 128), np.uint8)[:, ::2], casting=0), TypeError, "contiguous"),
        (dict(votes=[V, V], weights=[1], casting=0), ValueError, "1 weights for 2 votes"),
        (dict(votes=[V, V], weights=[1, 0], casting=0), ValueError, "weight 0"),
        (dict(votes=[V, V], weights=[1, 65536], casting=0), ValueError, "65535"),
        (dict(votes=[V, V], weights=[1, 1.5], casting=0), TypeError, "integer"),
        (dict(votes=[V, V], weights=[1, True], casting=0), TypeError, "integer"),
        (dict(votes=[V], casting=0, out=np.zeros(128, np.uint8)), ValueError, "out has 128 bytes"),
        (dict(votes=[V], casting=0, out=frozen()), ValueError, "read-only"),
    ],
)
def test_tally_refuses(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bits.tally(**arguments)


@pytest.mark.parametrize(
    ("nbytes", "most", "words"),
    [(0, 1, "multiple"), (63, 1, "multiple"), (64, 0, "max_weight 0"), (64, 2**31, "max_weight")],
)
def test_streaming_tally_refuses(nbytes: int, most: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bits.Tally(nbytes, most)
    tally = bits.Tally(64, 10)
    with pytest.raises(ValueError, match="weight 0"):
        tally.add(V, 0)
    tally.add(V)
    with pytest.raises(ValueError, match="casting_vote has 128 bytes"):
        tally.finish(np.zeros(128, np.uint8))
