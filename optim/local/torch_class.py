"""Any optimizer of ``torch.optim`` as a local optimizer, by the name of its class."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from optim.local.standalone import StandaloneInner, all_finite
from optim.roles import ParameterRole

# Options with a place of their own, or that make no sense here.
_REFUSED: Final = {
    "params": "the parameters are those of the model",
    "lr": "write it as the method's lr",
    "weight_decay": "decay is applied once a round, to the shared parameters: write it as the method's "
    "weight_decay",
    "maximize": "a loss is minimised",
    "differentiable": "nothing differentiates through a local step",
}


class TorchInner(StandaloneInner):
    """A class of ``torch.optim`` that trains by itself, with its weight decay off.

    Its state appears at the first step, as the class has it. Before that, :meth:`local_tensors` shows tensors
    of the shapes it will have; they take effect only if a checkpoint with at least one step is copied into
    them.

    Args:
        roles: the parameters it trains.
        name: of the class, such as ``"SGD"``.
        options: its further arguments.

    Attributes:
        optimizer: the instance.

    Raises:
        ValueError: for a class that does not exist or cannot be used here, and for options it refuses.
    """

    def __init__(
        self, roles: Sequence[ParameterRole], name: str, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(roles)
        options = {
            key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()
        }
        self._class = _find(name)
        self._options = _complete(self._class, name, options)
        self._taken = {role.name: torch.zeros((), dtype=torch.int64) for role in self.held}  # steps
        # What a checkpoint can be copied into: states before they exist, and numbers that are no tensors.
        self._drafts: dict[str, dict[str, Tensor]] = {}
        self._numbers: dict[tuple[str, str], Tensor] = {}
        self._try(name)
        parameters = [role.parameter for role in self.held]
        # torch refuses an empty list, which is what a rank may hold
        self.optimizer = self._build(parameters or [torch.nn.Parameter(torch.empty(0))])

    def step(self, lr: float) -> None:
        """One step of the class on every parameter with the learning rate ``lr``."""
        self._adopt()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        missing = [role.parameter for role in self.held if role.parameter.grad is None]
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        for parameter in missing:
            parameter.grad = None
        for taken in self._taken.values():
            taken += 1

    def local_tensors(self) -> dict[str, Tensor]:
        """The state of every parameter as ``optimizer/<name>/<key>``, with numbers as tensors without
        dimension, and the steps that it has seen as ``optimizer/<name>/taken``."""
        tensors: dict[str, Tensor] = {}
        for role in self.held:
            tensors[f"optimizer/{role.name}/taken"] = self._taken[role.name]
            for key, value in self._state(role).items():
                if not isinstance(value, Tensor):
                    dtype = torch.float64 if isinstance(value, float) else torch.int64
                    number = self._numbers.setdefault((role.name, key), torch.zeros((), dtype=dtype))
                    value = number.fill_(value)
                tensors[f"optimizer/{role.name}/{key}"] = value
        return tensors

    def prepare_load(self) -> None:
        """Make drafts of all states that do not exist yet."""
        for role in self.held:
            self._state(role)

    def restart(self) -> None:
        """Forget the state of parameters of which some is not finite: the class starts it anew."""
        for role in self.held:
            state = self.optimizer.state.get(role.parameter, {})
            if not all_finite(value for value in state.values() if isinstance(value, Tensor)):
                del self.optimizer.state[role.parameter]
                self._taken[role.name].zero_()

    # ------------------------------------------------------------------ details

    def _build(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return self._class(parameters, **self._options)

    def _try(self, name: str) -> None:
        """Make the class take one step, so that what it refuses is known before the run."""
        try:
            for dimensions in sorted({role.parameter.ndim for role in self.roles}):
                trial = torch.nn.Parameter(torch.zeros((2,) * dimensions))
                trial.grad = torch.zeros_like(trial)
                optimizer = self._build([trial])
                if "lr" not in optimizer.param_groups[0]:
                    raise ValueError(f"torch.optim.{name} has no learning rate that a schedule could set")
                optimizer.step()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"torch.optim.{name} cannot be the local optimizer with {self._options}: {error}"
            ) from error

    def _state(self, role: ParameterRole) -> dict[str, Any]:
        """The state of a parameter, or a draft of it: what the class has after one step."""
        state = self.optimizer.state.get(role.parameter)
        if state:
            return {key: value for key, value in state.items() if value is not None}
        if role.name not in self._drafts:
            copy = torch.nn.Parameter(torch.zeros_like(role.parameter))
            copy.grad = torch.zeros_like(copy)
            scratch = self._build([copy])
            scratch.step()
            self._drafts[role.name] = {k: v for k, v in scratch.state[copy].items() if v is not None}
        return self._drafts[role.name]

    def _adopt(self) -> None:
        """Take over what was copied into drafts and numbers."""
        if not self._drafts and not self._numbers:
            return
        for role in self.held:
            if not int(self._taken[role.name]):
                self.optimizer.state.pop(role.parameter, None)
            elif role.name in self._drafts:
                self.optimizer.state[role.parameter] = dict(self._drafts[role.name])
            state = self.optimizer.state.get(role.parameter, {})
            for key, value in state.items():
                if (number := self._numbers.get((role.name, key))) is not None:
                    state[key] = type(value)(number.item())
        self._drafts.clear()
        self._numbers.clear()


def _classes() -> Iterator[str]:
    for name, value in sorted(vars(torch.optim).items()):
        if (
            inspect.isclass(value)
            and issubclass(value, torch.optim.Optimizer)
            and value is not torch.optim.Optimizer
        ):
            yield name


def _find(name: str) -> type[torch.optim.Optimizer]:
    """The class of ``torch.optim`` with this name; raises ``ValueError``."""
    known = list(_classes())
    if name not in known:
        lower = {known_name.lower(): known_name for known_name in known}
        close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise ValueError(f"torch.optim has no optimizer {name!r}: {hint}")
    found: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"torch.optim.{name} evaluates the loss several times a step (it needs a closure), which a local "
            "step does not offer: use another class"
        )
    return found


def _complete(found: type[torch.optim.Optimizer], name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options with weight decay switched off; raises ``ValueError`` for one that cannot be given."""
    known = [key for key in inspect.signature(found).parameters if key not in _REFUSED]
    for key in options:
        if key in _REFUSED:
            raise ValueError(
                f"optimizer_options: {key} cannot be given to torch.optim.{name}: {_REFUSED[key]}"
            )
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
            raise ValueError(f"optimizer_options: torch.optim.{name} has no option {key!r}: {hint}")
    if "weight_decay" in inspect.signature(found).parameters:
        options = {**options, "weight_decay": 0.0}
    return options
