"""Spools: chunks of any state go through a file without a name and come out as they were."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.spool import Spool
from node.exchange.tensor_bytes import Row, fill, layout, read_pieces, total_bytes
from node.exchange.trouble import TransferError
from node.ranks import Alone
from node.state import SharedState
from node.whole_state import WholeState
from protos.digests import state_digest
from protos.snapshots import chunks, shares
from tests.node.snapshot_rig import LAYOUTS, content, small, state, stream_of

BYTES = Row("w", "uint8", (100,))


def whole(tensors: dict[str, torch.Tensor]) -> WholeState:
    return WholeState(SharedState(tensors), Alone())


@given(layouts=LAYOUTS, donors=st.integers(1, 4), chunk=st.integers(1, 40), piece=st.integers(1, 50))
def test_chunks_of_several_donors_make_the_state(
    layouts: list[tuple[torch.dtype, tuple[int, ...], bool]], donors: int, chunk: int, piece: int
) -> None:
    source, target = state(layouts, 1), state(layouts, 2)
    rows = layout(source)
    with small(chunk, piece):
        nbytes = total_bytes(rows)
        joined = Spool(rows, 0, chunks(nbytes))
        for _, first, count in shares(nbytes, [f"node-{index}" for index in range(donors)]):
            part = Spool(rows, first, count)
            place = part.start
            for offset, data in whole(source).pieces(part.start, part.stop):
                assert offset == place and 0 < len(data) <= piece
                part.write(offset, data)
                place += len(data)
            assert place == part.stop
            joined.write(part.start, memoryview(content(part)))
            part.close()
        assert content(joined) == stream_of(source)
        assert joined.digest() == state_digest(source)
        whole(target).fill(joined.read)
        joined.close()
    for name, tensor in source.items():
        assert torch.equal(target[name], tensor) and target[name].stride() == tensor.stride()


@given(layouts=LAYOUTS, span=st.tuples(st.integers(0, 300), st.integers(0, 300)))
def test_a_range_touches_no_other_tensors(
    layouts: list[tuple[torch.dtype, tuple[int, ...], bool]], span: tuple[int, int]
) -> None:
    source = state(layouts, 1)
    nbytes = len(stream_of(source))
    start, stop = sorted(min(place, nbytes) for place in span)
    rows = whole(source)
    offset = 0
    for name in sorted(source):  # what does not overlap is taken away
        end = offset + source[name].nbytes
        if end <= start or offset >= stop:
            del rows.part.tensors[name]
        offset = end
    assert b"".join(bytes(data) for _, data in rows.pieces(start, stop)) == stream_of(source)[start:stop]


def test_tensors_on_the_host_are_read_where_they_lie_and_filled_in_place() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    (position, piece), *rest = read_pieces(tensor, 2, 12)
    assert position == 2 and not rest and piece.data_ptr() == tensor.data_ptr() + 2
    address = tensor.data_ptr()
    fill(tensor, lambda position, data: data.fill_(1))
    assert tensor.data_ptr() == address and tensor.unique().tolist() == [257]


def test_the_file_has_no_name_and_ends_with_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    spool = Spool([BYTES], 0, 1)
    spool.write(0, memoryview(bytes(range(100))))
    assert list(tmp_path.iterdir()) == []
    assert content(spool) == bytes(range(100))
    spool.close()
    spool.close()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="closed file"):
        spool.write(0, memoryview(b"x"))


def test_only_its_own_bytes_are_taken_and_only_what_was_written_is_given() -> None:
    with small(32):
        spool = Spool([BYTES], 1, 2)
        assert (spool.start, spool.stop, spool.nbytes) == (32, 96, 64)
        for offset, nbytes in ((31, 1), (96, 1), (90, 7), (-1, 0)):
            with pytest.raises(ValueError, match="are not in a spool of 32 to 96"):
                spool.write(offset, memoryview(bytes(nbytes)))
            with pytest.raises(ValueError, match="are not in a spool"):
                spool.read(offset, memoryview(bytearray(nbytes)))
        spool.write(32, memoryview(bytes(10)))
        with pytest.raises(TransferError, match="54 bytes were never written"):
            spool.read(32, memoryview(bytearray(64)))
        spool.close()
        for first, count in ((4, 1), (0, 5), (-1, 1), (2, -1)):
            with pytest.raises(ValueError, match="100 bytes has 4 chunks, not"):
                Spool([BYTES], first, count)


def test_a_folder_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    huge = Row("w", "uint8", (1 << 60,))
    with pytest.raises(TransferError, match=f"{1 << 60} bytes .* '{tmp_path}': .* MB are free; set TMPDIR"):
        Spool([huge], 0, chunks(huge.nbytes))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(TransferError, match=r"gone': .*No such file"):
        Spool([BYTES], 0, 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is full is /dev/full")
def test_a_disk_that_fills_up_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    spool = Spool([BYTES], 0, 1)
    with pytest.raises(TransferError, match=r"100 bytes .*No space left on device; set TMPDIR"):
        spool.write(0, memoryview(bytes(100)))
    spool.close()
