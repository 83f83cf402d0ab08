"""A model from the user's own code, by import path."""

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tputrain.errors import UserError, is_out_of_memory
from tputrain.signals import Terminated
from tputrain.user_code import error_summary


def import_model(path: str) -> nn.Module:
    """What `package.module:function` returns when it is called without arguments: a class or a function.

    This runs code that a recipe names: ask for `trust_code` first. Raises UserError where it gives no module,
    or raises an error.
    """
    build = _found(path)
    _check_arguments(build, path)
    with _errors_named(path):
        made = build()
    if not isinstance(made, nn.Module):
        raise UserError(f"model.path={path}: it returned a {type(made).__name__}, expected an nn.Module")
    return made


def _found(path: str) -> Any:
    module_name, _, name = path.partition(":")
    expected = f"expected package.module:function, in {os.getcwd()} or installed"
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file of the user's stands for no library
    try:
        with _errors_named(path):
            module = importlib.import_module(module_name)
    except UserError as refusal:
        error = refusal.__cause__
        is_there = not isinstance(error, ImportError) or not f"{module_name}.".startswith(f"{error.name}.")
        if is_there and module_name and not module_name.startswith("."):
            raise
        raise UserError(f"model.path={path}: {error}; {expected}") from None
    found = getattr(module, name, None) if name else None
    if found is None:
        raise UserError(f"model.path={path}: module {module_name!r} has no attribute {name!r}; {expected}")
    return found


def _check_arguments(build: Any, path: str) -> None:
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        code = getattr(build, "__code__", None)
        at = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
        raise UserError(
            f"model.path={path}: {error}{at}; expected a function or a class that needs no argument"
        ) from None
    except ValueError:
        pass  # one in C does not say what it takes


@contextmanager
def _errors_named(path: str) -> Iterator[None]:
    """What the user's code raises in here becomes one line with its place. A lack of memory and signals stay
    what they are.
    """
    try:
        yield
    except (UserError, Terminated):
        raise
    except SystemExit as left:
        raise UserError(f"model.path={path}: it ends the process: {error_summary(left)}") from left
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"model.path={path}: {error_summary(error)}") from error
