"""Some of the faults of `python -m bench matrix`, in one run of real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import namespaces
from bench.matrix import Case, Scene, all_cases, scene

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from Linux's /proc"),
]

NO_LINKS = namespaces.why_not()
CEILING = 60.0  # seconds; a hang reaches it
CASES = [
    Case("node", "sending", "kill"),
    Case("node", "waiting", "freeze"),
    Case("donor", "uploading", "kill"),
    Case("joiner", "replaying", "kill"),
    Case("coordinator", "open", "kill"),
    Case("coordinator", "journaled", "kill"),
]
CUT = Case("node", "sending", "cut")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """All cases hit one run; at its end nothing may be lost."""
    folder = tmp_path_factory.mktemp("matrix")
    # Three heartbeats fit into a standstill: who stands still is taken for gone.
    with scene(folder, cuts=NO_LINKS is None, seconds=4.0, heartbeat=1.0, ceiling=CEILING) as made:
        yield made


def test_cases_are_of_the_matrix() -> None:
    assert set(CASES) < set(all_cases(cuts=False))
    assert CUT in all_cases(cuts=True)
    assert {case.who for case in CASES} == {"node", "donor", "joiner", "coordinator"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_run_goes_on(case: Case, played: Scene) -> None:
    played.play(case)
    assert played.standstills[case] < CEILING


@pytest.mark.root
@pytest.mark.skipif(NO_LINKS is not None, reason=str(NO_LINKS))
def test_the_run_goes_on_after_a_cut(played: Scene) -> None:
    played.play(CUT)
    assert played.standstills[CUT] < CEILING


def test_no_sample_is_lost_or_trained_twice(played: Scene) -> None:
    found = played.close()  # all states were equal
    assert found.violations == []
    assert found.rounds > len(CASES)
    assert found.trained + found.returned == found.frontier
