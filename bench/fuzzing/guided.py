"""``python -m bench.fuzzing.guided TARGET CORPUS [libFuzzer's options]``: one target, inputs of atheris."""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["protos", "coordinator", "node", "optim"]):
    from bench.fuzzing.targets import TARGETS


def main() -> None:
    """Fuzz until libFuzzer has had enough; does not return."""
    target = next(target for target in TARGETS if target.name == sys.argv[1])
    check = target.make()

    def one(data: bytes) -> None:
        with contextlib.suppress(*target.errors):
            check(data)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
