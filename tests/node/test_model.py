"""The core's decoder: sizes, initial weights, loss, causality, generation, errors."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from node.data import DataSource, open_data
from node.initializer import PortableRandom, fill_normal_, stream
from node.language import LanguageModel, ModelError
from node.llama import rotary_table, rotate, rotate_pairs
from node.model import LlamaShape, build_model, default_ff, model_on_meta, resolve_vocab
from optim.roles import classify

S64 = LlamaShape()
SMALL = LlamaShape(d_model=16, layers=1, heads=2, context=8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sha.update(name.encode() + parameter.detach().numpy().tobytes())
    return sha.hexdigest()


def tokens_of(*shape: int, vocab: int = 256) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, vocab, shape))


def test_s64_has_the_sizes_of_the_experiments() -> None:
    model = build_model(S64, 0)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and not n.startswith("embedding")]
    assert sum(p.numel() for p in model.parameters()) == 117_056
    assert len(matrices) == 14 and sum(p.numel() for p in matrices) == 100_352
    assert default_ff(64) == 176


def test_untied_head_is_a_matrix_of_its_own() -> None:
    tied = build_model(SMALL, 0)
    untied = build_model(dataclasses.replace(SMALL, tied=False), 0)
    extra = dict(untied.named_parameters()).keys() - dict(tied.named_parameters()).keys()
    assert extra == {"head.weight"}
    assert not torch.equal(untied.head.weight, untied.embedding.weight)
    assert torch.equal(untied.embedding.weight, tied.embedding.weight)
    roles = {item.name: item.role for item in classify(untied)}
    assert roles["head.weight"] == roles["embedding.weight"] == "embedding"
    assert tied.get_output_embeddings() is None


def test_a_matrix_shaped_like_the_embedding_stays_a_matrix() -> None:
    square = build_model(LlamaShape(d_model=32, layers=1, heads=2, ff=32), 0, vocab=32)
    roles = [item.role for item in classify(square)]
    assert (roles.count("matrix"), roles.count("embedding"), roles.count("vector")) == (7, 1, 3)


def test_initial_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    state = torch.get_rng_state()
    first = build_model(S64, 3)
    assert torch.equal(torch.get_rng_state(), state), "building a model must not draw from torch's generator"
    torch.manual_seed(2)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    try:
        second = build_model(S64, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert digest(first) == digest(second)
    assert digest(first) != digest(build_model(S64, 4))


def test_initial_weights_are_the_agreed_bits() -> None:
    assert digest(build_model(S64, 0)) == ("0a60d8581e068776876f4744af8bbe8c6caa72348d93f4818d801075d16347c7")


def test_initial_weights_do_not_depend_on_the_cpu() -> None:
    code = (
        "import hashlib; from node.model import *; m = build_model(LlamaShape(), 0); s = hashlib.sha256()\n"
        "for n, p in m.named_parameters(): s.update(n.encode() + p.detach().numpy().tobytes())\n"
        "print(s.hexdigest())"
    )
    environ = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == digest(build_model(S64, 0))


def test_initial_weights_have_the_stated_spread() -> None:
    parameters = dict(build_model(LlamaShape(d_model=128, layers=2, heads=2), 0).named_parameters())
    residual = 1 / math.sqrt(4)
    for name, std in {
        "embedding.weight": 0.02,
        "layers.0.attention.q.weight": 128**-0.5,
        "layers.1.attention.o.weight": 128**-0.5 * residual,
        "layers.0.feed_forward.gate.weight": 128**-0.5,
        "layers.1.feed_forward.down.weight": default_ff(128) ** -0.5 * residual,
    }.items():
        assert parameters[name].std().item() == pytest.approx(std, rel=0.03), name
        assert abs(parameters[name].mean().item()) < std * 0.03, name
    assert torch.equal(parameters["norm.weight"], torch.ones(128))


def test_a_tensor_fills_the_same_in_every_piece_size_and_rounds_once() -> None:
    count = (1 << 18) + 77
    whole = stream(9, "w").standard_normal(count) * 0.3
    filled = fill_normal_(torch.empty(count, dtype=torch.float32), stream(9, "w"), std=0.3)
    half = fill_normal_(torch.empty(count, dtype=torch.bfloat16), stream(9, "w"), std=0.3)
    assert np.array_equal(filled.numpy(), whole.astype(np.float32))
    assert torch.equal(half, filled.bfloat16())


def test_portable_random_replaces_torch_initialisation() -> None:
    def build(seed: int) -> nn.Module:
        with PortableRandom(seed):
            layer = nn.Linear(40, 50)
            nn.init.normal_(layer.weight, mean=2.0, std=0.5)
        return layer

    torch.manual_seed(0)
    first = build(1)
    torch.manual_seed(1)
    assert digest(first) == digest(build(1)) != digest(build(2))
    assert first.weight.mean().item() == pytest.approx(2.0, abs=0.05)
    assert first.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert first.bias.abs().max().item() <= 40**-0.5


def test_meta_model_has_the_same_parameters_without_memory() -> None:
    huge = LlamaShape(d_model=8192, layers=4, heads=64, context=4096, vocab=1 << 17)
    parameters = list(model_on_meta(huge).parameters())
    assert {p.device.type for p in parameters} == {"meta"}
    assert sum(p.numel() for p in parameters) > 4e9
    shapes = [(n, p.shape) for n, p in model_on_meta(SMALL).named_parameters()]
    assert shapes == [(n, p.shape) for n, p in build_model(SMALL, 0).named_parameters()]


def test_loss_at_the_start_is_that_of_a_uniform_guess() -> None:
    assert build_model(S64, 0).loss(tokens_of(8, 65)).item() == pytest.approx(math.log(256), abs=0.1)


def test_loss_is_the_mean_cross_entropy_of_the_next_token() -> None:
    model, tokens = build_model(SMALL, 0), tokens_of(3, 9)
    log_p = model(tokens[:, :-1]).double().log_softmax(-1)
    by_hand = -sum(log_p[b, t, tokens[b, t + 1]] for b in range(3) for t in range(8)) / 24
    assert model.loss(tokens).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_gradient_agrees_with_finite_differences() -> None:
    model, tokens = build_model(SMALL, 0).double(), tokens_of(2, 9)
    model.loss = lambda t: nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
    model.loss(tokens).backward()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        flat, index, step = parameter.data.view(-1), int(rng.integers(parameter.numel())), 1e-5
        centre = flat[index].item()
        sides = []
        for value in (centre + step, centre - step):
            flat[index] = value
            sides.append(model.loss(tokens).item())
        flat[index] = centre
        slope = (sides[0] - sides[1]) / (2 * step)
        assert parameter.grad.view(-1)[index].item() == pytest.approx(slope, rel=1e-4, abs=1e-7), name


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, tokens = build_model(S64, 0), tokens_of(2, 64)
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_rotation_forms_agree_and_depend_on_distance_alone() -> None:
    table = rotary_table(32, 8)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 32, 8), dtype=np.float32))
    assert torch.allclose(rotate(x, table), rotate_pairs(x, table), atol=1e-6)
    same = x[:1, :1, :1].expand(1, 1, 32, 8)
    turned = rotate(same, table)[0, 0]
    dots = turned @ turned.T
    assert dots[3, 7].item() == pytest.approx(dots[20, 24].item(), rel=1e-4)
    assert torch.allclose(turned.norm(dim=-1), same[0, 0].norm(dim=-1), rtol=1e-5)


def test_half_precision_forward_is_close() -> None:
    model, tokens = build_model(S64, 0), tokens_of(2, 65)
    exact = model.loss(tokens)
    rough = model.bfloat16().loss(tokens)
    assert rough.dtype is torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.01)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cached_generation_equals_reading_the_whole_window_again(temperature: float) -> None:
    model, prompt = build_model(SMALL, 1), tokens_of(2, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # far from uniform, so that the argmax is not decided by rounding
    fast = model.generate(prompt, 21, temperature, torch.Generator().manual_seed(0))
    slow = LanguageModel._continue(model, prompt, 21, temperature, torch.Generator().manual_seed(0))
    assert torch.equal(fast, slow)
    assert fast.shape == (2, 26) and torch.equal(fast[:, :5], prompt)


def test_generation_takes_a_row_and_a_prompt_longer_than_the_context() -> None:
    model, prompt = build_model(SMALL, 1), tokens_of(30)
    model.train()
    text = model.generate(prompt, 3, 0.0)
    assert text.shape == (33,) and model.training
    assert torch.equal(model.generate(prompt[-8:], 3, 0.0)[8:], text[30:])
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_the_model_learns_text() -> None:
    data = open_data(DataSource(), 32)
    model = build_model(LlamaShape(d_model=32, layers=1, heads=2, context=32), 0, vocab=data.vocab)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    held_out = data.validation(64)
    start = model.loss(held_out).item()
    for step in range(30):
        optimizer.zero_grad()
        model.loss(data.batch(16 * step, 16, 0)).backward()
        optimizer.step()
    assert start - model.loss(held_out).item() > 2.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "mamba"}, "name is 'mamba'"),
        ({"heads": 3}, "multiple of 6"),
        ({"heads": 64}, "multiple of 128"),
        ({"layers": 0}, "layers is 0"),
        ({"context": -1}, "context is -1"),
        ({"vocab": 100}, "data has 256 token ids"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change: dict[str, object], words: str) -> None:
    config = dataclasses.replace(S64, **change)
    for build in (lambda: build_model(config, 0), lambda: model_on_meta(config)):
        with pytest.raises(ModelError, match=words):
            build()


def test_vocabulary_follows_the_data_unless_it_is_set() -> None:
    assert resolve_vocab(SMALL, 777) == 777
    assert resolve_vocab(dataclasses.replace(SMALL, vocab=1000), 777) == 1000
    assert build_model(SMALL, 0, vocab=300).embedding.weight.shape == (300, 16)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.zeros(8, dtype=torch.long), r"\[batch, time\]"),
        (torch.zeros(2, 10, dtype=torch.long), "context 8"),
        (torch.zeros(2, 5), "integers"),
        (torch.full((1, 4), 256), "0 … 255"),
        (torch.full((1, 4), -1), "run from -1"),
        (torch.zeros(2, 1, dtype=torch.long), "at least 2"),
        (torch.zeros(0, 5, dtype=torch.long), r"\[batch, time\]"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens: torch.Tensor, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        build_model(SMALL, 0).loss(tokens)


def test_odd_requests_are_refused() -> None:
    model = build_model(SMALL, 0)
    with pytest.raises(ModelError, match="temperature -1"):
        model.generate(tokens_of(3), 2, -1.0)
    with pytest.raises(ModelError, match="at least 1 each"):
        model.generate(torch.zeros(0, dtype=torch.long), 2)
    with pytest.raises(ValueError, match="seed is -1"):
        build_model(SMALL, -1)
