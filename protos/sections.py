"""The sections of the run file: every field with its type, bounds and meaning, and the rules between them.

[method] has a module of its own, :mod:`protos.method_section`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from protos.address import Address
from protos.byzantine_section import ByzantineConfig
from protos.limits import LIMITS, Limits
from protos.method_section import MethodConfig
from protos.model_tensors import OWN, parse_all
from protos.problems import Form, Problem, Unset
from protos.section import Section
from protos.units import UnitError, parse_duration


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_duration(value)
    except UnitError as error:
        raise ValueError(str(error)) from error


def _listen(value: Any) -> Any:
    if isinstance(value, str):
        Address.parse(value)  # an AddressError is a ValueError: pydantic reports its text
    return value


def _off(value: Any) -> Any:
    return None if value == "off" else value


Duration = Annotated[
    float,
    BeforeValidator(_seconds),
    Form("a duration of at most 30 days: a number of seconds above 0, or a text such as '90s' or '2 min'"),
    Field(gt=0, le=30 * 86400),
]
Listen = Annotated[
    str, BeforeValidator(_listen), Form("host:port, IPv6 in brackets; port 0 takes a free one")
]
MetricsPort = Annotated[
    Annotated[int, Field(ge=0, le=65535)] | None,
    BeforeValidator(_off),
    Form('a port from 0 (takes a free one) to 65535, or "off"'),
]


class RunConfig(Section):
    """What the run is called and how long it lasts."""

    title = "run"

    name: Annotated[
        str, Form("1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit")
    ] = Field(
        default="atoll",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of the run, in logs, metrics and file names.",
    )
    seed: Annotated[int, Form("a whole number from 0 to 2^63 - 1")] = Field(
        default=0, ge=0, lt=1 << 63, description="Seed of the initial weights and the order of the data."
    )
    rounds: int = Field(
        default=512, ge=1, le=10**9, description="Rounds to train: exchanges between the nodes."
    )
    nodes: int = Field(
        default=3,
        ge=1,
        le=65535,
        description="Nodes to wait for before the first round; more may join later.",
    )
    evaluate_every: int = Field(
        default=32,
        ge=0,
        le=10**9,
        description="Rounds between two validation losses; 0 measures only at the end.",
    )
    validation_windows: int = Field(
        default=128,
        ge=1,
        le=1 << 24,
        description="Windows of the fixed validation text that a validation loss reads.",
    )


class ModelConfig(Section):
    """The model that is trained."""

    title = "model"

    name: Annotated[
        str, Form('"llama", "own", or "hf:" and the folder, config.json or hub id of a Transformers model')
    ] = Field(
        default="llama",
        pattern=r"^(llama|own|hf:.*\S.*)$",
        max_length=4096,
        description="Architecture; 'hf:' (extra 'hf') takes its sizes from the configuration it names, 'own' "
        "is the model of a script that joins by atoll.join.",
    )
    tensors: Annotated[
        list[str] | None,
        Form('texts such as "fc.weight matrix 64x32"'),
        Unset("an architecture has its own", ["fc.weight matrix 64x32"]),
    ] = Field(
        default=None,
        min_length=1,
        description="Name, role and shape of each trainable tensor of an 'own' model, in the model's order; "
        "'atoll run init --model FILE.py:FUNCTION' writes them.",
    )
    d_model: int = Field(default=64, ge=2, le=1 << 16, description="Width of the residual stream.")
    layers: int = Field(default=2, ge=1, le=4096, description="Number of decoder layers.")
    heads: int = Field(
        default=2, ge=1, le=4096, description="Attention heads; they divide d_model into even widths."
    )
    ff: Annotated[int | None, Unset("8/3 of d_model, rounded to a multiple of 16", 176)] = Field(
        default=None, ge=1, le=1 << 20, description="Width of the feed-forward part."
    )
    context: int = Field(default=64, ge=2, le=1 << 20, description="Tokens a prediction can look back on.")
    vocab: Annotated[int | None, Unset("256 for bytes; must be given for other tokens", 256)] = Field(
        default=None, ge=2, le=1 << 24, description="Token ids the model knows."
    )
    tied: bool = Field(default=True, description="Whether the embedding is the output head as well.")

    def without_effect(self) -> Iterable[Iterator[tuple[str, str]]]:
        return (self._unused_sizes(),)

    def _unused_sizes(self) -> Iterator[tuple[str, str]]:
        if self.name != OWN:
            yield "tensors", f"{self.name} has tensors of its own"
        if self.name == OWN:
            for key in ("d_model", "layers", "heads", "ff", "context", "vocab", "tied"):
                yield key, "the script that trains brings its model along"
        elif self.name.startswith("hf:"):
            for key in ("d_model", "layers", "heads", "ff", "tied"):
                yield key, f"{self.name} brings its own sizes"

    @property
    def predicted(self) -> int:
        """Tokens that are predicted of a sample; a sample of a script's own data counts as one."""
        return 1 if self.name == OWN else self.context

    def broken_rules(self) -> Iterable[Iterator[Problem]]:
        return (self._broken_heads(), self._broken_tensors())

    def _broken_tensors(self) -> Iterator[Problem]:
        if self.name != OWN:
            return
        if self.tensors is None:
            rule = 'must be given with name = "own": what travels follows from them'
            fix = "'atoll run init --model FILE.py:FUNCTION' writes them"
            yield Problem(self.title, "tensors", rule, fix)
            return
        try:
            for _ in parse_all(self.tensors):
                pass
        except ValueError as error:
            yield Problem(self.title, "tensors", str(error), "", self.tensors)

    def _broken_heads(self) -> Iterator[Problem]:
        if self.name == "llama" and self.d_model % (2 * self.heads):
            rule = (
                f"d_model = {self.d_model} must be a multiple of 2 x heads (rotary positions need even heads)"
            )
            fits = [heads for heads in range(1, self.d_model // 2 + 1) if self.d_model % (2 * heads) == 0]
            nearest = sorted(fits, key=lambda heads: abs(heads - self.heads))[:3]
            fix = f"heads can be {' or '.join(map(str, sorted(nearest)))}" if fits else "make d_model even"
            yield Problem(self.title, "heads", rule, fix, self.heads)


class DataConfig(Section):
    """The text that is read, and how it is dealt out."""

    title = "data"

    source: str = Field(
        default="shakespeare",
        min_length=1,
        max_length=4096,
        description="'shakespeare' (ships with Atoll), a text file, a folder of text files, a file of tokens "
        "('.bin', '.npy'), or 'hf:NAME[@config][:split][#column]' of a Hugging Face dataset (extra 'hf').",
    )
    tokenizer: str = Field(
        default="bytes",
        min_length=1,
        max_length=4096,
        description="'bytes' (256 token ids), or the path of a tokenizer.json (extra 'tokenizers').",
    )
    batch: int = Field(default=4, ge=1, le=1 << 20, description="Sequences that each node reads in a step.")


class RoundConfig(Section):
    """When a round closes."""

    title = "round"

    deadline: Duration = Field(
        default=60.0,
        description="The longest that a round waits after its first contribution, then it commits without "
        "the others. How long it really waits follows from when the contributions of the last rounds came.",
    )
    adaptive: bool = Field(
        default=True,
        description="Wait less than the deadline once it is known when contributions usually come; false: a "
        "slow node holds every round up to the deadline, and is always counted if it makes that.",
    )
    start_timeout: Duration = Field(
        default=600.0,
        description="Longest wait for a round's first contribution and, after the deadline, for a quorum.",
    )
    quorum: float = Field(
        default=0.6,
        gt=0.5,
        le=1,
        description="Fraction of the live members that has to contribute for a round to commit.",
    )

    def broken_rules(self) -> Iterable[Iterator[Problem]]:
        return (self._broken_deadline(),)

    def _broken_deadline(self) -> Iterator[Problem]:
        if self.deadline > self.start_timeout:
            rule = f"must not be longer than start_timeout = {self.start_timeout:g} s"
            fix = (
                "raise start_timeout or lower deadline: the wait for the others of a round must end before "
                "that for its first contribution would"
            )
            yield Problem(self.title, "deadline", rule, fix, self.deadline)


class ExchangeConfig(Section):
    """What carries the bytes of a round. This section is not part of the run's digest."""

    title = "exchange"

    transport: Literal["hub", "direct", "swarm", "auto"] = Field(
        default="hub",
        description="'hub': everything goes to the coordinator, which reduces; 'direct': nodes reduce "
        "a slice each and call each other; 'swarm': likewise over libp2p, through NAT (extra 'swarm'); "
        "'auto': every node by the best way that it has.",
    )


class CoordinatorConfig(Section):
    """Where the coordinator listens. This section is not part of the run's digest."""

    title = "coordinator"

    listen: Listen = Field(default="0.0.0.0:4600", description="Address the nodes connect to.")
    metrics: MetricsPort = Field(default=9464, description="Port of the Prometheus metrics.")

    @property
    def address(self) -> Address:
        """:attr:`listen`, parsed."""
        return Address.parse(self.listen)


class LimitsConfig(Section):
    """What strangers and nodes may take of the coordinator; many may share an address behind a NAT.

    Of what is counted by the minute, a minute's worth may come at once. This section is not part of the run's
    digest.
    """

    title = "limits"

    connections: int = Field(
        default=LIMITS.connections, ge=1, le=1 << 20, description="TCP connections to the coordinator in all."
    )
    connections_per_address: int = Field(
        default=LIMITS.connections_per_address,
        ge=1,
        le=1 << 20,
        description="Connections from one address (IPv6: from one network of 64 bits).",
    )
    handshake_seconds: Duration = Field(
        default=LIMITS.handshake_seconds, description="For the handshakes of a connection, TLS included."
    )
    first_call_seconds: Duration = Field(
        default=LIMITS.first_call_seconds,
        description="Until a connection has shown a right token; then it is cut. Also until the first "
        "message of a call is there whole.",
    )
    wrong_tokens: int = Field(
        default=LIMITS.wrong_tokens,
        ge=1,
        le=1 << 30,
        description="Wrong tokens a minute from an address; beyond that, its connections without a right one "
        "are cut.",
    )
    joins: int = Field(
        default=LIMITS.joins, ge=1, le=1 << 30, description="Nodes that join from an address in a minute."
    )
    questions: int = Field(
        default=LIMITS.questions,
        ge=1,
        le=1 << 30,
        description="Questions about the run and its status from an address in a minute.",
    )
    contributions: int = Field(
        default=LIMITS.contributions,
        ge=1,
        le=1 << 30,
        description="Streams of contributions that each rank of a node opens in a minute.",
    )
    messages: int = Field(
        default=LIMITS.messages,
        ge=1,
        le=1 << 30,
        description="Messages on a node's session in a minute; what comes faster waits.",
    )
    state: int = Field(
        default=LIMITS.state,
        ge=0,
        le=1 << 46,
        description="Largest shared state in bytes, for which the coordinator takes room on its disk; 0: 64 "
        "bytes for each parameter that travels, and 64 MiB.",
    )

    @property
    def limits(self) -> Limits:
        """As the coordinator takes them."""
        return Limits(**dict(self))


SECTIONS: Final[dict[str, type[Section]]] = {
    model.title: model
    for model in (
        RunConfig,
        ModelConfig,
        DataConfig,
        MethodConfig,
        RoundConfig,
        ByzantineConfig,
        ExchangeConfig,
        CoordinatorConfig,
        LimitsConfig,
    )
}


def used_keys(section: Section) -> list[str]:
    """The keys of ``section`` that have an effect and a value, in the schema's order."""
    unused = section.unused()
    return [
        key
        for key in type(section).model_fields
        if key not in unused and file_value(section, key) is not None
    ]


def file_value(section: Section, key: str) -> Any:
    """The value of ``key`` as it stands in a run file; ``None`` if it is left out."""
    value = getattr(section, key)
    return "off" if value is None and isinstance(section, CoordinatorConfig) else value
