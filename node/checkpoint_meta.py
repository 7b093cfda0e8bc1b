"""What ``meta.json`` says of a checkpoint: which state it is, and in which file every tensor lies."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from protos.digests import combine

FORMAT: Final = 2
META: Final = "meta.json"
_MAX_BYTES: Final = 256 << 20  # some 2 million tensors
_FILE: Final = re.compile(r"[a-z]+(-\d{5,}-of-\d{5,})?\.safetensors")

Kind = Literal["model", "local", "reducer"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Contents = Mapping[str, Mapping[str, str]]  # file -> tensor -> digest


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the text names the file and what to do."""


def file_name(kind: Kind, rank: int, size: int) -> str:
    """The file in which a rank of a node of ``size`` ranks puts its tensors of a kind."""
    return f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1:05d}-of-{size:05d}.safetensors"


def merged(contents: Contents) -> dict[str, str]:
    """Tensor to digest, whatever file it lies in."""
    return {name: digest for digests in contents.values() for name, digest in digests.items()}


def repeated(contents: Contents) -> str | None:
    """A tensor that lies in two files, if there is one."""
    names = sorted(itertools.chain.from_iterable(contents.values()))
    return next((one for one, other in itertools.pairwise(names) if one == other), None)


@dataclass(frozen=True)
class Meta:
    """The description of a checkpoint.

    Attributes:
        round: the next to be trained.
        run, run_digest: name and digest of the run file.
        state_digest: of the whole shared state.
        samples: first global sample index behind all that the run has leased, as far as this node knows.
        model: the shared state: file to tensor to its digest.
        local: what never leaves the node, likewise.
        reducer: the memory of a reduction that the node makes for itself, likewise.
    """

    round: int
    run: str
    run_digest: str
    state_digest: str
    samples: int
    model: Contents
    local: Contents
    reducer: Contents

    def contents(self, kind: Kind) -> Contents:
        """The files of one kind, what is in them, and its digests."""
        found: Contents = getattr(self, kind)
        return found

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT, **self.__dict__}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Meta:
        """Parse the ``meta.json`` of the checkpoint ``folder``.

        Raises:
            CheckpointError: missing, unreadable, of another format, or contradicting itself.
        """
        path = folder / META
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ValueError(f"it has more than {_MAX_BYTES} bytes")
            raw: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(raw, dict):
                raise ValueError("it is not a JSON object")
            if raw.get("format") != FORMAT:
                raise ValueError(f"its format is {raw.get('format')}, this version of Atoll reads {FORMAT}")
            meta = cls(**{field.name: raw[field.name] for field in fields(cls)})
            meta._check()
        except KeyError as error:
            raise CheckpointError(f"{path} says nothing of {error}: use another checkpoint") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not the description of a checkpoint ({error}): use another checkpoint"
            ) from error
        return meta

    def _check(self) -> None:
        for name in ("round", "samples"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"{name} is {number!r}")
        if not all(isinstance(text, str) for text in (self.run, self.run_digest, self.state_digest)):
            raise ValueError("a name or digest is not a text")
        for kind in KINDS:
            files: Any = self.contents(kind)
            if not isinstance(files, dict) or not all(isinstance(each, dict) for each in files.values()):
                raise ValueError(f"{kind} does not list files and their tensors")
            for file, digests in files.items():
                if not _FILE.fullmatch(file):
                    raise ValueError(f"{file!r} is not the name of a file of a checkpoint")
                if not all(isinstance(digest, str) for digest in digests.values()):
                    raise ValueError(f"a digest of {file} is not a text")
            if (twice := repeated(files)) is not None:
                raise ValueError(f"{twice!r} lies in two files")
        found = combine(merged(self.model))
        if found != self.state_digest:
            raise ValueError(
                f"the digests of its tensors make {found}, that of the state is {self.state_digest}"
            )
