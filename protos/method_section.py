"""The [method] section of the run file: local optimizer, local steps, codec, reduce and outer optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import Field

from protos.codecs import CodecSpec
from protos.method_fields import (
    Beta,
    Codec,
    MomentsCodec,
    OptimizerName,
    OptimizerOptions,
    Rate,
    VectorCodec,
)
from protos.methods import (
    LOCAL,
    LOW_RANK,
    MOMENTUM,
    OPTIMIZERS,
    OUTER_LR,
    POLAR,
    PRESETS,
    REDUCED_LR,
    SHORT_MOMENTUM,
    TORCH,
    VOTE,
    VOTED,
    WITH_STEPS,
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
from protos.problems import Problem, Unset
from protos.section import Section

_CHOOSING: Final = tuple(
    name for name in LOCAL if name != "lordo"
)  # methods with a choice of local optimizer
_OF_LOCAL_STEPS: Final = (
    *("codec", "embedding_codec", "vector_codec", "error_feedback"),
    *("outer", "outer_lr", "outer_momentum", "fragments", "overlap", "mix"),
)


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


class MethodConfig(Section):
    """How gradients become steps, and what travels between the nodes."""

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
    clip: float = Field(
        default=0.0,
        ge=0,
        le=10**6,
        description="Largest norm of a contribution to a mean, in multiples of the median; 0 is no limit.",
    )
    trim: int = Field(
        default=0,
        ge=0,
        le=32767,
        description="Largest and smallest values, so many each, that the mean of an entry leaves out.",
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
        return local_steps_of(self.name, self.local_steps)

    @property
    def votes(self) -> bool:
        """Whether a majority decides of anything, so that nodes can agree with it or not."""
        if self.has_local_steps:
            return self.codec in VOTE or self.embedding_codec in VOTE
        return self.name in VOTED

    def micro_steps(self, round_index: int) -> int:
        """Batches that a node trains in a round."""
        return micro_steps(self.name, self.local_steps, round_index, self.fragments, self.basis)

    def unused(self) -> dict[str, str]:
        unused: dict[str, str] = {}

        def only(condition: bool, reason: str, *keys: str) -> None:
            if not condition:
                unused.update(dict.fromkeys(keys, reason))

        def methods(names: tuple[str, ...], what: str) -> str:
            return f"{what} ({', '.join(names)}), not {self.name}"

        local, torch = self.has_local_steps, self.optimizer.startswith(TORCH)
        reason = methods(_CHOOSING, "only these methods have the choice of a local optimizer")
        only(self.name in _CHOOSING, reason, "optimizer", "optimizer_options")
        if self.name in _CHOOSING:
            only(torch, f"{self.optimizer} is not a class of torch.optim", "optimizer_options")
            chosen = f"the local optimizer {self.optimizer} has none"
            polar = self.optimizer in ("muon", "sign-muon")
            only(polar, f"{chosen}: only muon and sign-muon have", "ns_steps", "ns_coefficients")
            only(polar, f"{chosen}: only muon and sign-muon have", "momentum", "nesterov", "scaling")
        else:
            polar = self.name in POLAR or (self.name == "lordo" and self.direction == "muon")
            reason = methods(POLAR, "only methods with a polar factor use it")
            only(polar, reason, "ns_steps", "ns_coefficients")
            reason = methods(MOMENTUM, "only methods with a momentum use it")
            only(self.name in MOMENTUM, reason, "momentum", "nesterov", "scaling")
        voting = self.name in VOTED and not local
        reason = methods(VOTED, "only methods that vote in every step have the choice")
        if self.name in VOTED and local:
            reason = f"with local_steps = {self.local_steps} codec and embedding_codec say what travels"
        only(voting, reason, "embeddings", "vectors")
        if voting and "mean" not in (self.embeddings, self.vectors):
            reason = f'with {self.name} AdamW runs only where embeddings or vectors are "mean"'
            unused.update(dict.fromkeys(("beta1", "beta2", "eps"), reason))
            unused.update(dict.fromkeys(("clip", "trim"), "everything is voted on, nothing averaged"))
        unused |= self._unused_exchange(local)
        if self.schedule == "constant":
            unused["final"] = "a constant schedule ends at the peak"
        return unused

    def _unused_exchange(self, local: bool) -> dict[str, str]:
        """The keys about pseudo-gradients, outer steps and low ranks that have no effect."""
        unused: dict[str, str] = {}
        if not local:
            reason = f"{self.name} makes no local steps"
            if self.name == "sign-muon":
                reason += " unless local_steps is above 1"
            unused |= dict.fromkeys(_OF_LOCAL_STEPS, reason)
        elif self.outer != "nesterov":
            unused["outer_momentum"] = f'outer = "{self.outer}" has no momentum'
        if local and all(self._exact(c) for c in (self.codec, self.embedding_codec, self.vector_codec)):
            unused["error_feedback"] = "all codecs are exact, nothing is lost"
        low_rank = f"only low-rank methods use it ({', '.join(LOW_RANK)}), not {self.name}"
        if self.name not in LOW_RANK:
            unused |= dict.fromkeys(("rank", "omega", "mu"), low_rank)
        if self.name == "lowrank-ddp":
            unused |= dict.fromkeys(("clip", "trim"), "lowrank-ddp takes plain means")
        if self.name != "lordo":
            only_lordo = f"only lordo uses it, not {self.name}"
            unused |= dict.fromkeys(("basis", "direction", "moments_codec"), only_lordo)
        elif self.basis == "local":
            unused["moments_codec"] = "with a local basis the moments stay at home"
        if self.name != "lowrank-ddp":
            unused["basis_every"] = f"only lowrank-ddp uses it, not {self.name}"
        if self.name in LOW_RANK and self.omega == 1.0:
            unused["mu"] = "with omega = 1 there is no step along the whole gradient"
        return unused

    @staticmethod
    def _exact(codec: str) -> bool:
        return codec not in VOTE and CodecSpec.parse(codec).exact

    def broken_rules(self) -> Iterator[Problem]:
        title = self.title
        if self.local_steps > 1 and self.name in WITH_STEPS:
            rule = f"{self.name} exchanges in every step, so this is 1"
            fix = f"for local steps use {WITH_STEPS[self.name]}"
            yield Problem(title, "local_steps", rule, fix, self.local_steps)
        if not self.has_local_steps:
            return
        if self.optimizer == "lordo" and self.name != "lordo":
            rule = (
                "the low-rank optimizer needs a basis from all nodes, which only the method lordo exchanges"
            )
            yield Problem(title, "optimizer", rule, 'write name = "lordo"', self.optimizer)
        if self.optimizer.startswith(TORCH) and "lr" not in self.model_fields_set:
            rule = f"must be given with optimizer = {self.optimizer!r}, whose best value nobody has measured"
            yield Problem(title, "lr", rule, "for example lr = 0.01")
        if self.name == "lordo" and self.basis == "global" and self.codec in VOTE:
            rule = "the basis follows from the mean pseudo-gradient, and a vote has none"
            yield Problem(title, "codec", rule, 'use "1bit" for as few bytes', self.codec)
        yield from self._broken_fragments()

    def _broken_fragments(self) -> Iterator[Problem]:
        steps, parts = self.local_steps, self.fragments
        if parts > 1 and self.name == "lordo" and self.basis == "global":
            rule = "lordo finds its first bases for the whole model at once, so this is 1"
            yield Problem(self.title, "fragments", rule, "for fragments use muloco or diloco", parts)
            return
        if steps % parts:
            near = sorted({max(parts, steps // parts * parts), (steps // parts + 1) * parts})
            rule = f"must divide local_steps = {steps}, so that all rounds are equally long"
            fix = f"for example local_steps = {' or '.join(map(str, near))}"
            yield Problem(self.title, "fragments", rule, fix, parts)
        elif self.overlap >= steps // parts:
            rule = f"must be less than the {steps // parts} steps of a round"
            if parts > 1:
                rule += f" (local_steps / fragments = {steps} / {parts})"
            most = steps // parts - 1
            fix = f"at most {most}" if most else "a round of one step leaves nothing to overlap: remove it"
            yield Problem(self.title, "overlap", rule, fix, self.overlap)
