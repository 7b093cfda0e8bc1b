"""What pack, unpack and apply_ refuse, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optim import bits


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(x=torch.ones(4, dtype=torch.float64), seed=0), TypeError, "float64"),
        (dict(x=torch.ones(4, dtype=torch.int32), seed=0), TypeError, "int32"),
        (dict(x=torch.ones(4, 4).T[:, 1:], seed=0), ValueError, r"\.contiguous\(\)"),
        (dict(x=torch.ones(4), seed=-1), ValueError, "seed -1"),
        (dict(x=torch.ones(4), seed=2**64), ValueError, "seed"),
        (
            dict(x=torch.ones(513), seed=0, out=torch.empty(64, dtype=torch.uint8)),
            ValueError,
            "packed in 128",
        ),
        (dict(x=torch.ones(4), seed=0, out=torch.empty(64, dtype=torch.int8)), TypeError, "uint8"),
        (
            dict(x=torch.ones(4), seed=0, out=torch.empty(128, dtype=torch.uint8)[::2]),
            TypeError,
            "contiguous",
        ),
        (
            dict(x=torch.ones(4), seed=0, out=torch.empty(64, dtype=torch.uint8, device="meta")),
            ValueError,
            "meta",
        ),
    ],
)
def test_pack_refuses(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bits.pack(**arguments)


BITS = torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(bits=BITS, n=513), ValueError, "packed in 128"),
        (dict(bits=BITS, n=-1), ValueError, "-1 elements"),
        (dict(bits=BITS.float(), n=4), TypeError, "uint8"),
        (dict(bits=BITS, n=4, dtype=torch.float64), TypeError, "float64"),
        (dict(bits=BITS, n=4, dtype=torch.int8, scale=0.5), ValueError, "integer"),
        (dict(bits=BITS, n=4, dtype=torch.int8, scale=128), ValueError, "127"),
        (dict(bits=BITS, n=4, dtype=torch.int8, scale=float("inf")), ValueError, "finite"),
        (dict(bits=BITS, n=4, scale=float("nan")), ValueError, "finite"),
        (dict(bits=BITS, n=4, dtype=torch.float16, scale=1e6), ValueError, "not finite"),
        (dict(bits=BITS, n=4, out=torch.empty(5)), ValueError, "5 elements"),
        (dict(bits=BITS, n=4, out=torch.empty(4, dtype=torch.bfloat16)), TypeError, "bfloat16"),
        (dict(bits=BITS, n=4, out=torch.empty(8)[::2]), ValueError, "contiguous"),
    ],
)
def test_unpack_refuses(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bits.unpack(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(w=torch.ones(4, dtype=torch.bfloat16), bits=BITS, step=0.1), TypeError, "float32"),
        (dict(w=torch.ones(4, 2).T, bits=BITS, step=0.1), ValueError, "contiguous"),
        (dict(w=torch.ones(513), bits=BITS, step=0.1), ValueError, "packed in 128"),
        (dict(w=torch.ones(4), bits=BITS.to("meta"), step=0.1), ValueError, "meta"),
        (dict(w=torch.ones(4), bits=BITS, step=float("nan")), ValueError, "step nan"),
        (dict(w=torch.ones(4), bits=BITS, step=1e39), ValueError, "step"),
        (dict(w=torch.ones(4), bits=BITS, step=0.1, decay=float("inf")), ValueError, "decay inf"),
    ],
)
def test_apply_refuses(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    before = arguments["w"].clone()
    with pytest.raises(error, match=words):
        bits.apply_(**arguments)
    assert torch.equal(arguments["w"], before)
