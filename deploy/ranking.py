"""How far the methods came in the benchmark: what `atoll plan` ranks them by.

Validation losses in nats a byte after equal tokens: byte-level Shakespeare, 117,056 parameters, four nodes,
512 steps, mean over three seeds. ``python -m bench methods`` makes them; its figures lie in
``docs/results/methods.json``. What a model of another size does may differ: only the order of the methods is
used, and differences below 0.02 are within the noise of the seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from protos.methods import MethodName

SOURCE: Final = "python -m bench methods"


@dataclass(frozen=True)
class Candidate:
    """A method with the choices it was measured with.

    Attributes:
        label: in tables.
        name: the preset.
        loss: nats a byte, measured.
        figure: name of the figure in the published results, empty where there is none.
        values: of [method], beside the preset's.
    """

    label: str
    name: MethodName
    loss: float
    figure: str = ""
    values: tuple[tuple[str, Any], ...] = ()


CANDIDATES: Final = (
    Candidate("sign-muon", "sign-muon", 1.829, "loss_signmuon"),
    Candidate("ddp-muon", "ddp-muon", 1.838, "loss_ddpmuon"),
    Candidate("muloco-1bit K=4", "muloco-1bit", 1.871, "loss_muloco1bit_K4", (("local_steps", 4),)),
    Candidate("muloco-1bit", "muloco-1bit", 1.903, "loss_muloco1bit"),
    Candidate("ddp-adamw", "ddp-adamw", 1.944, "loss_ddpadamw"),
    Candidate("muloco", "muloco", 1.950, "loss_muloco"),
    Candidate("muloco-1bit K=64", "muloco-1bit", 1.978, "loss_muloco1bit_K64", (("local_steps", 64),)),
    Candidate("local-adamw", "local-adamw", 2.051, "loss_localadamw"),
    Candidate("signum", "signum", 2.061, "loss_signum"),
    Candidate("lowrank-ddp", "lowrank-ddp", 2.099, "loss_lowrankddp"),
    Candidate("lordo", "lordo", 2.132, "loss_lordo"),
    Candidate("diloco", "diloco", 2.159, "loss_diloco"),
)
