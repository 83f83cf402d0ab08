"""bfloat16 weights that learn in float32: the optimizer steps exact copies, and the model gets them rounded.

A bfloat16 number has 8 significant bits: an update below 1/256 of a weight would be lost in it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tputrain.optim.closure import evaluated

MASTER = "master"
"""The key of a parameter's float32 copy in the optimizer's state, and so in optimizer.safetensors."""


class MasterWeights(torch.optim.Optimizer):
    """An optimizer over float32 copies of bfloat16 parameters, the masters.

    Its groups hold the model's parameters, its state by parameter is that of `inner` by master, and the
    master itself. Gradients are bfloat16, as the backward pass leaves them, also where they are summed over
    micro-batches; `inner` gets them in float32.
    """

    def __init__(self, inner: torch.optim.Optimizer, masters: dict[nn.Parameter, nn.Parameter]):
        """`inner`: over the values of `masters`, with its state made; `masters`: by the model's parameter."""
        self.inner = inner
        self._masters = masters
        parameter_of = {id(master): parameter for parameter, master in masters.items()}
        groups = [
            group | {"params": [parameter_of[id(master)] for master in group["params"]]}
            for group in inner.param_groups
        ]
        super().__init__(groups, {})
        self.kind = f"{type(self).__name__} of {getattr(inner, 'kind', type(inner).__name__)}"
        """What a checkpoint calls it: its state is that of the one inside."""
        self._share_state()

    def _share_state(self) -> None:
        for parameter, master in self._masters.items():
            state = self.inner.state[master]
            state[MASTER] = master.detach()
            self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` gives."""
        loss = evaluated(closure)
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})
        trained = [(p, master) for p, master in self._masters.items() if p.grad is not None]
        for parameter, master in trained:
            master.grad = parameter.grad.float()  # type: ignore[union-attr]
        # Without the hooks around `step`: the end of an optimizer's step is where the tpu device ends a
        # program, and the weights are to be rounded in the same one.
        self.inner.step.__wrapped__(self.inner)  # type: ignore[attr-defined]
        for parameter, master in trained:
            parameter.copy_(master)
            master.grad = None
        return loss

    @contextmanager
    def in_place_of_weights(self, model: nn.Module) -> Iterator[None]:
        """In here `model` has the masters for parameters: values that are written are kept in float32."""
        replaced = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter in self._masters
        ]
        for module, name, parameter in replaced:
            module._parameters[name] = self._masters[parameter]
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter
            with torch.no_grad():
                for parameter, master in self._masters.items():
                    parameter.copy_(master)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave; PyTorch's own way would round it to the parameters' dtype."""
        self.inner.load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        for master in self._masters.values():
            master.copy_(self.inner.state[master][MASTER])
        self._share_state()


@torch.no_grad()
def round_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> MasterWeights:
    """Make the float32 parameters of `model` bfloat16, in place, and have `optimizer`, built on them and with
    its state made, step float32 copies instead.

    Parameters that are bfloat16 already have float32 copies of what they hold. Frozen parameters become
    bfloat16 too and need no copy; buffers stay.
    """
    is_rounded = getattr(optimizer, "rounded_state", ())
    trained = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    masters = {p: nn.Parameter(_at_least_float32(p.detach().clone())) for p in trained.values()}
    model._apply(_rounded)  # FSDP has to know of it
    for group in optimizer.param_groups:
        group["params"] = [masters[parameter] for parameter in group["params"]]
    for parameter, master in masters.items():
        state = optimizer.state.pop(parameter, {})
        optimizer.state[master] = {
            key: value if key in is_rounded else _at_least_float32(value) for key, value in state.items()
        }
    return MasterWeights(optimizer, masters)


def _rounded(tensor: Tensor) -> Tensor:
    is_rounded = isinstance(tensor, nn.Parameter) and tensor.dtype == torch.float32
    return tensor.bfloat16() if is_rounded else tensor


def _at_least_float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return value


def values_kept_exact(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """In here what is written to the parameters of `model` is kept as exactly as `optimizer` trains it."""
    if isinstance(optimizer, MasterWeights):
        return optimizer.in_place_of_weights(model)
    return nullcontext()
