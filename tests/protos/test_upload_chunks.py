"""The chunks of an upload."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protos.upload import LEAST_BYTES, chunk_bytes, chunk_stop
from protos.wire import CHUNK_BYTES


@given(st.integers(0, 1 << 33))
def test_chunks_are_whole_lines_and_a_small_share_of_what_is_sent(nbytes: int) -> None:
    size = chunk_bytes(nbytes)
    assert LEAST_BYTES <= size <= CHUNK_BYTES and size % LEAST_BYTES == 0
    assert size in (LEAST_BYTES, CHUNK_BYTES) or nbytes // 25 - LEAST_BYTES < size <= nbytes // 24


@given(st.integers(1, 3 * CHUNK_BYTES), st.integers(LEAST_BYTES, CHUNK_BYTES))
def test_a_chunk_takes_a_small_rest_with_it_and_never_more_than_a_frame_holds(nbytes: int, size: int) -> None:
    start, lengths = 0, []
    while start < nbytes:
        stop = chunk_stop(start, size, nbytes)
        lengths.append(stop - start)
        start = stop
    assert start == nbytes and max(lengths) <= CHUNK_BYTES and min(lengths) > 0
    assert all(length >= size for length in lengths[:-1])
    assert lengths[-1] >= min(LEAST_BYTES, nbytes) or size + lengths[-1] > CHUNK_BYTES
