"""What a training step of a model asks for: products, bytes kept, parameters; by part of the model.

A part is a repeated layer (the elements of a ModuleList that are alike count as one, which is run once), or
the rest. It is run on tensors without values, for two sizes of batch: all else follows on a straight line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from tputrain.parallel.slices import divides
from tputrain.parallel.tensor_plan import check_divides, makes_loss_of_part, matched_rules
from tputrain.parallel.tracing import Bytes, Cut, Product, Recorder, Trace
from tputrain.user_code import error_summary, line_of

ROWS = (2, 3)  # of the two runs; with one row, sizes of 1 would be taken for broadcasts
TILE_ROWS = 8
"""Of a TPU's tile in 32 bits, which has 128 columns: products pad to it, and several shards share one."""
CONTEXT_DEGREES = (2, 4, 8, 16)
SQUARE_ROWS = (1024, 1536, 2048)
"""Of the three runs of a model that compares rows with rows, so many that what grows with their square is
part of the peaks."""
_DEVICE = torch.device("tpu", 0)  # of tensors without values: PyTorch treats them as those of a run


@dataclass(frozen=True)
class Amount:
    """Bytes on a device, as they follow from its rows of the batch and from tensor parallelism."""

    fixed: float = 0.0
    fixed_cut: float = 0.0
    row: float = 0.0
    row_cut: float = 0.0
    square: float = 0.0
    """Of each pair of rows: the scores of a loss that compares them."""

    def at(self, rows: float, tensor: int) -> float:
        line = self.fixed + self.fixed_cut / tensor + rows * (self.row + self.row_cut / tensor)
        return line + rows**2 * self.square

    def plus(self, other: "Amount") -> "Amount":
        return Amount(
            self.fixed + other.fixed,
            self.fixed_cut + other.fixed_cut,
            self.row + other.row,
            self.row_cut + other.row_cut,
            self.square + other.square,
        )

    @classmethod
    def through(cls, rows: Sequence[int], found: Sequence[Bytes]) -> "Amount":
        """The line through what was found with two numbers of rows, the parabola with three."""
        (first, second), (few, many) = rows[:2], found[:2]
        span = second - first
        square = 0.0
        if len(rows) > 2:  # as far apart
            square = max(0.0, (found[2].total - 2 * many.total + few.total) / (2 * span**2))
        row = (many.whole - few.whole) / span - square * (first + second)
        row_cut = (many.cut - few.cut) / span
        fixed, fixed_cut = few.whole - first * row - first**2 * square, few.cut - first * row_cut
        return cls(max(fixed, 0.0), max(fixed_cut, 0.0), row, row_cut, square)


@dataclass(frozen=True)
class Work:
    """Products of one shape, with one row of the batch."""

    product: Product
    count: int
    scales: tuple[str, ...]
    """The dimensions that are as many times larger with more rows, of batch, m, k, n. Two where rows are
    compared with rows."""

    def sizes(self, rows: float, tensor: int) -> tuple[float, float, float, float]:
        """batch, m, k, n on a device."""
        product = self.product
        found: dict[str, float] = {
            "batch": product.batch,
            "m": product.m,
            "k": product.k,
            "n": product.n,
        }
        for name in self.scales:
            found[name] *= rows
        if product.cut is not Cut.NOT:
            found[product.cut.value] /= tensor
        return found["batch"], found["m"], found["k"], found["n"]

    def flops(self, rows: float) -> float:
        """Of all devices that share the rows."""
        return self.product.flops * self.count * rows ** len(self.scales)


@dataclass(frozen=True)
class Matrix:
    """A parameter of two dims."""

    rows: int
    elements: int
    cut: int | None
    """The dim that tensor ranks divide."""
    is_hidden: bool = False
    """Whether Muon would step it: it is trained, and between the embeddings and the output."""

    def rows_among(self, tensor: int) -> float:
        """Of a tensor rank."""
        return self.rows / tensor if self.cut == 0 else self.rows


@dataclass(frozen=True)
class Parameters:
    """Of a part, once. Numbers of elements."""

    whole: int = 0
    cut: int = 0
    trained_whole: int = 0
    trained_cut: int = 0
    largest: int = 0
    """Elements of the largest one."""
    itemsize: int = 4
    matrices: tuple[Matrix, ...] = ()

    def in_thin_shards(self, shards: int, tensor: int, itemsize: float) -> float:
        """Elements, on a tensor rank, of matrices whose shards by rows have fewer of them than a tile; by the
        share of the tile that they leave empty. `itemsize`: as they are gathered; in 16 bits a tile has twice
        as many rows.
        """
        if shards == 1:
            return 0.0
        tile = 4 * TILE_ROWS / itemsize
        return sum(
            each.elements
            / (1 if each.cut is None else tensor)
            * max(0.0, 1 - each.rows_among(tensor) / shards / tile)
            for each in self.matrices
        )

    def count(self, tensor: int) -> float:
        return self.whole + self.cut / tensor

    def trained(self, tensor: int) -> float:
        return self.trained_whole + self.trained_cut / tensor


@dataclass(frozen=True)
class Part:
    """A repeated layer, or (count 1) what is in none."""

    name: str
    count: int
    parameters: Parameters
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    forward_traffic: Amount
    backward_traffic: Amount
    input: Amount
    kept: Amount
    products_kept: Amount
    forward_peak: Amount
    backward_peak: Amount
    keys_and_values: Amount
    """Of attention, as much as a rank's own rows have."""
    held: Amount
    """While layers go backward."""
    logits: Amount
    most_logits: float
    sums: float
    """What `Trace.sums` says: there where the loss goes over blocks."""
    forward_reductions: Amount
    """Bytes that are all-reduced among tensor ranks."""
    backward_reductions: Amount
    num_reductions: int
    linears: tuple[tuple[str, int, int], ...]
    """Names of its Linear modules, with their inputs and outputs."""


@dataclass(frozen=True)
class Workload:
    """A model and its batch."""

    name: str
    parts: tuple[Part, ...]
    """Layers, and last the rest."""
    sequence: int | None
    """Tokens of a row, where rows are text."""
    tensor_degrees: tuple[int, ...]
    """Degrees that divide the layers; (1,) without a plan for cutting them."""
    context_degrees: tuple[int, ...] = (1,)
    """Degrees that plans choose among; (1,) for a model of which it is not known that it takes parts of a
    sequence."""
    whole_rest: Part | None = None
    """The rest without tensor parallelism, where that changes what it does: a head that is cut makes the
    logits of its part, one that is not may make the loss of blocks."""

    def parts_among(self, tensor: int) -> tuple[Part, ...]:
        """Layers, and last the rest, as so many tensor ranks run them."""
        if tensor > 1 or self.whole_rest is None:
            return self.parts
        return (*self.parts[:-1], self.whole_rest)

    @cached_property
    def num_parameters(self) -> int:
        return sum(part.count * (part.parameters.whole + part.parameters.cut) for part in self.parts)

    def model_flops(self, rows: float) -> float:
        """FLOPs that the model asks for, as `tputrain.metrics.flops` counts: attention in full, and nothing
        that is computed again."""
        total = 0.0
        for part in self.parts:
            forward = sum(work.flops(rows) for work in part.forward)
            backward = sum(work.flops(rows) for work in part.backward)
            total += part.count * (forward + min(backward, 2 * forward))
        return total


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
    takes_parts = loss_fn is None and getattr(model, "takes_parts", False)
    return Workload(
        name or type(model).__name__,
        tuple(parts),
        sequence,
        tensor.degrees,
        _context_degrees(sequence) if sequence is not None and takes_parts else (1,),
        whole_rest,
    )


def _context_degrees(*lengths: int) -> tuple[int, ...]:
    """Those whose ranks have stretches of whole blocks of an attention kernel, for sequences of any of these
    lengths.
    """

    def is_whole(length: int, degree: int) -> bool:
        stretch = length // (2 * degree)
        return divides(length, degree) and devices.padded_length(stretch) == stretch

    return (1, *(each for each in CONTEXT_DEGREES if lengths and all(is_whole(n, each) for n in lengths)))


def for_lengths(workload: Workload, lengths: Sequence[int]) -> Workload:
    """With the context degrees that its batches take, whose rows may have any of these lengths. None: they
    are not known.
    """
    fitting = _context_degrees(*lengths)
    return replace(workload, context_degrees=tuple(n for n in workload.context_degrees if n in fitting))


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
            None if each is None else torch.empty(each[0], dtype=each[1], device=_DEVICE)
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
        given = batch_of.to_device(tree_map(self._fake, batch), _DEVICE)
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
            _DEVICE.type,
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
            fake = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=_DEVICE)
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
                    inputs.append(torch.empty((), device=_DEVICE, requires_grad=True))
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
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_DEVICE)
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
