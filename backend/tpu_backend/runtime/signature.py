"""Signatures: what the C++ recorder knows about one form of one op, in Python's terms.

A tape is a list of words: for each entry a signature's id and the local numbers of the values it reads.
To decode a signature takes a quarter of a millisecond, so it is done once, and not where its summary will do.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import torch

from tpu_backend import _C, views
from tpu_backend.exact_key import exact_key
from tpu_backend.lowering.collectives import NAMESPACE
from tpu_backend.runtime.dtypes import TORCH_DTYPES, lowered_dtype, stored_dtype
from tpu_backend.runtime.user_line import share_first_line


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument: which slot of its buffer it shows."""

    reads: bool  # whether the entry has a link for it
    base_dims: tuple[int, ...]
    base_dtype: int
    geometry: views.Geometry | None  # None: the buffer itself
    has_offset: bool  # its offset is among the segment's
    dtype: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class RuntimeArg:
    """A number that is an input of the program."""

    is_integer: bool
    dtype: int
    wrapped: bool


@dataclass(frozen=True, eq=False)
class ConstantArg:
    """A value that is part of the program: 2, 2.0 and True are three."""

    value: Any

    def _key(self) -> Hashable:
        return exact_key(tuple(self.value) if isinstance(self.value, list) else self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantArg) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True)
class ListArg:
    items: tuple[Any, ...]


@dataclass(frozen=True)
class RepeatedArg:
    """A list whose elements are all one number."""

    length: int
    item: Any


@dataclass(frozen=True)
class Argument:
    name: str
    kwarg_only: bool
    is_out: bool
    value: Any


@dataclass(frozen=True)
class Output:
    written_arg: int  # -1: a new tensor
    element: int  # of a list; -1 outside one
    undefined: bool  # not computed (an output_mask entry that is false)
    partial: bool
    skip: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    layout_dims: tuple[int, ...]  # of the buffer's value
    layout_dtype: int
    computed: jax.ShapeDtypeStruct | None


class Summary(NamedTuple):
    """The fields of a signature that the recorder and the caches need before compilation."""

    number: int
    overload: str
    name: str
    digest: str  # of all of it: the same in every process
    outline: tuple[int, int]  # the same for forms that differ in sizes alone; of this process
    num_links: int  # values that it reads
    num_numbers: tuple[int, int, int, int]  # of a segment's floats, doubles, integers and offsets
    layouts: list[tuple[int, tuple[int, ...]]]  # dtype and dims of each value that it makes
    values: list[tuple[int, int]]  # dtype of each output, and the elements of its value

    @property
    def is_collective(self) -> bool:
        return self.name.startswith(NAMESPACE)

    @property
    def signature(self) -> Signature:
        return signature(self.number)


@dataclass(frozen=True)
class Signature:
    """One form of one op, decoded."""

    number: int
    overload: str
    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    wide: bool
    random: bool
    default_dtype: torch.dtype | None  # torch's when it was recorded; None: of the device's own entries
    compute_dtype: Any
    digest: str  # of all of it: the same in every process

    def named_leaves(self) -> Iterator[tuple[str, Any]]:
        """The tensors, numbers and constants of its arguments: ``self``, and ``tensors[1]`` of a list."""
        for argument in self.arguments:
            is_list = isinstance(argument.value, ListArg)
            for position, leaf in enumerate(leaves(argument.value)):
                yield f"{argument.name}[{position}]" if is_list else argument.name, leaf

    @property
    def ranks(self) -> list[int] | None:
        """Of a collective: the ranks of its group."""
        if not self.name.startswith(NAMESPACE):
            return None
        return next(leaf.value for name, leaf in self.named_leaves() if name == "ranks")

    def tensors(self) -> list[TensorArg]:
        """Its tensor arguments, lists taken apart."""
        return [leaf for _, leaf in self.named_leaves() if isinstance(leaf, TensorArg)]

    def described(self) -> str:
        """The call with its tensors: ``aten::mm(self=float32[2, 3], mat2=float32[3, 4])``."""
        tensors = [
            f"{argument.name}={str(TORCH_DTYPES[leaf.dtype]).removeprefix('torch.')}{list(leaf.sizes)}"
            for argument in self.arguments
            for leaf in leaves(argument.value)
            if isinstance(leaf, TensorArg)
        ]
        return f"{self.overload}({', '.join(tensors)})"


def _decode(item: tuple[Any, ...], schema_type: str) -> Any:
    kind = item[0]
    if kind == "none":
        return ConstantArg(None)
    if kind == "constant":
        value = item[1]
        if schema_type.startswith(("ScalarType", "Optional[ScalarType]")) or schema_type == "ScalarType?":
            value = TORCH_DTYPES[value]
        return ConstantArg(value)
    if kind == "runtime":
        return RuntimeArg(item[1], item[2], item[3])
    if kind == "repeated":
        return RepeatedArg(item[1], _decode(item[2], schema_type))
    if kind == "list":
        return ListArg(tuple(_decode(part, schema_type) for part in item[1]))
    _, reads, dims, base_dtype, sizes, strides, dtype, form = item
    dims = tuple(dims)
    if form == "whole":
        return TensorArg(reads, dims, base_dtype, None, False, dtype, dims)
    geometry = views.Geometry(tuple(sizes), tuple(strides), 0, stored_dtype(dtype), form == "box")
    return TensorArg(reads, dims, base_dtype, geometry, form != "dense", dtype, tuple(sizes))


def leaves(value: Any) -> Iterator[Any]:
    """The tensors, numbers and constants of an argument, lists taken apart."""
    if isinstance(value, ListArg):
        for item in value.items:
            yield from leaves(item)
    elif isinstance(value, RepeatedArg):
        yield value.item
    else:
        yield value


def _result_type(arguments: Sequence[Argument], default_dtype: torch.dtype | None) -> Any:
    """``torch.result_type`` over the tensor and number arguments of a recorded call."""
    seen: dict[Any, torch.Tensor | complex] = {}  # one example of each that counts alike
    for argument in arguments:
        if argument.is_out:
            continue
        for leaf in leaves(argument.value):
            if isinstance(leaf, TensorArg):
                kind = (leaf.dtype, bool(leaf.sizes))
                if kind not in seen:
                    seen[kind] = torch.empty((1,) * len(leaf.sizes), dtype=TORCH_DTYPES[leaf.dtype])
            elif isinstance(leaf, RuntimeArg) and leaf not in seen:
                dtype_of_number = TORCH_DTYPES[leaf.dtype]
                example = torch.empty((), dtype=dtype_of_number)
                seen[leaf] = torch.ones((), dtype=dtype_of_number).item() if leaf.wrapped else example
            elif isinstance(leaf, ConstantArg) and isinstance(leaf.value, (float, complex)):
                seen[leaf] = leaf.value
    return result_type(list(seen.values()), default_dtype)


def result_type(examples: Sequence[torch.Tensor | complex], default_dtype: torch.dtype | None) -> Any:
    """``torch.result_type`` over any number of tensors and numbers, by PyTorch's own rules; None: of none.
    It is what it would be under this default dtype (None: torch's now).
    """
    if not examples:
        return None
    tensors = [item for item in examples if isinstance(item, torch.Tensor)]
    numbers: list[Any] = [item for item in examples if not isinstance(item, torch.Tensor)]
    if not tensors:
        return lowered_dtype(_with_number(torch.empty((), dtype=torch.bool), numbers[0], default_dtype))
    total = tensors[0]
    for item in tensors[1:]:
        promoted = torch.result_type(total, item)
        total = torch.empty((1,) * max(total.dim(), item.dim()), dtype=promoted)
    for number in numbers:
        total = torch.empty((1,) * total.dim(), dtype=_with_number(total, number, default_dtype))
    return lowered_dtype(total.dtype)


# The dtype of a complex number beside exact ones, by the default dtype; by all others it is complex64.
_COMPLEX_OF = {torch.float16: torch.complex32, torch.float64: torch.complex128}


def _with_number(tensor: torch.Tensor, number: complex, default_dtype: torch.dtype | None) -> torch.dtype:
    is_exact = not (tensor.is_floating_point() or tensor.is_complex())
    if is_exact and default_dtype is not None and isinstance(number, float | complex):
        return default_dtype if isinstance(number, float) else _COMPLEX_OF.get(default_dtype, torch.complex64)
    return torch.result_type(tensor, number)


def _output(item: dict[str, Any]) -> Output:
    if item["undefined"]:
        return Output(-1, item["element"], True, False, True, (), (), 0, (), 0, None)
    return Output(
        item["written_arg"],
        item["element"],
        False,
        item["partial"],
        item["skip"],
        tuple(item["sizes"]),
        tuple(item["strides"]),
        item["dtype"],
        tuple(item["layout_dims"]),
        item["layout_dtype"],
        jax.ShapeDtypeStruct(tuple(item["computed_sizes"]), lowered_dtype(item["computed_dtype"])),
    )


_FIRST_DERIVED = 1 << 32  # above the recorder's own
_derived: dict[int, Signature] = {}  # the recorder does not know them
_derived_numbers: dict[str, int] = {}  # by digest
_lock = threading.Lock()


@cache
def summary(number: int) -> Summary:
    """The summary of the signature with this id."""
    if number >= _FIRST_DERIVED:
        return _summary_of(_derived[number])
    overload, name, identity, *rest = _C.summarize_signature(number)
    digest = hashlib.sha256(overload.encode() + b"\0" + identity).hexdigest()
    return Summary(number, overload, name, digest, *rest)


def _summary_of(entry: Signature) -> Summary:
    """The summary of a derived signature, which the recorder does not know. Nobody asks for its outline or
    its numbers.
    """
    made = [output for output in entry.outputs if not output.skip]
    num_links = sum(tensor.reads for tensor in entry.tensors()) + sum(output.partial for output in made)
    return Summary(
        entry.number,
        entry.overload,
        entry.name,
        entry.digest,
        (entry.number, 0),
        num_links,
        (0, 0, 0, 0),
        [(output.layout_dtype, output.layout_dims) for output in made],
        [(out.dtype, math.prod(out.layout_dims)) for out in entry.outputs if not out.undefined],
    )


def signature(number: int) -> Signature:
    """The decoded signature with this id."""
    return _derived[number] if number >= _FIRST_DERIVED else _decoded(number)


def add_derived(entry: Signature, origin: int) -> int:
    """The id of a signature that was made of the one with the id `origin`. Equal signatures share one id."""
    with _lock:
        number = _derived_numbers.setdefault(entry.digest, _FIRST_DERIVED + len(_derived_numbers))
        if number not in _derived:
            _derived[number] = replace(entry, number=number)
            share_first_line(number, origin)
    return number


@cache
def _decoded(number: int) -> Signature:
    known, raw = summary(number), _C.describe_signature(number)
    if known.name in ("zeros", "resize") and known.overload == known.name:
        arguments = tuple(
            Argument("source", False, False, _decode(item, "Tensor")) for item in raw["arguments"]
        )
    else:
        arguments = tuple(
            Argument(name, kwarg_only, is_out, _decode(value, schema_type))
            for name, kwarg_only, is_out, schema_type, value in raw["arguments"]
        )
    outputs = tuple(_output(item) for item in raw["outputs"])
    default_dtype = None if raw["default_dtype"] is None else TORCH_DTYPES[raw["default_dtype"]]
    return Signature(
        number,
        known.overload,
        known.name,
        arguments,
        outputs,
        raw["wide"],
        raw["random"],
        default_dtype,
        _result_type(arguments, default_dtype),
        known.digest,
    )


# Signatures whose lowering reads PyTorch's matrix product precision: the tape has it behind their id.
precision_readers: set[int] = set()


def entries(tape: Sequence[int]) -> Iterator[tuple[Signature, int | None, Sequence[int]]]:
    """The entries of a tape: each signature, the precision it was recorded with if it reads that, and the
    numbers of the values it reads.
    """
    for known, precision, links in summaries(tape):
        yield known.signature, precision, links


def summaries(tape: Sequence[int]) -> Iterator[tuple[Summary, int | None, Sequence[int]]]:
    """The entries of a tape, their signatures not decoded."""
    at = 0
    while at < len(tape):
        number, precision = tape[at], None
        at += 1
        if number in precision_readers:
            precision = tape[at]
            at += 1
        known = summary(number)
        end = at + known.num_links
        yield known, precision, tape[at:end]
        at = end
