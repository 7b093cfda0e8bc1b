"""Rounds of one step: every parameter group is voted on or averaged, see :mod:`optim.rules`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from optim import bits
from optim.adamw import adamw_pack_
from optim.newton_schulz import polar_factors
from optim.packs import Pack, PayloadError, check_payload, lay_out, read_mean, stacks, write_gradients
from optim.reduce import Reduction, identity
from optim.roles import ParameterRole
from optim.round_optimizer import RoundOptimizer
from optim.rules import (
    NS_DTYPES,
    REDUCE,
    RuleOptions,
    all_usable,
    check_parameter,
    local_direction,
    polar_scale,
    shared_direction,
    state_of,
    usable_gradient,
    vote_scale,
)
from protos.buckets import BucketTable, TableSchedule


class ExchangedOptimizer(RoundOptimizer):
    """A ``torch.optim.Optimizer`` made of voted and averaged parameter groups.

    Every matrix and every embedding is a bucket of its own; the vectors of a group share one. Majority
    buckets come first, then mean buckets, each in the order of their names. The index of a bucket in
    :attr:`table` is the tensor index of its zero votes.

    Args:
        groups: mappings with ``name``, ``roles`` (a sequence of :class:`optim.roles.ParameterRole`) and the
            fields of :class:`optim.rules.RuleOptions`. Groups without roles are dropped.
        reduce: the exchange used by :meth:`step`; the default serves a single node.

    Attributes:
        table: what travels in every round.

    Raises:
        ValueError: for options out of range, and parameters that are not contiguous fp32 or occur twice.
    """

    table: BucketTable

    def __init__(self, groups: Sequence[Mapping[str, Any]], *, reduce: Reduction = identity) -> None:
        if sys.byteorder != "little":
            raise RuntimeError("payloads are little-endian: big-endian hosts are not supported")
        self._roles: list[tuple[ParameterRole, ...]] = []
        rows: list[dict[str, Any]] = []
        for group in groups:
            options = {key: value for key, value in group.items() if key not in ("roles", "name")}
            roles = tuple(sorted(group["roles"], key=lambda role: role.name))
            if not roles:
                continue
            for role in roles:
                check_parameter(role, options["rule"])
            self._roles.append(roles)
            rows.append(
                {
                    "params": [role.parameter for role in roles],
                    "param_names": [role.name for role in roles],
                    "name": str(group["name"]),
                    **asdict(RuleOptions(**options)),
                }
            )
        if not rows:
            raise ValueError("there is nothing to train: the model has no trainable parameter")
        super().__init__(rows, reduce=reduce)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = state_of(group["rule"], parameter)
        self._packs = lay_out(
            (str(group["name"]), REDUCE[group["rule"]], roles)
            for group, roles in zip(self.param_groups, self._roles, strict=True)
        )
        self.table = BucketTable(tuple(pack.bucket for pack in self._packs))
        self.tables = TableSchedule((self.table,))

    # ------------------------------------------------------------------ the two halves of a round

    @torch.no_grad()
    def propose(self, round_index: int, out: Tensor) -> bool:
        """Write this node's contribution to a round.

        A parameter without gradient counts as one with a zero gradient.

        Args:
            round_index: number of the round, from 0; seeds the votes of exact zeros.
            out: uint8, ``table.nbytes`` elements, contiguous, on the CPU or beside the parameters;
                overwritten.

        Returns:
            False if a gradient entry is NaN, infinite or above a quarter of the fp32 range: the node
            abstains, and neither the state nor ``out`` has been touched.

        Raises:
            PayloadError: if ``out`` has another size, dtype or layout.
            RuntimeError: for a sparse or non-fp32 gradient.
        """
        check_payload(self.table, out, "the output of propose")
        gradients = {role.name: usable_gradient(role) for roles in self._roles for role in roles}
        if not all_usable([gradient for gradient in gradients.values() if gradient is not None]):
            return False
        for options, packs in self._packs_by_group():
            if options.rule == "vote-polar":
                self._propose_polar(round_index, options, packs, gradients, out)
                continue
            for pack in packs:
                if options.rule == "vote-sign":
                    parts = [
                        local_direction(self._momentum(item), gradients[item.name], options).view(-1)
                        for item in pack.items
                    ]
                    self._pack_signs(
                        round_index, pack, parts[0] if len(parts) == 1 else torch.cat(parts), out
                    )
                else:
                    write_gradients(pack, gradients, out)
        return True

    @torch.no_grad()
    def apply(self, round_index: int, payload: Tensor | None, *, counted: bool = True) -> None:
        """Apply the committed result of a round; equal bytes give equal parameters.

        Args:
            round_index: number of the round.
            payload: uint8, ``table.nbytes`` elements; ``None`` for a round nobody voted in, which changes
                nothing.
            counted: makes no difference here: nothing is kept of a vote that came too late.

        Raises:
            PayloadError: for another size, dtype or layout, or a mean that is not finite; nothing has been
                changed.
        """
        if payload is not None:
            check_payload(self.table, payload, "the result of the round")
            means = [read_mean(pack, payload) for pack in self._packs if pack.bucket.reduce == "mean"]
            if not all_usable(means):
                raise PayloadError(
                    f"round {round_index}: the mean gradient is not finite: the result was not applied"
                )
            del means
            for options, packs in self._packs_by_group():
                if options.rule == "mean-muon":
                    self._apply_muon(options, packs, payload)
                    continue
                for pack in packs:
                    if options.rule == "mean-adamw":
                        self._apply_adamw(options, pack, payload)
                    else:
                        _apply_votes(options, pack, payload)
        self.round_index = round_index + 1

    # ------------------------------------------------------------------ state

    def shared_tensors(self) -> dict[str, Tensor]:
        """The tensors that are bit-identical on all nodes after every round: the trained parameters under
        their names, and the state of averaged groups as ``optimizer/<name>/<key>``. Live storage, in the
        order of the table."""
        tensors = {item.name: item.parameter.detach() for pack in self._packs for item in pack.items}
        return tensors | self._states("mean")

    def local_tensors(self) -> dict[str, Tensor]:
        """The momenta of voted tensors as ``optimizer/<name>/momentum_buffer``: live storage, different on
        every node."""
        return self._states("majority")

    def _states(self, reduce: str) -> dict[str, Tensor]:
        return {
            f"optimizer/{item.name}/{key}": value
            for pack in self._packs
            if pack.bucket.reduce == reduce
            for item in pack.items
            for key, value in self.state[item.parameter].items()
        }

    def state_dict(self) -> dict[str, Any]:
        """As of torch, with the next round under ``"round"``."""
        return {**super().state_dict(), "round": self.round_index}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, into the existing storage of the state.

        Raises ``ValueError``, before anything changes, if groups, rules, names or shapes are not those of
        this optimizer.
        """
        saved_groups = state_dict["param_groups"]
        ours = [(group["rule"], list(group["param_names"])) for group in self.param_groups]
        theirs = [(group.get("rule"), list(group.get("param_names", ()))) for group in saved_groups]
        if ours != theirs:
            raise ValueError(
                "this state was saved by an optimizer with other groups, rules or parameter names"
            )
        for group in saved_groups:
            try:
                RuleOptions.of(group)
            except KeyError as error:
                raise ValueError(f"the saved group {group.get('name')!r} has no option {error}") from error
        places = [
            (index, key, self.state[parameter][key])
            for group, saved in zip(self.param_groups, saved_groups, strict=True)
            for parameter, index in zip(group["params"], saved["params"], strict=True)
            for key in self.state[parameter]
        ]
        for index, key, tensor in places:
            value = state_dict["state"].get(index, {}).get(key)
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                raise ValueError(
                    f"the saved state of parameter {index} has no {key} of shape {tuple(tensor.shape)}"
                )
        live = {
            parameter: dict(self.state[parameter])
            for group in self.param_groups
            for parameter in group["params"]
        }
        super().load_state_dict(state_dict)
        for parameter, state in live.items():
            for key, tensor in state.items():
                tensor.copy_(self.state[parameter][key])
            self.state[parameter] = state
        self.round_index = int(state_dict.get("round", 0))

    # ------------------------------------------------------------------ details

    def _packs_by_group(self) -> list[tuple[RuleOptions, list[Pack]]]:
        return [
            (RuleOptions.of(group), [pack for pack in self._packs if pack.group == index])
            for index, group in enumerate(self.param_groups)
        ]

    def _momentum(self, item: ParameterRole) -> Tensor:
        momentum: Tensor = self.state[item.parameter]["momentum_buffer"]
        return momentum

    def _pack_signs(self, round_index: int, pack: Pack, direction: Tensor, out: Tensor) -> None:
        seed = bits.zero_seed(round_index, pack.index)
        part = out[pack.begin : pack.end]
        if direction.device == out.device:
            _, finite = bits.pack(direction, seed=seed, out=part)
        else:
            packed, finite = bits.pack(direction, seed=seed)
            part.copy_(packed)
        if not finite:
            raise FloatingPointError(
                f"round {round_index}: the direction of {pack.bucket.name} is not finite, "
                "although its gradient is"
            )

    def _propose_polar(
        self,
        round_index: int,
        options: RuleOptions,
        packs: list[Pack],
        gradients: Mapping[str, Tensor | None],
        out: Tensor,
    ) -> None:
        for stack in stacks(packs):
            directions = []
            for pack in stack:
                item = pack.items[0]
                direction = local_direction(self._momentum(item), gradients[item.name], options)
                directions.append(direction.view(item.view))
            for pack, factor in zip(stack, _polar(directions, options), strict=True):
                self._pack_signs(round_index, pack, factor, out)

    def _apply_muon(self, options: RuleOptions, packs: list[Pack], payload: Tensor) -> None:
        for stack in stacks(packs):
            directions = []
            for pack in stack:
                item = pack.items[0]
                # a fresh copy: matrix products may depend on the alignment of their operands
                gradient = read_mean(pack, payload).to(item.parameter.device, copy=True).view(item.shape)
                directions.append(shared_direction(self._momentum(item), gradient, options).view(item.view))
            for pack, factor in zip(stack, _polar(directions, options), strict=True):
                item = pack.items[0]
                step = options.lr * polar_scale(options.scaling, *item.view[1:])
                if options.weight_decay != 0.0:
                    item.parameter.mul_(1.0 - options.lr * options.weight_decay)
                item.parameter.sub_(factor.to(torch.float32).mul_(step).view(item.shape))

    def _apply_adamw(self, options: RuleOptions, pack: Pack, payload: Tensor) -> None:
        adamw_pack_(
            pack,
            read_mean(pack, payload),
            self.state,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )


def _polar(directions: list[Tensor], options: RuleOptions) -> list[Tensor]:
    views = [x.squeeze(0) if x.shape[0] == 1 else x for x in directions]
    return polar_factors(
        views, steps=options.ns_steps, coefficients=options.ns_coefficients, dtype=NS_DTYPES[options.ns_dtype]
    )


def _apply_votes(options: RuleOptions, pack: Pack, payload: Tensor) -> None:
    decay = 1.0 - options.lr * options.weight_decay
    votes = payload[pack.begin : pack.end]
    if len(pack.items) == 1:
        item = pack.items[0]
        step = options.lr * vote_scale(options.scaling, item.fan_in)
        bits.apply_(item.parameter, votes.to(item.parameter.device), step=step, decay=decay)
        return
    step = options.lr * vote_scale(options.scaling, 1)
    flat = torch.cat([item.parameter.detach().view(-1) for item in pack.items])
    bits.apply_(flat, votes.to(flat.device), step=step, decay=decay)
    for item, part in pack.split(flat):
        item.parameter.copy_(part)
