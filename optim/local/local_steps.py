"""Local steps between exchanges: one mechanism for local AdamW, DiLoCo, MuLoCo, LoRDO and votes on
pseudo-gradients.

A round: every node makes K steps of its local optimizer on its live parameters ``W``. It sends ``A = D + e``,
the pseudo-gradient ``D = anchor - W`` and what codecs lost of earlier ones. The reduced ``R``, equal bytes
for all, moves the anchor by an outer step, and ``W`` starts the next round from there. DiLoCo: arXiv
2311.08105; fragments and overlap: Streaming DiLoCo, arXiv 2501.18512.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optim.local import saving
from optim.local.anchor import Anchor
from optim.local.error_feedback import ErrorFeedback
from optim.local.layout import Fragment, LocalGroup, Unit, check_numbers, fragments_of, schedule, units_of
from optim.local.outer import OuterStep, decay_factor
from optim.local.wire import U8, Wire
from optim.packs import check_bytes
from optim.reduce import Reduction
from optim.roles import ParameterRole, held
from optim.round_optimizer import RoundOptimizer
from optim.rules import all_usable, check_parameter, usable_gradient
from optim.streaming import OnReady, Ready
from protos.buckets import MeanRule, TableSchedule
from protos.methods import Outer, merge_share

# The gradient of a bootstrap round travels in place of a pseudo-gradient, and what a codec loses of its mean
# is added to the next one: so small, that does not show. A power of two; a basis does not depend on it.
BOOTSTRAP_SCALE = 2.0**-10


class LocalSteps(RoundOptimizer):
    """Several local steps a round, then an agreement on what they have changed.

    Memory beside parameters, gradients and the local optimizer's state: in host memory 4 bytes a parameter
    for the anchor, 4 for the outer momentum (``nesterov`` only), 4 for the error feedback of a codec and
    another 4 from a proposal to its result; and temporaries of a few times the largest matrix.

    Weight decay acts once a round on the anchor, as much as K steps of decay would: a pseudo-gradient is free
    of it. A gradient that is not finite costs its micro-step; a parameter that is not finite any more costs
    the node's contribution, and is reset to the anchor with the local optimizer's state.

    Args:
        groups: their local optimizers hold all trainable parameters; groups without are dropped.
        local_steps: K, the steps between two exchanges of the same parameter.
        outer, outer_lr, outer_momentum: see :class:`optim.local.outer.OuterStep`.
        fragments: parts of the model that are exchanged in turn, each round one, after K / ``fragments``
            steps.
        overlap: steps of a round that are made during its exchange, less than K / ``fragments``.
        mix: share of the anchor in the parameters a node goes on with; ``None`` is 1, with an overlap 0.5.
        rule: how means are taken.
        reduce: the exchange used by :meth:`step`.

    Raises:
        ValueError: for options out of range or that do not go together, and parameters that are not
            contiguous fp32 or occur twice.
    """

    def __init__(
        self,
        groups: Sequence[LocalGroup],
        *,
        local_steps: int,
        outer: Outer = "average",
        outer_lr: float = 1.0,
        outer_momentum: float = 0.5,
        fragments: int = 1,
        overlap: int = 0,
        mix: float | None = None,
        rule: MeanRule | None = None,
        reduce: Reduction | None = None,
    ) -> None:
        self._groups = [group for group in groups if group.inner.roles]
        roles = tuple(role for group in self._groups for role in group.inner.roles)
        if not roles:
            raise ValueError("there is nothing to train: the model has no trainable parameter")
        self._inners = [group.inner for group in self._groups]
        self._bootstrap = any(inner.bootstrap for inner in self._inners)
        check_numbers(local_steps, fragments, overlap, mix, bootstrap=self._bootstrap)
        for role in roles:
            check_parameter(role, "mean-adamw")
        self._roles = held(roles)
        for group in self._groups:
            for name, value in (("lr", group.lr), ("weight_decay", group.weight_decay)):
                if not 0.0 <= value < math.inf:
                    raise ValueError(f"{group.name}: {name} must be finite and not negative, not {value}")
        rows = [
            {
                "params": [role.parameter for role in group.inner.roles],
                "param_names": [role.name for role in group.inner.roles],
                "name": group.name,
                "lr": group.lr,
                "weight_decay": group.weight_decay,
            }
            for group in self._groups
        ]
        super().__init__(rows, reduce=reduce)
        units = units_of(self._groups)
        self._fragments = fragments_of(units, fragments, rule or MeanRule())
        self.tables = schedule(self._fragments)
        self.lane = TableSchedule(tuple(fragment.lane for fragment in self._fragments), self.tables.cycle)
        self._steps, self._overlap = local_steps // fragments, overlap
        self._mix = merge_share(overlap) if mix is None else mix
        # live parameters differ from the anchor between rounds
        self._keeps = fragments > 1 or self._mix < 1.0
        self._anchor = Anchor(self._roles)
        self._outer = OuterStep(outer, outer_lr, outer_momentum)
        self._feedback = ErrorFeedback()
        for unit in units:
            if not unit.held:
                continue
            self._outer.add_bucket(unit.name, unit.bucket.elements)
            if unit.feedback:
                self._feedback.add_bucket(unit.name, unit.bucket.elements)
        self._wire = Wire()
        self._moved = False  # local steps since the live parameters were last equal to the anchor
        self._made = self._left_out = 0  # micro-steps of the round
        self._on_ready: tuple[int, OnReady] | None = None
        self._own: Tensor | None = None  # what this node proposed last
        self._proposed = -1  # its round

    # ------------------------------------------------------------------ a round

    def micro_steps(self, round_index: int) -> int:
        """Batches that a node trains in a round: 1 in a bootstrap round, else K / fragments."""
        return 1 if self._is_bootstrap(round_index) else self._steps

    def send_after(self, round_index: int) -> int:
        """The micro-steps of a round before the proposal."""
        return 1 if self._is_bootstrap(round_index) else self._steps - self._overlap

    def local_step(self, round_index: int, micro_step: int) -> bool:
        """One step of every local optimizer, none in a bootstrap round; see the base class."""
        gradients = [usable_gradient(role) for role in self._roles]
        if not self.agree(all_usable([gradient for gradient in gradients if gradient is not None])):
            self._left_out += 1
            return False
        self._made += 1
        if not self._is_bootstrap(round_index):
            self._moved = True
            for group, options in zip(self._groups, self.param_groups, strict=True):
                group.inner.step(float(options["lr"]))
        return True

    def start(self, round_index: int, out: Tensor, on_ready: OnReady) -> None:
        """See the base class: :meth:`propose` tells ``on_ready`` as it goes, unit by unit."""
        self._on_ready = round_index, on_ready

    @torch.no_grad()
    def propose(self, round_index: int, out: Tensor) -> bool:
        """Write this node's contribution; see the base class.

        Returns False if not one gradient of the round was finite, or if something to be sent, here or by
        another rank, is not finite: the error feedback is then as before.

        Raises:
            PayloadError: if ``out`` has another size, dtype or layout.
        """
        fragment = self._fragment(round_index)
        check_bytes(out, fragment.lane.nbytes, "the output of propose")
        self._feedback.drop()
        self._own, self._proposed = None, -1
        host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=torch.uint8)
        payload = host.numpy()
        told, self._on_ready = self._on_ready, None
        tell = told[1] if told is not None and told[0] == round_index and host is out else None
        ready, usable = Ready(fragment.lane, tell), bool(self._made or not self._left_out)
        for unit in fragment.units:
            usable = usable and self._write(fragment, unit, round_index, payload)
            if usable:
                ready.add(unit.buckets)
        if not self.agree(usable):
            self._feedback.drop()
            self._left_out += 1  # apply() looks for what is not finite
            return False
        if host is not out:
            out.copy_(host)
        self._proposed = round_index
        self._own = host.clone() if self._feedback.sent else None
        return True

    @torch.no_grad()
    def apply(self, round_index: int, payload: Tensor | None, *, counted: bool = True) -> None:
        """Apply the committed result of a round; see the base class.

        Raises:
            PayloadError: for another size, dtype or layout, or values that must not be decoded; nothing has
                been changed.
        """
        fragment = self._fragment(round_index)
        result: U8 | None = None
        if payload is not None:
            what = f"the result of round {round_index}"
            check_bytes(payload, fragment.lane.result_nbytes, what)
            result = payload.cpu().numpy()
            self._wire.check(fragment, result, what)
        proposed = self._proposed == round_index
        counted = counted and proposed and result is not None
        if not proposed:
            self._feedback.drop()
        for unit in fragment.units:
            self._apply(fragment, unit, round_index, result, proposed=proposed, counted=counted)
        if self._left_out:
            self._heal()
        self._own, self._proposed = None, -1
        self._made = self._left_out = 0
        self._moved = self._moved and self._keeps
        self.round_index = round_index + 1

    def _write(self, fragment: Fragment, unit: Unit, round_index: int, payload: U8) -> bool:
        """Encode one unit; False if it is not finite."""
        if self._is_bootstrap(round_index):
            values = torch.cat([_gradient(item).mul(BOOTSTRAP_SCALE) for item in unit.items])
        else:
            values = self._feedback.correct(unit.name, self._anchor.delta(unit.items))
        if not all_usable([values]):
            return False
        self._wire.write(fragment, unit, values, round_index, payload)
        if not self._is_bootstrap(round_index):
            self._feedback.propose(unit.name, values)
        for bucket in unit.extras:
            if bucket.reduce == "basis":
                continue
            extra = self._groups[unit.group].inner.contribute(bucket)
            if not np.isfinite(extra).all():
                return False
            self._wire.write_mean(fragment, bucket, extra, round_index, payload)
        return True

    def _apply(
        self,
        fragment: Fragment,
        unit: Unit,
        round_index: int,
        result: U8 | None,
        *,
        proposed: bool,
        counted: bool,
    ) -> None:
        """Settle the error feedback of one unit, move its anchor and its live parameters."""
        self._feedback.settle(unit.name, self._own_values(fragment, unit) if counted else None)
        if result is not None and not self._is_bootstrap(round_index):
            mean = self._wire.read(fragment, unit, result, result=True)
            update = self._outer.update(unit.name, mean)
            decay = self._decay(unit, round_index)
            for item, member in zip(unit.items, unit.bucket.members, strict=True):
                anchor = self._anchor.tensors[item.name]
                if decay != 1.0:
                    anchor.mul_(decay)
                anchor.sub_(update[member.start : member.start + member.elements].view(item.shape))
        # what is in the error feedback as a whole must not stay in the parameters as well
        merged = proposed and self._mix < 1.0 and (counted or not unit.feedback)
        for item in unit.items:
            if merged:
                self._anchor.merge(item, self._mix)
            else:
                self._anchor.restore(item)
        if unit.extras and result is not None:
            values = {
                extra.name: self._wire.read_mean(fragment, extra, result, result=True)
                for extra in unit.extras
            }
            for item in unit.items:
                self._groups[unit.group].inner.take(item, values, round_index)

    def _own_values(self, fragment: Fragment, unit: Unit) -> Callable[[], Tensor]:
        own = self._own

        def decoded() -> Tensor:
            assert own is not None, "a proposal with error feedback keeps its bytes"
            return self._wire.read(fragment, unit, own.numpy(), result=False)

        return decoded

    def _decay(self, unit: Unit, round_index: int) -> float:
        """The factor of all micro-steps since the unit was last exchanged."""
        options = self.param_groups[unit.group]
        rounds = min(len(self._fragments), round_index + 1)
        return decay_factor(float(options["lr"]), float(options["weight_decay"]), self._steps * rounds)

    def _heal(self) -> None:
        """Reset what is not finite: live parameters to the anchor, local optimizers to their start."""
        for role in self._roles:
            if not bool(role.parameter.isfinite().all()):
                self._anchor.restore(role)
        for inner in self._inners:
            inner.restart()

    def _is_bootstrap(self, round_index: int) -> bool:
        return self._bootstrap and round_index == 0

    def _fragment(self, round_index: int) -> Fragment:
        return self._fragments[round_index % len(self._fragments)]

    # ------------------------------------------------------------------ state

    def shared_tensors(self) -> dict[str, Tensor]:
        """The anchors under the names of the parameters, the outer momentum as
        ``optimizer/<bucket>/outer_momentum``, and what local optimizers share."""
        tensors = dict(self._anchor.tensors) | self._outer.tensors()
        for inner in self._inners:
            tensors |= inner.shared_tensors()
        return tensors

    def local_tensors(self) -> dict[str, Tensor]:
        """The state of local optimizers, the errors of codecs as ``optimizer/<bucket>/error``, the states of
        encoders; with fragments or a mix also the live parameters, as ``optimizer/<name>/live``."""
        tensors: dict[str, Tensor] = {}
        if self._keeps:
            tensors = {f"optimizer/{role.name}/live": role.parameter.detach() for role in self._roles}
        return tensors | self._state_tensors()

    def _state_tensors(self) -> dict[str, Tensor]:
        for fragment in self._fragments:
            self._wire.prepare(fragment)
        tensors = self._feedback.tensors() | self._wire.tensors()
        for inner in self._inners:
            tensors |= inner.local_tensors()
        return tensors

    def prepare_load(self) -> None:
        """See the base class."""
        for inner in self._inners:
            inner.prepare_load()

    def loaded(self) -> None:
        """Start from the anchor, without a proposal; see the base class."""
        for role in self._roles:
            self._anchor.restore(role)
        for inner in self._inners:
            inner.loaded()
        self._feedback.drop()
        self._own, self._proposed = None, -1
        self._made = self._left_out = 0
        self._moved = self._keeps

    def evaluating(self) -> AbstractContextManager[None]:
        """The anchor in the model; see the base class. Between rounds it takes a copy of the parameters in
        host memory only with fragments or a mix."""
        return self._anchor.swapped(self._roles) if self._moved else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the live parameters, which are the model's state: anchors, momenta, errors and the
        state of local optimizers under ``"state"`` by name, and where in a round :meth:`step` is. Tensors
        are live, as of torch."""
        return saving.state_dict(self, self.shared_tensors() | self._state_tensors(), self._progress())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, into the existing storage. Load the model's state as well.

        Raises ``ValueError``, before anything changes, if groups, names or shapes are not those of this
        optimizer.
        """
        self.prepare_load()
        shared, local = self.shared_tensors(), self._state_tensors()
        saving.check(self, shared | local, state_dict)
        saving.copy(shared, state_dict)
        for inner in self._inners:
            inner.loaded()
        saving.copy(local, state_dict)
        progress = saving.restore(self, state_dict)
        self._moved = bool(progress["moved"])
        self._made, self._left_out = int(progress["made"]), int(progress["left_out"])
        self._own, self._proposed = progress["own"], int(progress["proposed"])
        self._feedback.sent = dict(progress["sent"])

    def _progress(self) -> dict[str, Any]:
        return {
            "moved": self._moved,
            "made": self._made,
            "left_out": self._left_out,
            "own": self._own,
            "proposed": self._proposed,
            "sent": dict(self._feedback.sent),
        }


def _gradient(item: ParameterRole) -> Tensor:
    """The gradient of a parameter on the host, 1-D; zeros if there is none."""
    gradient = item.parameter.grad
    if gradient is None:
        return torch.zeros(item.parameter.numel())
    return gradient.detach().reshape(-1).cpu()
