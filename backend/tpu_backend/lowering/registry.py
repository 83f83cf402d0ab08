"""The one table from ATen operators to JAX: what a lowering is, how it is found, how dtypes are decided.

A lowering is a pure function over ``jax.Array`` values whose parameters are those of the *functional* ATen
overload, in schema order (keyword-only schema arguments are passed by keyword). In-place and ``out=``
overloads never reach this table: the recorder turns them into "functional op, then write".

What arrives for each schema type
    Tensor              jax.Array (or None where the schema allows an undefined tensor)
    Tensor[]            list of jax.Array (elements may be None for ``Tensor?[]``)
    Scalar, float, int  a Python number when static, a 0-d traced array when runtime
    ScalarType          torch.dtype (or None)
    bool, str, int[]    the Python value
    Device, Layout, MemoryFormat, Generator   always None

Two extra keyword parameters are filled in when a lowering declares them
    out: tuple[jax.ShapeDtypeStruct | None, ...]   shape and dtype that PyTorch inferred for every output,
                                                   None where undefined (``output_mask`` is False)
    key: jax.Array                                 a typed JAX PRNG key, a pure function of (seed, offset);
                                                   marks the op random; an array of keys, of offsets in a
                                                   row, where its registration says ``draws``

A parameter whose name starts with an underscore (``_self`` of ``fill_``, ``normal_``) stands for a tensor
whose contents do not matter: it arrives as None, and the old value does not become an input of the program.

Dtypes are decided here and nowhere else.  ``promote``
    "result"   cast every tensor and runtime scalar to the output dtype, computing in float32 where that is a
               16-bit float (PyTorch's opmath), to which tensors of integers are rounded first; usual for
               pointwise ops
    "inputs"   cast to ``torch.result_type`` of the tensor and scalar inputs (comparisons, whose output is
               bool), same opmath rule; what is of another dtype is rounded to a 16-bit result_type first
    "opmath"   only widen 16-bit floats to float32, leave all else alone (softmax, norms, losses, reductions)
    None       nothing is touched
and afterwards each result is cast to the dtype that PyTorch inferred for it. Without "result" or "inputs" a
runtime scalar has its natural dtype (float64, int64, bool): such a lowering casts it, or it would widen the
arithmetic.

Results come in schema order: the functional overload's returns, where ``Tensor[]`` returns may be lists (they
are flattened) and an undefined output is None. A lowering that cannot express a case which shapes, dtypes and
static arguments alone decide (a boolean mask as index) raises ``NotLoweredError``; tracing it once tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tpu_backend.lowering.kinds import KINDS, is_of_kind
from tpu_backend.lowering.platforms import PLATFORMS, lowered_for

Promote = Literal["result", "inputs", "opmath"] | None
Fit = Literal["result", "opmath", "written"]


@dataclass(frozen=True)
class CannotCompile:
    """What the compiler of a real TPU makes of a lowering: these calls run on the CPU there.

    Neither an exception nor a wrong number: XLA:TPU may end the process, so such a call must never reach it.
    """

    reason: str  # one line, as the compiler puts it
    dtypes: frozenset[str] | None = None  # with an input or output of one of these; None: every call

    def covers(self, dtypes: Collection[Any]) -> bool:
        """Whether it holds for a call whose inputs and outputs have these dtypes."""
        return self.dtypes is None or any(str(jnp.dtype(dtype)) in self.dtypes for dtype in dtypes)


NO_COMPLEX128_ON_TPU = CannotCompile(
    "aborts: Unsupported CVT X{64|128} expansion from c128", frozenset({"complex128"})
)


@dataclass(frozen=True)
class Lowering:
    """One entry of the table."""

    name: str
    function: Callable[..., Any]
    promote: Promote
    static: frozenset[str]
    runtime: frozenset[str]
    takes_out: bool
    draws: int
    """Random numbers it takes from the generator, each a (seed, offset)."""
    on_tpu: CannotCompile | None = None
    one_dtype: tuple[str, ...] = ()
    or_wider: bool = False
    fits: Mapping[str, Fit] = field(default_factory=dict, hash=False)
    on: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    """Functions that take its place, by the platform that is compiled for."""

    def compiles_on_tpu(self, dtypes: Collection[Any]) -> bool:
        """Whether the compiler of a real TPU takes a call whose inputs and outputs have these dtypes."""
        limits = (NO_COMPLEX128_ON_TPU, self.on_tpu)
        return not any(limit is not None and limit.covers(dtypes) for limit in limits)

    def takes(self, dtypes: Mapping[str, Any], result: Any, inputs: Any) -> bool:
        """Whether PyTorch takes tensor arguments of these dtypes, by name and in order, in one call.

        ``result`` is the dtype of the first output, ``inputs`` the `torch.result_type` of the arguments.
        """
        kind = KINDS.get(self.name, "any")
        first = next(iter(dtypes.values()), None)
        computed = {"result": result, "inputs": inputs}.get(self.promote or "", first)
        counted = dtypes.values() if kind == "nowhere bool" else () if computed is None else (computed,)
        if not all(is_of_kind(jnp.dtype(dtype), kind) for dtype in counted):
            return False
        given = [jnp.dtype(dtypes[name]) for name in self.one_dtype if name in dtypes]
        first, others = given[:1], set(given[1:])
        return others <= set(first) or (self.or_wider and others == {opmath(first[0])})


class NotLoweredError(NotImplementedError):
    """This case of an operator has no XLA form; the caller falls back to the CPU, or reports it."""


TABLE: dict[str, Lowering] = {}


def lowering(
    *names: str,
    promote: Promote = None,
    static: Sequence[str] = (),
    runtime: Sequence[str] = (),
    on_tpu: CannotCompile | None = None,
    draws: int | None = None,
    one_dtype: Sequence[str] = (),
    or_wider: bool = False,
    fits: Mapping[str, Fit] | None = None,
    on: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for ATen overloads, e.g. ``@lowering("add.Tensor", "add.Scalar",
    promote="result")``.

    Names omit ``aten::``; an overload without a name is written bare (``"mm"``). ``static`` and ``runtime``
    name the numeric arguments whose values are part of the program or its inputs. Undeclared: ``Scalar``
    arguments are runtime, ``float`` and ``int`` arguments are static. ``on_tpu`` says which calls
    the compiler of a real TPU does not take. ``draws``: the number of keys, where that is not one.
    ``one_dtype`` names tensor arguments (not lists) that PyTorch refuses unless they are of one dtype;
    ``or_wider``: those after the first may all be of the dtype that it is computed in.  What is refused is
    not traced: the CPU says so, in its own words. ``fits`` names numbers that PyTorch refuses at a call where
    they overflow the result's dtype, or its opmath dtype; others wrap, or become infinite. "written" is
    "result", but where ``index`` has no elements or ``pad`` adds none the number is not looked at. ``on``
    names a function to lower with instead where the program is for that platform ("tpu", "cuda" or "cpu"): a
    kernel of its own, with the same parameters and results.
    """
    if unknown := set(on or {}) - set(PLATFORMS):
        raise ValueError(f"on={sorted(unknown)}: expected platforms among {', '.join(PLATFORMS)}")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters
        for name in names:
            if name in TABLE:
                raise ValueError(f"aten::{name} has two lowerings")
            TABLE[name] = Lowering(
                name,
                function,
                promote,
                frozenset(static),
                frozenset(runtime),
                "out" in parameters,
                int("key" in parameters) if draws is None else draws,
                on_tpu,
                tuple(one_dtype),
                or_wider,
                fits or {},
                on or {},
            )
        return function

    return register


_WIDE = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.float32), jnp.dtype(jnp.float16): jnp.dtype(jnp.float32)}


def opmath(dtype: Any) -> Any:
    """The dtype PyTorch computes in for a storage dtype: float32 for 16-bit floats, else the dtype itself."""
    return _WIDE.get(jnp.dtype(dtype), jnp.dtype(dtype))


def is_16_bit(dtype: Any) -> bool:
    """Whether PyTorch computes in float32 for this dtype."""
    return jnp.dtype(dtype) in _WIDE


def stored(value: jax.Array, dtype: Any) -> jax.Array:
    """What a 16-bit tensor holds of a float32 value, still in float32; wider dtypes hold all of it.

    For kernels of PyTorch's that round on their way. No cast there and back, which XLA may leave out.
    """
    if not is_16_bit(dtype):
        return value
    bits = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(value, bits.nexp, bits.nmant)
    if dtype == jnp.bfloat16:
        return rounded
    # What is below the least normal float16 would become 0; PyTorch keeps multiples of the least of all.
    least = bits.smallest_subnormal.astype(value.dtype)
    return jnp.where(jnp.abs(value) < bits.smallest_normal, jnp.round(value / least) * least, rounded)


def converted(value: jax.Array, dtype: Any) -> jax.Array:
    """``value`` in ``dtype``. A complex number becomes its real part, but True where any of it is not 0.

    A mask becomes ones and zeros by a select: XLA turns a converted mask times y into ``select(mask, y, 0)``,
    which is 0 where PyTorch has 0 * inf = nan.
    """
    if jnp.iscomplexobj(value) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return value != 0 if dtype == jnp.bool_ else value.real.astype(dtype)
    if value.dtype != jnp.bool_ or not jnp.issubdtype(dtype, jnp.inexact):
        return value.astype(dtype)
    return jnp.where(value, jnp.ones((), dtype), jnp.zeros((), dtype))


def apply(
    entry: Lowering,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: tuple[jax.ShapeDtypeStruct | None, ...],
    compute_dtype: Any = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array | None, ...]:
    """Run one lowering under the dtype rules above.

    ``compute_dtype`` is ``torch.result_type`` of the tensor and scalar inputs (needed for promote="inputs"
    only). Raises ValueError when a result's shape is not the one PyTorch inferred.
    """
    common = compute_dtype if entry.promote == "inputs" else None
    if entry.promote == "result":
        common = next(spec.dtype for spec in out if spec is not None)

    def cast(value: Any) -> Any:
        if isinstance(value, list):
            return [cast(item) for item in value]
        if not isinstance(value, jax.Array):
            return value
        if common is None:
            return converted(value, opmath(value.dtype))
        wide = converted(value, opmath(common))
        if entry.promote == "inputs":
            is_rounded = value.dtype != common
        else:
            is_rounded = value.ndim > 0 and jnp.issubdtype(value.dtype, jnp.integer)
        return stored(wide, common) if is_rounded else wide

    if entry.promote is not None:
        args = [cast(value) for value in args]
        kwargs = {name: cast(value) for name, value in kwargs.items()}
    extra: dict[str, Any] = {}
    if entry.takes_out:
        extra["out"] = out
    if entry.draws:
        extra["key"] = key
    function = entry.on.get(lowered_for() or "", entry.function)
    results = function(*args, **kwargs, **extra)
    checked: list[jax.Array | None] = []
    for value, spec in zip(_flatten(results), out, strict=True):
        if spec is None:
            checked.append(None)
            continue
        if value is None:  # PyTorch's inference makes a tensor even where output_mask asks for none
            value = jnp.zeros(spec.shape, spec.dtype)
        value = converted(jnp.asarray(value), spec.dtype)
        if value.shape != tuple(spec.shape):
            raise ValueError(
                f"aten::{entry.name}: lowered to shape {value.shape}, PyTorch says {tuple(spec.shape)}"
            )
        checked.append(value)
    return tuple(checked)


def _flatten(results: Any) -> list[Any]:
    if isinstance(results, (tuple, list)):
        return [leaf for item in results for leaf in _flatten(item)]
    return [results]
