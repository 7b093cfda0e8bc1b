"""Module and autograd hooks that tell the runtime when a unit's forward and backward begin and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn

from node.island.runtime import UNIT_ATTRIBUTE, Runtime, in_backward
from node.island.unit import Call, Unit


def attach(unit: Unit) -> None:
    """Register the unit's hooks on its modules."""

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _pre_forward(unit, args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _post_forward(unit, module, output)

    # a compiler that traced them would guard on the state of the runtime, and compile again and again
    hidden: Any = torch.compiler.disable
    for module in unit.modules:
        module.register_forward_pre_hook(hidden(before), prepend=True, with_kwargs=True)
        module.register_forward_hook(hidden(after))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a call of another method than ``forward`` gather and release the weights as forward does.

    Nothing happens to a module that is not wrapped, so that code may call it in any case.

    Raises:
        ValueError: if ``module`` has no such method.
    """
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    if not isinstance(unit, Unit):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name}")
    method = getattr(module, method_name)
    hidden: Any = torch.compiler.disable
    before, after = hidden(_pre_forward), hidden(_post_forward)

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(unit, args, kwargs)
        return after(unit, module, method(*args, **kwargs))

    setattr(module, method_name, wrapped)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with every tensor in it replaced, through tuples, lists, mappings and dataclasses.

    A container in which nothing changes is returned as it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        record = _is_record(value)  # outputs of transformers are both
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        kind: Any = type(value)
        return replace(cast(Any, value), **changed) if record else kind(changed)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_record(value):
        names = [field.name for field in fields(value) if field.init]
        parts = {name: map_tensors(function, getattr(value, name)) for name in names}
        if all(parts[name] is getattr(value, name) for name in names):
            return value
        return replace(value, **parts)
    return value


def _is_record(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in ``value``."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


class _BackwardExit(torch.autograd.Function):
    """Identity on a unit's inputs; its backward runs once all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.call = unit, call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        unit: Unit = ctx.unit
        if unit.runtime is not None:
            unit.runtime.backward_exit(unit, ctx.call)
        return (None, None, *gradients)


def _pre_forward(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if unit.runtime is None:
        Runtime.start(unit)
    assert unit.runtime is not None
    unit.runtime.forward_enter(unit)
    policy = unit.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = map_tensors(lambda x: _cast(x, policy.param_dtype), (args, kwargs))
    if torch.is_grad_enabled() and not in_backward():
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if inputs:
            watched = cast(Any, _BackwardExit).apply(unit, unit.begin_call(), *inputs)
            outputs = dict(zip(map(id, inputs), watched, strict=True))
            args, kwargs = map_tensors(lambda x: outputs.get(id(x), x), (args, kwargs))
        else:
            unit.open_calls = True
    return args, kwargs


def _post_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    runtime = unit.runtime
    assert runtime is not None
    if unit.policy.output_dtype is not None:
        output = map_tensors(lambda x: _cast(x, unit.policy.output_dtype), output)
    if torch.is_grad_enabled():

        def enter(gradient: Tensor) -> None:
            runtime.backward_enter(unit)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                cast(Any, tensor).register_hook(enter)
    runtime.forward_exit(unit, module)
    return output


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
