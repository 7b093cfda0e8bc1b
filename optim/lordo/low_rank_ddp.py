"""Low-rank Adam with an exchange in every step (GaLore, arXiv 2403.03507): the baseline of LoRDO."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from optim.adamw import adamw_pack_
from optim.every_step import EveryStep, Gradients
from optim.layout import Pack, packs_of
from optim.lordo.inner import LowRankOptions
from optim.lordo.ldadam import turn_and_project
from optim.lordo.rotation import rotate_moments
from optim.lordo.shapes import AN_EIGHTH, basis_shape, moment_shape
from optim.lordo.subspace_step import project, subspace_step
from optim.lordo.tables import GradientTable, gradient_tables, schedule
from optim.packs import PayloadError, check_bytes, write_gradients
from optim.reduce import Reduction
from optim.roles import ParameterRole, Role, classify, held
from optim.rules import all_usable, check_parameter, state_of
from optim.sign_muon import auxiliary_groups
from protos.buckets import TableSchedule
from protos.codecs import matrix_shape

F32 = npt.NDArray[np.float32]


class LowRankDDP(EveryStep):
    """Adam on the mean of projected gradients for matrices, AdamW on the mean gradient for everything else.

    Each step, ``Q^T G`` of every matrix travels in fp32, ``r n`` numbers for ``m <= n``. Every
    ``basis_every`` rounds the whole gradient does, and its leading directions, found where it is averaged,
    become the next basis Q; the moments are rotated into it. Moments and bases are shared state in host
    memory, ``2 r n + r m`` fp32 numbers a matrix, and replicas are bit-identical on all hardware, but with
    ``ldadam``.

    Args:
        model: its parameters are sorted by :func:`optim.roles.classify`.
        lr: of the matrices.
        embedding_lr, vector_lr: of AdamW; ``None`` is 6e-3.
        weight_decay: decoupled, of matrices and embeddings.
        rank: r, clamped to the shorter side; 0 is an eighth of that.
        basis_every: rounds from one basis to the next.
        omega, mu, betas, eps: as in :class:`optim.lordo.inner.LowRankOptions`. Below an ``omega`` of 1 the
            whole gradient travels in every round, because the full-rank term needs it.
        ldadam: turn the basis in every step, with error feedback (:mod:`optim.lordo.ldadam`); the whole
            gradient travels then, and the error, which is shared state too, takes ``m n`` numbers more.
        auxiliary_betas, auxiliary_eps: of AdamW.
        overrides: see :func:`optim.roles.classify`.
        reduce: the exchange used by ``step()``; ``None`` is a single node.

    Raises:
        ValueError: for options out of range and parameters that cannot be exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 2e-2,
        *,
        embedding_lr: float | None = None,
        vector_lr: float | None = None,
        weight_decay: float = 0.0,
        rank: int = AN_EIGHTH,
        basis_every: int = 16,
        omega: float = 1.0,
        mu: float = 1.0,
        betas: tuple[float, float] = (0.908, 0.99),
        eps: float = 1e-8,
        ldadam: bool = False,
        auxiliary_betas: tuple[float, float] = (0.9, 0.95),
        auxiliary_eps: float = 1e-8,
        overrides: Mapping[str, Role] | None = None,
        reduce: Reduction | None = None,
    ) -> None:
        if sys.byteorder != "little":
            raise RuntimeError("payloads are little-endian: big-endian hosts are not supported")
        LowRankOptions(rank, betas, eps, omega, mu)
        if basis_every < 1:
            raise ValueError(f"basis_every must be at least 1 round, not {basis_every}")
        if not (0.0 <= lr < math.inf and 0.0 <= weight_decay < math.inf):
            raise ValueError(f"lr and weight_decay must be finite and not negative: {lr}, {weight_decay}")
        roles = classify(model, overrides=overrides)
        every_matrix = tuple(item for item in roles if item.role == "matrix")
        rest = auxiliary_groups(
            roles,
            embeddings="mean",
            vectors="mean",
            embedding_lr=embedding_lr,
            vector_lr=vector_lr,
            weight_decay=weight_decay,
            betas=tuple(auxiliary_betas),
            eps=auxiliary_eps,
        )
        rest = [group for group in rest if group["roles"]]
        if not roles:
            raise ValueError("there is nothing to train: the model has no trainable parameter")
        for role in roles:
            check_parameter(role, "mean-adamw")
        every_pack = packs_of((str(group["name"]), "mean", tuple(group["roles"])) for group in rest)
        self._packs = [pack for pack in every_pack if pack.held]
        self._matrices = held(every_matrix)
        matrices: dict[str, Any] = {
            "name": "matrices",
            "roles": every_matrix,
            "lr": lr,
            "weight_decay": weight_decay,
            "omega": omega,
            "mu": mu,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__([_group(row) for row in (*rest, matrices) if row["roles"]], reduce=reduce)
        self._rank, self._ldadam = rank, ldadam
        self._roles = (*self._matrices, *(item for pack in self._packs for item in pack.items))
        for role in self._matrices:
            self.state[role.parameter] = _state(role, rank, with_error=ldadam)
        for pack in self._packs:
            for item in pack.items:
                self.state[item.parameter] = state_of("mean-adamw", item.parameter)
        layouts, cycle = gradient_tables(
            every_pack, every_matrix, rank, basis_every=basis_every, projected=omega >= 1.0, ldadam=ldadam
        )
        self.tables = schedule(layouts, cycle)
        self.lane = TableSchedule(tuple(layout.lane for layout in layouts), cycle)
        self._layouts = layouts

    # ------------------------------------------------------------------ a round

    @torch.no_grad()
    def propose(self, round_index: int, out: Tensor) -> bool:
        """Write this node's gradients, projected or whole; a missing one counts as zero.

        Returns False, with ``out`` of no use, if a gradient, here or on another rank, is not finite or above
        a quarter of the fp32 range, or if there is none (with a delay). Raises
        :class:`optim.packs.PayloadError` if ``out`` does not fit the lane of the round.
        """
        layout = self._layout(round_index)
        check_bytes(out, layout.lane.nbytes, "the output of propose")
        gradients = self._gradients(round_index)
        return self.agree(gradients is not None and self._write(layout, gradients, out))

    def _write(self, layout: GradientTable, gradients: Gradients, out: Tensor) -> bool:
        """Write what a lane carries; False if something is not finite."""
        if not all_usable([gradient for gradient in gradients.values() if gradient is not None]):
            return False
        for pack in self._packs:
            write_gradients(pack, gradients, layout.places[pack.name].sent(out))
        for role in self._matrices:
            place, gradient = layout.places[role.name], gradients[role.name]
            target, used = place.sent(out), 4 * place.bucket.elements
            target[used:].zero_()
            if gradient is None:
                target.zero_()
                continue
            if not layout.whole:
                gradient = self.state[role.parameter]["basis"].to(gradient.device).T @ _wide(gradient)
                if not all_usable([gradient]):
                    return False
            target[:used].copy_(gradient.contiguous().view(-1).view(torch.uint8))
        return True

    @torch.no_grad()
    def apply(self, round_index: int, payload: Tensor | None, *, counted: bool = True) -> None:
        """Apply the mean gradients of a round; equal bytes give equal parameters, moments and bases.

        Args:
            round_index: number of the round.
            payload: uint8, ``lane.of(round_index).result_nbytes`` elements, or ``None`` for a round without
                voters, which changes nothing.
            counted: makes no difference: nothing is kept of a gradient that came too late.

        Raises:
            PayloadError: for another size, dtype or layout, or values that are not finite; nothing has been
                changed.
        """
        if payload is not None:
            layout = self._layout(round_index)
            check_bytes(payload, layout.lane.result_nbytes, "the result of the round")
            payload = payload.cpu()
            rest = [layout.mean(pack, payload) for pack in self._packs]
            means = [layout.matrix(role, payload) for role in self._matrices]
            bases = [layout.basis(role, payload) for role in self._matrices]
            if not all_usable([*rest, *means, *(basis for basis in bases if basis is not None)]):
                raise PayloadError(
                    f"round {round_index}: the mean gradient is not finite: the result was not applied"
                )
            for pack, mean in zip(self._packs, rest, strict=True):
                self._apply_adamw(pack, mean)
            for role, mean, basis in zip(self._matrices, means, bases, strict=True):
                self._apply_matrix(role, mean, basis, whole=layout.whole)
        self.round_index = round_index + 1

    def _apply_adamw(self, pack: Pack, mean: Tensor) -> None:
        group = self.param_groups[pack.group]
        adamw_pack_(
            pack,
            mean,
            self.state,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def _apply_matrix(self, role: ParameterRole, mean: Tensor, new: Tensor | None, *, whole: bool) -> None:
        """Turn the moments into a new basis, if there is one, and make one step."""
        group, state = self.param_groups[-1], self.state[role.parameter]
        basis, first, second = state["basis"], state["exp_avg"], state["exp_avg_sq"]
        seen, betas = int(state["step"]), group["betas"]
        gradient = _wide(mean) if whole else None
        if new is not None:
            moments = first.numpy(), second.numpy()
            turned = rotate_moments(*moments, basis.numpy(), new.numpy(), step=seen, betas=betas)
            first.copy_(torch.from_numpy(turned[0]))
            second.copy_(torch.from_numpy(turned[1]))
            basis.copy_(new)
        if gradient is None:
            projected = mean
        elif self._ldadam:
            names = {"basis": "basis", "first": "exp_avg", "second": "exp_avg_sq", "error": "error"}
            arrays = {argument: state[key].numpy() for argument, key in names.items()}
            projected = torch.from_numpy(turn_and_project(gradient.numpy(), **arrays, step=seen, betas=betas))
        else:
            projected = project(basis, gradient)
        options = {key: group[key] for key in ("lr", "betas", "eps", "omega", "mu")}
        update = subspace_step(
            projected, gradient, basis=basis, first=first, second=second, step=seen + 1, **options
        )
        state["step"] += 1
        rows, columns = matrix_shape(role.shape)
        update = update if rows <= columns else update.T.contiguous()
        if group["weight_decay"] != 0.0:
            role.parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        role.parameter.sub_(update.view(role.shape).to(role.parameter.device))

    # ------------------------------------------------------------------ state

    def shared_tensors(self) -> dict[str, Tensor]:
        """All parameters and all state: nothing here is a node's own."""
        tensors = {role.name: role.parameter.detach() for role in self._roles}
        for role in self._roles:
            for key, value in self.state[role.parameter].items():
                tensors[f"optimizer/{role.name}/{key}"] = value
        return tensors

    def local_tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """As of torch, with the next round under ``"round"``."""
        return {**super().state_dict(), "round": self.round_index}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, into the existing storage of the state.

        Raises ``ValueError``, before anything changes, for groups, names or shapes that are not those of this
        optimizer.
        """
        names = [list(group["param_names"]) for group in self.param_groups]
        saved = state_dict["param_groups"]
        if names != [list(group.get("param_names", ())) for group in saved]:
            raise ValueError("this state was saved by an optimizer with other groups or parameter names")
        copies: list[tuple[Tensor, Tensor]] = []
        for group, old in zip(self.param_groups, saved, strict=True):
            for parameter, index in zip(group["params"], old["params"], strict=True):
                for key, tensor in self.state.get(parameter, {}).items():
                    value = state_dict["state"].get(index, {}).get(key)
                    if not isinstance(value, Tensor) or value.shape != tensor.shape:
                        shape = tuple(tensor.shape)
                        raise ValueError(
                            f"the saved state of parameter {index} has no {key} of shape {shape}"
                        )
                    copies.append((tensor, value.clone()))
        live = dict(self.state)
        super().load_state_dict(state_dict)
        self.state.update(live)
        for tensor, value in copies:
            tensor.copy_(value)
        self.round_index = int(state_dict.get("round", 0))

    def _layout(self, round_index: int) -> GradientTable:
        return self._layouts[self.tables.cycle[round_index % len(self.tables.cycle)]]


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group of torch."""
    roles = row["roles"]
    options = {key: value for key, value in row.items() if key != "roles"}
    return {
        **options,
        "params": [role.parameter for role in roles],
        "param_names": [role.name for role in roles],
    }


def _state(role: ParameterRole, rank: int, *, with_error: bool) -> dict[str, Tensor]:
    """Fresh state of a matrix, in host memory. The basis of a run that begins with a round without result is
    arbitrary, but the same on all nodes."""
    moment = moment_shape(role.shape, rank)
    state = {
        "basis": torch.eye(*basis_shape(role.shape, rank)),
        "exp_avg": torch.zeros(moment),
        "exp_avg_sq": torch.zeros(moment),
        "step": torch.zeros((), dtype=torch.int64),
    }
    if with_error:
        state["error"] = torch.zeros(*sorted(matrix_shape(role.shape)))
    return state


def _wide(gradient: Tensor) -> Tensor:
    """A view as a matrix, shorter side first."""
    rows, columns = matrix_shape(tuple(gradient.shape))
    matrix = gradient.reshape(rows, columns)
    return matrix if rows <= columns else matrix.T
