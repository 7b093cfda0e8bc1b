"""What every model of a run offers: logits, loss and text, with shapes checked at the door."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ModelError(ValueError):
    """A model that cannot be built, or tokens it cannot take; the text says which and what to change."""


class LanguageModel(nn.Module, ABC):
    """A causal language model over ``vocab`` token ids and at most ``context`` positions."""

    vocab: int
    context: int

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """``float[B, T, vocab]`` of checked ``int64[B, T]`` tokens: row t predicts token t + 1."""

    @abstractmethod
    def get_output_embeddings(self) -> nn.Module | None:
        """The head, under the name that ``transformers`` gave this; ``None`` where the embedding serves."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``float[B, T, vocab]`` of integer ``tokens[B, T]``, T <= context.

        Raises :class:`ModelError` for another shape or dtype and, for tokens in CPU memory, for ids outside
        the vocabulary.
        """
        return self.logits(self._checked(tokens, self.context))

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats per predicted token of integer ``tokens[B, T + 1]``: a float32 scalar.

        Token t + 1 is predicted from tokens 0 … t, so T <= context. Raises :class:`ModelError` as
        :meth:`forward` does.
        """
        tokens = self._checked(tokens, self.context + 1)
        if tokens.shape[1] < 2:
            raise ModelError("a loss needs at least 2 tokens in a row: one to read and one to predict")
        logits = self.logits(tokens[:, :-1])
        return F.cross_entropy(logits.float().reshape(-1, self.vocab), tokens[:, 1:].reshape(-1))

    def generate(
        self, prompt: Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue integer ``prompt`` (``[P]`` or ``[B, P]``, P >= 1) by ``n`` tokens.

        Returns int64 of the prompt's rank, prompt included. ``temperature`` 0 takes the likeliest token;
        otherwise tokens are drawn from ``generator`` (on the model's device; ``None``: torch's global one).
        A text longer than the context is continued from its last ``context // 2`` tokens whenever the
        window is full.
        """
        tokens = prompt if prompt.dim() != 1 else prompt.unsqueeze(0)
        tokens = self._checked(tokens, None)
        if n < 0 or temperature < 0:
            raise ModelError(f"cannot generate {n} tokens at temperature {temperature}: both are at least 0")
        with torch.no_grad(), _evaluating(self):
            text = self._continue(tokens, n, temperature, generator)
        return text[0] if prompt.dim() == 1 else text

    def _continue(
        self, tokens: Tensor, n: int, temperature: float, generator: torch.Generator | None
    ) -> Tensor:
        """Reference form of generation: the whole window is read again for every token."""
        start = max(0, tokens.shape[1] - self.context)
        for _ in range(n):
            start = self.window_start(start, tokens.shape[1])
            chosen = sample(self.logits(tokens[:, start:])[:, -1], temperature, generator)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
        return tokens

    def window_start(self, start: int, length: int) -> int:
        """Where the window that predicts token ``length`` begins, if the last one began at ``start``."""
        return start if length - start <= self.context else length - max(1, self.context // 2)

    def _checked(self, tokens: Tensor, longest: int | None) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 1:
            raise ModelError(
                f"tokens have shape {tuple(tokens.shape)}; expected [batch, time], at least 1 each"
            )
        if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype is torch.bool:
            raise ModelError(f"tokens are {tokens.dtype}; token ids are integers")
        if longest is not None and tokens.shape[1] > longest:
            raise ModelError(
                f"{tokens.shape[1]} tokens in a row are more than the model's context takes ({longest} here; "
                f"context {self.context}); cut the text or raise context in the [model] section"
            )
        # On an accelerator the check would wait for the device; there the lookup itself traps.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = (int(bound) for bound in torch.aminmax(tokens))
            if low < 0 or high >= self.vocab:
                raise ModelError(
                    f"token ids run from {low} to {high}, but the model's vocabulary is 0 … "
                    f"{self.vocab - 1}; set [model] vocab to the tokenizer's size or leave it out"
                )
        return tokens.long()


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """One token id for each row of ``logits[B, vocab]``: int64[B]; temperature 0 is the argmax."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = F.softmax(logits.float() / temperature, -1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
