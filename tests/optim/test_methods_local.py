"""What a configuration of local steps turns into, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from optim.local.adamw import AdamWInner
from optim.local.local_steps import LocalSteps
from optim.local.polar import MuonInner
from optim.local.torch_class import TorchInner
from optim.lordo.inner import LowRankAdam
from optim.lordo.low_rank_ddp import LowRankDDP
from optim.methods import MethodConfig, build_method
from optim.sign_muon import SignMuon
from protos.buckets import MeanRule
from protos.methods import LOCAL, PRESETS
from protos.runfile import MethodConfig as RunFileMethod
from tests.optim.local_rig import model


def local(config) -> LocalSteps:
    optimizer = build_method(config, model())
    assert isinstance(optimizer, LocalSteps)
    return optimizer


@pytest.mark.parametrize("name", [*LOCAL, "lowrank-ddp"])
def test_a_run_file_and_a_configuration_build_the_same(name) -> None:
    ours, theirs = (build_method(kind(name=name), model()) for kind in (MethodConfig, RunFileMethod))
    assert type(ours) is type(theirs) is (LowRankDDP if name == "lowrank-ddp" else LocalSteps)
    assert ours.tables.digest == theirs.tables.digest
    for left, right in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert {k: v for k, v in left.items() if k != "params"} == {
            k: v for k, v in right.items() if k != "params"
        }
    if isinstance(ours, LocalSteps) and isinstance(theirs, LocalSteps):
        assert vars(ours._outer) == {**vars(theirs._outer), "buffers": ours._outer.buffers}
        assert (ours._steps, ours._overlap, ours._mix) == (theirs._steps, theirs._overlap, theirs._mix)


@pytest.mark.parametrize(
    ("name", "inner", "codecs", "outer"),
    [
        ("local-adamw", AdamWInner, ("fp32", "fp32", "fp32"), ("average", 1.0)),
        ("diloco", AdamWInner, ("int8", "int8", "fp32"), ("nesterov", 0.7)),
        ("muloco", MuonInner, ("2bit", "int4", "fp32"), ("nesterov", 0.7)),
        ("muloco-1bit", MuonInner, ("vote", "int4", "fp32"), ("nesterov", 0.7)),
        ("lordo", LowRankAdam, ("int4", "int8", "fp32"), ("average", 1.0)),
    ],
)
def test_presets(name, inner, codecs, outer) -> None:
    optimizer = local(MethodConfig(name=name))
    assert [type(group.inner) for group in optimizer._groups] == [inner, AdamWInner, AdamWInner]
    assert tuple(group.codec for group in optimizer._groups) == codecs
    assert (optimizer._outer.outer, optimizer._outer.lr) == outer
    assert [group["lr"] for group in optimizer.param_groups] == [PRESETS[name].lr, 6e-3, 6e-3]


def test_every_field_arrives() -> None:
    optimizer = local(
        MethodConfig(
            name="muloco",
            local_steps=12,
            optimizer="sign-muon",
            lr=0.1,
            embedding_lr=0.2,
            vector_lr=0.3,
            momentum=0.5,
            nesterov=False,
            weight_decay=0.01,
            ns_steps=3,
            ns_coefficients="quintic",
            scaling="none",
            beta1=0.7,
            beta2=0.8,
            eps=1e-6,
            codec="vote-row",
            embedding_codec="vote",
            vector_codec="bf16",
            error_feedback=True,
            outer="sgd",
            outer_lr=0.4,
            fragments=2,
            overlap=3,
            mix=0.75,
            clip=3.0,
            trim=1,
        )
    )
    matrices, embeddings, vectors = optimizer._groups
    muon = matrices.inner
    assert isinstance(muon, MuonInner)
    assert (muon.signed, muon.momentum, muon.nesterov, muon.scaling) == (True, 0.5, False, "none")
    assert (muon._ns_steps, muon._ns_coefficients) == (3, "quintic")
    for group in (embeddings, vectors):
        assert isinstance(group.inner, AdamWInner)
        assert (group.inner.betas, group.inner.eps) == ((0.7, 0.8), 1e-6)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.1, 0.01),
        (0.2, 0.01),
        (0.3, 0.0),
    ]
    assert [group.codec for group in optimizer._groups] == ["vote-row", "vote", "bf16"]
    assert all(group.feedback for group in optimizer._groups)
    assert (optimizer._outer.outer, optimizer._outer.lr) == ("sgd", 0.4)
    assert (optimizer.micro_steps(0), optimizer.send_after(0)) == (6, 3)
    assert len(optimizer.tables.tables) == 2
    assert all(table.rule == MeanRule(3.0, 1) for table in optimizer.tables.tables)
    assert optimizer._mix == 0.75
    nesterov = local(MethodConfig(name="diloco", outer_momentum=0.8))
    assert nesterov._outer.momentum == 0.8


def test_low_rank_fields_arrive() -> None:
    config = MethodConfig(
        name="lordo",
        local_steps=6,
        rank=3,
        omega=0.5,
        mu=0.2,
        basis="local",
        direction="muon",
        beta1=0.8,
        beta2=0.97,
        eps=1e-5,
        ns_steps=2,
        ns_coefficients="quintic",
    )
    matrices, embeddings, _ = local(config)._groups
    assert isinstance(matrices.inner, LowRankAdam)
    options = matrices.inner.options
    assert (options.rank, options.omega, options.mu, options.basis, options.direction) == (
        3,
        0.5,
        0.2,
        "local",
        "muon",
    )
    assert (options.betas, options.eps) == ((0.8, 0.97), 1e-5)
    assert (options.ns_steps, options.ns_coefficients) == (2, "quintic")
    assert isinstance(embeddings.inner, AdamWInner)
    assert (embeddings.inner.betas, embeddings.inner.eps) == ((0.9, 0.95), 1e-8)
    assert local(MethodConfig(name="lordo"))._groups[0].inner.options.betas == (0.908, 0.99)
    table = local(MethodConfig(name="lordo", moments_codec="int8", rank=2)).tables.of(0)
    rows = {bucket.name: (bucket.reduce, bucket.shape, bucket.codec) for bucket in table.buckets}
    assert rows["optimizer/1.weight/basis"] == ("basis", (12, 2), "fp32")
    assert rows["optimizer/1.weight/exp_avg"] == ("mean", (2, 20), "int8")
    every = build_method(MethodConfig(name="lowrank-ddp", rank=2, basis_every=5, omega=1.0), model())
    assert len(every.tables.cycle) == 5


def test_sign_muon_votes_on_gradients_or_on_pseudo_gradients() -> None:
    assert isinstance(build_method(MethodConfig(name="sign-muon"), model()), SignMuon)
    optimizer = local(MethodConfig(name="sign-muon", local_steps=2))
    inner = optimizer._groups[0].inner
    assert isinstance(inner, MuonInner) and inner.signed and inner.scaling == "unit-gain"
    assert [group.codec for group in optimizer._groups] == ["vote", "vote-row", "fp32"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.032, 6e-3, 6e-3]


@pytest.mark.parametrize(
    ("optimizer", "lr", "scaling"),
    [("muon", 1e-2, "match-rms"), ("sign-muon", 0.032, "unit-gain"), ("adamw", 6e-3, None)],
)
def test_another_optimizer_brings_its_own_rate(optimizer, lr, scaling) -> None:
    built = local(MethodConfig(name="local-adamw", optimizer=optimizer))
    assert built.param_groups[0]["lr"] == lr
    assert getattr(built._groups[0].inner, "scaling", None) == scaling


def test_a_class_of_torch() -> None:
    config = MethodConfig(
        name="diloco", optimizer="torch:SGD", optimizer_options={"momentum": 0.8, "nesterov": True}, lr=0.05
    )
    inner = local(config)._groups[0].inner
    assert isinstance(inner, TorchInner)
    assert inner.optimizer.param_groups[0]["momentum"] == 0.8


@pytest.mark.parametrize("name", ["ddp-adamw", "ddp-muon"])
def test_the_mean_rule_of_methods_of_one_step(name) -> None:
    optimizer = build_method(MethodConfig(name=name, clip=2.0), model())
    assert optimizer.tables.of(0).rule == MeanRule(2.0, 0)
    assert optimizer.table is optimizer.tables.of(0)


def test_fragments_follow_the_order_of_the_model() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(12)))
    optimizer = build_method(
        MethodConfig(name="diloco", local_steps=4, fragments=4, embedding_codec="int8"), net
    )
    found = [sorted(int(b.name.split(".")[0]) for b in table.buckets) for table in optimizer.tables.tables]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], "in order of numbers, not of letters"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "ddp-adamw", "local_steps": 4}, "exchanges in every step, not after 4: .* local-adamw"),
        ({"name": "signum", "local_steps": 2}, "for local steps use sign-muon"),
        ({"name": "lowrank-ddp", "local_steps": 2}, "use lordo"),
        ({"name": "diloco", "local_steps": 0}, "local_steps must be at least 1"),
        ({"name": "ddp-muon", "optimizer": "adamw"}, "no local optimizer to choose"),
        ({"name": "diloco", "optimizer": "adam-w"}, "unknown local optimizer 'adam-w': did you mean 'adamw'"),
        ({"name": "diloco", "optimizer": "zzz"}, "use one of adamw, muon"),
        ({"name": "diloco", "optimizer": "lordo"}, "the method lordo exchanges the basis"),
        ({"name": "lordo", "optimizer": "adamw"}, "lordo cannot have the local optimizer 'adamw'"),
        ({"name": "diloco", "optimizer": "torch:SGD"}, "lr must be given with torch:SGD"),
        ({"name": "diloco", "optimizer": "torch:SDG", "lr": 1.0}, "did you mean SGD"),
        ({"name": "diloco", "optimizer_options": {"a": 1}}, "optimizer_options are for classes of torch"),
        ({"name": "lordo", "codec": "vote"}, "its basis follows from the mean"),
        ({"name": "lordo", "fragments": 2}, "needs fragments = 1"),
        ({"name": "muloco", "vector_codec": "lowrank:2"}, "a vector has no low rank"),
        ({"name": "muloco", "fragments": 3}, "local_steps = 32 cannot be shared out to 3 fragments"),
        ({"name": "muloco", "local_steps": 4, "overlap": 4}, "overlap must be from 0 to 3"),
        ({"name": "muloco", "clip": -1.0}, "clip and trim must not be negative"),
        ({"name": "lowrank-ddp", "direction": "muon"}, "lowrank-ddp has the direction adam only"),
        ({"name": "muloco", "codec": "int5"}, "unknown codec 'int5'"),
        ({"name": "muloco", "mix": 1.5}, "mix must be above 0"),
    ],
)
def test_choices_that_make_no_sense_together(config, words) -> None:
    with pytest.raises(ValueError, match=words):
        build_method(MethodConfig(**config), model())


def test_tables_can_be_had_of_a_model_without_storage() -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Embedding(1 << 20, 4096), torch.nn.Linear(4096, 1 << 20))
    for name in LOCAL:
        optimizer = build_method(MethodConfig(name=name), net)
        assert optimizer.tables.nbytes > 1 << 28
        assert not optimizer.lane.nbytes
        assert not optimizer.shared_tensors() and not optimizer.local_tensors()


def test_local_steps_do_not_import_the_compiler() -> None:
    """It would cost every node seconds and memory."""
    code = (
        "import sys, torch\n"
        "from optim.methods import MethodConfig, build_method\n"
        "net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "optimizer = build_method(MethodConfig(name='muloco', local_steps=1), net)\n"
        "net(torch.ones(1, 8)).sum().backward()\n"
        "optimizer.local_step(0, 0)\n"
        "payload = torch.empty(optimizer.tables.nbytes, dtype=torch.uint8)\n"
        "optimizer.apply(0, payload if optimizer.propose(0, payload) else None)\n"
        "optimizer.zero_grad()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
