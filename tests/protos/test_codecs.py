"""Codec names and exact sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.codecs import CodecError, CodecSpec, matrix_shape, round_up


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("fp32", CodecSpec("fp32")),
        ("bf16", CodecSpec("bf16")),
        ("int8", CodecSpec("int8", 256)),
        ("int8:64", CodecSpec("int8", 64)),
        ("int4:2", CodecSpec("int4", 2)),
        ("2bit", CodecSpec("2bit")),
        ("ternary", CodecSpec("ternary")),
        ("1bit", CodecSpec("1bit")),
        ("1bit-row", CodecSpec("1bit-row")),
        ("lowrank:8", CodecSpec("lowrank", 8)),
        ("lowrank:256", CodecSpec("lowrank", 256)),
        ("lowrank:8+1bit-row", CodecSpec("lowrank", 8, CodecSpec("1bit-row"))),
        ("lowrank:8+int4:32", CodecSpec("lowrank", 8, CodecSpec("int4", 32))),
    ],
)
def test_names_are_parsed_and_written_back(name: str, spec: CodecSpec) -> None:
    assert CodecSpec.parse(name) == spec
    assert str(spec) == name


def test_the_default_block_is_not_written() -> None:
    assert CodecSpec.parse("int8:256") == CodecSpec.parse("int8")
    assert str(CodecSpec.parse("lowrank:4+int4:256")) == "lowrank:4+int4"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "unknown codec ''"),
        ("fp16", "use fp32, bf16, int8"),
        ("FP32", "unknown codec"),
        ("int8:", "unknown codec"),
        ("int8:-2", "unknown codec"),
        ("int8 ", "unknown codec"),
        ("int8:123456", "unknown codec"),
        ("1bit-rows", "unknown codec"),
        ("fp32:2", "takes no number"),
        ("1bit-row:3", "takes no number"),
        ("2bit:0", "takes no number"),
        ("int8:1", "must be even"),
        ("int4:33", "must be even"),
        ("lowrank", "write the rank"),
        ("lowrank:0", "write the rank"),
        ("int8+1bit", "only lowrank leaves a residual"),
        ("lowrank:4+", "unknown codec ''"),
        ("lowrank:4+lowrank:2", "another kind"),
        ("lowrank:4+1bit+1bit", "unknown codec '1bit\\+1bit'|only lowrank"),
    ],
)
def test_other_names_are_refused_with_what_to_write(name: str, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        CodecSpec.parse(name)


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [
        ("fp32", (3, 5), 60),
        ("bf16", (3, 5), 30),
        ("int8", (3, 5), 4 + 15),
        ("int8", (16, 16), 4 + 256),
        ("int8", (257,), 8 + 257),
        ("int8:4", (3, 5), 16 + 15),
        ("int4", (3, 5), 4 + 8),
        ("int4:2", (2, 2), 8 + 2),
        ("2bit", (3, 5), 12 + 4),
        ("2bit", (5,), 4 + 2),
        ("2bit", (2, 3, 4), 8 + 6),
        ("ternary", (3, 5), 12 + 3),
        ("ternary", (2, 8), 8 + 4),
        ("1bit", (512,), 64 + 4),
        ("1bit", (3, 171), 128 + 4),
        ("1bit-row", (3, 171), 128 + 12),
        ("1bit-row", (7,), 64 + 4),
        ("lowrank:2", (3, 5), 8 + 2 * 2 * 8),
        ("lowrank:9", (3, 5), 8 + 2 * 3 * 8),
        ("lowrank:9", (7,), 8 + 2 * 8),
        ("lowrank:2", (3, 5, 2), 8 + 2 * 2 * 13),
        ("lowrank:2+1bit", (3, 5), 8 + 32 + 68),
        ("fp32", (), 4),
        ("ternary", (), 5),
        ("1bit", (0,), 4),
        ("fp32", (4, 0), 0),
        ("lowrank:2", (4, 0), 8),
    ],
)
def test_sizes_are_those_of_the_table(name: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert CodecSpec.parse(name).nbytes(shape) == nbytes


def test_the_bits_an_entry_of_a_large_matrix() -> None:
    shape = (768, 3072)
    bits = {
        name: 8 * CodecSpec.parse(name).nbytes(shape) / (768 * 3072)
        for name in ("int8", "int4", "2bit", "ternary", "1bit", "1bit-row", "lowrank:8")
    }
    assert bits == pytest.approx(
        {
            "int8": 8.125,
            "int4": 4.125,
            "2bit": 2 + 32 / 3072,
            "ternary": 1.6 + 32 / 3072,
            "1bit": 1.0,
            "1bit-row": 1 + 32 / 3072,
            "lowrank:8": 128 * (768 + 3072) / (768 * 3072),
        },
        rel=2e-4,
    )


def test_only_fp32_is_exact() -> None:
    names = ["fp32", "bf16", "int8", "int4", "2bit", "ternary", "1bit", "1bit-row", "lowrank:4+fp32"]
    assert [name for name in names if CodecSpec.parse(name).exact] == ["fp32"]


def test_tensors_are_seen_as_matrices() -> None:
    shapes = [(), (7,), (3, 5), (3, 5, 2), (1, 1, 1, 4)]
    assert [matrix_shape(shape) for shape in shapes] == [(1, 1), (1, 7), (3, 5), (3, 10), (1, 4)]


@given(value=st.integers(0, 10**12), multiple=st.integers(1, 10**6))
def test_rounding_up_reaches_the_next_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0 and 0 <= rounded - value < multiple
