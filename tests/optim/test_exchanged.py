"""The two halves of a round: layout, checks, state, and use as an ordinary torch optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from optim import bits
from optim.exchanged import ExchangedOptimizer
from optim.packs import PayloadError
from optim.roles import classify
from optim.sign_muon import SignMuon, Signum
from protos.buckets import LINE_BYTES, BucketTable


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(20, 6)
        self.zeta = nn.Linear(6, 10)
        self.alpha = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.norm(x + self.alpha(torch.relu(self.zeta(x)))) @ self.embedding.weight.T


def backward(model: Model, seed: int = 0) -> Tensor:
    tokens = torch.randint(0, 20, (3, 8), generator=torch.Generator().manual_seed(seed))
    model.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def payload_of(optimizer: ExchangedOptimizer) -> Tensor:
    return torch.full((optimizer.table.nbytes,), 0xAA, dtype=torch.uint8)


def everything(optimizer: ExchangedOptimizer) -> dict[str, Tensor]:
    tensors = optimizer.shared_tensors() | optimizer.local_tensors()
    return {name: value.clone() for name, value in tensors.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# ---------------------------------------------------------------------- layout


def test_majority_buckets_come_first_each_as_backward_makes_gradients() -> None:
    table = SignMuon(Model(), vectors="mean").table
    rows = [
        (bucket.name, bucket.reduce, number)
        for bucket, number in zip(table.buckets, table.numbers, strict=True)
    ]
    assert rows == [
        ("alpha.weight", "majority", 0),
        ("zeta.weight", "majority", 2),
        ("embedding.weight", "majority", 1),
        ("[vectors]", "mean", 3),
    ]
    vectors = table.buckets[-1]
    assert [member.name for member in vectors.members] == [
        "alpha.bias",
        "norm.bias",
        "norm.weight",
        "zeta.bias",
    ]
    assert vectors.elements == 6 + 6 + 6 + 10
    voted = SignMuon(Model()).table
    assert dict(zip([bucket.name for bucket in voted.buckets], voted.numbers, strict=True)) == {
        "[vectors]": 0,
        "alpha.weight": 1,
        "embedding.weight": 2,
        "zeta.weight": 3,
    }
    assert voted.nbytes == 4 * LINE_BYTES
    assert voted.elements == sum(p.numel() for p in Model().parameters())


def test_numbers_do_not_depend_on_registration_order() -> None:
    class Reordered(Model):
        def __init__(self) -> None:
            super().__init__()
            self._modules = dict(reversed(self._modules.items()))

    one, other = SignMuon(Model()).table, SignMuon(Reordered()).table
    assert dict(zip(one.buckets, one.numbers, strict=True)) == dict(
        zip(other.buckets, other.numbers, strict=True)
    )
    assert BucketTable.from_json(SignMuon(Model()).table.to_json()).digest == SignMuon(Model()).table.digest


def test_payload_holds_packed_signs_and_fp32_gradients() -> None:
    model = Model()
    optimizer = Signum(model, vectors="mean", momentum=0.0, nesterov=False)
    backward(model)
    payload = payload_of(optimizer)
    assert optimizer.propose(3, payload)
    assert model.embedding.weight.grad is not None and model.norm.bias.grad is not None
    offsets = dict(zip([b.name for b in optimizer.table.buckets], optimizer.table.offsets, strict=True))
    begin = offsets["embedding.weight"]
    expected, _ = bits.pack(model.embedding.weight.grad, seed=bits.zero_seed(3, 1))
    assert torch.equal(payload[begin : begin + expected.numel()], expected)
    vectors = payload[offsets["[vectors]"] :].clone().view(torch.float32)
    assert torch.equal(vectors[6:12], model.norm.bias.grad)
    assert not vectors[28:].any()  # padding


def test_votes_write_into_any_slice_of_a_larger_buffer() -> None:
    model, other = Model(), Model()
    optimizer, twin = SignMuon(model, vectors="mean"), SignMuon(other, vectors="mean")
    backward(model)
    backward(other)
    size = optimizer.table.nbytes
    buffer = torch.full((size + 10,), 7, dtype=torch.uint8)
    payload = payload_of(twin)
    assert optimizer.propose(0, buffer[3 : 3 + size]) and twin.propose(0, payload)
    assert torch.equal(buffer[3 : 3 + size], payload)
    assert (buffer[:3] == 7).all() and (buffer[3 + size :] == 7).all()
    optimizer.apply(0, buffer[3 : 3 + size])
    twin.apply(0, payload)
    assert same(everything(optimizer), everything(twin))


# ---------------------------------------------------------------------- refusals change nothing


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("where", ["zeta.weight", "embedding.weight", "norm.bias"])
def test_a_gradient_that_is_not_finite_abstains(value: float, where: str) -> None:
    model = Model()
    optimizer = SignMuon(model, vectors="mean")
    backward(model)
    optimizer.step()
    before = everything(optimizer)
    backward(model, 1)
    gradient = model.get_parameter(where).grad
    assert gradient is not None
    gradient.view(-1)[2] = value
    payload = payload_of(optimizer)
    assert not optimizer.propose(1, payload)
    assert same(before, everything(optimizer))
    assert (payload == 0xAA).all()
    optimizer.step()  # a single node that abstains: a round without voters
    assert same(before, everything(optimizer)) and optimizer.round_index == 2


def test_a_large_but_finite_gradient_votes() -> None:
    model = Model()
    optimizer = SignMuon(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -7e37)  # its square is beyond float32
    for _ in range(3):
        optimizer.step()
    assert all(torch.isfinite(tensor).all() for tensor in everything(optimizer).values())
    assert optimizer.local_tensors()["optimizer/norm.bias/momentum_buffer"].max() < -9e36


def test_payloads_of_another_form_are_refused() -> None:
    model = Model()
    optimizer = SignMuon(model)
    backward(model)
    before = everything(optimizer)
    size = optimizer.table.nbytes
    bad = [
        torch.zeros(size - 64, dtype=torch.uint8),
        torch.zeros(size + 64, dtype=torch.uint8),
        torch.zeros(size, dtype=torch.int8),
        torch.zeros(2 * size, dtype=torch.uint8)[::2],
        torch.zeros(1, size, dtype=torch.uint8),
    ]
    for payload in bad:
        with pytest.raises(PayloadError, match="output of propose"):
            optimizer.propose(0, payload)
        with pytest.raises(PayloadError, match="result of the round"):
            optimizer.apply(0, payload)
    assert same(before, everything(optimizer)) and optimizer.round_index == 0


def test_a_mean_that_is_not_finite_is_refused_as_a_whole() -> None:
    model = Model()
    optimizer = SignMuon(model, vectors="mean")
    backward(model)
    payload = payload_of(optimizer)
    assert optimizer.propose(0, payload)
    payload[optimizer.table.offsets[-1] :].view(torch.float32)[3] = float("inf")
    before = everything(optimizer)
    with pytest.raises(PayloadError, match="round 0: the mean gradient is not finite"):
        optimizer.apply(0, payload)
    assert same(before, everything(optimizer))


def test_a_round_without_voters_changes_nothing() -> None:
    model = Model()
    optimizer = SignMuon(model, weight_decay=0.1, vectors="mean")
    before = everything(optimizer)
    optimizer.apply(4, None)
    assert same(before, everything(optimizer)) and optimizer.round_index == 5


def test_parameters_that_cannot_be_exchanged() -> None:
    with pytest.raises(ValueError, match=r"contiguous float32 .* not torch.bfloat16"):
        SignMuon(nn.Linear(4, 4).bfloat16())
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"0\.weight: exchanged parameters are contiguous"):
        SignMuon(conv)
    with pytest.raises(ValueError, match="no trainable parameter"):
        SignMuon(nn.ReLU())
    roles = classify(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="needs a matrix"):
        ExchangedOptimizer([{"name": "all", "roles": roles, "rule": "vote-polar", "lr": 1.0}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        group = {"name": "all", "roles": roles, "rule": "vote-sign", "lr": 1.0}
        ExchangedOptimizer([group, {**group, "name": "again"}])


def test_sparse_gradients_are_named() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    optimizer = SignMuon(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight: .* sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("weight_decay", float("inf")),
        ("momentum", 1.0),
        ("betas", (0.9, 1.0)),
        ("scaling", "big"),
        ("ns_steps", -1),
        ("ns_coefficients", "cubic"),
        ("ns_dtype", "float16"),
        ("embeddings", "median"),
    ],
)
def test_bad_options_are_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"lr|decay|momentum|betas|scaling|Newton|ns_dtype|embeddings"):
        SignMuon(Model(), **{option: value})  # type: ignore[arg-type]


def test_unknown_rules_are_named() -> None:
    with pytest.raises(ValueError, match="unknown rule 'vote'"):
        ExchangedOptimizer([{"name": "all", "roles": classify(Model()), "rule": "vote", "lr": 1.0}])


def test_the_table_is_fixed_after_construction() -> None:
    with pytest.raises(RuntimeError, match="fixed"):
        SignMuon(Model()).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


# ---------------------------------------------------------------------- gradients in other layouts


def test_gradients_that_are_not_contiguous() -> None:
    plain, strided = Model(), Model()
    optimizers = [
        SignMuon(plain, vectors="mean", embeddings="mean"),
        SignMuon(strided, vectors="mean", embeddings="mean"),
    ]
    for model in (plain, strided):
        backward(model)
    for parameter in strided.parameters():
        assert parameter.grad is not None
        gradient = torch.empty(*parameter.shape, 2)[..., 0]
        assert parameter.numel() == 1 or not gradient.is_contiguous()
        parameter.grad = gradient.copy_(parameter.grad)
    for optimizer in optimizers:
        optimizer.step()
    assert same(everything(optimizers[0]), everything(optimizers[1]))


def test_a_convolutional_network_in_channels_last_activations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    optimizer = SignMuon(model, lr=0.05)
    images = torch.randn(8, 3, 6, 6).to(memory_format=torch.channels_last)
    labels = torch.arange(8) % 5
    losses = []
    for _ in range(40):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# ---------------------------------------------------------------------- an ordinary optimizer


def test_closures_return_the_loss() -> None:
    model, other = Model(), Model()
    optimizer, twin = SignMuon(model), SignMuon(other)
    assert optimizer.step(lambda: backward(model).item()) == pytest.approx(backward(other).item())
    twin.step()
    assert same(everything(optimizer), everything(twin))


def test_schedulers_of_torch_change_the_step() -> None:
    model = Model()
    optimizer = Signum(model, lr=0.5, embedding_lr=0.25, vector_lr=0.125)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
    for factor in (1.0, 0.5, 0.25):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        backward(model)
        optimizer.step()
        scheduler.step()
        for name, rate in (("zeta.weight", 0.5), ("embedding.weight", 0.25), ("norm.bias", 0.125)):
            moved = (model.get_parameter(name).detach() - before[name]).abs()
            torch.testing.assert_close(moved, torch.full_like(moved, rate * factor))


def test_groups_have_names_and_their_own_rates() -> None:
    optimizer = SignMuon(Model(), lr=0.1, embedding_lr=0.2, vector_lr=0.3, weight_decay=0.4)
    rows = [(group["name"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert rows == [("matrices", 0.1, 0.4), ("embeddings", 0.2, 0.4), ("vectors", 0.3, 0.0)]


@pytest.mark.parametrize("travel", ["vote", "mean"])
def test_a_saved_state_resumes_bit_for_bit(travel) -> None:
    whole, split = Model(), Model()
    reference = SignMuon(whole, embeddings=travel, vectors=travel)
    first = SignMuon(split, embeddings=travel, vectors=travel)
    for seed in range(3):
        backward(whole, seed)
        reference.step()
        backward(split, seed)
        first.step()
    saved = copy.deepcopy(first.state_dict())
    resumed = Model()
    resumed.load_state_dict(split.state_dict())
    second = SignMuon(resumed, lr=9.0, embeddings=travel, vectors=travel)
    held = second.shared_tensors() | second.local_tensors()
    second.load_state_dict(saved)
    assert second.round_index == 3 and second.param_groups[0]["lr"] == 0.032
    for seed in range(3, 6):
        backward(whole, seed)
        reference.step()
        backward(resumed, seed)
        second.step()
    assert same(everything(reference), everything(second))
    # the storage is the same as before loading: what a caller holds is what is trained
    assert same(held, everything(second))


def test_states_survive_a_file_without_pickle(tmp_path) -> None:
    model = Model()
    optimizer = SignMuon(model, vectors="mean")
    backward(model)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    other = SignMuon(Model(), vectors="mean")
    other.load_state_dict(loaded)
    assert same(optimizer.local_tensors(), other.local_tensors())


def test_states_of_other_optimizers_are_refused() -> None:
    model = Model()
    optimizer = SignMuon(model)
    backward(model)
    optimizer.step()
    before = everything(optimizer)
    with pytest.raises(ValueError, match="other groups, rules or parameter names"):
        optimizer.load_state_dict(Signum(Model()).state_dict())
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match="no momentum_buffer of shape"):
        optimizer.load_state_dict(wrong)
    missing = copy.deepcopy(optimizer.state_dict())
    del missing["param_groups"][0]["nesterov"]
    with pytest.raises(ValueError, match="has no option 'nesterov'"):
        optimizer.load_state_dict(missing)
    assert same(before, everything(optimizer)) and optimizer.round_index == 1


def test_shared_and_local_tensors() -> None:
    optimizer = SignMuon(Model(), embeddings="mean")
    parameters = set(dict(Model().named_parameters()))
    assert set(optimizer.shared_tensors()) == parameters | {
        "optimizer/embedding.weight/exp_avg",
        "optimizer/embedding.weight/exp_avg_sq",
        "optimizer/embedding.weight/step",
    }
    voted = parameters - {"embedding.weight"}
    assert set(optimizer.local_tensors()) == {f"optimizer/{name}/momentum_buffer" for name in voted}
    shared = optimizer.shared_tensors()
    assert shared["zeta.weight"].data_ptr() == optimizer.param_groups[0]["params"][1].data_ptr()
    assert not any(tensor.requires_grad for tensor in shared.values())


def test_step_asks_the_reduction_once_a_round() -> None:
    model = Model()
    seen: list[tuple[bool, int, str]] = []

    def invert(payload: Tensor | None, *, round_index: int, table: BucketTable) -> Tensor | None:
        seen.append((payload is not None, round_index, table.digest))
        return None if payload is None else ~payload

    optimizer = Signum(model, lr=0.5, momentum=0.0, nesterov=False, reduce=invert)
    before = model.zeta.weight.detach().clone()
    backward(model)
    optimizer.step()
    assert model.zeta.weight.grad is not None
    assert torch.equal(model.zeta.weight.detach() - before > 0, model.zeta.weight.grad > 0)  # against descent
    model.zeta.weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert seen == [(True, 0, optimizer.table.digest), (False, 1, optimizer.table.digest)]
