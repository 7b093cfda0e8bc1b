"""The claim that the polar factor is worth its price, in a short form: Sign-Muon against Signum.

``python -m bench methods`` is the long form, with three seeds and four claims.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.methods import MODEL, SIGN_MUON, SIGNUM, train
from node.data import DataSource, open_data


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_sign_muon_beats_signum_at_equal_bytes() -> None:
    data = open_data(DataSource(), MODEL.context)
    polar, plain = (train(method, steps=120, seed=0, data=data, warmup=12) for method in (SIGN_MUON, SIGNUM))
    assert polar.payload == plain.payload
    assert polar.loss < 2.5, "the model has learned more than the frequencies of bytes"
    assert plain.loss - polar.loss >= 0.08
