"""Sign-Muon and Signum: the identities that must hold, against loops written out here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from optim import bits
from optim.exchanged import ExchangedOptimizer
from optim.newton_schulz import newton_schulz
from optim.reduce import reduce_payloads
from optim.sign_muon import SignMuon, Signum

Batch = tuple[Tensor, Tensor]
Make = Callable[[nn.Module], ExchangedOptimizer]


class Net(nn.Module):
    """An embedding tied to the head, a convolution, a stack of matrices, a wide and two equal linear
    layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(40, 12)
        self.convolution = nn.Conv1d(12, 12, 3, padding=1)
        self.first = nn.Linear(12, 30)
        self.second = nn.Linear(30, 12)
        self.third = nn.Linear(12, 12, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 12, 12) / 4)
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.convolution(x.mT).mT
        x = x + self.second(torch.tanh(self.first(x))) + self.third(x)
        x = x + x @ self.experts[0] + torch.tanh(x @ self.experts[1])
        return self.norm(x) @ self.embedding.weight.T

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


def batches(count: int, seed: int = 7) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, 30, (4, 9), generator=generator)  # ten embedding rows never occur
        yield tokens[:, :-1], tokens[:, 1:]


def backward(model: Net, batch: Batch) -> None:
    model.zero_grad(set_to_none=True)
    model.loss(batch).backward()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def round_of(optimizers: list[ExchangedOptimizer], round_index: int) -> Tensor | None:
    """One round of nodes in one process; returns the result."""
    payloads = []
    for optimizer in optimizers:
        payload = torch.empty(optimizer.table.nbytes, dtype=torch.uint8)
        if optimizer.propose(round_index, payload):
            payloads.append(payload)
    result = reduce_payloads(optimizers[0].table, payloads, round_index=round_index)
    for optimizer in optimizers:
        optimizer.apply(round_index, result)
    return result


class Single(nn.Module):
    """One matrix with a gradient of our choice."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


def single(optimizer: type[ExchangedOptimizer], *shape: int, **options) -> tuple[Single, ExchangedOptimizer]:
    model = Single(*shape)
    return model, optimizer(model, overrides={"weight": "matrix"}, **options)


def drive(model: Single, optimizer: ExchangedOptimizer, gradients: Iterator[Tensor] | list[Tensor]) -> Tensor:
    for gradient in gradients:
        model.weight.grad = gradient.clone()
        optimizer.step()
    return model.weight.detach().clone()


def gaussians(count: int, *shape: int, seed: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


# ---------------------------------------------------------------------- sign after polar


def ascending_gradient() -> Tensor:
    """``1000 u v' + O`` with O orthogonal and ``O v = u``: polar factor O, but ``<G, sign(O)>`` is negative.

    O is a reflection, so its largest entries dominate it while its small ones decide the signs.
    """
    w = torch.tensor([1.0, 1.0, 1.0, 8.0], dtype=torch.float64)
    orthogonal = torch.eye(4, dtype=torch.float64) - 2.0 / 67.0 * torch.outer(w, w)
    signs = orthogonal.sign()
    _, vectors = torch.linalg.eigh((orthogonal.T @ signs + signs.T @ orthogonal) / 2)
    v = vectors[:, 0]
    return (1000.0 * torch.outer(orthogonal @ v, v) + orthogonal).float()


def test_sign_muon_ascends_where_the_sign_comes_after_the_polar_factor() -> None:
    gradient = ascending_gradient()

    def gain(make: type[ExchangedOptimizer], **options) -> float:
        """Growth of the linear function <G, W> over ten steps."""
        model, optimizer = single(make, 4, 4, lr=0.01, scaling="none", **options)
        return float((drive(model, optimizer, [gradient] * 10) * gradient).sum())

    assert gain(SignMuon, ns_steps=8) == pytest.approx(0.1 * 278.149, rel=1e-3)
    assert gain(SignMuon) > 0.0
    assert gain(Signum) < 0.0
    # the other order would descend, and so does the polar factor itself
    before = newton_schulz(gradient.sign(), steps=8)
    assert (before * gradient).sum() > 0.0 and (newton_schulz(gradient, steps=8) * gradient).sum() > 0.0


def test_steps_are_integers_of_the_parity_of_the_round() -> None:
    shape, lr = (6, 16), 2.0**-7
    model, optimizer = single(SignMuon, *shape, lr=lr, scaling="unit-gain")
    for count, gradient in enumerate(gaussians(9, *shape), start=1):
        drive(model, optimizer, [gradient])
        multiples = model.weight.detach() / (lr / 4)  # unit gain at fan_in 16
        assert torch.equal(multiples, multiples.round())
        assert (multiples.abs() <= count).all()
        assert torch.equal(multiples.abs() % 2, torch.full(shape, float(count % 2)))


@pytest.mark.parametrize("exponent", [-40, -3, 1, 30])
@pytest.mark.parametrize("make", [SignMuon, Signum])
def test_gradients_scaled_by_a_power_of_two_change_nothing(make, exponent: int) -> None:
    gradients = gaussians(6, 10, 24)
    plain = drive(*single(make, 10, 24), gradients)
    scaled = drive(*single(make, 10, 24), [gradient * 2.0**exponent for gradient in gradients])
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("nesterov", [True, False])
def test_no_iterations_is_signum(nesterov: bool) -> None:
    nets = [Net(), Net()]
    options = {"lr": 0.01, "scaling": "none", "nesterov": nesterov, "weight_decay": 0.1}
    optimizers = [SignMuon(nets[0], ns_steps=0, **options), Signum(nets[1], **options)]
    for batch in batches(5):
        for net, optimizer in zip(nets, optimizers, strict=True):
            backward(net, batch)
            optimizer.step()
    assert same(parameters_of(nets[0]), parameters_of(nets[1]))


def test_one_iteration_warns() -> None:
    with pytest.warns(UserWarning, match="behaves like Signum"):
        SignMuon(Net(), ns_steps=1)


# ---------------------------------------------------------------------- nodes


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
@pytest.mark.parametrize("make", [SignMuon, Signum])
def test_nodes_with_identical_batches_equal_one_node(make, nodes: int) -> None:
    nets = [Net() for _ in range(nodes + 1)]
    optimizers = [make(net, weight_decay=0.1) for net in nets]
    alone, together = optimizers[0], optimizers[1:]
    for round_index, batch in enumerate(batches(6)):
        for net in nets:
            backward(net, batch)
        alone.step()
        round_of(together, round_index)
        assert all(same(parameters_of(nets[0]), parameters_of(net)) for net in nets[1:])


@pytest.mark.parametrize("nodes", [3, 4])
@pytest.mark.parametrize("travel", ["vote", "mean"])
def test_replicas_with_their_own_batches_stay_identical(nodes: int, travel) -> None:
    nets = [Net() for _ in range(nodes)]
    optimizers = [SignMuon(net, embeddings=travel, vectors=travel, weight_decay=0.01) for net in nets]
    streams = [batches(12, seed=100 + node) for node in range(nodes)]
    start = parameters_of(nets[0])
    for round_index in range(12):
        for net, stream in zip(nets, streams, strict=True):
            backward(net, next(stream))
        round_of(list(optimizers), round_index)
        shared = [optimizer.shared_tensors() for optimizer in optimizers]
        assert all(same(shared[0], other) for other in shared[1:])
    assert not same(start, parameters_of(nets[0]))
    local = [optimizer.local_tensors()["optimizer/first.weight/momentum_buffer"] for optimizer in optimizers]
    assert not torch.equal(local[0], local[1])


def test_a_node_that_abstains_stays_identical() -> None:
    nets = [Net() for _ in range(3)]
    optimizers = [SignMuon(net) for net in nets]
    streams = [batches(4, seed=node) for node in range(3)]
    for round_index in range(4):
        for net, stream in zip(nets, streams, strict=True):
            backward(net, next(stream))
        if round_index == 1:
            assert nets[2].first.weight.grad is not None
            nets[2].first.weight.grad[3, 4] = float("nan")
            momenta = {name: value.clone() for name, value in optimizers[2].local_tensors().items()}
        round_of(list(optimizers), round_index)
        if round_index == 1:
            assert same(momenta, optimizers[2].local_tensors())
        assert all(same(parameters_of(nets[0]), parameters_of(net)) for net in nets[1:])


# ---------------------------------------------------------------------- one node against a plain loop


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scaling", ["unit-gain", "match-rms", "none"])
def test_one_node_is_the_reference_loop(nesterov: bool, scaling) -> None:
    lr, embedding_lr, vector_lr, beta, decay = 0.02, 0.003, 0.004, 0.9, 0.1
    net, plain = Net(), Net()
    optimizer = SignMuon(
        net,
        lr,
        embedding_lr=embedding_lr,
        vector_lr=vector_lr,
        momentum=beta,
        nesterov=nesterov,
        weight_decay=decay,
        scaling=scaling,
    )
    momenta = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    matrices = {  # name: shape of the matrices, and inputs of one output
        "convolution.weight": ((12, 36), 36),
        "first.weight": ((30, 12), 12),
        "second.weight": ((12, 30), 30),
        "third.weight": ((12, 12), 12),
        "experts": ((2, 12, 12), 12),
    }
    vectors = sorted(n for n, p in plain.named_parameters() if p.ndim == 1)
    # numbers in the bucket table: majority buckets by name; "[vectors]" sorts before all letters
    order = ["[vectors]", *sorted([*matrices, "embedding.weight"])]
    table = optimizer.table
    by_number = sorted(zip(table.numbers, [bucket.name for bucket in table.buckets], strict=True))
    assert [name for _, name in by_number] == order

    for round_index, batch in enumerate(batches(5)):
        backward(net, batch)
        optimizer.step()

        backward(plain, batch)
        directions = {}
        with torch.no_grad():
            for name, p in plain.named_parameters():
                assert p.grad is not None
                m = momenta[name] = torch.lerp(momenta[name], p.grad, 1 - beta)
                directions[name] = torch.lerp(p.grad, m, beta) if nesterov else m
            flat = torch.cat([directions[name] for name in vectors])

            def signs(x: Tensor, index: int, round_index: int = round_index) -> Tensor:
                seed = bits.zero_seed(round_index, index)
                hashed = [bits.splitmix64(seed + i // 64) >> (i % 64) & 1 for i in range(x.numel())]
                zeros = torch.tensor(hashed, dtype=torch.float32).mul(2).sub(1).view_as(x)
                return torch.where(x == 0, zeros, x.sign())

            for index, bucket in enumerate(order):
                if bucket == "[vectors]":
                    voted, start = signs(flat, index), 0
                    for name in vectors:
                        p = plain.get_parameter(name)
                        p.copy_(p - vector_lr * voted[start : start + p.numel()])
                        start += p.numel()
                    continue
                p = plain.get_parameter(bucket)
                if bucket == "embedding.weight":
                    step, direction = embedding_lr, directions[bucket]
                else:
                    shape, fan_in = matrices[bucket]
                    step = lr * {"unit-gain": 1 / math.sqrt(fan_in), "match-rms": 0.2, "none": 1.0}[scaling]
                    direction = newton_schulz(directions[bucket].view(shape)).reshape(p.shape)
                used = lr if bucket in matrices else embedding_lr
                p.copy_(p * (1 - used * decay) - step * signs(direction, index))
        assert same(parameters_of(net), parameters_of(plain))


def test_untouched_embedding_rows_do_not_drift() -> None:
    # rows 30..39 never occur and the head is left out, so that their gradient is exactly zero
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40, 16)

    torch.manual_seed(0)
    model = Lookup()
    start = model.embedding.weight.detach().clone()
    optimizer = SignMuon(model, embedding_lr=1.0)
    rounds = 200
    for tokens, _ in batches(rounds):
        model.zero_grad()
        model.embedding(tokens).sum().backward()
        optimizer.step()
    moved = model.embedding.weight.detach() - start
    assert (moved[:30] < -150).all()  # touched rows: a constant gradient
    # a random walk of 200 unit steps: mean 0, root mean square 14; a fixed sign would give 200
    assert moved[30:].mean().abs() < 5.0
    assert moved[30:].square().mean().sqrt() < 25.0


def test_an_all_zero_layer_votes_balanced_bits_that_change() -> None:
    model, optimizer = single(SignMuon, 32, 64, lr=1.0, scaling="none")
    steps = []
    for _ in range(4):
        before = model.weight.detach().clone()
        drive(model, optimizer, [torch.zeros(32, 64)])
        steps.append(before - model.weight.detach())
    for step in steps:
        assert torch.equal(step.abs(), torch.ones(32, 64)) and step.mean().abs() < 0.1
    assert not torch.equal(steps[0], steps[1])
    again, other = single(SignMuon, 32, 64, lr=1.0, scaling="none")
    assert torch.equal(drive(again, other, [torch.zeros(32, 64)]), -steps[0])


def test_decay_does_not_depend_on_the_shape() -> None:
    model, optimizer = single(SignMuon, 4, 64, lr=0.25, weight_decay=0.5)
    with torch.no_grad():
        model.weight.fill_(8.0)
    weight = drive(model, optimizer, gaussians(1, 4, 64))
    assert torch.equal((weight - 8.0 * (1 - 0.125)).abs(), torch.full((4, 64), 0.25 / 8))


def test_training_reduces_the_loss() -> None:
    for make in (SignMuon, Signum):
        net = Net()
        optimizer = make(net)
        (batch,) = batches(1)
        first = net.loss(batch).item()
        for _ in range(60):
            backward(net, batch)
            optimizer.step()
        assert net.loss(batch).item() < 0.5 * first


def test_accumulated_gradients_are_orthogonalised_once() -> None:
    nets = [Net(), Net()]
    optimizers = [SignMuon(net) for net in nets]
    left, right = batches(2)
    joined = (torch.cat([left[0], right[0]]), torch.cat([left[1], right[1]]))
    backward(nets[0], joined)
    nets[1].zero_grad()
    for part in (left, right):
        (nets[1].loss(part) / 2).backward()
    payloads = [torch.empty(optimizers[0].table.nbytes, dtype=torch.uint8) for _ in nets]
    for optimizer, payload in zip(optimizers, payloads, strict=True):
        assert optimizer.propose(0, payload)
    differing = sum(
        (a ^ b).bit_count() for a, b in zip(payloads[0].tolist(), payloads[1].tolist(), strict=True)
    )
    assert differing < 0.01 * optimizers[0].table.elements  # only rounding separates them


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_without_gradient_counts_as_zero(momentum: float) -> None:
    def run(missing: bool) -> Tensor:
        model, optimizer = single(SignMuon, 6, 8, momentum=momentum)
        drive(model, optimizer, gaussians(1, 6, 8))
        model.weight.grad = None if missing else torch.zeros(6, 8)
        optimizer.step()
        return model.weight.detach()

    assert torch.equal(run(True), run(False))
