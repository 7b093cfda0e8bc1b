"""The decoder of the core: RMSNorm, rotary positions, SwiGLU, no biases ("LLaMA", arXiv 2302.13971).

Every projection is a matrix of its own (q, k, v, o, gate, up, down), because a matrix is what the optimizers
orthogonalise and what travels as one bucket. Embeddings are small (std 0.02) and scaled by sqrt(d) on their
way in, so that the same matrix serves as the head of a tied model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.initializer import fill_normal_, stream
from node.language import LanguageModel, sample

EMBEDDING_STD = 0.02
ROPE_BASE = 10000.0
NORM_EPS = 1e-6  # torch's default is the dtype's own, which in bf16 drowns a small embedding


class KeyValues(NamedTuple):
    """Keys and values of one layer, ``[B, heads, context, d_head]``; how many are filled the caller knows."""

    keys: Tensor
    values: Tensor


class Matrix(nn.Linear):
    """``nn.Linear`` without bias, left uninitialised.

    The values ``nn.Linear`` starts with would be overwritten, and cost a draw from torch's generator.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Nothing; :meth:`Llama.initialize` sets the weights."""


class Embedding(nn.Embedding):
    """``nn.Embedding``, left uninitialised like :class:`Matrix`."""

    def reset_parameters(self) -> None:
        """Nothing; :meth:`Llama.initialize` sets the weights."""


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain (arXiv 1910.07467)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


def rotary_table(context: int, d_head: int) -> Tensor:
    """Cosine and sine by position (RoFormer, arXiv 2104.09864): ``float32[context, d_head / 2, 2]``."""
    inverse = ROPE_BASE ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * inverse
    return torch.stack([angles.cos(), angles.sin()], -1).float()


def rotate_pairs(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of ``x[..., T, d_head]`` by the angles of ``table[T, d_head / 2, 2]``.

    Reference form, for every dtype.
    """
    first, second = _pairs(x).unbind(-1)
    cosines, sines = table.to(x.dtype).unbind(-1)
    turned = torch.stack([first * cosines - second * sines, first * sines + second * cosines], -1)
    return turned.flatten(-2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """:func:`rotate_pairs` as one complex multiplication where torch has it: a third of the time on a CPU."""
    if x.dtype is not torch.float32 or table.dtype is not torch.float32 or torch.compiler.is_compiling():
        return rotate_pairs(x, table)
    turned = torch.view_as_complex(_pairs(x)) * torch.view_as_complex(table)
    return torch.view_as_real(turned).flatten(-2)


def _pairs(x: Tensor) -> Tensor:
    """``x[..., d]`` as ``[..., d / 2, 2]``, a view."""
    return x.view(*x.shape[:-1], x.shape[-1] // 2, 2)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = Matrix(d, d)
        self.k = Matrix(d, d)
        self.v = Matrix(d, d)
        self.o = Matrix(d, d)

    def forward(self, x: Tensor, table: Tensor, cache: KeyValues | None = None, filled: int = 0) -> Tensor:
        """``x[B, T, d]`` to the same shape; behind ``filled`` > 0 cached positions, T is 1."""
        batch, time, d = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, time, self.heads, d // self.heads).transpose(1, 2)

        query = rotate(split(self.q(x)), table)
        key = rotate(split(self.k(x)), table)
        value = split(self.v(x))
        if cache is not None:
            cache.keys[:, :, filled : filled + time] = key
            cache.values[:, :, filled : filled + time] = value
            key, value = cache.keys[:, :, : filled + time], cache.values[:, :, : filled + time]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=filled == 0)
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, time, d))
        return out


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.gate = Matrix(d, ff)
        self.up = Matrix(d, ff)
        self.down = Matrix(ff, d)

    def forward(self, x: Tensor) -> Tensor:
        """``x[B, T, d]`` to the same shape."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """One pre-norm residual layer."""

    def __init__(self, d: int, heads: int, ff: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(d)
        self.attention = Attention(d, heads)
        self.feed_forward_norm = RMSNorm(d)
        self.feed_forward = FeedForward(d, ff)

    def forward(self, x: Tensor, table: Tensor, cache: KeyValues | None = None, filled: int = 0) -> Tensor:
        """``x[B, T, d]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), table, cache, filled)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(LanguageModel):
    """The decoder. Built with uninitialised parameters; :meth:`initialize` gives them their values."""

    rotary: Tensor

    def __init__(
        self, *, d: int, layers: int, heads: int, ff: int, context: int, vocab: int, tied: bool
    ) -> None:
        super().__init__()
        self.vocab, self.context, self.heads = vocab, context, heads
        self.embedding = Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, heads, ff) for _ in range(layers))
        self.norm = RMSNorm(d)
        self.head = None if tied else Matrix(d, vocab)
        self.register_buffer("rotary", torch.empty(context, d // heads // 2, 2), persistent=False)

    def initialize(self, seed: int) -> None:
        """Set every parameter from ``seed`` alone, and the rotary table.

        Matrices get std fan_in^-0.5, those that write into the residual stream (o, down) that divided by
        sqrt(2 layers); embedding and head 0.02; gains 1.
        """
        residual = 1 / math.sqrt(2 * len(self.layers))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                    continue
                if name.startswith(("embedding.", "head.")):
                    std = EMBEDDING_STD
                else:
                    std = parameter.shape[1] ** -0.5
                    if name.endswith((".o.weight", ".down.weight")):
                        std *= residual
                fill_normal_(parameter, stream(seed, name), std=std)
            self.rotary.copy_(rotary_table(self.context, self.embedding.embedding_dim // self.heads))

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits ``float[B, T, vocab]`` of ``int64[B, T]``."""
        return self._logits(self._hidden(tokens))

    def get_output_embeddings(self) -> nn.Module | None:
        """The head of an untied model."""
        return self.head

    def _hidden(self, tokens: Tensor, cache: list[KeyValues] | None = None, filled: int = 0) -> Tensor:
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        table = self.rotary[filled : filled + tokens.shape[1]]
        for index, layer in enumerate(self.layers):
            x = layer(x, table, None if cache is None else cache[index], filled)
        out: Tensor = self.norm(x)
        return out

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight if self.head is None else self.head.weight)

    def _continue(
        self, tokens: Tensor, n: int, temperature: float, generator: torch.Generator | None
    ) -> Tensor:
        weight = self.embedding.weight
        shape = (tokens.shape[0], self.heads, self.context, weight.shape[1] // self.heads)
        cache = [KeyValues(weight.new_empty(shape), weight.new_empty(shape)) for _ in self.layers]
        start, filled = max(0, tokens.shape[1] - self.context), 0
        for _ in range(n):
            moved = self.window_start(start, tokens.shape[1])
            if moved != start:
                start, filled = moved, 0
            unread = tokens[:, start + filled :]
            hidden = self._hidden(unread, cache, filled)
            filled += unread.shape[1]
            chosen = sample(self._logits(hidden[:, -1]), temperature, generator)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
        return tokens
