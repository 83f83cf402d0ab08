"""What a piece of a model does, found by running it once forward and backward on tensors without values.

A compiler that sees a whole step writes few of its values to memory. So a value is one of two kinds:

- *stored*: results of matrix products, gathers, sorts, random numbers and reductions.
- *fused*: results of elementwise operations. They are computed where they are used, from the stored values
  that they come from. A fused value is written to memory if a product reads it.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tputrain import device as devices

aten = torch.ops.aten

_GROUPED = "_grouped_mm"  # of experts: each group of rows by a matrix of its own
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, _GROUPED: 0}  # and the place of the first factor
_CONVOLUTIONS = ("convolution", "convolution_backward")
_FEW_CHANNELS = 8
"""A convolution of at most so many (a TPU's tile has 8 rows) has the places of a window's last dim side by
side. With more, the matrix unit is padded for each place. The source are libtpu's cycles for ResNet-50 on v5e
with 32 rows, forward: 41 us for 3 x 3 of 256 channels, 159 for 64, 513 for 7 x 7 of 3. Here: 43, 171, 532."""
_STORED = {
    *("embedding", "embedding_dense_backward", "index", "index_put", "index_select", "index_add", "gather"),
    *("scatter", "scatter_add", "scatter_reduce", "sort", "topk", "cumsum", "native_dropout", "bernoulli"),
    *("rand", "randn", "rand_like", "randn_like", "randint", "uniform", "normal", "max_pool2d_with_indices"),
    *("upsample_nearest2d", "upsample_bilinear2d", "_fft_r2c", "_fft_c2c"),
}
_VOCABULARY_LOSS = "tpu::linear_cross_entropy"
_ATTENTION = ("_scaled_dot_product", "tpu::dropout_attention")
_LANES = 128
"""Of a TPU's vectors. A kernel of attention writes each query's log sum into all of them, and the compiler
was seen to keep them as they are."""
_IS_REDUCED = 4  # a result that is smaller than the largest input by this factor is one of a reduction


class Cut(Enum):
    """The dimension of a product that tensor parallelism divides."""

    NOT = ""
    BATCH = "batch"
    M = "m"
    K = "k"
    N = "n"


@dataclass(frozen=True)
class Product:
    """A product of (batch) matrices, m x k by k x n."""

    batch: int
    m: int
    k: int
    n: int
    cut: Cut = Cut.NOT
    has_parameter: bool = False
    itemsize: int = 4
    is_attention: bool = False
    """Part of one attention operation: its scores need not be in memory."""
    is_causal: bool = False
    is_kernel: bool = False
    """An operation of its own on a TPU, which nothing is fused into: attention whose scores are never in
    memory, products of groups."""
    is_whole: bool = False
    """Of attention whose scores are in memory all together."""
    padding: float = 1.0
    """What a kernel of attention computes, for each score that is asked for."""
    uses: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Of the factors and the result: how many of their elements, in all batches, are one in memory. A
    convolution has a batch for each place in its window, and the windows overlap."""

    @property
    def has_windows(self) -> bool:
        """Of a convolution, unless that is a product of matrices: a window of one place, without a stride."""
        return self.uses != (1.0, 1.0, 1.0)

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n


@dataclass
class Bytes:
    """On a device that has everything, and of that what tensor parallelism divides."""

    whole: float = 0.0
    cut: float = 0.0

    def add(self, num_bytes: float, is_cut: bool) -> None:
        if is_cut:
            self.cut += num_bytes
        else:
            self.whole += num_bytes

    @property
    def total(self) -> float:
        return self.whole + self.cut


@dataclass
class Trace:
    """What was found."""

    forward: list[Product] = field(default_factory=list)
    backward: list[Product] = field(default_factory=list)
    forward_traffic: Bytes = field(default_factory=Bytes)
    """Bytes that operations other than products read and write."""
    backward_traffic: Bytes = field(default_factory=Bytes)
    kept: Bytes = field(default_factory=Bytes)
    """What the backward pass needs of the forward pass, beside inputs and parameters."""
    products_kept: Bytes = field(default_factory=Bytes)
    """The results of products with parameters: what is kept if all else is computed again."""
    forward_peak: Bytes = field(default_factory=Bytes)
    backward_peak: Bytes = field(default_factory=Bytes)
    """The most that is in memory at a time, `kept` included; without inputs and gradients of parameters."""
    keys_and_values: Bytes = field(default_factory=Bytes)
    """What attention reads beside its queries: context ranks gather it."""
    held: Bytes = field(default_factory=Bytes)
    """Gradients of parameters with several uses (tied ones), which wait for the last while layers are run."""
    logits: Bytes = field(default_factory=Bytes)
    """Of a loss that makes them in blocks. They are in none of the peaks."""
    most_logits: float = 0.0
    """Bytes of a block of them, at most."""
    sums: float = 0.0
    """Bytes that the sums over such blocks, in float32, have more than the gradient of the head's weight."""
    forward_reductions: list[int] = field(default_factory=list)
    """Bytes of each all-reduce among tensor ranks."""
    backward_reductions: list[int] = field(default_factory=list)


class _Value:
    """The contents of one storage."""

    def __init__(self, num_bytes: int, made_at: int, is_cut: bool):
        self.num_bytes = num_bytes
        self.made_at = made_at
        self.gone_at: int | None = None
        self.is_cut = is_cut
        self.is_stored = False
        self.is_external = False
        self.is_parameter = False
        self.is_constant = True  # made of nothing but parameters and constants
        self.is_gradient = False  # of a parameter: it leaves at once
        self.is_product = False  # of a product with a parameter
        self.is_read = False
        self.is_of_kernel = False  # a kernel reads it, and can compute nothing by itself
        self.channels = 0  # of images, whose channels lie in the lanes of a TPU's vectors
        self.is_dropped = False  # nobody reads it: a device that records a step never computes it
        self.written: dict[bool, int] = {}  # in the forward (False) and backward pass: when first
        self.sources: set[_Value] = set()

    def as_sources(self) -> "set[_Value]":
        return {self} if self.is_stored or self.is_external else self.sources


class Recorder(TorchDispatchMode):
    """Records operations; tensors are expected to be fake."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.is_paused = False
        self._values: dict[int, _Value] = {}
        self._all: list[_Value] = []
        self._watched: list[Any] = []
        self._time = 0
        self._is_backward = False
        self._scratch: list[tuple[int, float, bool]] = []  # at a time: bytes of a moment
        self._reduced: set[int] = set()
        self._layers_at: list[int] = []
        self._made: list[tuple[list[Product], list[_Value]]] = []

    # -- what the caller says

    def external(self, tensor: Tensor, is_cut: bool = False, is_parameter: bool = False) -> None:
        """A tensor that is there anyway."""
        value = self._value(tensor)
        value.is_external = True
        value.is_cut, value.is_parameter, value.is_constant = is_cut, is_parameter, is_parameter

    def make_whole(self, tensor: Tensor) -> None:
        """From here on each tensor rank has all of it."""
        self._value(tensor).is_cut = False

    def reduce(self, tensor: Tensor) -> None:
        """It is summed over the tensor ranks."""
        reductions = self.trace.backward_reductions if self._is_backward else self.trace.forward_reductions
        reductions.append(_bytes(tensor))

    def reduce_gradient(self, tensor: Tensor) -> None:
        """Its gradient is summed over the tensor ranks, once however many modules it goes into."""
        key = id(self._value(tensor))
        if key not in self._reduced:
            self._reduced.add(key)
            self.trace.backward_reductions.append(_bytes(tensor))

    def layer_passed(self) -> None:
        """Here the backward pass runs a layer that is a part of its own."""
        self._layers_at.append(self._time)

    def run(
        self,
        forward: Callable[[], Any],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> Any:
        """Run `forward` and the backward pass of its outputs, and work out the trace."""
        with self:
            outputs = forward()
            tensors = [each for each in tree_iter(outputs) if isinstance(each, Tensor)]
            differentiable = [each for each in tensors if each.requires_grad]
            output_values = [self._value(each) for each in tensors]
            for value in output_values:
                self._write(value)
            boundary = self._time
            self._drop_unread(output_values)
            kept = [
                value
                for value in self._all
                if value.gone_at is None
                and not (value.is_external or value.is_dropped)
                and value not in output_values
            ]
            self._is_backward = True
            wanted = [each for each in (*inputs, *parameters) if each.requires_grad]
            if differentiable and wanted:
                self.is_paused = True
                gradients = [torch.empty_like(each) for each in differentiable]
                for each in gradients:
                    self.external(each)
                self.is_paused = False
                found = torch.autograd.grad(differentiable, wanted, gradients, allow_unused=True)
                first = sum(each.requires_grad for each in inputs)
                for gradient in found[first:]:
                    if gradient is not None:
                        for value in {self._value(gradient)} | self._value(gradient).sources:
                            value.is_gradient |= value.made_at > boundary
        self._work_out(kept, boundary)
        return outputs

    def _drop_unread(self, outputs: Sequence[_Value]) -> None:
        """Forget products of the forward pass whose results nobody asked for."""
        for products, values in self._made:
            # What is still there the backward pass may read: a loss that has made its gradients.
            is_gone = all(value.gone_at is not None for value in values)
            if is_gone and not any(value.is_read or value in outputs for value in values):
                for value in values:
                    value.is_dropped = True
                for product in products:
                    self.trace.forward.remove(product)

    # -- recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._time += 1
        inputs = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_iter(result) if isinstance(each, Tensor)]
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        read = [self._value(each) for each in inputs]
        products = self._products(name, args, read, outputs)
        is_cut = any(value.is_cut for value in read)
        if products:
            (self.trace.backward if self._is_backward else self.trace.forward).extend(products)
            is_cut = products[0].cut not in (Cut.NOT, Cut.K)
        is_kernel = bool(products) and products[0].is_kernel
        is_stored = bool(products) or name in _STORED
        largest = max(map(_bytes, inputs), default=0)
        fresh = []
        for each in outputs:
            if self._key(each) in self._values:
                continue  # a view, or written in place
            value = self._value(each)
            value.is_cut = is_cut
            if (channels := self._channels(name, args, inputs, each)) > 0:
                value.channels = channels
                value.num_bytes = value.num_bytes // channels * _lanes(channels)
            value.is_constant = all(other.is_constant for other in read) and not is_stored
            value.is_product = any(product.has_parameter for product in products)
            is_reduced = bool(inputs) and _bytes(each) * _IS_REDUCED <= largest
            value.is_stored = is_stored or (is_reduced and not value.is_constant)
            if not value.is_stored:
                for other in read:
                    value.sources |= other.as_sources()
            if products and products[0].is_attention and each.dtype is torch.float32 and each.dim() == 3:
                value.num_bytes = self._beside_log_sums(products[0], value.num_bytes)
            fresh.append((value, is_reduced))
        for value in read:
            value.is_read |= bool(fresh) or func._schema.is_mutable
            value.is_of_kernel |= is_kernel
        if not fresh:
            return
        if name == _VOCABULARY_LOSS:  # without blocks its weight's gradient is rounded where it is made
            for each in outputs[3:]:
                value = self._value(each)
                value.num_bytes = value.num_bytes * min(4, inputs[0].element_size()) // 4
        if products:
            self._made.append((products, [value for value, _ in fresh]))
        if is_stored:
            for value in read:
                self._write(value)
            if not products:
                self._count(sum(value.num_bytes for value, _ in fresh) * 2, is_cut)
        elif any(is_reduced for _, is_reduced in fresh):
            for value in {source for other in read for source in other.as_sources()}:
                self._count(value.num_bytes, value.is_cut)  # read once more

    def _products(
        self, name: str, args: tuple[Any, ...], read: list[_Value], outputs: list[Tensor]
    ) -> list[Product]:
        if name in _PRODUCTS:
            first = _PRODUCTS[name]
            left, right = args[first], args[first + 1]
            a, b = self._value(left), self._value(right)
            *batch, m, k = left.shape
            if batch:
                cut = Cut.BATCH if a.is_cut or b.is_cut else Cut.NOT
            elif a.is_cut and b.is_cut:
                cut = Cut.K
            else:
                cut = Cut.M if a.is_cut else Cut.N if b.is_cut else Cut.NOT
            has_parameter = self._is_of_parameter(a) or self._is_of_parameter(b)
            n = right.shape[-1]
            is_kernel = name == _GROUPED and not left.dim() == right.dim() == 3
            if is_kernel:
                batch = []  # groups, which share the rows, the columns or what is summed over
            return [
                Product(prod(batch), m, k, n, cut, has_parameter, left.element_size(), is_kernel=is_kernel)
            ]
        if name in _CONVOLUTIONS:
            return self._convolution(name, args, outputs)
        if name.startswith(_ATTENTION):
            return self._attention(name, args)
        if name == _VOCABULARY_LOSS:
            return self._vocabulary_loss(args)
        return []

    def _channels(self, name: str, args: tuple[Any, ...], inputs: list[Tensor], output: Tensor) -> int:
        """Of images that an operation makes; 0: it makes none."""
        if name in _CONVOLUTIONS:
            is_image = name == "convolution" or output.shape == args[1].shape
            return output.shape[1] if is_image else 0
        for each in inputs:
            channels = self._value(each).channels
            if channels > 0 and each.dim() == output.dim() and each.shape[:2] == output.shape[:2]:
                return channels if output.shape[1] == channels else 0
        return 0

    def _is_of_parameter(self, value: _Value) -> bool:
        return value.is_constant and (value.is_parameter or any(each.is_parameter for each in value.sources))

    @staticmethod
    def _convolution(name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> list[Product]:
        """The product of the forward pass, or of each gradient that is asked for.

        A window lies on the input, in a transposed convolution on the output ("unfolded" here). The other
        side has one pixel for each window.
        """
        is_forward = name == "convolution"
        if is_forward:
            given, weight, result = args[0], args[1], outputs[0]
            is_transposed, groups = args[6], args[8]
        else:
            result, given, weight = args[:3]
            is_transposed, groups = args[7], args[9]
        unfolded, other = (result, given) if is_transposed else (given, result)
        windows = other.shape[0] * prod(other.shape[2:])
        pixels = unfolded.shape[0] * prod(unfolded.shape[2:])
        places = prod(weight.shape[2:])
        narrow, wide = weight.shape[1], weight.shape[0] // groups  # channels of a group: unfolded, other
        beside = weight.shape[-1] if narrow <= _FEW_CHANNELS else 1
        times, size = places // beside, narrow * beside
        overlap = places * windows / pixels
        to_other = Product(
            *(groups * times, windows, size, wide),
            has_parameter=True,
            itemsize=weight.element_size(),
            uses=(overlap, 1.0, float(times)),
        )
        to_unfolded = replace(to_other, k=wide, n=size, uses=(float(times), 1.0, overlap))
        of_weight = replace(to_other, m=size, k=windows, uses=(overlap, float(times), 1.0))
        if is_forward:
            return [to_unfolded if is_transposed else to_other]
        of_input = to_other if is_transposed else to_unfolded
        return [each for each, is_wanted in zip((of_input, of_weight), args[10][:2]) if is_wanted]

    def _attention(self, name: str, args: tuple[Any, ...]) -> list[Product]:
        is_backward = name.endswith("backward")
        query, key, value = args[1:4] if is_backward else args[:3]
        batch, heads, length, features = query.shape
        is_cut = any(self._value(each).is_cut for each in (query, key, value))
        if not is_backward:
            self.trace.keys_and_values.add(_bytes(key) + _bytes(value), is_cut)
        is_causal = any(each is True for each in args)
        cut, size, keys = Cut.BATCH if is_cut else Cut.NOT, batch * heads, key.shape[2]
        mask = args[4 if is_backward else 3]
        most, has_dropout = None, "dropout" in name
        if has_dropout or "efficient" in name:
            most = devices.attention_scores(query, key, value, mask, has_dropout)
        scores = Product(
            *(size, length, features, keys, cut, False, query.element_size(), True, is_causal),
            is_kernel=most == 0,
            is_whole=most is None,
            padding=1.0 if most != 0 else prod(devices.padded_length(n) / n for n in (length, keys)),
        )
        mixed = replace(scores, k=keys, n=value.shape[3])
        if most != 0:  # values like any other: float32, and as many again
            count = 3 if is_backward else 2
            in_memory, is_divided = (size * length * keys, is_cut) if most is None else (most, False)
            self._scratch.append((self._time, 4.0 * count * in_memory, is_divided))
            self._count(4.0 * (2 * count + 1) * size * length * keys, is_cut)
        return [scores, scores, mixed, mixed, mixed] if is_backward else [scores, mixed]

    @staticmethod
    def _beside_log_sums(scores: Product, num_bytes: int) -> int:
        """Bytes that attention keeps for its backward pass beside what it reads and its results.

        Scores that are in memory together are computed once: the compiler takes the softmax of the forward
        pass for that of the backward pass.
        """
        if scores.is_kernel:
            return num_bytes * _LANES
        return num_bytes + scores.batch * scores.m * scores.n * scores.itemsize * scores.is_whole

    def _vocabulary_loss(self, args: tuple[Any, ...]) -> list[Product]:
        """Logits, and the gradients that are asked for: the forward pass computes them, too."""
        hidden, weight, wanted = args[0], args[1], args[6]
        (tokens, features), classes, itemsize = hidden.shape, weight.shape[0], hidden.element_size()
        self.trace.logits.add(itemsize * tokens * classes, False)
        self.trace.most_logits += itemsize * devices.logits_of_loss(hidden, weight, wanted[1])
        products = [Product(1, tokens, features, classes, has_parameter=True, itemsize=itemsize)]
        if wanted[0]:
            products.append(Product(1, tokens, classes, features, has_parameter=True, itemsize=itemsize))
        if wanted[1]:
            products.append(Product(1, classes, tokens, features, itemsize=itemsize))
            self.trace.sums += max(0, 4 - itemsize) * classes * features
        return products

    def _write(self, value: _Value) -> None:
        """A product reads this value: it is in memory from here on."""
        is_there = value.is_stored or value.is_external or value.is_constant
        if is_there or self._is_backward in value.written:
            return
        value.written[self._is_backward] = self._time
        self._count(value.num_bytes, value.is_cut)
        for source in value.sources:
            self._count(source.num_bytes, source.is_cut)

    def _count(self, num_bytes: float, is_cut: bool) -> None:
        (self.trace.backward_traffic if self._is_backward else self.trace.forward_traffic).add(
            num_bytes, is_cut
        )

    def _key(self, tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _value(self, tensor: Tensor) -> _Value:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._values.get(key)
        if found is None:
            found = _Value(_bytes(tensor), self._time, False)
            self._values[key] = found
            self._all.append(found)

            def forget(_: Any, value: _Value = found, key: int = key) -> None:
                value.gone_at = self._time
                if self._values.get(key) is value:
                    del self._values[key]

            self._watched.append(weakref.ref(storage, forget))
        return found

    # -- what follows from it

    def _work_out(self, alive: list[_Value], boundary: int) -> None:
        chosen = _kept(alive)
        for value in chosen:
            self.trace.kept.add(value.num_bytes, value.is_cut)
        for value in self._all:
            if value.is_product and value.made_at <= boundary and not value.is_dropped:
                self.trace.products_kept.add(value.num_bytes, value.is_cut)
        for value in self._waiting(boundary):
            self.trace.held.add(value.num_bytes, value.is_cut)
        changes: list[tuple[int, float, bool]] = []

        def occupy(value: _Value, first: int, last: int) -> None:
            changes.append((first, value.num_bytes, value.is_cut))
            changes.append((last, -value.num_bytes, value.is_cut))

        end = self._time + 1
        for value in self._all:
            if value.is_external or value.is_gradient or value.is_dropped:
                continue
            gone = end if value.gone_at is None else value.gone_at
            if value in chosen:
                begins = value.made_at if value.is_stored else value.written.get(False, boundary)
                occupy(value, begins, max(gone, boundary + 1))
            elif value.is_stored:
                occupy(value, value.made_at, gone)
            else:  # written where a product reads it, in each pass anew
                for is_backward, begins in value.written.items():
                    occupy(value, begins, gone if is_backward else min(gone, boundary))
        for moment, num_bytes, is_cut in self._scratch:
            changes.append((moment, num_bytes, is_cut))
            changes.append((moment + 1, -num_bytes, is_cut))
        self.trace.forward_peak = _peak(changes, 0, boundary)
        self.trace.backward_peak = _peak(changes, boundary, end)

    def _waiting(self, boundary: int) -> set[_Value]:
        """What the backward pass made before all layers and reads behind them.

        A fused value is computed where it is read: its sources wait.
        """
        if not self._layers_at:
            return set()
        first, last = self._layers_at[0], self._layers_at[-1]
        found: set[_Value] = set()
        for value in self._all:
            if boundary < value.made_at <= first and value.gone_at is not None and value.gone_at > last:
                found |= {each for each in value.as_sources() if not each.is_external}
        return found


def _kept(alive: list[_Value]) -> set[_Value]:
    """What has to stay so that all of `alive` is there, or can be computed, in the backward pass.

    A fused value is computed again if all that it comes from stays anyway; else it stays itself, in its own
    dtype, as the TPU's compiler was seen to do (the float32 softmax of bfloat16 scores). What a kernel reads
    stays, too.
    """
    chosen = {value for value in alive if value.is_stored or value.is_of_kernel}
    for place, value in enumerate(alive):
        if value in chosen or value.is_constant:
            continue
        if all(source.is_external or source in chosen for source in value.sources):
            continue
        chosen.add(value)
        # What is computed from it later can be computed from it again.
        for other in alive[place + 1 :]:
            if not other.is_stored and value.sources <= other.sources:
                other.sources = (other.sources - value.sources) | {value}
    return chosen


def _peak(changes: list[tuple[int, float, bool]], first: int, last: int) -> Bytes:
    """The most bytes at a time from `first` to before `last`."""
    now, most = Bytes(), Bytes()
    # At one moment what comes is there before what goes.
    for moment, num_bytes, is_cut in sorted(changes, key=lambda each: (each[0], each[1] < 0)):
        if moment >= last:
            break
        now.add(num_bytes, is_cut)
        if moment >= first and now.total > most.total:
            most = Bytes(now.whole, now.cut)
    return most


def _lanes(channels: int) -> int:
    """With the lanes that stay empty: libtpu's layout of ResNet-50 on v5e with 32 rows. With 128 rows it puts
    the batch in the lanes, and this counts too much.
    """
    return -(-channels // _LANES) * _LANES


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
