"""How a message names the packages that an extra of Atoll brings."""

from __future__ import annotations


def hint(extra: str) -> str:
    """What to do for the packages of ``extra``, in words: no package index has Atoll, so it needs a path."""
    return f"pip install 'PATH[{extra}]', where PATH is Atoll's wheel or checkout"
