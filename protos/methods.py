"""The methods of a run and their presets: learning rates that work, and which settings a method uses at all.

The presets were measured on byte-level Shakespeare with a small llama-style model, 512 rounds of 1024 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MethodName = Literal["sign-muon", "signum", "ddp-muon", "ddp-adamw"]
Scaling = Literal["unit-gain", "match-rms", "none"]
Reduction = Literal["vote", "mean"]
Schedule = Literal["cosine", "linear", "constant"]
Coefficients = Literal["polar-express", "quintic"]

POLAR: Final = ("sign-muon", "ddp-muon")  # take the polar factor of a momentum
MOMENTUM: Final = ("sign-muon", "signum", "ddp-muon")
VOTED: Final = ("sign-muon", "signum")  # matrices travel as signs


@dataclass(frozen=True)
class Preset:
    """What a method uses where the run file says nothing."""

    lr: float
    scaling: Scaling


PRESETS: Final[dict[MethodName, Preset]] = {
    "sign-muon": Preset(lr=0.032, scaling="unit-gain"),
    "signum": Preset(lr=1e-3, scaling="none"),
    "ddp-muon": Preset(lr=1e-2, scaling="match-rms"),
    "ddp-adamw": Preset(lr=6e-3, scaling="none"),
}
# Embeddings, norms and biases are not matrices: their rule, and so their rate, follows from their reduction.
REDUCED_LR: Final[dict[str, float]] = {"vote": 2e-3, "mean": 6e-3}
