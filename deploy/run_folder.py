"""The folder into which a run of several processes of this machine is written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """Where everything lies in the folder ``out``; ``who`` writes there, for texts."""

    out: Path
    who: str

    @property
    def run(self) -> Path:
        return self.out / "run.toml"

    @property
    def invite(self) -> Path:
        return self.out / "invite"

    @property
    def journal(self) -> Path:
        return self.out / "journal"

    @property
    def results(self) -> Path:
        return self.out / "results.json"

    def log(self, name: str) -> Path:
        return self.out / f"{name}.log"

    def events(self, name: str) -> Path:
        return self.out / f"{name}.jsonl"

    def rounds(self, name: str) -> Path:
        return self.out / f"{name}.csv"

    def kept(self, name: str) -> tuple[str, ...]:
        """Options of a node by which its logs go here."""
        return ("--events", str(self.events(name)), "--log", f"csv:{self.rounds(name)}")

    def prepare(self, names: Sequence[str], *others: Path) -> None:
        """Make the folder and remove what an earlier run of these processes has left in it.

        Args:
            names: of the processes.
            others: further files and folders of such a run.

        Raises:
            UserError: it cannot be written to.
        """
        logs = [path for name in names for path in (self.log(name), self.events(name), self.rounds(name))]
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for path in (self.invite, self.results, self.journal, *logs, *others):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.who} cannot write to {self.out}: {error.strerror or error}") from error
