"""Local optimizers that train by themselves: AdamW, Muon, Sign-Muon, and classes of torch.optim."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optim.local.adamw import AdamWInner
from optim.local.polar import MuonInner
from optim.local.torch_class import TorchInner
from optim.muon import Muon
from optim.newton_schulz import newton_schulz
from optim.roles import classify
from tests.optim.local_rig import backward, batch, matrices, model

TORCH_CLASSES = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {}),
    ("Adam", {"betas": [0.8, 0.9]}),
    ("Adagrad", {}),
    ("ASGD", {}),
    ("NAdam", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}),
    ("Adafactor", {}),
]


def values(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def equal(left: nn.Module, right: nn.Module) -> bool:
    return all(map(torch.equal, values(left), values(right)))


def test_adamw_is_that_of_torch() -> None:
    ours, theirs = model(), model()
    inner = AdamWInner(classify(ours), betas=(0.9, 0.95), eps=1e-8)
    reference = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(5):
        lr = 0.01 / (step + 1)
        backward(ours, batch(step))
        backward(theirs, batch(step))
        inner.step(lr)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        assert equal(ours, theirs)


def test_a_missing_gradient_counts_as_zero() -> None:
    ours, theirs = model(), model()
    inners = [AdamWInner(classify(ours)), AdamWInner(classify(theirs))]
    for net, inner in zip((ours, theirs), inners, strict=True):
        backward(net, batch(0))
        inner.step(0.01)
        backward(net, batch(1))
    ours[3].weight.grad = None
    theirs[3].weight.grad.zero_()
    for inner in inners:
        inner.step(0.01)
    assert equal(ours, theirs)
    assert ours[3].weight.grad is None


def test_muon_is_the_full_precision_one() -> None:
    ours, theirs = model(), model()
    roles = matrices(ours)
    inner = MuonInner(roles, momentum=0.9, ns_coefficients="quintic", scaling="match-rms")
    reference = Muon(
        [role.parameter for role in matrices(theirs)],
        weight_decay=0.0,
        momentum=0.9,
        eps=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(3):
        for net in (ours, theirs):
            backward(net, batch(step))
        inner.step(0.01)
        reference.param_groups[0]["lr"] = 0.01
        reference.step()
        assert equal(ours, theirs)


def test_sign_muon_steps_by_the_signs_of_the_polar_factor() -> None:
    net = model()
    role = matrices(net)[0]
    backward(net, batch(0))
    before, gradient = role.parameter.detach().clone(), role.parameter.grad.clone()
    MuonInner([role], signed=True, momentum=0.5, nesterov=False, scaling="unit-gain").step(0.1)
    step = 0.1 / role.fan_in**0.5
    expected = before - step * newton_schulz(gradient * 0.5).sign()
    torch.testing.assert_close(role.parameter.detach(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"momentum": 1.0}, "momentum"), ({"ns_steps": 1000}, "steps"), ({"scaling": "big"}, "scaling")],
)
def test_muon_refuses_options_out_of_range(options, word) -> None:
    with pytest.raises(ValueError, match=word):
        MuonInner(matrices(model()), **options)


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ValueError, match="polar factor needs a matrix"):
        MuonInner(classify(model()))


@pytest.mark.parametrize("options", [{"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1.0}])
def test_adamw_refuses_options_out_of_range(options) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AdamWInner(classify(model()), **options)


@pytest.mark.parametrize(
    "make", [AdamWInner, lambda roles: MuonInner([r for r in roles if r.role == "matrix"])]
)
def test_restart_zeroes_only_what_is_not_finite(make) -> None:
    net = model()
    inner = make(classify(net))
    backward(net, batch(0))
    inner.step(0.01)
    broken, whole = inner.roles[0].name, inner.roles[1].name
    key = next(iter(inner.state[broken]))
    inner.state[broken][key].view(-1)[0] = torch.inf
    kept = {k: v.clone() for k, v in inner.state[whole].items()}
    inner.restart()
    assert all(not tensor.any() for tensor in inner.state[broken].values())
    assert all(torch.equal(inner.state[whole][k], v) for k, v in kept.items())


# ---------------------------------------------------------------------- classes of torch.optim


@pytest.mark.parametrize(("name", "options"), TORCH_CLASSES)
def test_a_class_of_torch_trains_as_it_does_alone(name, options) -> None:
    ours, theirs = model(), model()
    inner = TorchInner(classify(ours), name, options)
    known = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    decay = {"weight_decay": 0.0} if name != "Rprop" else {}
    reference = getattr(torch.optim, name)(
        [role.parameter for role in classify(theirs)], **known, **decay, lr=0.01
    )
    inner.prepare_load()  # must not change anything
    for step in range(4):
        for net in (ours, theirs):
            backward(net, batch(step))
        if step == 2:
            inner.local_tensors()
        inner.step(0.01)
        reference.step()
        assert equal(ours, theirs)


@pytest.mark.parametrize(("name", "options"), TORCH_CLASSES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_class_of_torch_continues_from_a_copy_of_its_tensors(name, options, steps) -> None:
    ours, theirs = model(), model()
    inner = TorchInner(classify(ours), name, options)
    for step in range(steps):
        backward(ours, batch(step))
        inner.step(0.01)
    saved = {key: tensor.clone() for key, tensor in inner.local_tensors().items()}
    other = TorchInner(classify(theirs), name, options)
    if steps:
        backward(theirs, batch(77))
        other.step(0.5)  # a state to be overwritten
    theirs.load_state_dict(ours.state_dict())
    other.prepare_load()
    targets = other.local_tensors()
    assert {k: (v.shape, v.dtype) for k, v in targets.items()} == {
        k: (v.shape, v.dtype) for k, v in saved.items()
    }
    for key, tensor in targets.items():
        tensor.copy_(saved[key])
    for step in range(10, 13):
        for net, one in ((ours, inner), (theirs, other)):
            backward(net, batch(step))
            one.step(0.01)
        assert equal(ours, theirs)


def test_numbers_in_a_state_are_saved_too() -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["share"] = state.get("share", 1.0) * 0.5
                    parameter.sub_(parameter.grad, alpha=group["lr"] * state["share"] * state["count"])

    torch.optim.Counting = Counting  # type: ignore[attr-defined]
    try:
        ours, theirs = model(), model()
        inners = [TorchInner(classify(net), "Counting") for net in (ours, theirs)]
        for step in range(3):
            backward(ours, batch(step))
            inners[0].step(0.1)
        saved = {key: tensor.clone() for key, tensor in inners[0].local_tensors().items()}
        assert saved["optimizer/0.weight/count"].item() == 3
        assert saved["optimizer/0.weight/share"].item() == 0.125
        theirs.load_state_dict(ours.state_dict())
        for key, tensor in inners[1].local_tensors().items():
            tensor.copy_(saved[key])
        for net, inner in zip((ours, theirs), inners, strict=True):
            backward(net, batch(9))
            inner.step(0.1)
        assert equal(ours, theirs)
    finally:
        del torch.optim.Counting  # type: ignore[attr-defined]


def test_restart_of_a_class_of_torch_forgets_one_parameter() -> None:
    net = model()
    inner = TorchInner(classify(net), "Adam")
    backward(net, batch(0))
    inner.step(0.01)
    broken = inner.roles[0]
    inner.local_tensors()[f"optimizer/{broken.name}/exp_avg"].fill_(torch.nan)
    inner.restart()
    assert broken.parameter not in inner.optimizer.state
    assert len(inner.optimizer.state) == len(inner.roles) - 1
    backward(net, batch(1))
    inner.step(0.01)
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())
    assert inner.local_tensors()[f"optimizer/{broken.name}/step"].item() == 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Adamw", {}, "no optimizer 'Adamw': did you mean AdamW"),
        ("Quux", {}, "there are ASGD, "),
        ("Optimizer", {}, "no optimizer 'Optimizer'"),
        ("lr_scheduler", {}, "no optimizer"),
        ("LBFGS", {}, "LBFGS evaluates the loss several times"),
        ("SparseAdam", {}, "SparseAdam cannot be the local optimizer"),
        ("Muon", {}, "Muon cannot be the local optimizer"),  # vectors are among the parameters
        ("SGD", {"momentun": 0.9}, "no option 'momentun': did you mean 'momentum'"),
        ("SGD", {"qqq": 0.9}, "no option 'qqq': it has momentum"),
        ("SGD", {"weight_decay": 0.1}, "weight_decay cannot be given to torch.optim.SGD: decay is applied"),
        ("SGD", {"lr": 0.1}, "lr cannot be given"),
        ("SGD", {"maximize": True}, "maximize cannot be given"),
        ("SGD", {"momentum": -1}, "Invalid momentum"),
        ("Adam", {"betas": 3}, "Adam cannot be the local optimizer"),
    ],
)
def test_classes_and_options_that_cannot_be_used(name, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        TorchInner(classify(model()), name, options)


def test_muon_of_torch_takes_matrices() -> None:
    inner = TorchInner(matrices(model()), "Muon", {"momentum": 0.9})
    assert inner.optimizer.param_groups[0]["weight_decay"] == 0.0
