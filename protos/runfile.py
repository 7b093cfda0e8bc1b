"""The run file: one TOML text that says everything a run is, checked before anything starts.

Node and coordinator read the same text and compare its digest when a node joins: the digest of the effective
values, without the coordinator's addresses and limits. Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protos.byzantine_section import ByzantineConfig
from protos.digests import sha256_text
from protos.method_section import MethodConfig
from protos.methods import outer_momentum
from protos.problems import Problem, nearest, problem_of, with_lines
from protos.section import judged, refuse
from protos.sections import (
    SECTIONS,
    CoordinatorConfig,
    DataConfig,
    ExchangeConfig,
    LimitsConfig,
    ModelConfig,
    RoundConfig,
    RunConfig,
    file_value,
    used_keys,
)
from protos.toml_writer import to_toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ByzantineConfig",
    "CoordinatorConfig",
    "DataConfig",
    "ExchangeConfig",
    "LimitsConfig",
    "MethodConfig",
    "ModelConfig",
    "RoundConfig",
    "RunConfig",
    "RunFile",
    "RunFileError",
]

MAX_CHARACTERS: Final = 1 << 20  # of a run file; the text may come from a peer
_DIGEST_FORMAT: Final = "atoll run file 1"


class RunFileError(ValueError):
    """A run file that cannot be used; the text lists every problem with its place, value, rule and fix."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{name}: {count}", *map(str, problems)]))


class RunFile(BaseModel):
    """A whole run file with every value in effect."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    method: MethodConfig = Field(default_factory=MethodConfig)
    round: RoundConfig = Field(default_factory=RoundConfig)
    byzantine: ByzantineConfig = Field(default_factory=ByzantineConfig)
    exchange: ExchangeConfig = Field(default_factory=ExchangeConfig)
    coordinator: CoordinatorConfig = Field(default_factory=CoordinatorConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)

    @model_validator(mode="after")
    def _check_together(self) -> RunFile:
        method = self.method
        values: dict[str, float] = {"warmup": min(method.warmup, self.run.rounds // 10)}
        if "outer_momentum" not in method.unused():
            values["outer_momentum"] = outer_momentum(self.run.rounds)
        left_out = {key: value for key, value in values.items() if key not in method.model_fields_set}
        if any(getattr(method, key) != value for key, value in left_out.items()):
            given = method.model_fields_set
            method = MethodConfig.model_construct(_fields_set=given, **{**dict(method), **left_out})
            object.__setattr__(self, "method", method)
        refuse([*judged((*_broken_between(self.run, self.method), *_broken_vocab(self.model, self.data)))])
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunFile:
        """Read and check a run file.

        Raises:
            RunFileError: it cannot be read, is not TOML, or breaks a rule; the text is ready for the user.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RunFileError(
                str(path), [Problem("", "file", "is not UTF-8 text", f"byte {error.start}")]
            ) from error
        except OSError as error:
            reason = error.strerror or str(error)
            fix = (
                "'atoll run init FILE' writes a commented one" if isinstance(error, FileNotFoundError) else ""
            )
            raise RunFileError(str(path), [Problem("", "file", f"cannot be read: {reason}", fix)]) from error
        return cls.parse(text, name=str(path))

    @classmethod
    def parse(cls, text: str, name: str = "run file") -> RunFile:
        """Check the text of a run file; ``name`` is what error messages call it.

        Raises:
            RunFileError: not TOML, or a rule is broken. Every problem is listed at once.
        """
        if len(text) > MAX_CHARACTERS:
            rule = f"has {len(text)} characters, at most {MAX_CHARACTERS} are read"
            raise RunFileError(name, [Problem("", "file", rule)])
        try:
            raw = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            detail = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RunFileError(name, [Problem("", "file", f"is not valid TOML: {detail}")]) from error
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            problems = [problem for item in error.errors() for problem in problem_of(item, SECTIONS)]
            known = set(map(str, problems))
            problems += [problem for problem in _broken_beside(raw, error) if str(problem) not in known]
            raise RunFileError(name, with_lines(problems, text)) from error

    @property
    def digest(self) -> str:
        """sha256, in hex, of the effective values of all sections that decide what is computed."""
        ways = (ByzantineConfig.title, ExchangeConfig.title, CoordinatorConfig.title, LimitsConfig.title)
        values = {name: dict(section) for name, section in self if name not in ways}
        canonical = json.dumps(
            [_DIGEST_FORMAT, values], sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return sha256_text(canonical)

    def to_toml(self) -> str:
        """The effective values as a run file without comments; :meth:`parse` of it gives equal values."""
        return to_toml(
            {name: {key: file_value(section, key) for key in used_keys(section)} for name, section in self}
        )


def _broken_between(run: RunConfig, method: MethodConfig) -> Iterable[Iterator[Problem]]:
    return _broken_warmup(run, method), _broken_rounds(run, method), _broken_fragments(run, method)


def _broken_warmup(run: RunConfig, method: MethodConfig) -> Iterator[Problem]:
    if "warmup" in method.model_fields_set and method.warmup >= run.rounds:
        rule = f"must be less than [run] rounds = {run.rounds}, or the learning rate never reaches its peak"
        yield Problem("method", "warmup", rule, f"for example {run.rounds // 10}", method.warmup)


def _broken_rounds(run: RunConfig, method: MethodConfig) -> Iterator[Problem]:
    if run.rounds < 2 and method.micro_steps(0) < method.micro_steps(1):
        rule = "must be at least 2 with lordo: the first round only finds the first basis"
        yield Problem("run", "rounds", rule, "", run.rounds)


def _broken_fragments(run: RunConfig, method: MethodConfig) -> Iterator[Problem]:
    if method.fragments > run.rounds:
        rule = f"must not be more than [run] rounds = {run.rounds}, or some fragments are never exchanged"
        yield Problem("method", "fragments", rule, f"at most {run.rounds}", method.fragments)


def _broken_vocab(model: ModelConfig, data: DataConfig) -> Iterable[Iterator[Problem]]:
    return _too_small_vocab(model, data), _missing_vocab(model, data)


def _too_small_vocab(model: ModelConfig, data: DataConfig) -> Iterator[Problem]:
    if data.tokenizer == "bytes" and model.vocab is not None and model.vocab < 256:
        rule = 'must be at least 256 with [data] tokenizer = "bytes"'
        yield Problem("model", "vocab", rule, "or leave it out", model.vocab)


def _missing_vocab(model: ModelConfig, data: DataConfig) -> Iterator[Problem]:
    tokens = data.tokenizer != "bytes" or data.source.endswith((".bin", ".npy"))
    if tokens and model.vocab is None and model.name == "llama":
        rule = "must be given unless the data are bytes: the coordinator never reads the data"
        yield Problem("model", "vocab", rule, "write the number of the tokenizer's token ids")


def _broken_beside(raw: dict[str, Any], error: ValidationError) -> Iterator[Problem]:
    """The rules between keys and between sections, as far as they can be judged beside wrong values."""
    given = {title: raw.get(title, {}) for title in SECTIONS if isinstance(raw.get(title, {}), dict)}
    wrong: dict[str, set[str]] = {title: set() for title in given}
    for item in error.errors():
        title, key = [*map(str, item["loc"]), "", ""][:2]
        if title in wrong and key in given[title]:
            meant = nearest(key, SECTIONS[title].model_fields)
            unknown = item["type"] == "extra_forbidden" and meant not in given[title]
            wrong[title] |= {key, meant} if unknown and meant else {key}
    sections: dict[str, Any] = {
        title: SECTIONS[title].without(values, wrong[title]) for title, values in given.items()
    }
    for section in sections.values():
        yield from section.problems()
    if (run := sections.get("run")) and (method := sections.get("method")):
        yield from judged(_broken_between(run, method))
    if (model := sections.get("model")) and (data := sections.get("data")):
        yield from judged(_broken_vocab(model, data))
