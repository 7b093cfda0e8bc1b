"""Types of the values in [method]: what may be written for each, and errors in words."""

from __future__ import annotations

import difflib
import math
import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field

from protos.buckets import MEDIAN
from protos.codecs import CodecError, CodecSpec
from protos.methods import OPTIMIZERS, TORCH, VOTE
from protos.problems import Form

MOMENT_KINDS: Final = ("fp32", "bf16", "int8", "int4")  # keep magnitudes: a sign says nothing of a variance
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Options of a torch optimizer that have a key of their own in [method].
_OWN_KEYS: Final = {"lr": "lr", "weight_decay": "weight_decay"}
_CODECS: Final = "fp32, bf16, int8, int4, 2bit, ternary, 1bit, 1bit-row, lowrank:RANK or lowrank:RANK+CODEC"

OptionValue = bool | int | float | list[int | float]


def _mean_codec(value: str) -> str:
    """The codec's canonical name: spellings of one codec are one run."""
    try:
        return str(CodecSpec.parse(value))
    except CodecError as error:
        if value in VOTE:
            raise ValueError(
                f"{value!r} is a vote of pseudo-gradients, not possible here; use one of {_CODECS}"
            ) from error
        raise ValueError(str(error)) from error


def _codec(value: str) -> str:
    if value in VOTE:
        return value
    try:
        return str(CodecSpec.parse(value))
    except CodecError as error:
        raise ValueError(f"{error}; 'vote' and 'vote-row' take the majority of the signs") from error


def _vector_codec(value: str) -> str:
    value = _mean_codec(value)
    if CodecSpec.parse(value).kind == "lowrank":
        raise ValueError("a vector has no low rank; use fp32, bf16, int8 or int4, or a codec of few bits")
    return value


def _moments_codec(value: str) -> str:
    value = _mean_codec(value)
    if CodecSpec.parse(value).kind not in MOMENT_KINDS:
        raise ValueError(
            f"moments need their magnitudes, which {value} does not keep; use {', '.join(MOMENT_KINDS)}"
        )
    return value


def _optimizer(value: str) -> str:
    if value in OPTIMIZERS:
        return value
    if value.startswith(TORCH) and _NAME.fullmatch(value[len(TORCH) :]):
        return value
    close = difflib.get_close_matches(value.lower(), OPTIMIZERS, n=1, cutoff=0.55)
    hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(OPTIMIZERS)}"
    raise ValueError(f"unknown local optimizer: {hint} (a class of torch.optim is written 'torch:Adagrad')")


def _options(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be a table, for example { momentum = 0.9, nesterov = true }")
    for name, option in value.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an option: letters, digits and '_', at most 64")
        if name in _OWN_KEYS:
            raise ValueError(f"{name} has a key of its own; write [method] {_OWN_KEYS[name]}")
        if name == "params":
            raise ValueError("params is not for a run file: the parameters are those of the model")
        if not all(map(_plain, option if isinstance(option, list) and option else [option])):
            raise ValueError(
                f"{name} must be a finite number, true or false, or a list of numbers, "
                "as in betas = [0.9, 0.95]"
            )
        if isinstance(option, list) and any(isinstance(item, bool) for item in option):
            raise ValueError(f"{name} must be a list of numbers, without true and false")
    return value


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _trim(value: Any) -> Any:
    return MEDIAN if value == "median" else value


Rate = Annotated[float, Field(gt=0, le=100)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Codec = Annotated[str, AfterValidator(_codec), Form(f'"vote", "vote-row", or a codec: {_CODECS}')]
VectorCodec = Annotated[
    str,
    AfterValidator(_vector_codec),
    Form("a codec without a low rank: fp32, bf16, int8, int4, 2bit, ternary, 1bit"),
]
MomentsCodec = Annotated[
    str, AfterValidator(_moments_codec), Form(f"a codec of numbers: {', '.join(MOMENT_KINDS)}")
]
Trim = Annotated[
    Annotated[int, Field(ge=0, le=MEDIAN)],
    BeforeValidator(_trim),
    Form(f'a whole number from 0 to {MEDIAN}, or "median", which is {MEDIAN}'),
]
OptimizerName = Annotated[
    str,
    AfterValidator(_optimizer),
    Form('"adamw", "muon", "sign-muon", or "torch:" and a class of torch.optim'),
]
OptimizerOptions = Annotated[
    dict[str, OptionValue],
    BeforeValidator(_options),
    Form("a table of numbers, true and false, such as { momentum = 0.9, nesterov = true }"),
]
