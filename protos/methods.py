"""The methods of a run and their presets: what each of the choices is where the run file says nothing.

A method is *local optimizer x local steps x codec x reduce (+ outer optimizer)*; the names are presets of
these choices. The learning rates were measured on byte-level Shakespeare with a small llama-style model,
524,288 tokens by four nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MethodName = Literal[
    "sign-muon",
    "signum",
    "ddp-muon",
    "ddp-adamw",
    "lordo",
    "lowrank-ddp",
    "local-adamw",
    "diloco",
    "muloco",
    "muloco-1bit",
]
Scaling = Literal["unit-gain", "match-rms", "none"]
Reduction = Literal["vote", "mean"]
Schedule = Literal["cosine", "linear", "constant"]
Coefficients = Literal["polar-express", "quintic"]
Outer = Literal["average", "sgd", "nesterov"]
Basis = Literal["global", "local"]
Direction = Literal["adam", "muon"]

VOTE: Final = ("vote", "vote-row")  # codecs of a pseudo-gradient whose signs the majority decides
TORCH: Final = "torch:"  # before the name of a class of torch.optim as local optimizer

# Why a global basis and a vote do not go together.
BASIS_OF_A_VOTE: Final = "the basis follows from the mean pseudo-gradient, and a vote has none"

POLAR: Final = ("sign-muon", "ddp-muon", "muloco", "muloco-1bit")  # take the polar factor of a momentum
MOMENTUM: Final = ("sign-muon", "signum", "ddp-muon", "muloco", "muloco-1bit")
VOTED: Final = ("sign-muon", "signum")  # matrices travel as signs in every step
LOCAL: Final = ("lordo", "local-adamw", "diloco", "muloco", "muloco-1bit")  # K local steps a round
LOW_RANK: Final = ("lordo", "lowrank-ddp")
# What to use instead where a method of one step a round is given more of them.
WITH_STEPS: Final = {
    "signum": "sign-muon",
    "ddp-muon": "muloco",
    "ddp-adamw": "local-adamw or diloco",
    "lowrank-ddp": "lordo",
}


@dataclass(frozen=True)
class Preset:
    """What a method uses where the run file says nothing.

    Attributes:
        lr: of the matrices.
        scaling: of the matrices' steps.
        optimizer: local optimizer of the matrices: ``adamw``, ``muon``, ``sign-muon``, ``lordo``, or
            ``torch:`` and a class of ``torch.optim``. Embeddings and vectors take AdamW.
        local_steps: K, the batches between two exchanges.
        codec: of the matrices' pseudo-gradients: a name of :mod:`protos.codecs`, or ``vote`` / ``vote-row``:
            the majority of the signs, times the mean magnitude of the matrix / of each row.
        embedding_codec, vector_codec: the same for embeddings, and for norms and biases.
        outer: what happens to the mean pseudo-gradient.
    """

    lr: float
    scaling: Scaling
    optimizer: str = ""
    local_steps: int = 1
    codec: str = "fp32"
    embedding_codec: str = "fp32"
    vector_codec: str = "fp32"
    outer: Outer = "average"


PRESETS: Final[dict[MethodName, Preset]] = {
    "sign-muon": Preset(0.032, "unit-gain", "sign-muon", codec="vote", embedding_codec="vote-row"),
    "signum": Preset(lr=1e-3, scaling="none"),
    "ddp-muon": Preset(lr=1e-2, scaling="match-rms"),
    "ddp-adamw": Preset(lr=6e-3, scaling="none"),
    "lordo": Preset(2e-2, "none", "lordo", 32, "int4", "int8"),
    "lowrank-ddp": Preset(lr=2e-2, scaling="none"),
    "local-adamw": Preset(6e-3, "none", "adamw", 16),
    "diloco": Preset(6e-3, "none", "adamw", 100, "int8", "int8", outer="nesterov"),
    "muloco": Preset(1e-2, "match-rms", "muon", 32, "2bit", "int4", outer="nesterov"),
    "muloco-1bit": Preset(1e-2, "match-rms", "muon", 16, "vote", "int4", outer="nesterov"),
}
# Peak rate and scaling of the matrix steps of a local optimizer that is not the preset's.
OPTIMIZERS: Final[dict[str, tuple[float, Scaling]]] = {
    "adamw": (6e-3, "none"),
    "muon": (1e-2, "match-rms"),
    "sign-muon": (0.032, "unit-gain"),
    "lordo": (2e-2, "none"),
}
# Embeddings, norms and biases are not matrices: their rule, and so their rate, follows from their reduction.
REDUCED_LR: Final[dict[str, float]] = {"vote": 2e-3, "mean": 6e-3}

OUTER_LR: Final[dict[str, float]] = {"average": 1.0, "sgd": 1.0, "nesterov": 0.7}
LONG_RUN: Final = 100  # rounds from which on an outer momentum of 0.9 pays
SHORT_MOMENTUM: Final = 0.5
LONG_MOMENTUM: Final = 0.9


def outer_momentum(rounds: int) -> float:
    """Momentum of the outer Nesterov step where nothing else is said: 0.9 has a memory of ten rounds, and
    costs a short run more than it brings (0.42 nats in 32 rounds)."""
    return LONG_MOMENTUM if rounds >= LONG_RUN else SHORT_MOMENTUM


def betas(name: str) -> tuple[float, float]:
    """AdamW's decays where nothing else is said.

    A low-rank method restarts its moments in the directions that are new in a basis; there the first step is
    ``(1 - beta1) / sqrt(1 - beta2)`` times the learning rate, 0.92 with these values (LDAdam's), and 3.2
    with the usual (0.9, 0.999).
    """
    return (0.908, 0.99) if name in LOW_RANK else (0.9, 0.95)


def omega_of(name: str) -> float:
    """Share of the low-rank step where nothing else is said. With less than 1 every round of ``lowrank-ddp``
    would carry the whole gradient, which is what it is there to avoid."""
    return 1.0 if name == "lowrank-ddp" else 0.9


def merge_share(overlap: int) -> float:
    """Share of the agreed weights in those a node goes on with: steps made during the exchange would be lost
    with 1, so that half of both is taken where there are any."""
    return 0.5 if overlap else 1.0


def local_steps_of(name: str, local_steps: int) -> bool:
    """Whether pseudo-gradients of local steps travel, rather than something of each single gradient."""
    return name in LOCAL or (name == "sign-muon" and local_steps > 1)


def micro_steps(
    name: str, local_steps: int, round_index: int, fragments: int = 1, basis: Basis = "global"
) -> int:
    """Batches that a node trains in a round: K, shared out to the rounds of the fragments, but one in round 0
    of ``lordo`` with a global basis, which finds the first one."""
    finds_basis = name == "lordo" and basis == "global"
    return 1 if finds_basis and round_index == 0 else local_steps // fragments
