"""The tensors of a model by name, as a checkpoint has them."""

from torch import Tensor, nn

from tputrain.errors import UserError
from tputrain.models.lora import lora_layers


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name; a tensor with several names has the first."""
    names: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise UserError(
                f"{name} in the model's state is a {type(tensor).__name__}: a checkpoint holds tensors only"
            )
        names.setdefault(id(tensor), name)
    return {name: tensors[name].detach() for name in names.values()}


def tensors_of_plain_model(model: nn.Module) -> dict[str, Tensor]:
    """Those of `distinct_tensors` that the model has without LoRA, as it holds them."""
    tensors = distinct_tensors(model)
    for name, _ in lora_layers(model):
        del tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
    return tensors
