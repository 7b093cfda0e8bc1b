"""Rounds of one step: every parameter group is voted on or averaged, see :mod:`optim.rules`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from optim import bits
from optim.adamw import adamw_pack_
from optim.every_step import EveryStep, Gradients
from optim.layout import Pack, backward_order, packs_of, places_of
from optim.newton_schulz import polar_factors
from optim.packs import PayloadError, check_payload, read_fp32, stacks, write_gradients
from optim.reduce import Reduction, identity
from optim.roles import ParameterRole
from optim.rules import (
    NS_DTYPES,
    REDUCE,
    RuleOptions,
    all_usable,
    check_parameter,
    local_directions,
    polar_scale,
    shared_direction,
    state_of,
    usable_gradient,
    vote_scale,
)
from optim.streaming import OnReady, Ready, Stream
from protos.buckets import BucketTable, MeanRule, Reduce, TableSchedule


class ExchangedOptimizer(EveryStep):
    """A ``torch.optim.Optimizer`` made of voted and averaged parameter groups.

    Every matrix and every embedding is a bucket of its own; the vectors of a group share one. Majority
    buckets come first, then mean buckets, each from the end of the model to its beginning, as a backward pass
    makes their gradients. The number of a bucket in :attr:`table` seeds its zero votes.

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
        groups_of_roles: list[tuple[str, Reduce, tuple[ParameterRole, ...]]] = []
        rows: list[dict[str, Any]] = []
        for group in groups:
            options = {key: value for key, value in group.items() if key not in ("roles", "name")}
            roles = tuple(sorted(group["roles"], key=lambda role: role.name))
            if not roles:
                continue
            for role in roles:
                check_parameter(role, options["rule"])
            rows.append(
                {
                    "params": [role.parameter for role in roles],
                    "param_names": [role.name for role in roles],
                    "name": str(group["name"]),
                    **asdict(RuleOptions(**options)),
                }
            )
            groups_of_roles.append((str(group["name"]), REDUCE[options["rule"]], roles))
        if not rows:
            raise ValueError("there is nothing to train: the model has no trainable parameter")
        super().__init__(rows, reduce=reduce)
        numbered = packs_of(groups_of_roles)
        packs = sorted(numbered, key=lambda p: (p.bucket.reduce != "majority", backward_order(p.items)))
        self._packs = [pack for pack in packs if pack.held]
        for pack in self._packs:
            for item in pack.items:
                self.state[item.parameter] = state_of(self.param_groups[pack.group]["rule"], item.parameter)
        self._roles = tuple(item for pack in self._packs for item in pack.items)
        self._stream: Stream | None = None
        numbers = {pack.name: number for number, pack in enumerate(numbered)}
        buckets = tuple(pack.bucket for pack in packs)
        self._take_table(BucketTable(buckets, numbers=tuple(numbers[bucket.name] for bucket in buckets)))

    def use_rule(self, rule: MeanRule) -> None:
        """Take means by ``rule``; before the first round."""
        self._take_table(replace(self.table, rule=rule))

    def _take_table(self, table: BucketTable) -> None:
        self.table = table
        self.tables = TableSchedule((table,))
        self.lane = self.tables.part({pack.name for pack in self._packs})
        self._places = places_of(self.lane.of(0))

    # ------------------------------------------------------------------ the two halves of a round

    def start(self, round_index: int, out: Tensor, on_ready: OnReady) -> None:
        """See the base class. A bucket is written as soon as its gradients have come; matrices of one shape
        wait for a few neighbours, with which they are orthogonalised, with or without :meth:`start`."""
        lane = self.lane.of(round_index)
        check_payload(lane, out, "the output of start")
        self._stream = Stream(round_index, out, self._stacks, Ready(lane, on_ready))

    def completes(self, parameter: Tensor) -> bool:
        """See the base class."""
        return self._stream is not None and not self.delay and self._stream.completes(parameter)

    def arrived(self, parameter: Tensor) -> None:
        """See the base class. With a delay, gradients are used one round later."""
        stream = self._stream
        if stream is None or self.delay:
            return
        stack = stream.arrived(parameter)
        if stack is None or not stream.usable:
            return
        with torch.no_grad():
            gradients = {item.name: usable_gradient(item) for pack in stack for item in pack.items}
            stream.usable = all_usable(_of([stack], gradients))
            if stream.usable:
                self._write(stream, stack, gradients)

    @torch.no_grad()
    def propose(self, round_index: int, out: Tensor) -> bool:
        """Write this node's contribution to a round.

        A parameter without gradient counts as one with a zero gradient.

        Args:
            round_index: number of the round, from 0; seeds the votes of exact zeros.
            out: uint8, as many elements as the lane has bytes, contiguous, on the CPU or beside the
                parameters; overwritten.

        Returns:
            False if a gradient entry, here or on another rank, is NaN, infinite or above a quarter of the
            fp32 range, or if there is no gradient (with a delay): the node abstains, and neither the state
            nor ``out`` has been touched. After :meth:`start` they have: buckets that were written before the
            bad gradient came have taken theirs into their momenta.

        Raises:
            PayloadError: if ``out`` has another size, dtype or layout.
            RuntimeError: for a sparse or non-fp32 gradient.
        """
        lane = self.lane.of(round_index)
        check_payload(lane, out, "the output of propose")
        stream, self._stream = self._stream, None
        if stream is None or not stream.serves(round_index, out):
            stream = Stream(round_index, out, self._stacks, Ready(lane, None))
        left, gradients = list(stream.left.values()), self._gradients(round_index)
        usable = stream.usable and gradients is not None and all_usable(_of(left, gradients))
        if not self.agree(usable):
            return False
        assert gradients is not None, "all ranks have agreed that there are some"
        for stack in left:
            self._write(stream, stack, gradients)
        return True

    def _write(self, stream: Stream, stack: list[Pack], gradients: Gradients) -> None:
        """Write the buckets of a stack, all of one group, and update their momenta."""
        options = RuleOptions.of(self.param_groups[stack[0].group])
        if REDUCE[options.rule] == "majority":
            items = [item for pack in stack for item in pack.items]
            directions = local_directions(
                [self._momentum(item) for item in items], [gradients[item.name] for item in items], options
            )
            if options.rule == "vote-polar":
                views = [direction.view(item.view) for direction, item in zip(directions, items, strict=True)]
                flat = [factor.view(-1) for factor in _polar(views, options)]
            else:  # one bucket
                flat = [torch.cat([direction.view(-1) for direction in directions])]
            for pack, direction in zip(stack, flat, strict=True):
                self._pack_signs(stream, pack, direction)
        else:
            for pack in stack:
                write_gradients(pack, gradients, self._places[pack.name].sent(stream.out))
        stream.ready.add(pack.name for pack in stack)

    @torch.no_grad()
    def apply(self, round_index: int, payload: Tensor | None, *, counted: bool = True) -> None:
        """Apply the committed result of a round; equal bytes give equal parameters.

        Args:
            round_index: number of the round.
            payload: uint8, the lane's bytes; ``None`` for a round nobody voted in, which changes nothing.
            counted: makes no difference here: nothing is kept of a vote that came too late.

        Raises:
            PayloadError: for another size, dtype or layout, or a mean that is not finite; nothing has been
                changed.
        """
        if payload is not None:
            check_payload(self.lane.of(round_index), payload, "the result of the round")
            means = [self._mean(pack, payload) for pack in self._packs if pack.bucket.reduce == "mean"]
            if not all_usable(means):
                raise PayloadError(
                    f"round {round_index}: the mean gradient is not finite: the result was not applied"
                )
            del means
            options = [RuleOptions.of(group) for group in self.param_groups]
            for pack in self._packs:
                rule = options[pack.group].rule
                if rule == "mean-muon":
                    # one by one: stacks, whose bits may depend on what is in them, differ between islands
                    self._apply_muon(options[pack.group], pack, payload)
                elif rule == "mean-adamw":
                    self._apply_adamw(options[pack.group], pack, payload)
                else:
                    self._apply_votes(options[pack.group], pack, payload)
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
            for key in self.state.get(parameter, {})
        ]
        for index, key, tensor in places:
            value = state_dict["state"].get(index, {}).get(key)
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                raise ValueError(
                    f"the saved state of parameter {index} has no {key} of shape {tuple(tensor.shape)}"
                )
        live = {parameter: dict(state) for parameter, state in self.state.items()}
        super().load_state_dict(state_dict)
        for parameter, state in live.items():
            for key, tensor in state.items():
                tensor.copy_(self.state[parameter][key])
            self.state[parameter] = state
        self.round_index = int(state_dict.get("round", 0))

    # ------------------------------------------------------------------ details

    @cached_property
    def _stacks(self) -> list[list[Pack]]:
        """The buckets that are written together."""
        found: list[list[Pack]] = []
        for index, group in enumerate(self.param_groups):
            packs = [pack for pack in self._packs if pack.group == index]
            found += stacks(packs) if group["rule"] == "vote-polar" else [[pack] for pack in packs]
        order = {pack.name: index for index, pack in enumerate(self._packs)}
        return sorted(found, key=lambda stack: order[stack[0].name])

    def _momentum(self, item: ParameterRole) -> Tensor:
        momentum: Tensor = self.state[item.parameter]["momentum_buffer"]
        return momentum

    def _pack_signs(self, stream: Stream, pack: Pack, direction: Tensor) -> None:
        place = self._places[pack.name]
        seed, part = bits.zero_seed(stream.round, place.number), place.sent(stream.out)
        if direction.device == part.device:
            _, finite = bits.pack(direction, seed=seed, out=part)
        else:
            packed, finite = bits.pack(direction, seed=seed)
            part.copy_(packed)
        if not finite:
            raise FloatingPointError(
                f"round {stream.round}: the direction of {pack.name} is not finite, although its gradient is"
            )

    def _mean(self, pack: Pack, payload: Tensor) -> Tensor:
        return read_fp32(self._places[pack.name].returned(payload), pack.bucket.elements)

    def _apply_muon(self, options: RuleOptions, pack: Pack, payload: Tensor) -> None:
        item = pack.items[0]
        # a fresh copy: matrix products may depend on the alignment of their operands
        gradient = self._mean(pack, payload).to(item.parameter.device, copy=True).view(item.shape)
        direction = shared_direction(self._momentum(item), gradient, options).view(item.view)
        (factor,) = _polar([direction], options)
        step = options.lr * polar_scale(options.scaling, *item.view[1:])
        if options.weight_decay != 0.0:
            item.parameter.mul_(1.0 - options.lr * options.weight_decay)
        item.parameter.sub_(factor.to(torch.float32).mul_(step).view(item.shape))

    def _apply_adamw(self, options: RuleOptions, pack: Pack, payload: Tensor) -> None:
        adamw_pack_(
            pack,
            self._mean(pack, payload),
            self.state,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )

    def _apply_votes(self, options: RuleOptions, pack: Pack, payload: Tensor) -> None:
        decay = 1.0 - options.lr * options.weight_decay
        votes = self._places[pack.name].returned(payload)
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


def _of(stacks_: list[list[Pack]], gradients: Gradients) -> list[Tensor]:
    """The gradients that there are of some stacks."""
    found = [gradients[item.name] for stack in stacks_ for pack in stack for item in pack.items]
    return [gradient for gradient in found if gradient is not None]


def _polar(directions: list[Tensor], options: RuleOptions) -> list[Tensor]:
    views = [x.squeeze(0) if x.shape[0] == 1 else x for x in directions]
    return polar_factors(
        views, steps=options.ns_steps, coefficients=options.ns_coefficients, dtype=NS_DTYPES[options.ns_dtype]
    )
