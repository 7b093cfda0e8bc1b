"""pack, unpack and apply_: every backend gives the bits of the reference form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim import bits
from optim.bits import backends, device, reference
from optim.bits.layout import splitmix64

SIZES = [1, 7, 8, 9, 63, 64, 65, 127, 128, 500, 511, 512, 513, 1024, 1025, 4096, 4161]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIALS = torch.tensor(
    [
        0.0,
        -0.0,
        torch.nan,
        torch.inf,
        -torch.inf,
        1e-45,
        -1e-45,
        1e-38,
        -1e-38,
        6e-8,
        -6e-8,
        1.0,
        -1.0,
        6e4,
        -6e4,
    ]
)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


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
    assert bits.backend() == request.param
    return str(request.param)


@pytest.fixture
def flush_to_zero() -> Iterator[None]:
    """Subnormal operands and results of this thread become zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers to zero")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def numbers(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal deviates, a fifth of them replaced by special values, and NaN with the sign bit set."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    chosen = torch.rand(n, generator=generator) < 0.2
    x = torch.where(chosen, SPECIALS[torch.randint(len(SPECIALS), (n,), generator=generator)], x).to(dtype)
    integers, sign = (torch.int32, -(2**31)) if dtype == torch.float32 else (torch.int16, -(2**15))
    flipped = chosen & (torch.rand(n, generator=generator) < 0.5)
    return torch.where(flipped, x.view(integers) ^ sign, x.view(integers)).view(dtype)


def patterns(x: Tensor) -> np.ndarray[Any, Any]:
    """Bit patterns as unsigned integers."""
    integers = torch.int32 if x.dtype == torch.float32 else torch.int16
    array: np.ndarray[Any, Any] = x.contiguous().view(integers).numpy()
    return array.view(np.uint32 if x.dtype == torch.float32 else np.uint16)


def expected(x: Tensor, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], bool]:
    """Votes, bytes and finite flag of the reference form."""
    votes, finite = reference.signs(patterns(x), str(x.dtype).removeprefix("torch."), seed)
    return votes, reference.pack(votes), finite


def pack_by_torch(x: Tensor, seed: int) -> tuple[Tensor, bool]:
    """The path of other devices, taken on the CPU."""
    integers, infinity = {
        torch.float32: (torch.int32, 0x7F800000),
        torch.bfloat16: (torch.int16, 0x7F80),
        torch.float16: (torch.int16, 0x7C00),
    }[x.dtype]
    out = torch.full((bits.packed_nbytes(x.numel()),), 0xAA, dtype=torch.uint8)
    return out, device.pack(x.view(integers), infinity, seed, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_pack_and_unpack_follow_the_sign_rule(n: int, dtype: torch.dtype, backend: str) -> None:
    x, seed = numbers(n, dtype, seed=n), bits.zero_seed(n, 3)
    votes, packed, finite = expected(x, seed)
    nbytes = bits.packed_nbytes(n)

    memory = torch.full((nbytes + 128,), 0xAA, dtype=torch.uint8)
    out, all_finite = bits.pack(x, seed=seed, out=memory[64 : 64 + nbytes])
    assert out.data_ptr() == memory[64:].data_ptr()
    assert (memory[:64] == 0xAA).all() and (memory[64 + nbytes :] == 0xAA).all()
    assert all_finite == finite
    np.testing.assert_array_equal(out.numpy(), packed)

    by_numpy = np.packbits(votes > 0, bitorder="little")
    np.testing.assert_array_equal(out.numpy()[: by_numpy.size], by_numpy)
    assert not out.numpy()[by_numpy.size :].any()
    padding = np.unpackbits(out.numpy(), bitorder="little")[n:]
    assert not padding.any()
    np.testing.assert_array_equal(bits.unpack(out, n).numpy(), votes.astype(np.float32))
    np.testing.assert_array_equal(reference.unpack(out.numpy(), n), votes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 64, 513, 3000])
def test_the_torch_path_packs_the_same_bytes(
    n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "ELEMENTS", 1024)
    x = numbers(n, dtype, seed=n)
    _, packed, finite = expected(x, 2**64 - 2)  # the seed wraps around within the tensor
    out, all_finite = pack_by_torch(x, 2**64 - 2)
    np.testing.assert_array_equal(out.numpy(), packed)
    assert all_finite == finite


@pytest.mark.parametrize("at", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_and_devices_agree_across_chunks(dtype: torch.dtype, at: str) -> None:
    x = numbers(3 * 65536 + 77, dtype, seed=9)
    x[65000:66000] = 0.0
    wanted, finite = pack_by_torch(x, 12345)
    for name in available():
        packed = np.full(wanted.numel(), 0xAA, np.uint8)
        infinity = reference.INFINITY[str(dtype).removeprefix("torch.")]
        assert backends.load(name).pack(patterns(x), infinity, 12345, packed) == finite
        np.testing.assert_array_equal(packed, wanted.numpy(), err_msg=name)
    packed_there, finite_there = bits.pack(x.to(at), seed=12345)
    assert packed_there.device.type == at and finite_there == finite
    assert torch.equal(packed_there.cpu(), wanted)


@given(
    st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 2**31]), min_size=1, max_size=200),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None)
def test_any_bit_pattern_packs_alike(values: list[int], seed: int) -> None:
    x = torch.from_numpy(np.array(values, np.uint32).view(np.float32))
    _, packed, finite = expected(x, seed)
    by_torch, finite_by_torch = pack_by_torch(x, seed)
    np.testing.assert_array_equal(by_torch.numpy(), packed)
    assert finite_by_torch == finite
    for name in available():
        out = np.full(packed.size, 0xAA, np.uint8)
        assert backends.load(name).pack(patterns(x), 0x7F800000, seed, out) == finite
        np.testing.assert_array_equal(out, packed, err_msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_16_bits(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(dtype)
    _, packed, _ = expected(x, 99)
    by_torch, finite = pack_by_torch(x, 99)
    assert not finite
    np.testing.assert_array_equal(by_torch.numpy(), packed)
    for name in available():
        out = np.full(packed.size, 0xAA, np.uint8)
        infinity = reference.INFINITY[str(dtype).removeprefix("torch.")]
        assert not backends.load(name).pack(patterns(x), infinity, 99, out)
        np.testing.assert_array_equal(out, packed, err_msg=name)


@pytest.mark.parametrize("places", [range(64), range(64, 69)], ids=["whole words", "the last, partial word"])
def test_patterns_at_the_edges_of_each_class(places: range) -> None:
    edges = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    for magnitude in edges:
        for sign in (0, 2**31):
            values = np.full(69, 0x3F800000, np.uint32)
            values[places.start : places.stop] = sign + magnitude
            x = torch.from_numpy(values.view(np.float32))
            _, packed, finite = expected(x, 7)
            assert finite == (magnitude < 0x7F800000)
            by_torch, finite_by_torch = pack_by_torch(x, 7)
            assert torch.equal(by_torch, torch.from_numpy(packed)) and finite_by_torch == finite
            for name in available():
                out = np.full(packed.size, 0xAA, np.uint8)
                assert backends.load(name).pack(values, 0x7F800000, 7, out) == finite
                np.testing.assert_array_equal(out, packed, err_msg=f"{name} {sign + magnitude:#x}")


def test_zeros_vote_hash_bits(backend: str) -> None:
    n = 1000
    seed = bits.zero_seed(5, 2)
    packed, finite = bits.pack(torch.zeros(n), seed=seed)
    negative, _ = bits.pack(torch.full((n,), -0.0), seed=seed)
    words = b"".join(splitmix64((seed + w) % 2**64).to_bytes(8, "little") for w in range(16))
    voted = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")[:n]
    assert finite and torch.equal(packed, negative)
    np.testing.assert_array_equal(np.unpackbits(packed.numpy(), bitorder="little")[:n], voted)
    assert 400 < voted.sum() < 600  # nobody drifts
    for other in (bits.zero_seed(6, 2), bits.zero_seed(5, 3)):
        differing = np.unpackbits(bits.pack(torch.zeros(n), seed=other)[0].numpy() ^ packed.numpy()).sum()
        assert 400 < differing < 600


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 63, 200, 698])
def test_one_bad_number_is_seen(place: int, value: float, dtype: torch.dtype, backend: str) -> None:
    x = torch.ones(699, dtype=dtype)
    assert bits.pack(x, seed=0)[1]
    x[place] = value
    packed, finite = bits.pack(x, seed=0)
    assert not finite
    assert bits.unpack(packed, 699)[place] == (1.0 if value == torch.inf else -1.0)


def test_flush_to_zero_does_not_change_a_vote(backend: str, flush_to_zero: None) -> None:
    assert (torch.tensor([1e-40]) * 1.0).item() == 0.0, "flush-to-zero is not on"
    x = torch.from_numpy(np.arange(1, 1025, dtype=np.uint32).view(np.float32))  # all subnormal
    for signed, byte in ((x, 0xFF), (-x, 0x00)):
        assert (bits.pack(signed, seed=0)[0] == byte).all()
        assert (pack_by_torch(signed, 0)[0] == byte).all()
        assert (expected(signed, 0)[1] == byte).all()


@pytest.mark.parametrize("n", [1, 63, 64, 65, 513, 70001])
@pytest.mark.parametrize(
    ("step", "decay"), [(1e-3, 0.9999), (3e-4, 1.0), (0.1, 0.0), (0.0, 0.9), (-0.02, 0.99)]
)
def test_apply_has_the_same_bits_everywhere(n: int, step: float, decay: float) -> None:
    generator = torch.Generator().manual_seed(n)
    w = torch.randn(n, generator=generator)
    w[::7] *= 1e-3
    packed = torch.randint(256, (bits.packed_nbytes(n),), dtype=torch.uint8, generator=generator)
    votes = np.where(np.unpackbits(packed.numpy(), bitorder="little")[:n] == 1, 1, -1).astype(np.int8)
    wanted = reference.applied(w.numpy(), votes, step=step, decay=decay)

    by_operations = w * decay
    by_operations -= torch.from_numpy(votes).float() * step
    np.testing.assert_array_equal(by_operations.numpy().view(np.uint32), wanted.view(np.uint32))
    for name in available():
        moved = w.numpy().copy()
        backends.load(name).apply_(moved, packed.numpy(), np.float32(step), np.float32(decay))
        np.testing.assert_array_equal(moved.view(np.uint32), wanted.view(np.uint32), err_msg=name)
    by_torch = w.clone()
    device.apply_(by_torch, packed, float(np.float32(step)), float(np.float32(decay)))
    np.testing.assert_array_equal(by_torch.numpy().view(np.uint32), wanted.view(np.uint32))
    for at in DEVICES:
        there = w.to(at, copy=True)
        bits.apply_(there, packed.to(at), step=step, decay=decay)
        np.testing.assert_array_equal(there.cpu().numpy().view(np.uint32), wanted.view(np.uint32))

    if n > 1000 and decay == 0.9999:  # a fused multiply-add rounds once, and this test would see it
        fused = w.numpy().astype(np.float64) * np.float32(decay) - np.float32(step) * votes.astype(np.float64)
        assert (fused.astype(np.float32) != wanted).mean() > 0.05


def test_apply_handles_non_finite_weights(backend: str) -> None:
    w = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0, -0.0, 1e-45])
    packed = torch.zeros(64, dtype=torch.uint8)
    packed[0] = 0b10110010
    votes = reference.unpack(packed.numpy(), 8)
    with np.errstate(all="ignore"):
        wanted = reference.applied(w.numpy(), votes, step=1e38, decay=2.0)
    bits.apply_(w, packed, step=1e38, decay=2.0)
    np.testing.assert_array_equal(w.numpy(), wanted)


def test_apply_is_proof_against_flush_to_zero(backend: str, flush_to_zero: None) -> None:
    w = torch.from_numpy(np.arange(1, 1025, dtype=np.uint32).view(np.float32))
    packed = torch.full((128,), 0x55, dtype=torch.uint8)
    bits.apply_(w, packed, step=1e-30, decay=0.999)
    step = np.float32(1e-30)
    np.testing.assert_array_equal(w.numpy(), np.tile(np.array([-step, step], np.float32), 512))


def test_apply_tells_autograd(backend: str) -> None:
    w = torch.nn.Parameter(torch.ones(10))
    packed = torch.full((64,), 0xFF, dtype=torch.uint8)
    loss = (w * w).sum()
    before = w._version
    with torch.no_grad():
        bits.apply_(w, packed, step=0.5)
    assert w._version > before
    assert torch.equal(w.detach(), torch.full((10,), 0.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="no_grad"):
        bits.apply_(w, packed, step=0.5)
    with torch.inference_mode():
        there = torch.ones(10)
        bits.apply_(there, packed, step=0.5)
        assert torch.equal(there, torch.full((10,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("n", [1, 65, 512, 1000, 65536 * 2 + 9])
def test_unpack_to_each_dtype(n: int, dtype: torch.dtype, backend: str) -> None:
    scale = 3.0 if dtype == torch.int8 else 0.3
    packed = torch.randint(256, (bits.packed_nbytes(n),), dtype=torch.uint8)
    ones = torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little")[:n] == 1)
    wanted = torch.where(ones, torch.tensor(scale, dtype=dtype), torch.tensor(-scale, dtype=dtype))
    assert torch.equal(bits.unpack(packed, n, dtype=dtype, scale=scale), wanted)
    memory = torch.full((n + 20,), 9, dtype=dtype)
    out = bits.unpack(packed, n, dtype=dtype, scale=scale, out=memory[10 : 10 + n])
    assert torch.equal(out, wanted)
    assert (memory[:10] == 9).all() and (memory[10 + n :] == 9).all()
    by_torch = torch.empty(n, dtype=dtype)
    device.unpack(packed, by_torch, scale, -scale)
    assert torch.equal(by_torch, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("first", [0, 1, 16])
def test_unpack_around_the_cache(first: int, dtype: torch.dtype, backend: str) -> None:
    n = (2 << 20) // dtype.itemsize + 1000
    packed = torch.randint(256, (bits.packed_nbytes(n),), dtype=torch.uint8)
    memory = torch.full((n + 64,), 9, dtype=dtype)
    bits.unpack(packed, n, dtype=dtype, out=memory[first : first + n])
    ones = torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little")[:n] == 1)
    assert torch.equal(memory[first : first + n], torch.where(ones, 1, -1).to(dtype))
    assert (memory[:first] == 9).all() and (memory[first + n :] == 9).all()


def test_packed_bytes_may_lie_at_any_address(backend: str) -> None:
    x = numbers(1000, torch.float32)
    packed, _ = bits.pack(x, seed=4)
    memory = torch.frombuffer(bytearray(1024), dtype=torch.uint8)
    for offset in (1, 3, 62):
        shifted, _ = bits.pack(x, seed=4, out=memory[offset : offset + 128])
        assert torch.equal(shifted, packed)
        assert torch.equal(bits.unpack(shifted, 1000), bits.unpack(packed, 1000))
        a, b = torch.ones(1000), torch.ones(1000)
        bits.apply_(a, shifted, step=0.1, decay=0.9)
        bits.apply_(b, packed, step=0.1, decay=0.9)
        assert torch.equal(a, b)


def test_shapes_and_empty_tensors(backend: str) -> None:
    x = numbers(24, torch.float32).view(2, 3, 4)
    flat = bits.pack(x.view(-1), seed=1)[0]
    assert torch.equal(bits.pack(x, seed=1)[0], flat)
    out = torch.empty(4, 6)
    assert torch.equal(bits.unpack(flat, 24, out=out).view(-1), bits.unpack(flat, 24))
    scalar, finite = bits.pack(torch.tensor(2.0), seed=1)
    assert finite and scalar.tolist() == [1] + 63 * [0]
    empty, finite = bits.pack(torch.empty(0, 5), seed=1)
    assert finite and empty.shape == (0,)
    assert bits.unpack(empty, 0).shape == (0,)
    bits.apply_(torch.empty(0), empty, step=1.0)
    gradient = torch.randn(10, requires_grad=True)
    assert not bits.pack(gradient, seed=1)[0].requires_grad
