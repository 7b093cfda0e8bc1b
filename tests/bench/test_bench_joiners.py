"""The joiners bench: figures and bars from given measurements, readings of processes, small real runs."""

from __future__ import annotations

import dataclasses
import os
import resource

import pytest

from bench import joiners, namespaces
from bench.joiners import Memory, Wave, busy_share, process_seconds, status_bytes

TINY = {"d_model": 32, "layers": 1, "heads": 1}
WAVE = Wave([0.1, 0.2, 0.3], [0.2, 0.21, 0.9], 0.5, 0.75, 1.5, 6.0, 1000)
MEMORY = Memory(100, 110, 40, 900, 5, 20_000_000)


def test_figures_come_from_medians_and_hold_their_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(WAVE, meanwhile=[0.5])
    monkeypatch.setattr(joiners, "waves", lambda count, model, compute: [WAVE, slow, WAVE])
    monkeypatch.setattr(joiners, "memory", lambda *size: MEMORY)
    report = joiners.run(quick=False)
    assert report.figures["round_time_ratio"] == pytest.approx(1.05)
    assert report.figures["join_memory"] == pytest.approx(1.1)
    assert report.missed() == []
    monkeypatch.setattr(joiners, "waves", lambda count, model, compute: [slow])
    monkeypatch.setattr(joiners, "memory", lambda *size: dataclasses.replace(MEMORY, joiner=121))
    missed = joiners.run(quick=True).missed()
    assert [text.split()[0] for text in missed] == ["round_time_ratio", "join_memory"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from Linux's /proc")
def test_what_is_read_of_a_process_is_its_own() -> None:
    pid = os.getpid()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert status_bytes(pid, "VmHWM") == pytest.approx(peak, rel=0.05)
    used = resource.getrusage(resource.RUSAGE_SELF)
    assert process_seconds(pid) == pytest.approx(used.ru_utime + used.ru_stime, abs=0.1)
    assert busy_share((10.0, 100.0), (40.0, 200.0)) == pytest.approx(0.3)
    with pytest.raises(ProcessLookupError):
        status_bytes(pid, "no such entry")


@pytest.mark.slow
def test_joiners_load_a_snapshot_while_the_others_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiners, "JOINERS", 2)
    monkeypatch.setattr(namespaces, "why_not", lambda: "this test runs on loopback")
    (wave,) = joiners.waves(1, TINY, 0.01)
    assert len(wave.before) >= joiners.BEFORE - 1 and wave.ratio > 0
    assert wave.nbytes > 4 * 32 * 256 and wave.cpu > 0 and 0 < wave.busy <= 1


@pytest.mark.slow
def test_a_joiner_gets_along_with_little_more_memory_than_others() -> None:
    kept = joiners.memory(TINY, 5, 40)
    assert kept.limited_rounds >= joiners.MORE
    assert 0 < kept.joiner < 1.2 * kept.steady < 2 * kept.data
