"""``python -m bench votes``: 1-bit vote kernels against reading and copying the same bytes, on one core.

*Read* is a xor over the same votes, row by row: what one core can take in, and the ceiling of a tally, which
has to read every vote once. *Copy* copies the float32 tensor that is packed or moved. Times are CPU times of
the calling thread, taken in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from bench.report import Report, interleave, median, median_ratio
from optim import bits

Bytes = NDArray[np.uint8]

ROW_PADDING = 4160  # bytes; rows a power of two apart would fall into the same sets of the cache
CHUNK_BYTES = 65536  # of a vote that the coordinator tallies at once
# Elements and repeats: the votes and the tensors are larger than the cache of a core.
QUICK, FULL = (16 << 20, 15), (64 << 20, 21)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch work in the calling thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def reader(votes: Sequence[Bytes]) -> Callable[[], int]:
    """A function that reads every byte of ``votes`` once and returns the xor of their 64-bit words."""
    if bits.backend() != "numba":
        return lambda: int(np.bitwise_xor.reduce([np.bitwise_xor.reduce(v.view(np.uint64)) for v in votes]))
    from bench.reading import read

    rows = np.array([vote.ctypes.data for vote in votes], np.uint64)
    return lambda: int(read(rows, votes[0].size))


def random_votes(count: int, nbytes: int, rng: np.random.Generator) -> list[Bytes]:
    """``count`` rows of random bits in one slab, each aligned to 64 bytes."""
    stride = nbytes + ROW_PADDING
    slab = np.empty(count * stride + 64, np.uint8)
    start = -slab.ctypes.data % 64
    rows = [slab[start + i * stride :][:nbytes] for i in range(count)]
    for row in rows:
        row[:] = np.frombuffer(rng.bytes(nbytes), np.uint8)
    return rows


def measure_tally(report: Report, elements: int, repeats: int, rng: np.random.Generator) -> dict[str, float]:
    """The tally of 8 and of 64 votes against reading them; returns rates in GB/s by figure name."""
    nbytes = bits.packed_nbytes(elements)
    votes, out = random_votes(64, nbytes, rng), np.zeros(nbytes, np.uint8)
    table = report.table(
        f"Tally of {elements / 2**20:g} Mi signs ({nbytes / 2**20:g} MiB a vote), GB/s of packed votes",
        "votes",
        "tally",
        "read",
        "tally of read",
    )
    floor = 0.7 if bits.backend() == "numba" else None
    rates: dict[str, float] = {}
    for count in (8, 64):
        rows = votes[:count]

        def count_rows(rows: Sequence[Bytes] = rows) -> Bytes:
            return bits.tally(rows, casting=0, out=out)

        times = interleave({"read": reader(rows), "tally": count_rows}, repeats=repeats)
        ratio = median_ratio(times["read"], times["tally"])
        report.add(f"tally_m{count}_of_read", ratio, floor=floor)
        tally, read = (count * nbytes / median(times[name]) / 1e9 for name in ("tally", "read"))
        rates |= {f"tally_m{count}_gb_per_s": tally, f"read_m{count}_gb_per_s": read}
        table.row(str(count), tally, read, ratio)
    return rates


def measure_tensors(report: Report, elements: int, repeats: int) -> dict[str, float]:
    """Pack, unpack and apply of a float32 tensor against copying it; returns milliseconds by figure name."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(elements, generator=generator)
    w, target = torch.randn(elements, generator=generator), torch.zeros(elements)
    packed, _ = bits.pack(x, seed=1)
    source, copied = x.numpy(), target.numpy()
    cases: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(copied, source),
        "pack": lambda: bits.pack(x, seed=1, out=packed),
        "apply": lambda: bits.apply_(w, packed, step=1e-3, decay=0.9999),
        "unpack": lambda: bits.unpack(packed, elements, out=target),
    }
    times = interleave(cases, repeats=repeats)
    table = report.table(f"{elements / 2**20:g} Mi float32", "kernel", "ms", "copy's time over its own")
    for name in cases:
        ratio = median_ratio(times["copy"], times[name])
        table.row(name, median(times[name]) * 1e3, ratio)
        if name != "copy":
            report.add(f"{name}_of_copy", ratio)
    return {f"{name}_ms": median(times[name]) * 1e3 for name in cases}


def measure_int8(report: Report, elements: int, repeats: int, rng: np.random.Generator) -> dict[str, float]:
    """Eight votes summed as int8 against their tally; returns milliseconds by figure name."""
    votes = random_votes(8, bits.packed_nbytes(elements), rng)
    out = np.zeros_like(votes[0])
    wide = [bits.unpack(torch.from_numpy(vote), elements, dtype=torch.int8) for vote in votes]
    total = torch.zeros(elements, dtype=torch.int8)

    def sum_int8() -> None:
        total.zero_()
        for vote in wide:
            total.add_(vote)

    times = interleave(
        {"int8_sum_m8": sum_int8, "tally_m8": lambda: bits.tally(votes, casting=0, out=out)}, repeats=repeats
    )
    floor = 10.0 if bits.backend() == "numba" else None
    report.add("int8_over_tally", median_ratio(times["int8_sum_m8"], times["tally_m8"]), floor=floor)
    return {f"{name}_ms": median(times[name]) * 1e3 for name in times}


def measure_chunks(count: int, repeats: int, rng: np.random.Generator) -> float:
    """GB/s of votes when ``count`` voters' chunks of 64 KiB are tallied one call after the other."""
    chunks = [random_votes(count, CHUNK_BYTES, rng) for _ in range(16)]
    out = np.zeros(CHUNK_BYTES, np.uint8)

    def tally_chunks() -> None:
        for rows in chunks:
            bits.tally(rows, casting=0, out=out)

    times = interleave({"chunks": tally_chunks}, repeats=repeats)
    return len(chunks) * count * CHUNK_BYTES / median(times["chunks"]) / 1e9


def run(quick: bool) -> Report:
    """Measure at 16 Mi parameters (``quick``) or at 64 Mi."""
    elements, repeats = QUICK if quick else FULL
    report, rng = Report("votes"), np.random.default_rng(7)
    with one_thread():
        absolute = measure_tally(report, elements, repeats, rng)
        absolute |= measure_tensors(report, elements, repeats)
        absolute |= measure_int8(report, elements, repeats, rng)
        for count in (4, 64):
            absolute[f"tally_m{count}_chunks_gb_per_s"] = measure_chunks(count, repeats, rng)
    for name, value in absolute.items():
        report.add(name, value)
    report.note(
        f"Backend {bits.backend()}, one core. 64 KiB chunks are what the coordinator tallies at once."
    )
    return report
