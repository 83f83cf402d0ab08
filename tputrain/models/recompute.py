"""Activation checkpointing: the backward pass computes a layer again instead of keeping what it computed."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tputrain.checkpoint.rows import around, is_distributed, local_part
from tputrain.config_checks import did_you_mean, expect, nearest
from tputrain.device import computed_again, computed_before, held_by_host, taken_from_host

NONE = "none"
"""A layer is computed once."""
LAYERS = "layers"
"""A layer is computed again from its input."""
PRODUCTS = "products"
"""The results of products with parameters are kept, too."""
OFFLOAD = "offload"
"""As LAYERS; on a TPU the input is in the host's memory meanwhile."""

SETTINGS = {NONE: None, LAYERS: True, PRODUCTS: PRODUCTS, OFFLOAD: OFFLOAD}
"""By kind: how `model.activation_checkpointing` says it of all layers."""
Setting = bool | str | Sequence[str] | None
"""`model.activation_checkpointing`: true (layers), false, or a kind. Or kinds that repeat over the layers, as
a list ([layers, none]) or as text (layers,none). None: it says nothing."""

_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,  # of experts
)


def offloads(model: nn.Module) -> bool:
    """Whether layers of it are computed again from inputs that the host keeps."""
    return any(getattr(each, "recomputes", None) == OFFLOAD for each in model.modules())


def read_setting(setting: Setting) -> bool | str | None:
    """A setting as it is meant: of several kinds as text. Raises UserError where it is none."""
    if setting is None or isinstance(setting, bool):
        return setting
    if isinstance(setting, str) and setting.lower() in ("true", "false"):  # a recipe's, which may be text
        return setting.lower() == "true"
    given = setting.split(",") if isinstance(setting, str) else setting
    kinds = [str(each).strip() for each in given] if isinstance(given, Sequence) else []
    hint = next((nearest(each, SETTINGS) for each in kinds if each not in SETTINGS), None)
    expect(
        bool(kinds) and set(kinds) <= set(SETTINGS),
        "model.activation_checkpointing",
        setting,
        f"one of true, false, {LAYERS}, {PRODUCTS}, {OFFLOAD}, or kinds that repeat over the layers, such as "
        f"[{LAYERS}, {NONE}]{did_you_mean(hint)}",
    )
    return pattern(kinds) if pattern(kinds) != NONE else False


def pattern(kinds: Sequence[str]) -> str:
    """Kinds of layer after layer, up to where they repeat."""
    sizes = [size for size in range(1, len(kinds) + 1) if len(kinds) % size == 0]
    size = next(size for size in sizes if kinds[:-size] == kinds[size:])
    return ",".join(kinds[:size])


def kinds_of(setting: Setting, num_layers: int) -> list[str]:
    """The kind of each layer. Raises UserError where it is no setting, or names more kinds than layers."""
    kinds = (rung_of(read_setting(setting)) or NONE).split(",")
    expect(
        len(kinds) <= num_layers,
        "model.activation_checkpointing",
        ",".join(kinds),
        f"at most {num_layers}, a kind for each layer",
    )
    return list(islice(cycle(kinds), num_layers))


def override(rung: str) -> str | None:
    """What a recipe sets for kinds: `model.activation_checkpointing=true`; None: nothing."""
    setting = SETTINGS.get(rung, rung)
    return None if setting is None else f"model.activation_checkpointing={str(setting).lower()}"


def rung_of(setting: bool | str | None) -> str | None:
    """The kind that a setting asks for, or kinds (`layers,none`); off is none. None: it says nothing."""
    if setting is None or isinstance(setting, str):
        return setting
    return LAYERS if setting else NONE


def recomputed(layer: nn.Module, hidden: Tensor, *others: Any, kind: str = LAYERS) -> Tensor:
    """`layer(hidden, *others)`, of which only `hidden` is kept for the backward pass; with PRODUCTS the
    results of products with parameters too, and with NONE everything. With OFFLOAD `hidden` is kept in the
    host's memory.

    The layer must not draw random numbers, and no gradient flows to `others` (Chen et al., 2016).
    checkpoint() alone would not do: XLA merges both computations. Here the second is kept apart.
    """
    if kind == NONE or not torch.is_grad_enabled():
        return layer(hidden, *others)
    # torch.compile knows checkpoint(), and keeps both computations apart by itself.
    if kind == PRODUCTS or torch.compiler.is_compiling():
        return recomputed_call(layer, hidden, *others, kind=kind)
    trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if any(hasattr(parameter, "device_mesh") for parameter in trainable):  # made whole only when it is called
        return recomputed_call(layer, hidden, *others, kind=kind)
    return _Recomputed.apply(lambda values: layer(values, *others), kind, hidden, *trainable)


def recomputed_call(function: Callable[..., Any], *inputs: Any, kind: str = LAYERS) -> Any:
    """`function(*inputs)`, computed again in the backward pass, with the same random numbers: what
    transformers asks for of each of its layers, whose outputs and further inputs may be anything.
    """
    if kind == NONE:
        return function(*inputs)
    if torch.compiler.is_compiling():
        if kind == OFFLOAD:
            return _not_compiled(function, *inputs, kind=kind)
        return checkpoint(function, *inputs, use_reentrant=False, **_options(kind))
    if not torch.is_grad_enabled():
        return function(*inputs)
    first = [inputs[0]]  # until it is read
    has_gradient = inputs[0].requires_grad
    again = computed_again
    if kind == OFFLOAD:
        inputs, again = (_of_own_part(held_by_host, inputs[0].detach()), *inputs[1:]), taken_from_host
    gradient: list[Tensor] = []  # of what the function returns, once it is there

    def run(hidden: Tensor, *others: Any) -> Any:
        if first:
            return function(first.pop(), *others)
        try:
            # Detached: only what the layer keeps for its backward pass is wanted of this computation.
            hidden = _apart(hidden.detach(), gradient, again)
            return function(hidden.requires_grad_(has_gradient), *others)
        finally:  # once all is there that the backward pass wants, this is left by an exception
            gradient.clear()

    if kind != PRODUCTS:
        output = checkpoint(run, *inputs, use_reentrant=False)
    else:
        kept: list[tuple[Tensor, int]] = []
        contexts = _KeepProducts(kept), _TakeProducts(kept, gradient)
        output = checkpoint(run, *inputs, use_reentrant=False, context_fn=lambda: contexts)
    for each in tree_iter(output):
        if isinstance(each, Tensor) and each.requires_grad:
            each.register_hook(partial(_note, gradient))
            break
    return output


@torch.compiler.disable(reason="torch.compile keeps layers' inputs on the device")
def _not_compiled(function: Callable[..., Any], *inputs: Any, kind: str) -> Any:
    return recomputed_call(function, *inputs, kind=kind)


def _note(gradient: list[Tensor], value: Tensor) -> None:
    gradient[:] = [local_part(value.detach())]


def _options(kind: str) -> dict[str, Any]:
    """Of `checkpoint` under torch.compile, which knows PyTorch's own way to keep some results."""
    keeps = partial(create_selective_checkpoint_contexts, list(_PRODUCTS))
    return {"context_fn": keeps} if kind == PRODUCTS else {}


class _KeepProducts(TorchDispatchMode):
    """Keeps the results of products, in their order, each with its version."""

    def __init__(self, kept: list[tuple[Tensor, int]]):
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _PRODUCTS:
            # Below autograd a view has a version of its own, unless this key is let in.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                self._kept.append((result.detach(), result._version))
        return result


class _TakeProducts(TorchDispatchMode):
    """Has the results that were kept in the place of products, in their order."""

    def __init__(self, kept: list[tuple[Tensor, int]], gradient: list[Tensor]):
        super().__init__()
        self._kept, self._gradient, self._next = kept, gradient, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _PRODUCTS:
            return function(*args, **(kwargs or {}))
        result, version = self._kept[self._next]
        self._next += 1
        if result._version != version:
            raise RuntimeError(
                "model.activation_checkpointing=products: the result of a product was written in place; take "
                "layers"
            )
        # Kept apart like the hidden states: else what is computed from it again is taken from before.
        return _apart(result, self._gradient)


def _apart(
    tensor: Tensor,
    gradient: list[Tensor],
    again: Callable[..., tuple[Tensor, ...]] = computed_again,
) -> Tensor:
    """`tensor` as `again` gives it, of a rank's part where ranks share it. Numbers without gradients stay."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return _of_own_part(lambda own: again(own, *gradient)[0], tensor)


def _of_own_part(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    found = function(local_part(tensor))
    return around(found, tensor) if is_distributed(tensor) else found


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], kind: str, hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        device = hidden.device.type
        ctx.run, ctx.kind = run, kind
        ctx.autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
        }
        ctx.save_for_backward(held_by_host(hidden) if kind == OFFLOAD else hidden, *parameters)
        return run(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *parameters = ctx.saved_tensors
        is_of_host = ctx.kind == OFFLOAD
        hidden, grad = (taken_from_host if is_of_host else computed_again)(hidden, grad)
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            output = ctx.run(hidden)
        of_hidden, *of_parameters = torch.autograd.grad(
            output, [hidden, *parameters], grad, allow_unused=True
        )
        # Of one layer at a time what a gradient is computed from is in memory.
        if of_hidden is not None:
            there = [each for each in of_parameters if each is not None]
            if is_of_host:  # which has a TPU put off products, too
                of_hidden = taken_from_host(of_hidden, *there)[0]
            else:
                of_hidden = computed_before(of_hidden, *there)
        return (None, None, of_hidden, *of_parameters)
