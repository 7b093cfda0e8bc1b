"""Codecs at the edges of what a tensor can be, what they refuse, and what must not come from a peer."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from optim.codecs import F32, U8, codec_of
from protos.codecs import CodecError, CodecSpec

NAMES = ["fp32", "bf16", "int8", "int8:6", "int4", "2bit", "ternary", "1bit", "1bit-row"]
NAMES += ["lowrank:2", "lowrank:3+1bit-row", "lowrank:1+int4", "lowrank:2+2bit"]
SHAPES = [(1,), (997,), (1, 1), (31, 17), (2, 509), (509, 2), (4, 3, 5)]
LARGEST = float(np.finfo(np.float32).max)


def encoded(name: str, x: F32, seed: int = 0) -> U8:
    codec = codec_of(name, x.shape)
    out = np.full(codec.nbytes, 0xAA, np.uint8)
    codec.encode(x, out, seed=seed)
    assert not codec.problem(out)
    return out


def there_and_back(name: str, x: F32) -> F32:
    decoded = codec_of(name, x.shape).decode(encoded(name, x))
    assert decoded.shape == x.shape and decoded.dtype == np.float32
    return decoded


def gaussian(shape: tuple[int, ...], seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_frozen_tensor_decodes_to_zeros(name: str, shape: tuple[int, ...]) -> None:
    for zero in (0.0, -0.0):
        decoded = there_and_back(name, np.full(shape, zero, np.float32))
        assert not decoded.any()
        if name not in ("fp32", "bf16"):
            assert not np.signbit(decoded).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_zeros_are_a_tensor_of_zeros(name: str, shape: tuple[int, ...]) -> None:
    codec = codec_of(name, shape)
    data = np.zeros(codec.nbytes, np.uint8)
    assert not codec.problem(data)
    decoded = codec.decode(data)
    assert not decoded.any() and not np.signbit(decoded).any()


@pytest.mark.parametrize("name", ["2bit", "ternary", "1bit-row"])
def test_a_frozen_row_among_others_decodes_to_zeros(name: str) -> None:
    x = gaussian((9, 13))
    x[4] = 0
    decoded = there_and_back(name, x)
    assert not decoded[4].any() and decoded[3].any() and decoded[5].any()
    assert not np.signbit(decoded[4]).any()


@pytest.mark.parametrize("name", ["2bit", "1bit", "1bit-row"])
def test_single_zeros_get_both_signs_and_others_with_another_seed(name: str) -> None:
    x = gaussian((8, 300))
    x[:, ::2] = 0
    signs = []
    for seed in (1, 2):
        codec = codec_of(name, x.shape)
        signs.append(codec.decode(encoded(name, x, seed))[:, ::2] > 0)
    assert 0.4 < signs[0].mean() < 0.6
    assert 0.4 < (signs[0] == signs[1]).mean() < 0.6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1.0, -3.7, 1e-20, 1e30])
def test_one_element_comes_back(name: str, value: float) -> None:
    for shape in ((), (1,), (1, 1)):
        x = np.full(shape, value, np.float32)
        decoded = there_and_back(name, x)
        assert np.allclose(decoded, x, rtol=2**-8 if name == "bf16" else 2**-14, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (3, 0, 2)])
def test_a_tensor_without_entries_is_scales_of_zero(name: str, shape: tuple[int, ...]) -> None:
    codec = codec_of(name, shape)
    assert codec.nbytes == CodecSpec.parse(name).nbytes(shape)
    data = encoded(name, np.empty(shape, np.float32))
    assert not data.any()
    assert codec.decode(data).shape == shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_named(name: str, bad: float) -> None:
    x = gaussian((31, 17))
    x[30, 16] = bad
    codec = codec_of(name, x.shape)
    with pytest.raises(ValueError, match=rf"entry 526 is {bad}"):
        codec.encode(x, np.empty(codec.nbytes, np.uint8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_numbers_do_not_become_infinite(name: str, shape: tuple[int, ...]) -> None:
    for x in (
        np.full(shape, LARGEST, np.float32),
        np.where(gaussian(shape) > 0, LARGEST, -LARGEST).astype(np.float32),
        np.clip(gaussian(shape).astype(np.float64) * 2e38, -LARGEST, LARGEST).astype(np.float32),
    ):
        decoded = there_and_back(name, x)
        assert np.isfinite(decoded).all()
        assert decoded.any()
        if CodecSpec.parse(name).kind != "lowrank":
            assert np.abs(decoded.astype(np.float64)).max() <= 2 * np.abs(x.astype(np.float64)).max()


@pytest.mark.parametrize("name", NAMES)
def test_entries_near_the_smallest_scale_decode_to_zeros_or_far_above_subnormal_numbers(name: str) -> None:
    if name in ("fp32", "bf16"):
        return
    for magnitude in (1e-45, 1e-40, 1e-38, 1e-33, 1e-30, 1e-28, 1e-22, 1e-20):
        x = (gaussian((31, 17)) * magnitude).astype(np.float32)
        decoded = there_and_back(name, x)
        used = np.abs(decoded[decoded != 0])
        assert used.size == 0 or used.min() > 2.0**-124
        error, energy = np.linalg.norm(x.astype(np.float64) - decoded), np.linalg.norm(x.astype(np.float64))
        assert error <= energy * (1 + 1e-6)
        assert error < energy or magnitude < 1e-21


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_subnormal_numbers_pass(name: str) -> None:
    x = np.array([1e-45, -1e-40, 2.0**-130, -(2.0**-133)], np.float32)
    decoded = there_and_back(name, x)
    expected = x if name == "fp32" else torch.from_numpy(x).bfloat16().float().numpy()
    assert (decoded == expected).all()
    assert decoded[2] == x[2] and decoded[3] == x[3]


def test_fp32_returns_every_bit() -> None:
    random = np.random.default_rng(0)
    patterns = random.integers(0, 2**32, 10000, dtype=np.uint32)
    x = patterns[(patterns & 0x7F800000) != 0x7F800000].view(np.float32)
    assert there_and_back("fp32", x).tobytes() == x.tobytes()


def test_bf16_rounds_as_torch_and_saturates() -> None:
    random = np.random.default_rng(0)
    patterns = random.integers(0, 2**32, 100000, dtype=np.uint32)
    patterns[:1000] = (patterns[:1000] & 0xFFFF0000) | 0x8000  # ties
    x = patterns[(patterns & 0x7F800000) != 0x7F800000].view(np.float32)
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    decoded = there_and_back("bf16", x)
    finite = np.isfinite(expected)
    assert not finite.all()
    assert (decoded[finite] == expected[finite]).all()
    assert (np.abs(decoded[~finite]) == np.float32(3.3895314e38)).all()


@pytest.mark.parametrize("name", NAMES)
def test_flush_to_zero_changes_neither_bytes_nor_entries(name: str) -> None:
    if name in ("fp32", "bf16"):
        return
    tensors = []
    for magnitude in (1.0, 1e-28, 1e-30, 1e-36, 1e-21):
        x = gaussian((40, 33)) * np.float32(magnitude)
        x[::3] *= np.float32(1e-8)
        tensors.append(x)
    ordinary = [(encoded(name, x).tobytes(), there_and_back(name, x).tobytes()) for x in tensors]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        flushed = [(encoded(name, x).tobytes(), there_and_back(name, x).tobytes()) for x in tensors]
    finally:
        torch.set_flush_denormal(False)
    for (data, entries), (flushed_data, flushed_entries) in zip(ordinary, flushed, strict=True):
        assert entries == flushed_entries
        if CodecSpec.parse(name).kind != "lowrank":  # its encoder may use the subnormal entries
            assert data == flushed_data


@pytest.mark.parametrize("name", NAMES)
def test_flat_tensors_out_and_unaligned_bytes_are_taken(name: str) -> None:
    x = gaussian((31, 17))
    codec = codec_of(name, x.shape)
    data = encoded(name, x)
    for offset in range(4):
        memory = np.zeros(codec.nbytes + 4, np.uint8)
        place = memory[offset : offset + codec.nbytes]
        codec.encode(x.reshape(-1), place)
        assert (
            (place == data).all() and not memory[:offset].any() and not memory[offset + codec.nbytes :].any()
        )
        out = np.empty(x.size, np.float32)
        place.flags.writeable = False
        assert codec.decode(place, out) is out
        assert (out.reshape(x.shape) == codec.decode(data)).all()


@pytest.mark.parametrize("name", NAMES)
def test_encoding_does_not_change_its_argument(name: str) -> None:
    x = gaussian((31, 17))
    before = x.copy()
    x.flags.writeable = False
    encoded(name, x)
    assert (x == before).all()


def test_wrong_arguments_are_refused() -> None:
    codec = codec_of("int8", (4, 6))
    x, out = gaussian((4, 6)), np.empty(codec.nbytes, np.uint8)
    with pytest.raises(ValueError, match="x must be contiguous float32"):
        codec.encode(x.astype(np.float64), out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must be contiguous float32"):
        codec.encode(gaussian((6, 4)).T, out)
    with pytest.raises(ValueError, match="24"):
        codec.encode(gaussian((4, 5)), out)
    with pytest.raises(ValueError, match="out has 29 bytes"):
        codec.encode(x, np.empty(29, np.uint8))
    with pytest.raises(ValueError, match="out must be contiguous"):
        codec.encode(x, np.empty(2 * codec.nbytes, np.uint8)[::2])
    with pytest.raises(ValueError, match="seed"):
        codec.encode(x, out, seed=-1)
    with pytest.raises(ValueError, match="data has 27 bytes"):
        codec.decode(out[1:])
    with pytest.raises(ValueError, match="out of shape"):
        codec.decode(out, np.empty(5, np.float32))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        codec.encode(x, out)
    with pytest.raises(CodecError, match="shape"):
        codec_of("int8", (4, -6))
    with pytest.raises(CodecError, match="unknown codec"):
        codec_of("int7", (4, 6))


def test_a_codec_is_made_once() -> None:
    assert codec_of("int8", (4, 6)) is codec_of("int8", (4, 6))
    assert codec_of("int8", (4, 6)) is not codec_of("int4", (4, 6))
    assert "int8" in repr(codec_of("int8", (4, 6))) and "[4, 6]" in repr(codec_of("int8", (4, 6)))


# ------------------------------------------------------------------ bytes from peers


def with_scale(name: str, value: float) -> tuple[str, F32 | None]:
    """The problem of a payload in which one scale is ``value``, and what it decodes to if there is none."""
    x = gaussian((5, 7))
    codec, data = codec_of(name, x.shape), encoded(name, x)
    offset = data.size - 4 if name.startswith("1bit") else 0
    data[offset : offset + 4].view("<f4")[:] = value
    problem = codec.problem(data)
    return problem, None if problem else codec.decode(data)


@pytest.mark.parametrize("name", ["int8", "int4", "2bit", "ternary", "1bit", "1bit-row", "lowrank:2"])
def test_scales_that_are_negative_or_too_large_are_a_problem(name: str) -> None:
    for bad in (np.nan, -np.nan, -1.0, -1e-45, -np.inf):
        assert "negative or NaN" in with_scale(name, bad)[0]
    assert "so large" in with_scale(name, np.inf)[0]
    factor = {"int8": 127, "int4": 7, "2bit": 4}.get(name, 1)
    problem, decoded = with_scale(name, LARGEST / factor * (1 - 1e-6))
    assert not problem and decoded is not None and np.isfinite(decoded).all()
    if factor > 1:
        assert "so large" in with_scale(name, LARGEST / factor * (1 + 1e-6))[0]


@pytest.mark.parametrize(
    ("name", "byte", "text"),
    [
        ("int8", 0x80, "-128"),
        ("int4", 0x18, "-8"),
        ("int4", 0x81, "-8"),
        ("ternary", 243, "above 242"),
        ("ternary", 255, "above 242"),
        ("lowrank:2+int8", 0x80, "-128"),
        ("lowrank:1+int4", 0x08, "-8"),
    ],
)
def test_codes_out_of_range_are_a_problem(name: str, byte: int, text: str) -> None:
    x = gaussian((5, 7))
    codec, data = codec_of(name, x.shape), encoded(name, x)
    for at in (data.size - 1, data.size - 3):
        broken = data.copy()
        broken[at] = byte
        assert text in codec.problem(broken)


@pytest.mark.parametrize("name", ["fp32", "bf16", "lowrank:1+fp32"])
def test_entries_that_are_not_finite_are_a_problem(name: str) -> None:
    x = gaussian((5, 7))
    codec, data = codec_of(name, x.shape), encoded(name, x)
    for pattern in (0x7F80, 0xFF80, 0x7FC0):
        broken = data.copy()
        broken[-2:].view("<u2")[:] = pattern
        assert "NaN or infinite" in codec.problem(broken)


def test_a_factor_out_of_range_is_a_problem() -> None:
    codec, data = codec_of("lowrank:2", (5, 7)), encoded("lowrank:2", gaussian((5, 7)))
    for at in (8, data.size - 2):
        broken = data.copy()
        broken[at : at + 2].view("<i2")[:] = -32768
        assert "outside -32767 to 32767" in codec.problem(broken)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_size_is_a_problem(name: str) -> None:
    codec, data = codec_of(name, (5, 7)), encoded(name, gaussian((5, 7)))
    for wrong in (data[:-1], np.concatenate([data, data[:1]]), data[:0]):
        assert f"has {wrong.size} bytes" in codec.problem(wrong)
    assert "uint8" in codec.problem(data.view(np.int8))  # type: ignore[arg-type]


def test_codecs_need_no_torch() -> None:
    code = "import sys, optim.codecs, optim.exact; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
