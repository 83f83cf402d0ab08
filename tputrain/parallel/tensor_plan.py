"""Tensor parallelism: which modules of a model are cut over ranks, and how. It knows no model by name.

The rules are the user's (`parallel.plan`), or else the model's own attribute `tp_plan`, which models of
`transformers` have, too.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tputrain.announce import say
from tputrain.errors import UserError
from tputrain.models.divided_vocabulary import own_rows
from tputrain.models.lora import LoraLinear
from tputrain.models.vocabulary_loss import VocabularyHead
from tputrain.parallel.config import TensorRule, is_style

_WHOLE_LOGITS = [TensorRule("colwise", each, "replicate") for each in (None, "replicate")]
_LAYOUTS: dict[str | None, Placement | None] = {
    None: None,
    "replicate": Replicate(),
    "sequence": Shard(1),
    "features": Shard(-1),
}

# LoRA's matrices: the one that shares the cut dimension with the weight is cut, the other one is whole.
_NARROW: dict[str, dict[str, Placement]] = {
    "colwise": {"lora_a": Replicate(), "lora_b": Shard(0)},
    "rowwise": {"lora_a": Shard(1), "lora_b": Replicate()},
}


def parallelise_layers(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
    """Cut the layers of `model` over the ranks of `mesh`, in place, by `plan` or else by the model's own.

    The parameters of a module that a rule matches become DTensors. All others stay whole on each rank, and
    a line lists them. Raises UserError where there is no plan, or a layer does not divide.
    """
    source, chosen, unused = _chosen(model, plan, mesh.size())
    tied = _tied(model)
    shared = _SharedInput()
    for module, rule in chosen.values():
        if rule.output == "sequence" and rule.style != "sequence":
            module.register_forward_pre_hook(_SequenceDivides(mesh.size()))
        narrow = _taken_off(module) if rule.style in _NARROW else {}
        # Every rank has built the whole model alike: nothing is sent.
        parallelize_module(module, mesh, _style(module, rule, shared), src_data_rank=None)
        for name, parameter in narrow.items():
            _divide(module, name, parameter, mesh, _NARROW[rule.style][name])
    for owners in tied:
        _tie_again(owners)
    _list_what_is_left(model, source, unused)


def matched_rules(
    model: nn.Module, plan: Mapping[str, Any], degree: int = 1
) -> dict[str, tuple[nn.Module, TensorRule]]:
    """The modules that tensor parallelism cuts, by name, and how: by `plan`, or else by the model's own.

    Raises UserError where there is no plan, or a layer does not divide into `degree` parts.
    """
    return _chosen(model, plan, degree)[1]


def check_divides(model: nn.Module, rules: Mapping[str, tuple[nn.Module, TensorRule]], degree: int) -> None:
    """Raise UserError where a layer does not divide into `degree` parts. `rules`: of `matched_rules`."""
    for name, (module, rule) in rules.items():
        _check_divides(model, name, module, rule, degree)


def _chosen(
    model: nn.Module, plan: Mapping[str, Any], degree: int
) -> tuple[str, dict[str, tuple[nn.Module, TensorRule]], list[str]]:
    """Where the plan comes from, what it cuts, and its rules that match nothing."""
    source, rules = _rules(model, plan, degree)
    chosen, unused = _matched(model, rules)
    check_divides(model, chosen, degree)
    return source, chosen, unused


def _rules(model: nn.Module, plan: Mapping[str, Any], degree: int) -> tuple[str, dict[str, TensorRule]]:
    """Where the plan comes from, and its rules by the pattern of module names."""
    if plan:
        return "parallel.plan", {pattern: TensorRule.of(pattern, each) for pattern, each in plan.items()}
    own = getattr(model, "tp_plan", None)
    if not own:
        raise UserError(
            f"parallel.tensor={degree}: {type(model).__name__} has no plan for cutting its layers: expected "
            "an attribute tp_plan, or parallel.plan, such as {'layers.*.q_proj': colwise, 'layers.*.o_proj': "
            "rowwise}; parallel.shard cuts the weights of any model"
        )
    source = f"the tp_plan of {type(model).__name__}"
    for pattern, style in own.items():
        if isinstance(style, str) and not is_style(style):
            raise UserError(
                f"parallel.tensor={degree}: {source} cuts {pattern} by the style {style}, which is not known "
                "so far: expected parallel.shard in its place, or a parallel.plan of your own"
            )
    return source, {pattern: TensorRule.of(pattern, each, source) for pattern, each in own.items()}


def _matched(
    model: nn.Module, rules: Mapping[str, TensorRule]
) -> tuple[dict[str, tuple[nn.Module, TensorRule]], list[str]]:
    """The modules that a rule cuts, of several rules the last one's; and the rules that match nothing."""
    chosen: dict[str, tuple[nn.Module, TensorRule]] = {}
    unused = []
    modules = list(model.named_modules())
    for pattern, rule in rules.items():
        found = {name: module for name, module in modules if fnmatchcase(name, pattern)}
        if not found:
            unused.append(pattern)
        chosen |= {name: (module, rule) for name, module in found.items()}
    return {name: each for name, each in chosen.items() if each[1].style != "whole"}, unused


def _check_divides(model: nn.Module, name: str, module: nn.Module, rule: TensorRule, degree: int) -> None:
    """Raise UserError where the ranks' parts would not be of equal size, or no whole heads of attention."""
    if rule.style not in ("colwise", "rowwise"):
        return
    expected = f"parallel.tensor={degree}: {name}"
    is_colwise = rule.style == "colwise"
    if isinstance(module, nn.Linear):
        size, what = (module.out_features, "outputs") if is_colwise else (module.in_features, "inputs")
    elif isinstance(module, nn.Embedding):
        size, what = (module.embedding_dim, "features") if is_colwise else (module.num_embeddings, "entries")
    else:
        raise UserError(
            f"{expected} is a {type(module).__name__}: expected a Linear or an Embedding for the style "
            f"{rule.style} (parallel.plan names others)"
        )
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if isinstance(module, nn.Linear) and isinstance(head_dim, int) and size % head_dim == 0:
        size, what = size // head_dim, f"heads of {head_dim}"
    if size % degree:
        count = f"{size} {what}" if size > 1 else f"1 {what.replace('heads', 'head')}"
        raise UserError(
            f"{expected} has {count}: expected a number that {degree} divides, "
            "another parallel.tensor, or a parallel.plan that leaves the module whole"
        )


def _style(module: nn.Module, rule: TensorRule, shared: "_SharedInput") -> ParallelStyle:
    taken, given = _LAYOUTS[rule.input], _LAYOUTS[rule.output]
    if makes_loss_of_part(module, rule):
        return _DividedHead()
    if rule.style == "rowwise" and taken in (None, Replicate()) and _is_plain_table(module):
        return _DividedTable(given or Replicate())
    if isinstance(module, nn.Embedding):
        taken = taken or Replicate()  # RowwiseParallel's own default is for a Linear
    match rule.style:
        case "colwise":
            return _Colwise(shared, input_layouts=taken, output_layouts=given)
        case "rowwise":
            return RowwiseParallel(input_layouts=taken, output_layouts=given)
        case "sequence":
            return _OnSequenceParts(taken or Shard(1), given or Shard(1))
    return _OnParts()


def _taken_off(module: nn.Module) -> dict[str, nn.Parameter]:
    """LoRA's matrices, which are no parameters of `module` from here on: PyTorch's styles would cut them as
    they cut the weight.
    """
    if not isinstance(module, LoraLinear):
        return {}
    found = {"lora_a": module.lora_a, "lora_b": module.lora_b}
    for name in found:
        delattr(module, name)
    return found


def makes_loss_of_part(module: nn.Module, rule: TensorRule) -> bool:
    """Whether a rank needs no more than its part of the logits for the loss."""
    return isinstance(module, VocabularyHead) and rule in _WHOLE_LOGITS


class _SharedInput:
    """The last tensor that modules cut by columns have taken, and the DTensor made of it.

    It is kept until its gradient comes, or another tensor is taken: autograd need not keep it, since under
    autocast a linear layer saves a copy.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, Tensor, Tensor] | None = None

    def of(self, tensor: Tensor, layouts: Any, make: Callable[[], Tensor]) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return make()
        key, known = (layouts, tensor._version), self._known
        if known is not None and known[0] == key and known[1] is tensor:
            return known[2]
        made = make()
        self._known = key, tensor, made
        made.register_hook(self._forget)
        return made

    def _forget(self, gradient: Tensor) -> None:
        self._known = None


class _Colwise(ColwiseParallel):
    """Modules that take one tensor after each other (queries, keys and values; gate and up) share its
    DTensor: ranks gather it once, and sum its gradient once.
    """

    def __init__(self, shared: _SharedInput, **layouts: Any):
        super().__init__(**layouts)
        self._shared = shared

    def _prepare_input_fn(  # type: ignore[override]  # PyTorch's is static, and is taken from the instance
        self, given: Any, wanted: Any, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh
    ) -> Tensor:
        def make() -> Tensor:
            return ColwiseParallel._prepare_input_fn(given, wanted, module, inputs, mesh)

        return self._shared.of(inputs[0], given, make)


class _DividedHead(ParallelStyle):
    """A head of which each rank has some of the classes. It makes its loss of them, or gathers its logits."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            _divide(module, name, parameter, device_mesh, Shard(0))
        cast(VocabularyHead, module).is_divided = True
        return module


def _is_plain_table(module: nn.Module) -> bool:
    """Whether it is an embedding without options, and its forward pass is PyTorch's."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    options = module.padding_idx is not None, module.max_norm is not None
    return not any((*options, module.scale_grad_by_freq, module.sparse))


class _DividedTable(ParallelStyle):
    """A plain embedding of which each rank has some of the entries.

    RowwiseParallel would do, but the gradient that DTensor makes of one is the whole table's, on each rank.
    """

    def __init__(self, given: Placement):
        self._given = given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide(module, "weight", module.get_parameter("weight"), device_mesh, Shard(0))

        def take(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
            table = cast(DTensor, module._parameters["weight"])
            place, is_here = own_rows(inputs[0], table)
            module.__dict__ |= {"weight": table.to_local(), "_is_here": is_here}
            return torch.where(is_here, place, 0)

        def give(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            part = torch.where(module.__dict__.pop("_is_here")[..., None], output, 0)
            summed = DTensor.from_local(part, device_mesh, [Partial()], run_check=False)
            return summed.redistribute(placements=[self._given]).to_local()

        module.register_forward_pre_hook(take)
        module.register_forward_hook(give)
        module.register_forward_hook(_forget_local_parameters, always_call=True)
        return module


class _OnParts(ParallelStyle):
    """A module with whole parameters, on inputs of which each rank has a part (its heads).

    Each rank's gradient is then the one of its part: they are summed over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _replicate(module, device_mesh)
        module.register_forward_pre_hook(_use_local_parameters)
        module.register_forward_hook(_forget_local_parameters, always_call=True)
        return module


def _use_local_parameters(module: nn.Module, _: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        # Beside the parameter, which is found again when this is gone.
        module.__dict__[name] = parameter.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]


def _forget_local_parameters(module: nn.Module, *_: Any) -> None:
    for name, _parameter in module.named_parameters(recurse=False):
        module.__dict__.pop(name, None)


class _OnSequenceParts(ParallelStyle):
    """A module with whole parameters (a norm, a dropout), on each rank for a part of the sequence."""

    def __init__(self, taken: Placement, given: Placement):
        self._taken, self._given = taken, given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _replicate(module, device_mesh)
        whole_first = self._taken != Shard(1)

        def take(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if whole_first:
                _SequenceDivides(device_mesh.size())(module, inputs)
            hidden = DTensor.from_local(inputs[0], device_mesh, [self._taken], run_check=False)
            return hidden.redistribute(placements=[Shard(1)]), *inputs[1:]

        def give(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
            return output.redistribute(placements=[self._given]).to_local()

        module.register_forward_pre_hook(take)
        module.register_forward_hook(give)
        return module


class _SequenceDivides:
    """A hook: raises UserError for a sequence that ranks cannot take equal parts of."""

    def __init__(self, degree: int):
        self._degree = degree

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        length = inputs[0].shape[1]
        if length % self._degree:
            raise UserError(
                f"parallel.plan: a sequence of {length} tokens does not divide among {self._degree} ranks "
                f"(parallel.tensor): expected a multiple of {self._degree} with the layout sequence"
            )


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            _divide(owner, name, parameter, mesh, Replicate())


def _divide(
    module: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement
) -> None:
    """Make a parameter that every rank has the whole of the parameter `name` of `module`, as a DTensor."""
    divided = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _tied(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Of each parameter that several modules share: name, module and the parameter's name there."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((path, module, name))
    return [each for each in owners.values() if len(each) > 1]


def _tie_again(owners: list[tuple[str, nn.Module, str]]) -> None:
    """One parameter for modules that shared one before each was cut. Raises UserError where they differ."""
    parameters = [module.get_parameter(name) for _, module, name in owners]
    first = parameters[0]
    if all(each is first for each in parameters):
        return
    layouts = [each.placements if isinstance(each, DTensor) else None for each in parameters]
    if any(each != layouts[0] for each in layouts):
        names = " and ".join(path for path, _, _ in owners)
        raise UserError(
            f"parallel.plan: {names} share one weight, which their rules cut differently: expected rowwise "
            "for an embedding with colwise for the output layer, or a rule for neither"
        )
    for _, module, name in owners:
        module.register_parameter(name, first)


def _list_what_is_left(model: nn.Module, source: str, unused: list[str]) -> None:
    for pattern in unused:
        say(f"note: {source}: no module of the model matches {pattern}")
    whole = [name for name, each in model.named_parameters() if not isinstance(each, DTensor)]
    if whole:
        say(f"note: {source}: whole on each tensor rank, as no rule matches them: {in_short(whole)}")


def in_short(names: list[str]) -> str:
    """Names for people: those of many layers as one, and how many these are."""
    numbered = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in numbered.items())
