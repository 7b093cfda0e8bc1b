"""lowrank: the factors, the warm start, and exact products of whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.codecs import F32, U8, codec_of, reference
from optim.codecs.low_rank import LowRank


def gaussian(shape: tuple[int, ...], seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def of_rank(rank: int, shape: tuple[int, int], seed: int = 0) -> F32:
    return gaussian((shape[0], rank), seed) @ gaussian((rank, shape[1]), seed + 1)


def spectrum(shape: tuple[int, int], power: float, seed: int = 0) -> F32:
    """A matrix whose singular values are 1, 2^-power, 3^-power, ..."""
    short = min(shape)
    left = np.linalg.qr(gaussian((shape[0], short), seed).astype(np.float64))[0]
    right = np.linalg.qr(gaussian((shape[1], short), seed + 1).astype(np.float64))[0]
    return ((left * np.arange(1, short + 1) ** -power) @ right.T).astype(np.float32)


def encoded(name: str, x: F32, state: dict[str, F32] | None = None) -> U8:
    codec = codec_of(name, x.shape)
    out = np.full(codec.nbytes, 0xAA, np.uint8)
    codec.encode(x, out, state=state)
    return out


def relative_error(name: str, x: F32, state: dict[str, F32] | None = None) -> float:
    decoded = codec_of(name, x.shape).decode(encoded(name, x, state))
    return float(np.linalg.norm(x.astype(np.float64) - decoded) / np.linalg.norm(x.astype(np.float64)))


def best_error(x: F32, rank: int) -> float:
    values = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    return float(np.sqrt((values[rank:] ** 2).sum() / (values**2).sum()))


@pytest.mark.parametrize("shape", [(13, 29), (29, 13), (17, 17)])
def test_the_step_is_that_of_the_reference(shape: tuple[int, int]) -> None:
    x, right = gaussian(shape, 3), gaussian((shape[1], 4), 5)
    decoded = codec_of("lowrank:4", shape).decode(encoded("lowrank:4", x, {"right": right.copy()}))
    left, back = reference.low_rank_factors(x.tolist(), right.T.tolist(), 1)
    expected = np.array(left).T @ np.array(back)
    assert np.abs(decoded - expected).max() < 3e-4 * np.abs(expected).max()


def test_a_cold_start_is_some_steps_from_noise() -> None:
    x = spectrum((31, 47), 0.7)
    codec = codec_of("lowrank:3", x.shape)
    assert isinstance(codec, LowRank)
    assert (encoded("lowrank:3", x) == encoded("lowrank:3", x, codec.state())).all()
    assert relative_error("lowrank:3", x) < 1.02 * best_error(x, 3)


@pytest.mark.parametrize(
    ("rank", "shape"), [(1, (13, 29)), (3, (29, 13)), (5, (5, 40)), (7, (40, 7)), (9, (9, 9)), (4, (4, 1))]
)
def test_a_matrix_of_the_rank_comes_back(rank: int, shape: tuple[int, int]) -> None:
    x = of_rank(rank, shape)
    assert relative_error(f"lowrank:{rank}", x) < 2e-4
    assert relative_error(f"lowrank:{rank + 5}", x) < 2e-4  # a rank above the shorter side is that side
    assert codec_of(f"lowrank:{max(shape)}", shape).nbytes == 8 + 2 * min(shape) * sum(shape)


@pytest.mark.parametrize("shape", [(), (1,), (37,), (1, 37), (37, 1)])
def test_vectors_come_back(shape: tuple[int, ...]) -> None:
    assert relative_error("lowrank:4", gaussian(shape)) < 1e-4


def test_a_warm_start_approaches_the_best_approximation_and_follows_a_drift() -> None:
    x = spectrum((40, 60), 0.5)
    best = best_error(x, 4)
    state = codec_of("lowrank:4", x.shape).state()
    errors = [relative_error("lowrank:4", x, state) for _ in range(12)]
    assert errors[-1] < 1.001 * best
    assert errors[-1] <= errors[0]
    drift = gaussian(x.shape, 9) * np.float32(0.001)
    for _ in range(10):
        x = x + drift
        warm = relative_error("lowrank:4", x, state)
    # one step from where the last tensor ended is worth as much as four from noise
    assert warm < 1.01 * best_error(x, 4)
    assert warm <= relative_error("lowrank:4", x) * 1.001


def test_the_state_holds_unit_columns_whatever_the_size_of_the_tensor() -> None:
    x = spectrum((20, 30), 0.5)
    reached = []
    for size in (2.0**-60, 1.0, 2.0**120):
        state = codec_of("lowrank:3", x.shape).state()
        assert set(state) == {"right"} and state["right"].shape == (30, 3) and not state["right"].any()
        kept = state["right"]
        error = relative_error("lowrank:3", (x * np.float32(size)), state)
        assert error == pytest.approx(best_error(x, 3), rel=0.05)
        assert state["right"] is kept
        assert np.allclose(np.linalg.norm(kept, axis=0), 1, atol=1e-6)
        reached.append(kept)
    assert np.allclose(reached[0], reached[1], atol=1e-4) and np.allclose(reached[1], reached[2], atol=1e-4)


@pytest.mark.parametrize("name", ["lowrank:3", "lowrank:3+1bit"])
def test_neither_zeros_nor_a_refused_tensor_change_the_state(name: str) -> None:
    x = gaussian((11, 13))
    codec = codec_of(name, x.shape)
    state = codec.state()
    assert not encoded(name, np.zeros_like(x), state)[:8].any()
    assert not state["right"].any()
    encoded(name, x, state)
    before = state["right"].copy()
    assert before.any()
    encoded(name, np.zeros_like(x), state)
    assert (state["right"] == before).all()
    x[3, 4] = np.nan
    with pytest.raises(ValueError, match="entry 43 is nan"):
        encoded(name, x, state)
    assert (state["right"] == before).all()


def test_directions_that_were_missing_come_back() -> None:
    first, second = of_rank(1, (19, 23), 1), of_rank(3, (19, 23), 5)
    state = codec_of("lowrank:3", first.shape).state()
    for _ in range(3):
        assert relative_error("lowrank:3", first, state) < 2e-4
    errors = [relative_error("lowrank:3", second, state) for _ in range(4)]
    assert errors[-1] < 5e-4


def test_a_state_of_another_shape_is_refused() -> None:
    x = gaussian((11, 13))
    with pytest.raises(ValueError, match=r"right factor has shape \(11, 3\)"):
        encoded("lowrank:3", x, {"right": np.zeros((11, 3), np.float32)})


@pytest.mark.parametrize("rest", ["bf16", "int8", "int4:64", "2bit", "ternary", "1bit", "1bit-row"])
def test_a_residual_is_encoded_with_its_codec(rest: str) -> None:
    x = spectrum((37, 53), 1.0) + gaussian((37, 53), 8) * np.float32(0.003)
    both, low = f"lowrank:4+{rest}", "lowrank:4"
    start = codec_of(low, x.shape).nbytes
    data = encoded(both, x)
    assert (data[:start] == encoded(low, x)).all()
    remainder = x - codec_of(low, x.shape).decode(data[:start].copy())
    assert (data[start:] == encoded(rest, remainder)).all()
    total = codec_of(low, x.shape).decode(data[:start].copy()) + codec_of(rest, x.shape).decode(data[start:])
    assert (codec_of(both, x.shape).decode(data) == total).all()
    assert relative_error(both, x) < min(relative_error(low, x), relative_error(rest, x))


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), rank=st.integers(1, 9), seed=st.integers(0, 2**32 - 1)
)
def test_products_are_exact_in_any_order(rows: int, columns: int, rank: int, seed: int) -> None:
    codec = codec_of(f"lowrank:{rank}", (rows, columns))
    rank = min(rank, rows, columns)
    random = np.random.default_rng(seed)
    left = random.choice([-32767, -32766, 0, 1, 32765, 32767], (rows, rank)).astype("<i2")
    right = random.integers(-32767, 32768, (columns, rank)).astype("<i2")
    scales = random.random(2).astype("<f4")

    def decoded(order: list[int]) -> bytes:
        parts = [scales, left[:, order], right[:, order]]
        data = np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8)
        assert not codec.problem(data)
        return codec.decode(data).tobytes()

    order = list(range(rank))
    whole = left.astype(np.int64) @ right.astype(np.int64).T
    expected = (whole * (float(scales[0]) * float(scales[1]))).astype(np.float32) + np.float32(0)
    assert decoded(order) == expected.tobytes()
    assert decoded(random.permutation(rank).tolist()) == decoded(order)


def test_a_large_product_does_not_depend_on_the_order_of_its_sums() -> None:
    shape, rank = (300, 700), 64
    codec, data = codec_of(f"lowrank:{rank}", shape), encoded(f"lowrank:{rank}", gaussian(shape))
    left = data[8 : 8 + 2 * rank * shape[0]].view("<i2").reshape(shape[0], rank)
    right = data[8 + 2 * rank * shape[0] :].view("<i2").reshape(shape[1], rank)
    order = np.random.default_rng(0).permutation(rank)
    other = np.concatenate(
        [data[:8], *(np.ascontiguousarray(f[:, order]).view(np.uint8).reshape(-1) for f in (left, right))]
    )
    assert codec.decode(other).tobytes() == codec.decode(data).tobytes()
