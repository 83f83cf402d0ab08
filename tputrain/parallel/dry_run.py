"""Runs a model on tensors without values and tells what its step asks for (`workload.py`).

Each part is run once, for two sizes of batch: all else follows on a straight line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain.batches import Batch
from tputrain.errors import UserError, first_line
from tputrain.loss import LossFunction, loss_of
from tputrain.models.transformers_masks import Said, attach_documents, attached_documents
from tputrain.optim.muon import hidden_matrices
from tputrain.parallel.blocks import blocks, signature, without_numbers
from tputrain.parallel.limits import why_no_parts
from tputrain.parallel.tensor_plan import check_divides, makes_loss_of_part, matched_rules
from tputrain.parallel.tracing import Bytes, Product, Recorder, Trace
from tputrain.parallel.workload import Amount, Matrix, Parameters, Part, Work, Workload, context_degrees
from tputrain.user_code import error_summary, line_of

ROWS = (2, 3)  # of the two runs; with one row, sizes of 1 would be taken for broadcasts
SQUARE_ROWS = (1024, 1536, 2048)
"""Of the three runs of a model that compares rows with rows, so many that what grows with their square is
part of the peaks."""


@cache
def _device() -> torch.device:
    """Of tensors without values: PyTorch treats them as those of a run."""
    return torch.device(devices.find_device("tpu").type, 0)


def workload_of(
    model: nn.Module,
    batch: Callable[[int], Batch],
    *,
    name: str = "",
    loss_fn: LossFunction | None = None,
    autocast: str | None = None,
    plan: Mapping[str, Any] | None = None,
    has_masters: bool = False,
) -> Workload:
    """Run `model` (parameters anywhere, best on meta) on `batch(rows)`, tensors of any device.

    `has_masters`: its float32 parameters are bfloat16 in the step (`optim.master_weights`).

    Raises UserError for a model that cannot be run without values.
    """
    tensor = _TensorPlan.of(model, plan or {})
    settings = _Settings(model, loss_fn, autocast, tensor, has_masters)
    sizes: tuple[int, ...] = ROWS
    parts = _parts(settings, batch, sizes)
    if any(len(work.scales) > 1 for part in parts for work in (*part.forward, *part.backward)):
        sizes = SQUARE_ROWS
        parts = _parts(settings, batch, sizes)
    whole_rest = None
    if tensor.cuts_rest(model):
        *parts, whole_rest = parts
    example = batch(ROWS[0])
    sequence = example["input_ids"].shape[1] if batch_of.is_text(example) else None
    takes_parts = loss_fn is None and getattr(model, "takes_parts", False) and why_no_parts(model) is None
    return Workload(
        name or type(model).__name__,
        tuple(parts),
        sequence,
        tensor.degrees,
        context_degrees(sequence) if sequence is not None and takes_parts else (1,),
        whole_rest,
    )


def batch_like(example: Batch) -> Callable[[int], Batch]:
    """Batches of any number of rows that are like `example`, in memory of none."""
    rows = batch_of.num_samples(example)

    def of(wanted: int) -> Batch:
        def resized(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != rows:
                return value
            return torch.empty((wanted, *value.shape[1:]), dtype=value.dtype, device="meta")

        return tree_map(resized, example)

    return of


# -- tensor parallelism ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorPlan:
    rules: dict[str, Any]
    """By the names of modules."""
    degrees: tuple[int, ...]
    cut: Mapping[int, int] = field(default_factory=dict)
    """The dim that is cut, by the identities of the parameters that are."""

    @classmethod
    def of(cls, model: nn.Module, plan: Mapping[str, Any]) -> "_TensorPlan":
        try:
            rules = matched_rules(model, plan)
        except UserError:
            return cls({}, (1,))
        degrees = []
        for degree in (1, 2, 4, 8, 16, 32, 64):
            try:
                check_divides(model, rules, degree)
            except UserError:
                continue
            degrees.append(degree)
        by_name = {name: rule for name, (_, rule) in rules.items()}
        return cls(by_name, tuple(degrees), _cut_parameters(model, by_name))

    def cuts_rest(self, model: nn.Module) -> bool:
        """Whether it cuts modules that are in no layer."""
        in_layers = {id(each) for block in blocks(model) for each in block.modules()}
        return any(id(model.get_submodule(name)) not in in_layers for name in self.rules)


def _cut_parameters(model: nn.Module, rules: Mapping[str, Any]) -> dict[int, int]:
    found = {}
    for name, rule in rules.items():
        if rule.style not in ("colwise", "rowwise"):
            continue
        module = model.get_submodule(name)
        by_rows = (rule.style == "colwise") != isinstance(module, nn.Embedding)
        for own, parameter in module.named_parameters(recurse=False):
            if rule.style == "colwise" or own == "weight":
                found[id(parameter)] = 0 if by_rows else 1
    return found


# -- running -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    model: nn.Module
    loss_fn: LossFunction | None
    autocast: str | None
    tensor: _TensorPlan
    has_masters: bool


@dataclass
class _Run:
    """One part with one size of batch."""

    key: Any
    name: str
    count: int
    parameters: Parameters
    linears: tuple[tuple[str, int, int], ...]
    trace: Trace
    input: Bytes


class _StandIn(torch.autograd.Function):
    """In place of a layer that was run already: outputs and gradients of the right shapes."""

    @staticmethod
    def forward(
        ctx: Any, made: Callable[[], list[Tensor]], passed: Callable[[], None], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.passed = passed
        ctx.shapes = [(each.shape, each.dtype) if each.is_floating_point() else None for each in inputs]
        return tuple(made())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        ctx.passed()
        gradients = [
            None if each is None else torch.empty(each[0], dtype=each[1], device=_device())
            for each in ctx.shapes
        ]
        return (None, None, *gradients)


def _runs(tracer: "_Tracer", batch: Callable[[int], Batch], rows: int) -> list[_Run]:
    """As `_Tracer.runs`."""
    model = tracer.model
    devices.use_meta_kernels()
    try:
        # In this thread: the one that autograd has for a device may let go of tensors while Python ends, and
        # abort the process then.
        here = torch.autograd.set_multithreading_enabled(False)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), here, tracer.mode:
            return tracer.runs(batch(rows))
    except UserError:
        raise
    except Exception as error:
        raise _refusal(model, error) from error


class _WithoutDevice(FakeTensorMode):
    """Does not open the device, which `torch.tensor([0], device=x.device)` would."""

    avoid_device_init = True


def _refusal(model: nn.Module, error: Exception, where: str = "") -> UserError:
    """Of a model that raised an error without values. `where`: in which part that is not the user's own."""
    begins = f"{_title(model)}: cannot be planned: "
    is_read = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    if not (is_read or ".numpy() is not supported for tensor subclasses" in str(error)):
        return UserError(f"{begins}{error_summary(error)}{where}")
    line = line_of(error)
    return UserError(
        f"{begins}it reads a value{'' if line is None else f' at {line}'}{where} ({first_line(error)}); "
        "a plan's tensors have none: expected no item(), numpy(), `if tensor`, nonzero() or mask as an "
        "index; torch.where needs no value"
    )


def _shapes(value: Any) -> str:
    return (
        ", ".join(str(list(each.shape)) for each in _tensors(value)) or f"no tensor ({type(value).__name__})"
    )


class _Tracer:
    """Runs a model without values, for batches of several sizes."""

    def __init__(self, settings: _Settings):
        self.model = settings.model
        self.mode = _WithoutDevice(allow_non_fake_inputs=True)
        self._settings = settings
        # With the tensor that each is for: ids are used again.
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self._names = {id(module): name for name, module in settings.model.named_modules()}
        self._hidden = hidden_matrices(settings.model)
        self._signatures = {id(each): signature(each) for each in blocks(settings.model)}
        self._calls: dict[Any, _Call] = {}
        self._order: list[_Call] = []

    def runs(self, batch: Batch) -> list[_Run]:
        """The layers of the model, the rest of it, and if tensor parallelism cuts that: the rest uncut."""
        tensor = self._settings.tensor
        self._calls, self._order = {}, []
        given = batch_of.to_device(tree_map(self._fake, batch), _device())
        rest = self._run_rest(given, tensor)
        runs = [*map(self._run_layer, self._order), rest]
        if tensor.cuts_rest(self.model):
            runs.append(self._run_rest(given, _TensorPlan({}, (1,))))
        return runs

    def _run_rest(self, batch: Batch, tensor: _TensorPlan) -> _Run:
        model = self.model
        recorder = Recorder()
        parameters = self._external(recorder, model, tensor, skip=True)
        for each in _tensors(batch):
            recorder.external(each)

        def forward() -> Tensor:
            output = self._call(model, lambda: batch_of.call(model, batch))
            target = batch_of.target_of(batch)
            try:
                return loss_of(output, target, self._settings.loss_fn)
            except UserError:
                raise
            except Exception as error:
                where = f" in the loss of outputs {_shapes(output)} with labels {_shapes(target)}"
                raise _refusal(model, error, where) from error

        with self._stand_ins(recorder), self._hooks(recorder, model, tensor), self._faked(model):
            recorder.run(forward, [], parameters)
        inside = {id(each) for block in blocks(model) for each in block.modules()}
        return self._run("rest", "the rest", 1, model, recorder.trace, Bytes(), tensor, inside)

    def _run(
        self,
        key: Any,
        name: str,
        count: int,
        module: nn.Module,
        trace: Trace,
        held: Bytes,
        tensor: _TensorPlan,
        without: set[int],
    ) -> _Run:
        """`without`: modules that are parts of their own."""
        modules = [(name, each) for name, each in module.named_modules() if id(each) not in without]
        owned: dict[int, nn.Parameter] = {}
        for _, each in modules:
            owned |= {id(own): own for own in each.parameters(recurse=False)}
        sizes = {"whole": 0, "cut": 0, "trained_whole": 0, "trained_cut": 0}
        for number, parameter in owned.items():
            kind = "cut" if number in tensor.cut else "whole"
            sizes[kind] += parameter.numel()
            sizes[f"trained_{kind}"] += parameter.numel() * parameter.requires_grad
        largest = max((each.numel() for each in owned.values()), default=0)
        itemsize = max((self._fake(each).element_size() for each in owned.values()), default=4)
        linears = [
            (name, each.in_features, each.out_features)
            for name, each in modules
            if isinstance(each, nn.Linear)
        ]
        matrices = tuple(
            Matrix(
                each.shape[0],
                each.numel(),
                tensor.cut.get(number),
                id(each) in self._hidden and each.requires_grad,
            )
            for number, each in owned.items()
            if each.dim() == 2
        )
        parameters = Parameters(**sizes, largest=largest, itemsize=itemsize, matrices=matrices)
        return _Run(key, name, count, parameters, tuple(linears), trace, held)

    def _run_layer(self, call: "_Call") -> _Run:
        module, tensor = call.module, self._settings.tensor
        recorder = Recorder()
        leaves, spec = tree_flatten(call.arguments)
        inputs, held = [], Bytes()
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _Form):
                given = leaf.new()
                leaves[index] = given.requires_grad_(leaf.requires_grad)
                for each in _tensors((given, leaf.said)):
                    recorder.external(each)
                if leaf.requires_grad:
                    inputs.append(given)
                    held.add(given.numel() * given.element_size(), False)
        args, kwargs = tree_unflatten(leaves, spec)
        parameters = self._external(recorder, module, tensor)

        def forward() -> Any:
            return self._call(module, lambda: module(*args, **kwargs))

        with self._hooks(recorder, module, tensor), self._faked(module):
            recorder.run(forward, inputs, parameters)
        name = self._layer_name(module)
        return self._run(call.key, name, call.count, module, recorder.trace, held, tensor, set())

    def _call(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        dtype = self._settings.autocast
        with torch.autocast(
            _device().type,
            getattr(torch, dtype or "bfloat16"),
            enabled=dtype is not None,
            cache_enabled=False,
        ):
            return function()

    @contextmanager
    def _faked(self, module: nn.Module) -> Iterator[None]:
        """In here the parameters and buffers of `module` have no values."""
        from torch.nn.utils.stateless import _reparametrize_module

        tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors |= dict(module.named_buffers(remove_duplicate=False))
        fakes = {name: self._fake(tensor) for name, tensor in tensors.items()}
        with _reparametrize_module(module, fakes):
            yield

    def _fake(self, value: Any) -> Any:
        """The same tensor without values, on the CPU as far as PyTorch knows; what is no tensor, as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._fakes:
            dtype = value.dtype
            if self._settings.has_masters and isinstance(value, nn.Parameter) and dtype is torch.float32:
                dtype = torch.bfloat16
            fake = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=_device())
            fake.requires_grad_(value.requires_grad)
            self._fakes[id(value)] = value, fake
        return self._fakes[id(value)][1]

    def _external(
        self, recorder: Recorder, module: nn.Module, tensor: _TensorPlan, skip: bool = False
    ) -> list[Tensor]:
        """Tell the recorder of the parameters and buffers; returns those that are trained (`skip`: but not
        those of layers)."""
        inside: set[int] = set()
        if skip:
            inside = {id(each) for block in blocks(module) for each in block.parameters()}
        trained = []
        for parameter in module.parameters():
            if id(parameter) not in inside:
                fake = self._fake(parameter)
                recorder.external(fake, id(parameter) in tensor.cut, is_parameter=True)
                trained.append(fake)
        for buffer in module.buffers():
            recorder.external(self._fake(buffer))
        return [each for each in trained if each.requires_grad]

    # -- layers that are alike

    @contextmanager
    def _stand_ins(self, recorder: Recorder) -> Iterator[None]:
        """In here a layer of a ModuleList is run once for all that are like it, and not recorded."""
        layers = list(blocks(self._settings.model))
        for layer in layers:
            layer.__dict__["forward"] = self._stand_in(layer, recorder)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]

    def _stand_in(self, layer: nn.Module, recorder: Recorder) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            was_paused, recorder.is_paused = recorder.is_paused, True
            try:
                call = self._called(layer, args, kwargs)
                call.count += 1
                inputs = [each for each in _tensors((args, kwargs)) if each.requires_grad]
                made: list[Tensor] = []

                def make() -> list[Tensor]:
                    made.extend(form.new() for form in call.outputs)
                    return made

                if any(form.requires_grad for form in call.outputs):  # by its parameters
                    inputs.append(torch.empty((), device=_device(), requires_grad=True))
                tensors = list(_StandIn.apply(make, recorder.layer_passed, *inputs))
                for tensor in tensors:
                    recorder.external(tensor)
            finally:
                recorder.is_paused = was_paused
            leaves = [tensors.pop(0) if isinstance(leaf, _Form) else leaf for leaf in call.leaves]
            return tree_unflatten(leaves, call.spec)

        return forward

    def _called(self, layer: nn.Module, args: Any, kwargs: Any) -> "_Call":
        arguments = tree_map(_Form.of, (args, kwargs))
        forms = tuple(leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, _Form))
        key = (self._signatures[id(layer)], forms)
        found = self._calls.get(key)
        if found is None:
            forward = layer.__dict__.pop("forward")
            try:
                output = layer.forward(*args, **kwargs)
            finally:
                layer.__dict__["forward"] = forward
            leaves, spec = tree_flatten(tree_map(_Form.of, output))
            found = _Call((self._signatures[id(layer)], len(forms)), layer, arguments, leaves, spec)
            self._calls[key] = found
            self._order.append(found)
        return found

    def _layer_name(self, module: nn.Module) -> str:
        return without_numbers(self._names[id(module)])

    # -- tensor parallelism

    @contextmanager
    def _hooks(self, recorder: Recorder, module: nn.Module, tensor: _TensorPlan) -> Iterator[None]:
        """In here modules that are cut tell the recorder what their outputs are, and what is summed."""
        model, handles = self._settings.model, []
        own = {id(each) for each in module.modules()}
        if module is model:
            own -= {id(each) for block in blocks(model) for each in block.modules()}
        for name, rule in tensor.rules.items():
            cut = model.get_submodule(name)
            if id(cut) in own and rule.style in ("colwise", "rowwise"):
                handles.append(cut.register_forward_hook(_CutModule(recorder, rule)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _CutModule:
    """After the forward pass of a module that tensor parallelism cuts."""

    def __init__(self, recorder: Recorder, rule: Any):
        self._recorder, self._rule = recorder, rule

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._rule.style == "rowwise":
            self._recorder.reduce(output)
            self._recorder.make_whole(output)
            return
        if isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            self._recorder.reduce_gradient(inputs[0])
        if self._rule.output in ("replicate", "sequence") and not makes_loss_of_part(module, self._rule):
            self._recorder.make_whole(output)


@dataclass(frozen=True)
class _Form:
    """A tensor by what is known of it without values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    said: Said | None = field(default=None, compare=False)
    """Of a mask: attention that knows this asks for no pairs."""

    @classmethod
    def of(cls, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        said = attached_documents(value)
        return cls(tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad, said)

    def new(self) -> Tensor:
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_device())
        if self.said is not None:
            attach_documents(tensor, *self.said)
        return tensor


class _Call:
    """A layer as it was called first."""

    def __init__(self, key: Any, module: nn.Module, arguments: Any, leaves: list[Any], spec: Any):
        self.key, self.module, self.arguments = key, module, arguments
        self.leaves, self.spec = leaves, spec
        self.outputs = [leaf for leaf in leaves if isinstance(leaf, _Form)]
        self.count = 0


def _tensors(values: Any) -> Iterable[Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


def _title(model: nn.Module) -> str:
    return type(model).__name__


# -- from two runs to a part -------------------------------------------------------------------------------


def _parts(settings: _Settings, batch: Callable[[int], Batch], sizes: Sequence[int]) -> list[Part]:
    """As `_Tracer.runs`."""
    tracer = _Tracer(settings)
    runs = [_runs(tracer, batch, rows) for rows in sizes]
    if any([run.key for run in each] != [run.key for run in runs[0]] for each in runs):
        raise UserError(
            f"{_title(settings.model)}: cannot be planned: it runs other layers for other sizes of a batch"
        )
    return [_part(settings.model, sizes, found) for found in zip(*runs, strict=True)]


def _part(model: nn.Module, sizes: Sequence[int], runs: Sequence[_Run]) -> Part:
    """From runs with so many rows each."""
    traces = [run.trace for run in runs]

    lines: dict[str, Any] = {
        name: Amount.through(sizes, [getattr(each, name) for each in traces])
        for name, value in vars(traces[0]).items()
        if isinstance(value, Bytes)
    }

    def summed(name: str) -> Amount:
        return Amount.through(sizes, [Bytes(sum(getattr(each, name))) for each in traces])

    few, one = runs[0], traces[0]
    return Part(
        name=few.name,
        count=few.count,
        parameters=few.parameters,
        forward=_works(model, sizes, [each.forward for each in traces]),
        backward=_works(model, sizes, [each.backward for each in traces]),
        input=Amount.through(sizes, [run.input for run in runs]),
        most_logits=one.most_logits,
        sums=one.sums,
        forward_reductions=summed("forward_reductions"),
        backward_reductions=summed("backward_reductions"),
        num_reductions=len(one.forward_reductions) + len(one.backward_reductions),
        linears=few.linears,
        **lines,
    )


def _works(model: nn.Module, sizes: Sequence[int], found: Sequence[list[Product]]) -> tuple[Work, ...]:
    if len({len(each) for each in found}) > 1:
        raise UserError(f"{_title(model)}: cannot be planned: other sizes of a batch do other operations")
    few, many = sizes[:2]
    counts: dict[tuple[Product, tuple[str, ...]], int] = {}
    for one, other in zip(*found[:2], strict=True):
        scales = tuple(
            name
            for name in ("m", "batch", "k", "n")
            if getattr(one, name) * many == getattr(other, name) * few != 0
        )
        key = replace(one, **{name: getattr(one, name) // few for name in scales}), scales
        counts[key] = counts.get(key, 0) + 1
    return tuple(Work(product, count, scales) for (product, scales), count in counts.items())
