"""The [method] section of the run file: its keys, and which of their values go together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from protos.codecs import CodecSpec
from protos.method_keys import MethodKeys
from protos.methods import (
    BASIS_OF_A_VOTE,
    LOCAL,
    LOW_RANK,
    MOMENTUM,
    POLAR,
    TORCH,
    VOTE,
    VOTED,
    WITH_STEPS,
)
from protos.problems import Problem

_CHOOSING: Final = tuple(name for name in LOCAL if name != "lordo")  # have a choice of local optimizer
_OF_LOCAL_STEPS: Final = (
    *("codec", "embedding_codec", "vector_codec", "error_feedback"),
    *("outer", "outer_lr", "outer_momentum", "fragments", "overlap", "mix"),
)


def _all(reason: str, *keys: str) -> Iterator[tuple[str, str]]:
    return ((key, reason) for key in keys)


class MethodConfig(MethodKeys):
    """How gradients become steps, and what travels between the nodes."""

    def without_effect(self) -> Iterable[Iterator[tuple[str, str]]]:
        return (
            self._unused_local_optimizer(),
            self._unused_polar(),
            self._unused_votes(),
            self._unused_exchange(),
            self._unused_feedback(),
            self._unused_low_rank(),
            self._unused_of_lordo(),
            self._unused_mu(),
            self._unused_final(),
        )

    def _unused_local_optimizer(self) -> Iterator[tuple[str, str]]:
        if self.name not in _CHOOSING:
            reason = self._only(_CHOOSING, "only these methods have the choice of a local optimizer")
            yield from _all(reason, "optimizer", "optimizer_options")
        elif not self.optimizer.startswith(TORCH):
            yield "optimizer_options", f"{self.optimizer} is not a class of torch.optim"

    def _unused_polar(self) -> Iterator[tuple[str, str]]:
        """What belongs to polar factors and momenta."""
        if self.name in _CHOOSING:
            if self.optimizer not in ("muon", "sign-muon"):
                reason = f"the local optimizer {self.optimizer} has none: only muon and sign-muon have"
                yield from _all(reason, "ns_steps", "ns_coefficients", "momentum", "nesterov", "scaling")
            return
        if self.name not in MOMENTUM:
            reason = self._only(MOMENTUM, "only methods with a momentum use it")
            yield from _all(reason, "momentum", "nesterov", "scaling")
        if self.name not in POLAR and (self.name != "lordo" or self.direction != "muon"):
            reason = self._only(POLAR, "only methods with a polar factor use it")
            yield from _all(reason, "ns_steps", "ns_coefficients")

    def _unused_votes(self) -> Iterator[tuple[str, str]]:
        """The choice between vote and mean, and what belongs to the means."""
        if self.name not in VOTED:
            reason = self._only(VOTED, "only methods that vote in every step have the choice")
            yield from _all(reason, "embeddings", "vectors")
        elif self.has_local_steps:
            reason = f"with local_steps = {self.local_steps} codec and embedding_codec say what travels"
            yield from _all(reason, "embeddings", "vectors")
        elif "mean" not in (self.embeddings, self.vectors):
            reason = f'with {self.name} AdamW runs only where embeddings or vectors are "mean"'
            yield from _all(reason, "beta1", "beta2", "eps")
            yield from _all("everything is voted on, nothing averaged", "clip", "trim")

    def _unused_exchange(self) -> Iterator[tuple[str, str]]:
        """What belongs to pseudo-gradients and outer steps."""
        if not self.has_local_steps:
            reason = f"{self.name} makes no local steps"
            if self.name == "sign-muon":
                reason += " unless local_steps is above 1"
            yield from _all(reason, *_OF_LOCAL_STEPS)
        elif self.outer != "nesterov":
            yield "outer_momentum", f'outer = "{self.outer}" has no momentum'

    def _unused_feedback(self) -> Iterator[tuple[str, str]]:
        codecs = (self.codec, self.embedding_codec, self.vector_codec)
        if self.has_local_steps and all(c not in VOTE and CodecSpec.parse(c).exact for c in codecs):
            yield "error_feedback", "all codecs are exact, nothing is lost"

    def _unused_low_rank(self) -> Iterator[tuple[str, str]]:
        """What belongs to low-rank methods, and to one of them alone."""
        if self.name not in LOW_RANK:
            reason = f"only low-rank methods use it ({', '.join(LOW_RANK)}), not {self.name}"
            yield from _all(reason, "rank", "omega", "mu")
        if self.name == "lowrank-ddp":
            yield from _all("lowrank-ddp takes plain means", "clip", "trim")
        else:
            yield "basis_every", f"only lowrank-ddp uses it, not {self.name}"

    def _unused_of_lordo(self) -> Iterator[tuple[str, str]]:
        if self.name != "lordo":
            yield from _all(f"only lordo uses it, not {self.name}", "basis", "direction", "moments_codec")
        elif self.basis == "local":
            yield "moments_codec", "with a local basis the moments stay at home"

    def _unused_mu(self) -> Iterator[tuple[str, str]]:
        if self.name in LOW_RANK and self.omega == 1.0:
            yield "mu", "with omega = 1 there is no step along the whole gradient"

    def _unused_final(self) -> Iterator[tuple[str, str]]:
        if self.schedule == "constant":
            yield "final", "a constant schedule ends at the peak"

    def _only(self, names: tuple[str, ...], what: str) -> str:
        return f"{what} ({', '.join(names)}), not {self.name}"

    def broken_rules(self) -> Iterable[Iterator[Problem]]:
        return (
            self._broken_steps(),
            self._broken_low_rank_optimizer(),
            self._broken_rate(),
            self._broken_codec(),
            self._broken_fragments(),
            self._broken_delay(),
        )

    def _broken_steps(self) -> Iterator[Problem]:
        if self.name in WITH_STEPS and self.local_steps > 1:
            rule = f"{self.name} exchanges in every step, so this is 1"
            fix = f"for local steps use {WITH_STEPS[self.name]}"
            yield Problem(self.title, "local_steps", rule, fix, self.local_steps)

    def _broken_low_rank_optimizer(self) -> Iterator[Problem]:
        if self.has_local_steps and self.name != "lordo" and self.optimizer == "lordo":
            rule = (
                "the low-rank optimizer needs a basis from all nodes, which only the method lordo exchanges"
            )
            yield Problem(self.title, "optimizer", rule, 'write name = "lordo"', self.optimizer)

    def _broken_rate(self) -> Iterator[Problem]:
        torch = self.has_local_steps and self.optimizer.startswith(TORCH)
        if torch and "lr" not in self.model_fields_set:
            rule = f"must be given with optimizer = {self.optimizer!r}, whose best value nobody has measured"
            yield Problem(self.title, "lr", rule, "for example lr = 0.01")

    def _broken_codec(self) -> Iterator[Problem]:
        if self.name == "lordo" and self.basis == "global" and self.codec in VOTE:
            yield Problem(self.title, "codec", BASIS_OF_A_VOTE, 'use "1bit" for as few bytes', self.codec)

    def _broken_fragments(self) -> Iterator[Problem]:
        if not self.has_local_steps:
            return
        parts = self.fragments
        if parts > 1 and self.name == "lordo" and self.basis == "global":
            rule = "lordo finds its first bases for the whole model at once, so this is 1"
            yield Problem(self.title, "fragments", rule, "for fragments use muloco or diloco", parts)
            return
        steps = self.local_steps
        if steps % parts:
            near = sorted({max(parts, steps // parts * parts), (steps // parts + 1) * parts})
            rule = f"must divide local_steps = {steps}, so that all rounds are equally long"
            fix = f"for example local_steps = {' or '.join(map(str, near))}"
            yield Problem(self.title, "fragments", rule, fix, parts)
        elif self.overlap >= steps // parts:
            rule = f"must be less than the {steps // parts} steps of a round"
            if parts > 1:
                rule += f" (local_steps / fragments = {steps} / {parts})"
            most = steps // parts - 1
            fix = f"at most {most}" if most else "a round of one step leaves nothing to overlap: remove it"
            yield Problem(self.title, "overlap", rule, fix, self.overlap)

    def _broken_delay(self) -> Iterator[Problem]:
        if self.has_local_steps and self.delay:
            rule = "only methods that exchange in every step can be late by a round, so this is 0"
            fix = "to train during the exchange use overlap, for example overlap = 1"
            yield Problem(self.title, "delay", rule, fix, self.delay)
