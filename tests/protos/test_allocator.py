"""The allocator's setting: taken by glibc, left alone where the user has set it."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from protos.allocator import keep_freed_memory

ROOT = Path(__file__).parents[2]
GLIBC = platform.libc_ver()[0] == "glibc"

# Page faults of freeing and taking 1 MiB a hundred times: 256 each when every block goes back to the kernel.
FAULTS = """
import resource, sys
from protos.allocator import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
else:
    import ctypes
    ctypes.CDLL(None).mallopt(-3, 128 << 10)
bytes(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    bytearray(b"x") * (1 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_kept_memory_is_not_faulted_in_again() -> None:
    def faults(keep: bool) -> int:
        code = FAULTS.format(keep=keep)
        text = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        return int(text)

    assert faults(keep=False) > 10_000
    assert faults(keep=True) < 2_000


def test_the_users_own_setting_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert keep_freed_memory() is False


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
