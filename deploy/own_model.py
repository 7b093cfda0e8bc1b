"""The model of a script, for the run file: `atoll run init --model FILE.py:FUNCTION`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from deploy.errors import UserError


def own_tensors(where: str) -> list[str]:
    """Run a file of the user's, call a function or class in it, and list the tensors of what it returns.

    Args:
        where: ``FILE.py:NAME``.

    Raises:
        UserError: there is no such file or name, or it makes no model.
        RoleError: a parameter that fits no rule.
    """
    text, colon, name = where.rpartition(":")
    path = Path(text)
    if not colon or not name.isidentifier() or path.suffix != ".py":
        raise UserError(f"--model {where}: write a file and a function in it, such as train.py:make_model")
    if not path.is_file():
        raise UserError(f"--model {where}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"_script_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    import torch

    from node.own_loop import tensors_of
    from optim.role import RoleError

    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as if it had been started; also for imports inside the function
    sys.modules[spec.name] = module  # where dataclasses look for the names in annotations
    try:
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"--model {where}: running {path} failed: {_said(error)}; what it does beside defining the "
                "model belongs below: if __name__ == '__main__'"
            ) from error
        make = getattr(module, name, None)
        if not callable(make):
            raise UserError(f"--model {where}: {path} has no function {name!r}")
        try:
            model = make()
        except (Exception, SystemExit) as error:
            raise UserError(
                f"--model {where}: {name}() failed: {_said(error)}; it is called without arguments"
            ) from error
    finally:
        sys.path.remove(folder)
        del sys.modules[spec.name]
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"--model {where}: {name} returns a {type(model).__name__}, not a torch.nn.Module")
    try:
        return tensors_of(model)
    except RoleError:
        raise
    except ValueError as error:  # of torch, for a lazy layer that has seen no data
        raise UserError(f"--model {where}: the tensors cannot be listed: {error}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
