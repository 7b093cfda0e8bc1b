"""Methods that exchange in every step: which gradient a contribution is made of."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from optim.roles import ParameterRole
from optim.round_optimizer import RoundOptimizer
from optim.rules import usable_gradient

Gradients: TypeAlias = "dict[str, Tensor | None]"


class EveryStep(RoundOptimizer):
    """The base of methods whose rounds have one step.

    With a delay, a contribution is made of the gradient of the round before. It is ready when the round
    begins, and travels while the round's own gradient is computed: exchange and computation take turns no
    more, and every update comes a round late (delayed gradients: Zinkevich et al., "Slow Learners are Fast",
    2009). The first round, and every round after one without a gradient, has nothing to propose. Gradients
    are kept as they are, not copied: clear them with ``set_to_none=True``, torch's default.

    Attributes:
        delay: 0, or 1 for contributions made of the gradient of the round before; set before the first
            round.
    """

    delay: int = 0
    _roles: tuple[ParameterRole, ...]  # held here; set by subclasses
    _kept: tuple[int, Gradients] | None = None

    def send_after(self, round_index: int) -> int:
        """1; with a delay 0: the contribution does not wait for the round's gradient."""
        return 1 - self.delay

    def local_step(self, round_index: int, micro_step: int) -> bool:
        """Keep the gradients for the next round if there is a delay; see the base class."""
        if self.delay:
            self._kept = round_index, self._read()
        return True

    def loaded(self) -> None:
        """What was kept belongs to a past that is over; see the base class."""
        self._kept = None

    def _read(self) -> Gradients:
        return {role.name: usable_gradient(role) for role in self._roles}

    def _gradients(self, round_index: int) -> Gradients | None:
        """What the contribution to a round is made of, by the names of the held parameters; ``None`` if there
        is nothing. With a delay it can be had once."""
        if not self.delay:
            return self._read()
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] == round_index - 1 else None
