"""``_foreach_*``: a single-tensor entry of the table applied to every element of the lists.

Recording one entry for a whole list of parameters costs less than one an element; the program is the same.
Lists (``Tensor[]``, ``Scalar[]``) are walked together, all other arguments go to every element.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_backend.lowering.registry import TABLE, NotLoweredError, apply, lowering


def _each(single: str):
    entry = TABLE[single]

    def foreach(*args, out, **kwargs):
        results = []
        for i, spec in enumerate(out):
            args_of_one = [
                argument[i] if isinstance(argument, (list, tuple)) else argument for argument in args
            ]
            results.extend(apply(entry, args_of_one, kwargs, (spec,)))
        return results

    return foreach


# fmt: off
_UNARY = [
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac",
    "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign",
    "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "clone", "zero", "max",
]
# fmt: on
for _name in _UNARY:
    lowering(f"_foreach_{_name}")(_each(_name))

for _name in ("add", "sub", "mul", "div"):
    lowering(f"_foreach_{_name}.List", fits=TABLE[f"{_name}.Tensor"].fits)(_each(f"{_name}.Tensor"))
    lowering(f"_foreach_{_name}.Scalar", f"_foreach_{_name}.ScalarList")(_each(f"{_name}.Scalar"))
    if _name != "sub":
        lowering(f"_foreach_{_name}.Tensor", fits=TABLE[f"{_name}.Tensor"].fits)(_each(f"{_name}.Tensor"))

for _name, _single in {
    "clamp_min": "maximum",
    "maximum": "maximum",
    "clamp_max": "minimum",
    "minimum": "minimum",
}.items():
    lowering(
        f"_foreach_{_name}.List",
        f"_foreach_{_name}.Scalar",
        f"_foreach_{_name}.ScalarList",
        fits={"scalar": "result", "scalars": "result"},
    )(_each(_single))

lowering("_foreach_pow.List")(_each("pow.Tensor_Tensor"))
lowering("_foreach_pow.Scalar", "_foreach_pow.ScalarList", static=("exponent",))(_each("pow.Tensor_Scalar"))
lowering("_foreach_pow.ScalarAndTensor")(_each("pow.Scalar"))
lowering("_foreach_lerp.List")(_each("lerp.Tensor"))
lowering("_foreach_lerp.Scalar", "_foreach_lerp.ScalarList", fits=TABLE["lerp.Scalar"].fits)(
    _each("lerp.Scalar")
)


def _with_value(single: str):
    """addcmul and addcdiv take their scale positionally here, by keyword there."""
    entry = TABLE[single]

    def foreach(self, tensor1, tensor2, value=1, *, out):
        def of(i):  # one scalar for all, or a list of them
            return value[i] if isinstance(value, (list, tuple)) else value

        if any(tensor.dtype == jnp.bool_ for tensor in self):
            raise NotLoweredError("tensors of bool: PyTorch refuses them, in its own words on the CPU")
        return [
            apply(entry, tensors, {"value": of(i)}, (out[i],))
            for i, tensors in enumerate(zip(self, tensor1, tensor2, strict=True))
        ]

    return foreach


for _name in ("addcmul", "addcdiv"):
    lowering(
        f"_foreach_{_name}.Scalar",
        f"_foreach_{_name}.ScalarList",
        fits={"value": "opmath", "scalars": "opmath"},
    )(_with_value(_name))


@lowering("_foreach_norm.Scalar", static=("ord",))
def foreach_norm(self, ord=2, dtype=None, *, out):
    entry = TABLE["linalg_vector_norm"]
    return [apply(entry, [tensor, ord], {}, (spec,)) for tensor, spec in zip(self, out, strict=True)]
