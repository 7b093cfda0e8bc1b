"""Error feedback of a codec: what a contribution lost on its way is added to the next one.

After Seide et al. (1-bit SGD, 2014) and Karimireddy et al. (arXiv 1901.09847): ``A = D + e`` is sent for the
pseudo-gradient ``D``, and ``e`` becomes ``A`` less what the encoded ``A`` decodes to. A contribution that was
not counted has been lost as a whole: ``e`` becomes ``A``.

Memory: 4 bytes a parameter on the host, and another 4 between a proposal and its result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class ErrorFeedback:
    """The errors of some buckets, and what has been proposed and not settled yet.

    Attributes:
        errors: by the name of the bucket; fp32, 1-D, on the host, zero at first, live.
        sent: the uncoded proposals that wait for a result, by the name of the bucket.
    """

    def __init__(self) -> None:
        self.errors: dict[str, Tensor] = {}
        self.sent: dict[str, Tensor] = {}

    def add_bucket(self, name: str, elements: int) -> None:
        """Keep the error of a bucket."""
        self.errors[name] = torch.zeros(elements)

    def correct(self, name: str, delta: Tensor) -> Tensor:
        """``A = D + e``, in place of ``D`` (fp32, 1-D); ``D`` itself for a bucket without feedback."""
        error = self.errors.get(name)
        return delta if error is None else delta.add_(error)

    def propose(self, name: str, corrected: Tensor) -> None:
        """Remember what is sent; of several proposals for one round only the last can count."""
        if name in self.errors:
            self.sent[name] = corrected

    def settle(self, name: str, decoded: Callable[[], Tensor] | None) -> None:
        """The round of a proposal is over.

        Without a proposal nothing changes.

        Args:
            name: of the bucket.
            decoded: gives what the encoded proposal decodes to; ``None`` if it was not counted.
        """
        sent = self.sent.pop(name, None)
        if sent is None:
            return
        if decoded is not None:
            sent.sub_(decoded())
        self.errors[name].copy_(sent)

    def drop(self) -> None:
        """Forget all proposals: the errors stay as they are."""
        self.sent.clear()

    def tensors(self) -> dict[str, Tensor]:
        """The errors as ``optimizer/<bucket>/error``, live."""
        return {f"optimizer/{name}/error": error for name, error in self.errors.items()}
