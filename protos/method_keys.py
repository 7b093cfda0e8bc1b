"""The keys of [method] in the run file: local optimizer, local steps, codec, reduce and outer optimizer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from protos.method_fields import (
    Beta,
    Codec,
    MomentsCodec,
    OptimizerName,
    OptimizerOptions,
    Rate,
    Trim,
    VectorCodec,
)
from protos.methods import (
    OPTIMIZERS,
    OUTER_LR,
    PRESETS,
    REDUCED_LR,
    SHORT_MOMENTUM,
    VOTE,
    VOTED,
    Basis,
    Coefficients,
    Direction,
    MethodName,
    Outer,
    Preset,
    Reduction,
    Scaling,
    Schedule,
    betas,
    local_steps_of,
    merge_share,
    micro_steps,
    omega_of,
)
from protos.problems import Unset
from protos.section import Section


# Defaults that follow from other values. Where those are wrong, which is reported, any answer will do.
def _preset(data: dict[str, Any]) -> Preset:
    return PRESETS[data.get("name", "sign-muon")]


def _reduction(data: dict[str, Any]) -> Reduction:
    return "vote" if data.get("name") in VOTED and data.get("local_steps", 1) == 1 else "mean"


def _inner(data: dict[str, Any]) -> tuple[float, Scaling]:
    """Rate and scaling of the matrices."""
    preset, optimizer = _preset(data), data.get("optimizer")
    if optimizer == preset.optimizer or optimizer not in OPTIMIZERS:
        return preset.lr, preset.scaling
    return OPTIMIZERS[optimizer]


class MethodKeys(Section):
    """The keys, each judged by itself."""

    title = "method"

    name: MethodName = Field(
        default="sign-muon",
        description="sign-muon and signum send 1 bit a parameter in every step and the majority decides; "
        "ddp-muon, ddp-adamw and lowrank-ddp send gradients. lordo, local-adamw, diloco, muloco and "
        "muloco-1bit train for several steps and send how far they have come, the pseudo-gradient.",
    )
    local_steps: int = Field(
        default_factory=lambda data: _preset(data).local_steps,
        ge=1,
        le=1 << 20,
        description="Steps that a node makes between two exchanges of the same parameters, often called K.",
    )
    optimizer: OptimizerName = Field(
        default_factory=lambda data: _preset(data).optimizer,
        description="Local optimizer of the matrices; embeddings, norms and biases take AdamW.",
    )
    optimizer_options: OptimizerOptions = Field(
        default_factory=dict,
        description="Arguments of the class of torch.optim that optimizer names.",
    )
    embeddings: Reduction = Field(
        default_factory=_reduction,
        description="How embeddings and untied heads are reduced in every step: the majority of 1-bit votes, "
        "or the fp32 mean (AdamW), which costs 32 times the bytes.",
    )
    vectors: Reduction = Field(
        default_factory=_reduction,
        description="The same choice for norms and biases.",
    )
    lr: Rate = Field(
        default_factory=lambda data: _inner(data)[0],
        description="Peak learning rate of the matrices.",
    )
    embedding_lr: Rate = Field(
        default_factory=lambda data: REDUCED_LR[data.get("embeddings", "vote")],
        description="Peak learning rate of embeddings and heads. Left out: 0.002 voted, else 0.006.",
    )
    vector_lr: Rate = Field(
        default_factory=lambda data: REDUCED_LR[data.get("vectors", "vote")],
        description="Peak learning rate of norms and biases. Left out: 0.002 voted, else 0.006.",
    )
    momentum: Beta = Field(default=0.95, description="Share of the old momentum that each step keeps.")
    nesterov: bool = Field(default=True, description="Whether the step looks one step ahead of the momentum.")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Decoupled weight decay: weights shrink by lr x weight_decay a step.",
    )
    ns_steps: int = Field(
        default=5,
        ge=1,
        le=20,
        description="Newton-Schulz iterations of the polar factor. One is hardly more than signum.",
    )
    ns_coefficients: Coefficients = Field(
        default="polar-express", description="Polynomials of the Newton-Schulz iterations."
    )
    scaling: Scaling = Field(
        default_factory=lambda data: _inner(data)[1],
        description="How a step depends on a matrix's shape: 'unit-gain' gives all layers the same gain, "
        "'match-rms' the step size of AdamW, 'none' the bare lr.",
    )
    beta1: Beta = Field(
        default_factory=lambda data: betas(data.get("name", ""))[0],
        description="AdamW's decay of the mean gradient; in low-rank methods only that of the matrices.",
    )
    beta2: Beta = Field(
        default_factory=lambda data: betas(data.get("name", ""))[1],
        description="AdamW's decay of the squared gradient; in low-rank methods only that of the matrices.",
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="AdamW's floor under the square root.")
    codec: Codec = Field(
        default_factory=lambda data: _preset(data).codec,
        description="How the pseudo-gradient of a matrix travels. 'vote' is 1 bit an entry, of which the "
        "majority decides, times the mean magnitude in the matrix ('vote-row': in each row).",
    )
    embedding_codec: Codec = Field(
        default_factory=lambda data: _preset(data).embedding_codec,
        description="The same for embeddings and heads.",
    )
    vector_codec: VectorCodec = Field(
        default_factory=lambda data: _preset(data).vector_codec,
        description="The same for norms and biases, which travel together as one vector.",
    )
    error_feedback: Annotated[bool | None, Unset("on where a mean is lossy, off for votes", True)] = Field(
        default=None,
        description="Whether what a codec lost of a contribution is added to the next one.",
    )
    outer: Outer = Field(
        default_factory=lambda data: _preset(data).outer,
        description="What is done with the mean pseudo-gradient: 'average' and 'sgd' take it off, 'nesterov' "
        "by way of a momentum.",
    )
    outer_lr: Rate = Field(
        default_factory=lambda data: OUTER_LR[data.get("outer", "average")],
        description="Factor on the mean pseudo-gradient. Left out: 0.7 with nesterov, else 1.0.",
    )
    outer_momentum: Beta = Field(
        default=SHORT_MOMENTUM,
        description="Share of the old outer momentum that each round keeps. Left out: 0.9 in a run of at "
        "least 100 rounds, else 0.5; 0.9 costs a run of 32 rounds 0.42 nats.",
    )
    rank: int = Field(
        default=0,
        ge=0,
        le=1 << 16,
        description="Rank of the low-rank moments; 0 is an eighth of each matrix's shorter side.",
    )
    omega: float = Field(
        default_factory=lambda data: omega_of(data.get("name", "")),
        ge=0,
        le=1,
        description="Share of the low-rank step; the rest is a step along the whole gradient. With 1 the "
        "weights never leave the span of the first basis.",
    )
    mu: float = Field(
        default=1.0, gt=0, le=10**6, description="Divisor of the whole gradient's step; below 1 it is longer."
    )
    basis: Basis = Field(
        default="global",
        description="What the basis spans: 'global' the mean pseudo-gradient of all nodes, 'local' each "
        "node's own gradient.",
    )
    direction: Direction = Field(
        default="adam",
        description="The low-rank step: 'adam' divides by the second moment, 'muon' takes the polar factor "
        "and needs none.",
    )
    moments_codec: MomentsCodec = Field(
        default="fp32", description="How the low-rank moments travel, which are averaged with a global basis."
    )
    basis_every: int = Field(
        default=16, ge=1, le=10**9, description="Rounds between two bases of lowrank-ddp."
    )
    fragments: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Parts of the model that take turns: a round is local_steps / fragments steps long and "
        "exchanges one of them.",
    )
    overlap: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Last steps of a round that are made while its exchange is on the way.",
    )
    mix: float = Field(
        default_factory=lambda data: merge_share(data.get("overlap", 0)),
        gt=0,
        le=1,
        description="Share of the agreed weights in those that a node goes on with. Left out: 0.5 with an "
        "overlap, else 1.",
    )
    delay: int = Field(
        default=0,
        ge=0,
        le=1,
        description="Rounds between a gradient and the vote or mean that it goes into: with 1 it travels "
        "while the next one is computed. For methods that exchange in every step.",
    )
    clip: float = Field(
        default=0.0,
        ge=0,
        le=10**6,
        description="Largest norm of a contribution to a mean, in multiples of the median; 0 is no limit.",
    )
    trim: Trim = Field(
        default=0,
        description="Largest and smallest values, so many each, that the mean of an entry leaves out: as "
        "many as nodes may lie. 'median' leaves out all but the one or two in the middle.",
    )
    warmup: int = Field(
        default=50,
        ge=0,
        le=10**9,
        description="Rounds in which the learning rate rises. Left out: 50, or a tenth of a shorter run.",
    )
    schedule: Schedule = Field(default="cosine", description="How the learning rate falls after the warm-up.")
    final: float = Field(
        default=0.05, ge=0, le=1, description="Learning rate of the last round, as a fraction of the peak."
    )

    @property
    def has_local_steps(self) -> bool:
        """Whether pseudo-gradients travel."""
        # Read only where it decides: a wrong number leaves the rules of other methods to be judged.
        steps = self.local_steps if self.name == "sign-muon" else 1
        return local_steps_of(self.name, steps)

    @property
    def votes(self) -> bool:
        """Whether a majority decides of anything, so that nodes can agree with it or not."""
        if self.has_local_steps:
            return self.codec in VOTE or self.embedding_codec in VOTE
        return self.name in VOTED

    def micro_steps(self, round_index: int) -> int:
        """Batches that a node trains in a round."""
        return micro_steps(self.name, self.local_steps, round_index, self.fragments, self.basis)
