"""The claim that the polar factor is worth its price, in a short form: Sign-Muon against Signum.

``python -m bench methods`` is the long form, with three seeds and four claims.
"""

from __future__ import annotations

import pytest

from bench.methods import SIGN_MUON, SIGNUM
from bench.simulated import simulate


@pytest.mark.slow
def test_sign_muon_beats_signum_at_equal_bytes() -> None:
    outcomes = simulate([SIGN_MUON, SIGNUM], steps=120, seeds=1)
    (polar,), (plain,) = outcomes[SIGN_MUON.label], outcomes[SIGNUM.label]
    assert polar.bytes_up == plain.bytes_up
    assert polar.validation_loss < 2.5, "the model has learned more than the frequencies of bytes"
    assert plain.validation_loss - polar.validation_loss >= 0.08
