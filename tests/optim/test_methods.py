"""The presets, and what a configuration turns into."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from optim.averaged import DDPAdamW, DDPMuon
from optim.methods import MethodConfig, build_method
from optim.sign_muon import SignMuon, Signum
from protos.runfile import MethodConfig as RunFileMethod


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 4, bias=False))


def options_of(config) -> dict[str, dict]:
    """Group name to the options of the group, without its tensors."""
    groups = build_method(config, model()).param_groups
    return {
        group["name"]: {k: v for k, v in group.items() if k not in ("params", "param_names", "name")}
        for group in groups
    }


@pytest.mark.parametrize(
    ("name", "kind", "rules", "rates", "scaling"),
    [
        ("sign-muon", SignMuon, ("vote-polar", "vote-sign", "vote-sign"), (0.032, 2e-3, 2e-3), "unit-gain"),
        ("signum", Signum, ("vote-sign", "vote-sign", "vote-sign"), (1e-3, 2e-3, 2e-3), "none"),
        ("ddp-muon", DDPMuon, ("mean-muon", "mean-adamw", "mean-adamw"), (1e-2, 6e-3, 6e-3), "match-rms"),
        ("ddp-adamw", DDPAdamW, ("mean-adamw", "mean-adamw", "mean-adamw"), (6e-3, 6e-3, 6e-3), "none"),
    ],
)
def test_presets(name, kind, rules, rates, scaling) -> None:
    for config in (MethodConfig(name=name), RunFileMethod(name=name)):
        optimizer = build_method(config, model())
        assert type(optimizer) is kind
        groups = optimizer.param_groups
        assert [group["name"] for group in groups] == ["matrices", "embeddings", "vectors"]
        assert tuple(group["rule"] for group in groups) == rules
        assert tuple(group["lr"] for group in groups) == rates
        assert groups[0]["scaling"] == scaling


@pytest.mark.parametrize("name", ["sign-muon", "signum", "ddp-muon", "ddp-adamw"])
def test_the_defaults_of_the_classes_are_the_presets(name) -> None:
    kind = {"sign-muon": SignMuon, "signum": Signum, "ddp-muon": DDPMuon, "ddp-adamw": DDPAdamW}[name]
    built = build_method(MethodConfig(name=name), model())
    for ours, theirs in zip(built.param_groups, kind(model()).param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }


def test_every_field_arrives() -> None:
    config = MethodConfig(
        name="sign-muon",
        lr=0.1,
        embedding_lr=0.2,
        vector_lr=0.3,
        momentum=0.5,
        nesterov=False,
        weight_decay=0.01,
        ns_steps=3,
        ns_coefficients="quintic",
        scaling="match-rms",
        embeddings="mean",
        vectors="mean",
        beta1=0.7,
        beta2=0.8,
        eps=1e-6,
    )
    groups = options_of(config)
    matrices = {
        "rule": "vote-polar",
        "lr": 0.1,
        "weight_decay": 0.01,
        "momentum": 0.5,
        "nesterov": False,
        "ns_steps": 3,
        "ns_coefficients": "quintic",
        "scaling": "match-rms",
    }
    assert matrices.items() <= groups["matrices"].items()
    adamw = {"rule": "mean-adamw", "betas": (0.7, 0.8), "eps": 1e-6}
    assert {**adamw, "lr": 0.2, "weight_decay": 0.01}.items() <= groups["embeddings"].items()
    assert {**adamw, "lr": 0.3, "weight_decay": 0.0}.items() <= groups["vectors"].items()
    muon = options_of(replace(config, name="ddp-muon"))["matrices"]
    assert {**matrices, "rule": "mean-muon"}.items() <= muon.items()
    signum = options_of(replace(config, name="signum"))["matrices"]
    assert {"rule": "vote-sign", "lr": 0.1, "momentum": 0.5, "scaling": "match-rms"}.items() <= signum.items()
    adam = options_of(replace(config, name="ddp-adamw"))["matrices"]
    assert {**adamw, "lr": 0.1, "weight_decay": 0.01}.items() <= adam.items()


def test_rates_follow_the_way_a_tensor_travels() -> None:
    groups = options_of(MethodConfig(embeddings="mean"))
    assert (groups["embeddings"]["lr"], groups["vectors"]["lr"]) == (6e-3, 2e-3)


def test_unknown_methods_are_named() -> None:
    with pytest.raises(ValueError, match="unknown method 'sgd': use one of sign-muon, signum"):
        build_method(MethodConfig(name="sgd"), model())  # type: ignore[arg-type]
