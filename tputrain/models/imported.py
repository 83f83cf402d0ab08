"""A model from the user's own code, by import path."""

import importlib

from torch import nn

from tputrain.errors import UserError


def import_model(path: str) -> nn.Module:
    """What `package.module:function` returns when it is called without arguments: a class or a function.

    This runs code that a recipe names: ask for `trust_code` first. Raises UserError where it gives no module.
    """
    module_name, _, name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model.path={path}: {error}; expected package.module:function, importable from here"
        ) from None
    if not isinstance(made, nn.Module):
        raise UserError(f"model.path={path}: it returned a {type(made).__name__}, expected an nn.Module")
    return made
