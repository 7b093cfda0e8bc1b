from __future__ import annotations

import errno
import importlib

import pytest

from deploy.errors import EXPECTED, UserError, message
from protos.invite import Invite, InviteError


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_expected_error_exists(name: str) -> None:
    module, _, kind = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), kind), Exception)


def test_expected_errors_and_their_subclasses_are_messages() -> None:
    class Special(UserError):
        pass

    assert message(Special("choose another")) == "choose another"
    with pytest.raises(InviteError) as caught:
        Invite.parse("")
    assert message(caught.value) == str(caught.value)


def test_the_system_says_what_and_where() -> None:
    assert message(FileNotFoundError(errno.ENOENT, "No such file or directory", "run.toml")) == (
        "run.toml: No such file or directory"
    )
    text = message(OSError(errno.EADDRINUSE, "Address already in use"))
    assert text is not None and "Address already in use" in text and "another port" in text


def test_a_missing_extra_names_the_package() -> None:
    error = ModuleNotFoundError("install atoll[hf]", name="transformers")
    assert message(error) == "the Python package 'transformers' is not installed: install atoll[hf]"


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RuntimeError("x"), AssertionError()])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    assert message(error) is None
