"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """The installed version of a package, by its name at PyPI; empty if it is not installed as one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
