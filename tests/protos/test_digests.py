"""Digests: everything that matters enters, nothing else does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from protos.digests import (
    combine,
    sha256_bytes,
    sha256_file,
    sha256_text,
    state_digest,
    tensor_digest,
    torch_digest,
)

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def of(*tensors: tuple[str, str, tuple[int, ...], bytes]) -> str:
    return combine({tensor[0]: tensor_digest(*tensor) for tensor in tensors})


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


def test_the_digest_of_a_tensor_is_xxh3_of_its_frame_and_bytes_and_that_of_a_state_of_those() -> None:
    frame = b"\x01\0\0\0w" + b"\x07\0\0\0float32" + b"\x02\0\0\0" + b"\x01" + b"\0" * 7 + b"\x02" + b"\0" * 7
    data = b"\0\0\x80\x3f\0\0\0\xc0"  # 1.0, -2.0
    expected = xxhash.xxh3_128_hexdigest(frame + data)
    tensor = torch.tensor([[1.0, -2.0]])
    assert tensor_digest("w", "float32", (1, 2), data) == torch_digest("w", tensor) == expected
    whole = xxhash.xxh3_128_hexdigest(b"\x01\0\0\0w" + b"\x20\0\0\0" + expected.encode())
    assert state_digest({"w": tensor}) == of(("w", "float32", (1, 2), data)) == whole


def test_name_dtype_shape_and_bytes_all_enter() -> None:
    tensors = [
        of(("w", "uint8", (4,), b"abcd")),
        of(("v", "uint8", (4,), b"abcd")),
        of(("w", "int8", (4,), b"abcd")),
        of(("w", "uint8", (2, 2), b"abcd")),
        of(("w", "uint8", (4, 1), b"abcd")),
        of(("w", "uint8", (4,), b"abce")),
        of(("w", "uint8", (2,), b"ab"), ("w2", "uint8", (2,), b"cd")),
        of(("w", "float32", (), b"abcd")),
        of(("w", "float32", (1,), b"abcd")),
        of(("w", "uint8", (0,), b"")),
        of(),
    ]
    assert len(set(tensors)) == len(tensors)


@given(st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=5)), max_size=4))
def test_moving_bytes_across_a_boundary_changes_the_digest(tensors: list[tuple[str, bytes]]) -> None:
    tensors = list(dict(tensors).items())
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
    dtype = str(tensor.dtype).removeprefix("torch.")
    assert torch_digest("t", tensor) == tensor_digest("t", dtype, tuple(tensor.shape), data)


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


@given(st.dictionaries(st.text(max_size=4), st.binary(max_size=8), max_size=6), st.randoms())
def test_ranks_may_digest_what_they_hold(state: dict[str, bytes], random: Random) -> None:
    digests = {name: tensor_digest(name, "uint8", (len(data),), data) for name, data in state.items()}
    ranks: list[dict[str, str]] = [{}, {}, {}]
    for name, digest in digests.items():
        random.choice(ranks)[name] = digest
    assert combine(ranks[2] | ranks[0] | ranks[1]) == combine(digests)
