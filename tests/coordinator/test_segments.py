from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.ranges import Ranges, in_words
from coordinator.segments import HEADER_BYTES, Place, SegmentError, Segments, read_record
from tests.coordinator.journal_rig import Disk


def pieces(*data: bytes) -> list[memoryview]:
    return [memoryview(piece) for piece in data]


def test_records_come_back_from_where_they_were_put(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    first = segments.append(7, pieces(b"abc", b"", b"defg"))
    second = segments.append(8, [memoryview(np.arange(5, dtype=np.uint8)), *pieces(b"!")])
    assert first == Place(1, 0, 7) and second == Place(1, first.end, 6)
    assert segments.read(7, first) == b"abcdefg"
    assert segments.read(8, second) == b"\0\1\2\3\4!"
    assert segments.sizes == {1: second.end} == {1: os.path.getsize(tmp_path / "00000001.seg")}
    segments.close()


def test_a_full_segment_is_followed_by_another_also_after_opening_again(tmp_path: Path) -> None:
    segments = Segments(tmp_path, roll_bytes=HEADER_BYTES + 10)
    places = [segments.append(index, pieces(bytes(6))) for index in range(3)]
    segments.close()
    assert [place.segment for place in places] == [1, 1, 2]
    again = Segments(tmp_path, roll_bytes=HEADER_BYTES + 10)
    assert again.sizes == segments.sizes
    assert again.append(3, pieces(b"x")) == Place(2, places[2].end, 1)
    again.drop(1)
    assert sorted(os.listdir(tmp_path)) == ["00000002.seg"] and list(again.sizes) == [2]
    again.cut(2, places[2].end)
    assert again.append(4, pieces(b"y")).offset == places[2].end
    assert again.read(4, Place(2, places[2].end, 1)) == b"y"
    again.clear()
    assert not os.listdir(tmp_path) and again.total == 0
    again.close()


def test_a_record_is_never_taken_for_another(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    places = [segments.append(index, pieces(bytes([index] * 9))) for index in range(2)]
    segments.close()
    with pytest.raises(SegmentError, match="no record of round 1 begins there"):
        read_record(tmp_path, 0, places[1])
    with pytest.raises(SegmentError, match="no record of round 1 begins there"):
        read_record(tmp_path, 0, Place(1, 0, 8))
    with pytest.raises(SegmentError, match="ends within the record"):
        read_record(tmp_path, 1, Place(1, places[1].offset, 10))
    with pytest.raises(SegmentError, match=r"00000009\.seg is gone"):
        read_record(tmp_path, 1, Place(9, 0, 9))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_changed_bit_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("segments")
    segments = Segments(folder)
    place = segments.append(5, pieces(data.draw(st.binary(max_size=40))))
    segments.close()
    path = segments.path(1)
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(SegmentError):
        segments.read(5, place)


def test_a_disk_that_takes_half_a_record(tmp_path: Path) -> None:
    disk = Disk(room=2 * HEADER_BYTES)
    segments = Segments(tmp_path, opener=disk.open)
    place = segments.append(0, pieces(b"abc"))
    with pytest.raises(OSError, match="No space left"):
        segments.append(1, pieces(bytes(100)))
    segments.close()
    assert os.path.getsize(segments.path(1)) == 2 * HEADER_BYTES > place.end
    assert segments.read(0, place) == b"abc"


SPANS = st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 12)), max_size=30)


@settings(max_examples=200, deadline=None)
@given(spans=SPANS, first=st.integers(0, 50), count=st.integers(0, 30))
def test_ranges_are_a_set(spans: list[tuple[bool, int, int]], first: int, count: int) -> None:
    ranges, numbers = Ranges(), set[int]()
    for adds, low, length in spans:
        span = range(low, low + length)
        if adds:
            known = ranges.add(low, low + length)
            assert [number for part in known for number in range(*part)] == sorted(numbers & set(span))
            numbers |= set(span)
        else:
            ranges.remove(low, low + length)
            numbers -= set(span)
    assert [number for part in ranges for number in range(*part)] == sorted(numbers)
    assert ranges.total == len(numbers)
    parts = list(ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(parts))
    wanted = set(range(first, first + count)) - numbers
    assert [number for part in ranges.missing(first, first + count) for number in range(*part)] == sorted(
        wanted
    )
    lowest = first
    while lowest - 1 in numbers:
        lowest -= 1
    assert ranges.unbroken(first) == lowest


def test_ranges_in_words() -> None:
    assert in_words([(2, 3), (4, 9)]) == "3, 5 to 9"
    assert in_words([(index, index + 1) for index in range(0, 20, 2)], most=2) == "1, 3, 8 more"
