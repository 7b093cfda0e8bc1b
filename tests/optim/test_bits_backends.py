"""The layout's constants, and which backend a process gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim import bits
from optim.bits import backends
from optim.bits.layout import hash_words, splitmix64
from protos.buckets import LINE_ELEMENTS, Bucket

ROOT = Path(__file__).parents[2]


def run_python(code: str, **environment: str) -> str:
    """Standard output of ``code`` in a fresh interpreter, which must succeed."""
    inherited = {name: value for name, value in os.environ.items() if name != backends.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sizes_match_the_bucket_table() -> None:
    assert bits.LINE == LINE_ELEMENTS
    for n in (1, 7, 511, 512, 513, 123457):
        assert bits.packed_nbytes(n) == Bucket.of("w", "majority", [("w", (n,))]).nbytes
    assert bits.packed_nbytes(0) == 0
    with pytest.raises(ValueError, match="-1"):
        bits.packed_nbytes(-1)


def test_splitmix64_gives_the_published_sequence() -> None:
    gamma = 0x9E3779B97F4A7C15
    outputs = [splitmix64(i * gamma % 2**64) for i in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 20))
def test_hash_words_are_splitmix64_of_seed_plus_word(seed: int, first: int, count: int) -> None:
    wanted = [splitmix64((seed + first + w) % 2**64) for w in range(count)]
    assert hash_words(seed, first, count).tolist() == wanted


def test_zero_seeds_are_fixed_and_distinct() -> None:
    assert bits.zero_seed(0, 0) == splitmix64(splitmix64(0))
    assert bits.zero_seed(1, 5) == splitmix64((splitmix64(1) + 5) % 2**64)
    assert len({bits.zero_seed(r, t) for r in range(100) for t in range(50)}) == 5000
    for indices in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="negative"):
            bits.zero_seed(*indices)


def test_a_tally_needs_no_torch() -> None:
    code = """
import sys
import numpy as np
from optim import bits
vote = np.arange(64, dtype=np.uint8)
assert (bits.tally([vote, vote, 255 - vote], casting=0) == vote).all()
assert "torch" not in sys.modules
print(bits.backend())
"""
    assert run_python(code, ATOLL_BITS="numpy").split() == ["numpy"]


def test_without_numba_the_backend_is_numpy() -> None:
    code = """
import sys
sys.modules["numba"] = None
import numpy as np
from optim import bits
assert bits.backend() == "numpy"
vote = np.arange(64, dtype=np.uint8)
assert (bits.tally([vote, 255 - vote], casting=0) == vote).all()
"""
    run_python(code)


def test_a_forced_backend_must_load() -> None:
    code = """
import sys
sys.modules["numba"] = None
from optim import bits
try:
    bits.backend()
except RuntimeError as error:
    print(error)
"""
    assert "extra 'fast'" in run_python(code, ATOLL_BITS="numba")


def test_numba_is_preferred() -> None:
    pytest.importorskip("numba")
    assert run_python("from optim import bits; print(bits.backend())").split() == ["numba"]


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_chosen", None)
    monkeypatch.setenv(backends.VARIABLE, "fortran")
    with pytest.raises(ValueError, match="ATOLL_BITS='fortran'"):
        bits.backend()


def test_kernels_compile_without_a_cache() -> None:
    pytest.importorskip("numba")
    from optim.bits.jit import kernel

    names: dict[str, object] = {}
    exec("def double(x):\n    return x + x", names)  # a function without a file has no place for a cache
    double = kernel("intp(intp)")(names["double"])  # type: ignore[arg-type]
    assert double(21) == 42


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'vote'"):
        bits.vote  # noqa: B018
