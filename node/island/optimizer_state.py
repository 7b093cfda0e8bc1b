"""What an optimizer keeps of one parameter, as the JSON text and the tensors of a checkpoint, and back.

Tensors of the parameter's shape are cut as it is; others (steps, factors of Shampoo and SOAP) are whole.
States that are quantised in blocks (torchao's 8-bit optimizers) are stored as codes and scales, block by
block, so that ranks with the same pieces go on bit for bit.

Such optimizers quantise a piece only from some size on (torchao: 4,096 elements), so that of one parameter
some ranks may hold quantised state and others full precision. Then the values are stored beside the codes,
and blocks without codes have the scale :data:`PLAIN`. A piece is quantised after loading if the optimizer
quantises pieces of its size and all of its blocks were quantised when they were saved; else it is in full
precision, with the values that were saved. Loading hence never rounds, whatever the sizes of pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from node.island.optimizers import Slot
from node.island.ragged_tensor import RaggedTensor
from node.island.storage import CheckpointError, Index

PLAIN: Final = -1.0  # scale of a block that is not quantised
_OWN: Final = ("params", "param_names", "fan_in", "role")  # of a group, and not options

State = dict[str, Any]


def precisions(slots: Iterable[Slot], names: Sequence[str]) -> Tensor:
    """What this rank holds of each parameter's state: int64[2, names].

    Whether some of it is in full precision, and the elements of a quantisation block, 0 for none.
    """
    found = torch.zeros(2, len(names), dtype=torch.int64)
    number = {name: i for i, name in enumerate(names)}
    for slot in slots:
        if slot.name not in number:
            continue  # a matrix inside of a parameter, which one rank has whole
        for value in slot.optimizer.state.get(slot.parameter, {}).values():
            if _quantised(value):
                found[1, number[slot.name]] = _block(value)
            elif isinstance(value, Tensor) and value.shape == slot.parameter.shape:
                found[0, number[slot.name]] = 1
    return found


def tensors_of(slot: Slot, mixed: int = 0) -> dict[str, Tensor]:
    """The state of ``slot`` by names in the checkpoint.

    Args:
        slot: what is saved.
        mixed: elements of a quantisation block, where some ranks quantise their pieces of the parameter and
            others do not; else 0.

    Raises:
        CheckpointError: for what no checkpoint can hold.
    """
    parts: dict[str, Tensor] = {}
    state = {str(key): value for key, value in slot.optimizer.state.get(slot.parameter, {}).items()}
    form = {"state": _form(slot, "", state, parts, mixed), "group": _options(slot.group)}
    text = torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)
    if mixed and not any(map(_quantised, state.values())):
        return parts  # the ranks that quantise describe the state
    return {f"optimizer.{slot.name}": text, **parts}


def _form(slot: Slot, path: str, value: object, parts: dict[str, Tensor], mixed: int) -> Any:
    """The JSON form of a state; its tensors go to ``parts``."""
    key = f"optimizer.{slot.name}{path}"
    if _quantised(value):
        parts.update(_blocks(slot, key, value, mixed))
        signed = bool(getattr(value, "signed", True))
        return {"blocks": path, "signed": signed, "size": _block(value), "values": bool(mixed)}
    if isinstance(value, Tensor):
        parts[key] = _part(slot, key, value)
        if mixed and value.shape == slot.parameter.shape:
            parts.update(_plain_blocks(slot, key, value, mixed))
        away = value.device.type == "cpu" and slot.parameter.device.type != "cpu"
        return {"tensor": path, "cpu": away}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {
            "dict": {name: _form(slot, f"{path}.{name}", item, parts, mixed) for name, item in value.items()}
        }
    if isinstance(value, (list, tuple)):
        items = [_form(slot, f"{path}.{number}", item, parts, mixed) for number, item in enumerate(value)]
        return {type(value).__name__: items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise CheckpointError(
        f"the state {path.lstrip('.')} of {slot.name} is a {type(value).__name__}:"
        f" {type(slot.optimizer).__name__} keeps what a checkpoint cannot hold"
    )


def _part(slot: Slot, key: str, value: Tensor) -> Tensor:
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        raise CheckpointError(f"{key} is a {type(value).__name__}: only plain tensors can be saved")
    if value.shape == slot.parameter.shape:
        return RaggedTensor.of(value.contiguous(), slot.shape, slot.start)
    if value.numel() > 1 and slot.parameter.numel() != prod(slot.shape):
        raise CheckpointError(
            f"{key} has shape {tuple(value.shape)}, its parameter {tuple(slot.parameter.shape)}: the state of"
            f" a divided parameter must be elementwise"
        )
    return value.detach()


# ---- quantised states


def _quantised(value: object) -> bool:
    return hasattr(value, "codes") and hasattr(value, "scale")


def _block(value: Any) -> int:
    return int(value.codes.numel() // value.scale.numel())


def _wide(slot: Slot) -> torch.dtype:
    return torch.promote_types(slot.parameter.dtype, torch.float32)


def _blocks(slot: Slot, key: str, value: Any, mixed: int) -> dict[str, Tensor]:
    """Codes and scales, the table of what codes mean, and the values where not all ranks have codes."""
    block = _block(value)
    _check_cut(slot, block)
    parts: dict[str, Tensor] = {
        f"{key}.codes": RaggedTensor.of(value.codes, slot.shape, slot.start),
        f"{key}.scale": RaggedTensor.of(value.scale, _scales(slot, block), slot.start // block),
    }
    if hasattr(value, "qmap"):
        parts[f"{key}.qmap"] = value.qmap
    if mixed:
        parts[key] = RaggedTensor.of(value.dequantize().to(_wide(slot)), slot.shape, slot.start)
    return parts


def _plain_blocks(slot: Slot, key: str, value: Tensor, block: int) -> dict[str, Tensor]:
    """What a piece in full precision has in place of codes. A block belongs to who has its first element."""
    first, end = -(-slot.start // block), -(-(slot.start + value.numel()) // block)
    scales = torch.full((end - first,), PLAIN, device=value.device)
    codes = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    return {
        key: RaggedTensor.of(value.to(_wide(slot)).contiguous(), slot.shape, slot.start),
        f"{key}.codes": RaggedTensor.of(codes, slot.shape, slot.start),
        f"{key}.scale": RaggedTensor.of(scales, _scales(slot, block), first),
    }


def _scales(slot: Slot, block: int) -> tuple[int]:
    return (-(-prod(slot.shape) // block),)


def _check_cut(slot: Slot, block: int) -> None:
    if slot.start % block:
        raise CheckpointError(
            f"{slot.name} is cut inside a quantisation block of {block}: give fully_shard"
            f" granularity=quantisation_units({block})"
        )


# ---- loading


def rebuild(slot: Slot, form: Any, index: Index) -> tuple[Callable[[], State], dict[str, Tensor]]:
    """The tensors to read for the state that ``form`` describes, and the state, once they have been read.

    Raises:
        CheckpointError: if the checkpoint lacks some of them, or they fit neither this rank's piece nor its
            optimizer.
    """
    wanted: dict[str, Tensor] = {}

    def build(node: Any) -> Callable[[], Any]:
        kind, value = next(iter(node.items()))
        if kind == "tensor":
            tensor = _empty(slot, index, f"optimizer.{slot.name}{value}", bool(node["cpu"]), wanted)
            return lambda: tensor
        if kind == "blocks":
            return _rebuild_blocks(slot, node, index, wanted)
        if kind == "dict":
            parts = {key: build(item) for key, item in value.items()}
            return lambda: {key: part() for key, part in parts.items()}
        if kind in ("list", "tuple"):
            items = [build(item) for item in value]
            make = tuple if kind == "tuple" else list
            return lambda: make(item() for item in items)
        return lambda: value

    return build(form), wanted


def _size(index: Index, key: str) -> torch.Size:
    if key not in index.tensors:
        raise CheckpointError(f"the checkpoint lacks {key}")
    return index.tensors[key].size


def _empty(slot: Slot, index: Index, key: str, cpu: bool, wanted: dict[str, Tensor]) -> Tensor:
    """Memory for one tensor of the state, which is added to what is ``wanted``."""
    size, dtype = _size(index, key), index.tensors[key].properties.dtype
    device = torch.device("cpu") if cpu else slot.parameter.device
    if tuple(size) == slot.shape:
        local = torch.zeros(slot.parameter.shape, dtype=dtype, device=device)
        wanted[key] = RaggedTensor.of(local, slot.shape, slot.start)
        return local
    if size.numel() > 1 and slot.parameter.numel() != prod(slot.shape):
        raise CheckpointError(f"{key} of shape {tuple(size)} needs the whole of {slot.name} on one rank")
    wanted[key] = torch.zeros(size, dtype=dtype, device=device)
    return wanted[key]


def _rebuild_blocks(
    slot: Slot, node: Mapping[str, Any], index: Index, wanted: dict[str, Tensor]
) -> Callable[[], Any]:
    key, block, numel = f"optimizer.{slot.name}{node['blocks']}", int(node["size"]), slot.parameter.numel()
    make = getattr(slot.optimizer, "_new_buffer", None)
    if make is None:
        raise CheckpointError(
            f"{slot.name} has a quantised state, and {type(slot.optimizer).__name__} does not quantise: load"
            f" with the optimizer that it was saved of"
        )
    buffer, own = make(slot.parameter, bool(node["signed"])), block
    quantises = _quantised(buffer)
    if quantises:
        own = _block(buffer)
        _check_cut(slot, own)
    if own != block or _size(index, f"{key}.scale") != _scales(slot, block):
        raise CheckpointError(f"{key}.scale in the checkpoint is for blocks of another size than {own}")
    low, high = slot.start // block, -(-(slot.start + numel) // block)
    device = slot.parameter.device
    scales = buffer.scale if quantises else torch.zeros(high - low, device=device)
    wanted[f"{key}.scale"] = RaggedTensor.of(scales, _scales(slot, block), low)
    values = _empty(slot, index, key, False, wanted) if node["values"] else None
    codes = table = None
    if quantises:
        codes = buffer.codes
        wanted[f"{key}.codes"] = RaggedTensor.of(codes, slot.shape, slot.start)
    elif values is None:
        codes = _empty(slot, index, f"{key}.codes", False, wanted)
        if f"{key}.qmap" in index.tensors:
            table = torch.zeros(_size(index, f"{key}.qmap"), device=device)
            wanted[f"{key}.qmap"] = table

    def state() -> Any:
        if quantises and bool((scales != PLAIN).all()):
            return buffer
        if values is not None:
            return values.to(slot.parameter.dtype) if bool((scales == PLAIN).all()) else values
        assert codes is not None
        flat = codes.view(-1)
        known = flat.float() if table is None else table[flat.long()]
        which = torch.arange(slot.start, slot.start + numel, device=device) // block - low
        return (known * scales[which]).view(slot.parameter.shape).to(_wide(slot))

    return state


def parse(folder: Path, name: str, text: Tensor) -> dict[str, Any]:
    """The form in a JSON text; raises :class:`CheckpointError` for any other text."""
    try:
        form = json.loads(bytes(text.tolist()))
        if not isinstance(form["state"]["dict"], dict) or not isinstance(form["group"], dict):
            raise TypeError("it is not an object")
        return dict(form)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} in {folder} does not describe a state: {error}") from error


# ---- options of parameter groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON can hold; the others stay as the optimizer was built."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key in _OWN:
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, tuple) and all(isinstance(item, (int, float)) for item in value):
            value = list(value)
        if value is None or isinstance(value, (bool, int, float, str, list)):
            found[key] = value
    return found


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a parameter group the ``options`` that were saved, in the types that it has them in."""
    for key, value in options.items():
        present = group.get(key)
        if isinstance(present, Tensor):
            present.fill_(value)
        elif isinstance(present, tuple):
            group[key] = tuple(value)
        else:
            group[key] = value
