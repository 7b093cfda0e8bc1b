"""Digests: everything that matters enters, nothing else does."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from protos.digests import StateDigest, sha256_bytes, sha256_file, sha256_text, state_digest

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def of(*tensors: tuple[str, str, tuple[int, ...], bytes]) -> str:
    digest = StateDigest()
    for tensor in tensors:
        digest.update(*tensor)
    return digest.hexdigest()


def test_sha256_of_text_bytes_and_file_agree(tmp_path: Path) -> None:
    assert sha256_text("") == sha256_bytes(b"") == EMPTY_SHA256
    data = "naïve\n".encode() * 400_000  # more than one chunk
    path = tmp_path / "data"
    path.write_bytes(data)
    assert (
        sha256_file(path)
        == sha256_bytes(data)
        == sha256_text(data.decode())
        == hashlib.sha256(data).hexdigest()
    )


def test_the_state_digest_is_xxh3_of_the_framed_tensors() -> None:
    frame = b"\x01\0\0\0w" + b"\x07\0\0\0float32" + b"\x02\0\0\0" + b"\x01" + b"\0" * 7 + b"\x02" + b"\0" * 7
    data = b"\0\0\x80\x3f\0\0\0\xc0"  # 1.0, -2.0
    expected = xxhash.xxh3_128_hexdigest(frame + data)
    assert of(("w", "float32", (1, 2), data)) == expected
    assert state_digest({"w": torch.tensor([[1.0, -2.0]])}) == expected


def test_name_dtype_shape_bytes_and_order_all_enter() -> None:
    tensors = [
        of(("w", "uint8", (4,), b"abcd")),
        of(("v", "uint8", (4,), b"abcd")),
        of(("w", "int8", (4,), b"abcd")),
        of(("w", "uint8", (2, 2), b"abcd")),
        of(("w", "uint8", (4, 1), b"abcd")),
        of(("w", "uint8", (4,), b"abce")),
        of(("w", "uint8", (2,), b"ab"), ("w2", "uint8", (2,), b"cd")),
        of(("w2", "uint8", (2,), b"cd"), ("w", "uint8", (2,), b"ab")),
        of(("w", "float32", (), b"abcd")),
        of(("w", "float32", (1,), b"abcd")),
        of(("w", "uint8", (0,), b"")),
        of(),
    ]
    assert len(set(tensors)) == len(tensors)


@given(st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=5)), max_size=4))
def test_moving_bytes_across_a_boundary_changes_the_digest(tensors: list[tuple[str, bytes]]) -> None:
    joined = [("".join(name for name, _ in tensors), b"".join(data for _, data in tensors))]

    def digest(parts: list[tuple[str, bytes]]) -> str:
        return of(*((name, "uint8", (len(data),), data) for name, data in parts))

    assert (digest(tensors) == digest(joined)) == (tensors == joined)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float32).reshape(3, 4),
        torch.arange(12, dtype=torch.float32).reshape(4, 3).T,
        torch.arange(24, dtype=torch.int64)[::2].reshape(3, 4),
        torch.arange(12).reshape(3, 4).to(torch.bfloat16),
        torch.arange(12).reshape(3, 4).to(torch.float16),
        torch.arange(12).reshape(3, 4) % 2 == 0,
        torch.zeros(3, 0),
        torch.tensor(5, dtype=torch.int16),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_tensor_enters_as_its_contiguous_bytes(tensor: torch.Tensor) -> None:
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    digest = StateDigest()
    digest.update_tensor("t", tensor)
    assert digest.hexdigest() == of(
        ("t", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    )


def test_negative_zero_and_nan_payloads_are_told_apart() -> None:
    values = [torch.tensor([0.0]), torch.tensor([-0.0])]
    values += [
        torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)
    ]
    assert len({state_digest({"t": value}) for value in values}) == 4


def test_a_mapping_s_order_does_not_matter_and_two_tensors_of_one_name_are_refused() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    assert state_digest({"a": a, "b": b}) == state_digest([("b", b), ("a", a)])
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        state_digest([("a", a), ("a", b)])


def test_wrong_sizes_and_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'w': float32\[2\] has 8 bytes, not 7"):
        of(("w", "float32", (2,), b"1234567"))
    with pytest.raises(ValueError, match="cannot digest dtype 'complex64'"):
        state_digest({"w": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="negative size"):
        of(("w", "uint8", (-1, -4), b"1234"))


def test_the_digest_may_be_read_on_the_way() -> None:
    digest = StateDigest()
    digest.update("a", "uint8", (1,), b"x")
    first = digest.hexdigest()
    digest.update("b", "uint8", (1,), b"y")
    assert first == of(("a", "uint8", (1,), b"x"))
    assert digest.hexdigest() == of(("a", "uint8", (1,), b"x"), ("b", "uint8", (1,), b"y"))
