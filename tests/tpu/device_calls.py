"""Calls of lowerings that no database of PyTorch's makes, or that only the device makes: written down here.

Each is run on the device, on whatever it stands for; the shapes that its lowering then gets are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tpu.call import LOWERINGS, Call, is_shape, shape_of
from tpu_backend.lowering import Lowering, registry

aten = torch.ops.aten

_POLYNOMIALS = [
    f"special_{name}"
    for name in (
        "chebyshev_polynomial_t",
        "chebyshev_polynomial_u",
        "chebyshev_polynomial_v",
        "chebyshev_polynomial_w",
        "hermite_polynomial_h",
        "hermite_polynomial_he",
        "laguerre_polynomial_l",
        "legendre_polynomial_p",
        "shifted_chebyshev_polynomial_t",
        "shifted_chebyshev_polynomial_u",
        "shifted_chebyshev_polynomial_v",
        "shifted_chebyshev_polynomial_w",
    )
]


def _values(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Between 0.1 and 0.9."""
    return (torch.rand(*sizes, device="tpu") * 0.8 + 0.1).to(dtype)


def _integers(*sizes: int, below: int = 4) -> Tensor:
    return torch.randint(0, below, sizes, device="tpu")


def _mask(*sizes: int) -> Tensor:
    return torch.rand(*sizes, device="tpu") > 0.5


def bits() -> Iterator[Tensor]:
    x, shift = _integers(4, 5), _integers(4, 5)
    for name in ("__lshift__", "__rshift__"):
        yield getattr(aten, name).Scalar(x, 2)
        yield getattr(aten, name).Tensor(x, shift)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        yield getattr(aten, name).Scalar(x, 3)
        yield getattr(aten, name).Scalar_Tensor(3, x)
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        yield getattr(aten, name).Scalar_Tensor(3, shift)
        yield getattr(aten, name).Tensor_Scalar(x, 2)


def numbers_beside_tensors() -> Iterator[Tensor]:
    x, order = _values(4, 5), _integers(4, 5)
    for name in _POLYNOMIALS:
        yield getattr(aten, name).n_scalar(x, 3)
        yield getattr(aten, name).x_scalar(0.5, order.float())
    for name in ("special_xlog1py", "special_zeta"):
        yield getattr(aten, name).other_scalar(x + 1, 1.5)
        yield getattr(aten, name).self_scalar(1.5, x)
    yield aten.xlogy.Scalar_Other(x, 0.5)
    yield aten.xlogy.Scalar_Self(0.5, x)
    yield aten.copysign.Scalar(x, -1.0)
    yield aten.div.Scalar_mode(x, 0.3, rounding_mode="floor")
    yield aten.floor_divide.Scalar(x, 0.3)
    yield aten.fmod.Scalar(x, 0.3)
    yield aten.remainder.Scalar_Tensor(2.0, x)
    yield aten.clamp_max(x, 0.5)
    yield aten.fill.Tensor(x, torch.tensor(2.0, device="tpu"))
    yield aten.isin.Scalar_Tensor(2, order)
    yield aten.isin.Tensor_Scalar(order, 2)
    edges = torch.arange(4.0, device="tpu")
    yield aten.bucketize.Scalar(2.5, edges)
    yield aten.searchsorted.Scalar(edges, 2.5)


def reductions() -> Iterator[Any]:
    x, mask = _values(4, 5), _mask(4, 5)
    yield aten._is_all_true(mask)
    yield aten._is_any_true(mask)
    yield aten.all.dims(mask, [0, 1])
    yield aten.any.dims(mask, [0, 1])
    yield aten.count_nonzero.dim_IntList(x, [1])
    yield aten._logcumsumexp.out(x, 1, out=torch.empty_like(x))
    yield aten.conj_physical(
        x.to(torch.complex64), out=torch.empty(4, 5, dtype=torch.complex64, device="tpu")
    )
    yield aten.linalg__powsum(x, 2.0, [1])
    yield aten.norm.Scalar(x)
    yield aten.norm.ScalarOpt_dtype(x, 2.0, dtype=torch.float32)
    yield aten.norm.ScalarOpt_dim_dtype(x, 2.0, [1], False, dtype=torch.float32)
    yield aten.sort.stable(x, stable=True)
    yield aten._masked_softmax(_values(2, 2, 4, 5), _mask(2, 2, 4, 5), 3, 2)
    yield aten._masked_scale(x, mask, 2.0)


def lists() -> Iterator[Any]:
    some, others = [_values(3, 2), _values(4)], [_values(3, 2), _values(4)]
    number, numbers = torch.tensor(2.0, device="tpu"), [0.5, 1.5]
    for name in ("add", "sub", "mul", "div", "clamp_max", "clamp_min", "maximum", "minimum", "pow"):
        yield getattr(aten, f"_foreach_{name}").ScalarList(some, numbers)
    for name in ("add", "mul", "div"):
        yield getattr(aten, f"_foreach_{name}").Tensor(some, number)
    for name in ("addcdiv", "addcmul"):
        yield getattr(aten, f"_foreach_{name}").ScalarList(some, others, others, numbers)
    yield aten._foreach_lerp.ScalarList(some, others, numbers)
    yield aten._foreach_pow.ScalarAndTensor(2.0, some)
    yield aten._stack([_values(3), _values(3)])


def steps() -> Iterator[Any]:
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        weight = nn.Parameter(_values(4, 3))
        weight.grad = _values(4, 3)
        yield kind([weight], lr=torch.tensor(0.1, device="tpu"), fused=True).step()
    scaler = torch.amp.GradScaler("tpu")
    weight = nn.Parameter(_values(4, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(optimizer)
    yield scaler.update()


def products() -> Iterator[Any]:
    a, b = _values(4, 5, dtype=torch.bfloat16), _values(5, 8, dtype=torch.bfloat16)
    yield aten.mm.dtype(a, b, torch.float32)
    yield aten.bmm.dtype(a[None], b[None], torch.float32)
    yield aten.addmm.dtype(_values(4, 8), a, b, torch.float32)
    yield aten._addmm_activation(_values(8), _values(4, 5), _values(5, 8))
    yield aten._int_mm(_integers(32, 16).to(torch.int8), _integers(16, 8).to(torch.int8))
    ends = torch.tensor([16, 32], dtype=torch.int32, device="tpu")
    yield F.grouped_mm(
        _values(32, 16, dtype=torch.bfloat16), _values(2, 16, 16, dtype=torch.bfloat16), offs=ends
    )
    yield aten._cholesky_solve_helper(_values(3, 2), torch.eye(3, device="tpu"), False)
    yield torch.linalg.lstsq(_values(5, 3), _values(5, 2))


def layers() -> Iterator[Any]:
    x = _values(2, 3, 8).requires_grad_()
    for kind in (nn.LSTMCell, nn.GRUCell):
        cell = kind(4, 5).to("tpu")
        state = cell(_values(2, 4))
        yield (state[0] if isinstance(state, tuple) else state).sum().backward()
    weight, bias, mean, variance = (_values(3) for _ in range(4))
    yield aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
    yield aten._native_batch_norm_legit_no_training(x, weight, bias, mean, variance, 0.1, 1e-5)
    yield aten._batch_norm_no_update(x, weight, bias, mean, variance, 0.1, 1e-5)
    norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)).to("tpu")
    yield norm(_values(2, 4)).sum().backward()
    yield aten.native_dropout(x.detach(), 0.5, True)
    yield aten.affine_grid_generator(_values(1, 2, 3), [1, 1, 4, 4], False)
    image = _values(1, 2, 6, 6).requires_grad_()
    yield nn.Conv2d(2, 3, 3).to("tpu")(image).sum().backward()
    for mode in ("bicubic", "lanczos"):
        yield F.interpolate(image, size=(4, 4), mode=mode, antialias=True).sum().backward()
    volume = _values(1, 2, 4, 4, 4).requires_grad_()
    for mode in ("nearest", "nearest-exact"):
        yield F.interpolate(image, size=(4, 4), mode=mode).sum().backward()
        yield F.interpolate(volume, size=(3, 3, 3), mode=mode).sum().backward()
    table = _values(6, 4).requires_grad_()
    words, bags = _integers(5), torch.tensor([0, 2], device="tpu")
    yield F.embedding_bag(words, table, bags, mode="sum").sum().backward()
    yield aten._embedding_bag_forward_only(table.detach(), words, bags)
    yield aten.embedding_renorm(table.detach(), words, 1.0, 2.0)


def indices() -> Iterator[Any]:
    x, positions, mask = _values(4, 5), _integers(3), _mask(4, 5)
    yield aten._unsafe_index.Tensor(x, [positions])
    yield aten._unsafe_index_put(x, [positions], _values(3, 5))
    yield aten._index_put_impl(x, [positions], _values(3, 5))
    yield aten.scatter.value_reduce(x, 0, _integers(2, 5), 2.0, reduce="multiply")
    yield torch.nonzero(mask)
    yield torch.nonzero_static(mask, size=6)
    yield x[mask]
    yield x[:, mask[0]]
    yield x[mask[:, 0]]
    yield torch.bincount(positions)
    yield torch.unique(positions, return_counts=True)
    yield torch.unique(_integers(4, 3), dim=0)
    yield torch.repeat_interleave(x, _integers(4), dim=0)
    yield torch.where(mask)
    entries = torch.tensor([[0, 1, 1], [2, 0, 2]], device="tpu")
    matrix = torch.sparse_coo_tensor(entries, _values(3), (2, 3), is_coalesced=True)
    yield matrix.to_sparse_csr().to_sparse_coo()


def ranges() -> Iterator[Any]:
    out, square = torch.empty(0, device="tpu"), torch.empty(0, 0, device="tpu")
    begin, end = (torch.tensor(value, device="tpu") for value in (0.0, 1.0))
    yield torch.arange(0, 5, out=out)
    yield torch.range(0, 5, device="tpu")
    yield torch.range(0, 5, 0.5, device="tpu")
    yield torch.range(0, 5, out=out.clone())
    for name in ("linspace", "logspace"):
        make = getattr(torch, name)
        yield make(0.0, 1.0, 5, out=torch.empty(5, device="tpu"))
        yield make(begin, 1.0, 5, out=torch.empty(5, device="tpu"))
        yield make(begin, end, 5, out=torch.empty(5, device="tpu"))
        yield make(0.0, end, 5, out=torch.empty(5, device="tpu"))
        yield make(0.0, end, 5, device="tpu")
    yield torch.eye(3, out=square)
    yield torch.eye(3, 4, out=torch.empty(0, 0, device="tpu"))
    for name in ("tril_indices", "triu_indices"):
        yield getattr(torch, name)(3, 4, device="tpu")
        yield getattr(aten, name).out(3, 4, out=_integers(2, 0))
    yield _values(3, 4).t().clone()


def graphs() -> Iterator[Any]:
    """What the device takes apart, and a compiled graph does not."""
    repeats, end = torch.tensor([2, 1, 3], device="tpu"), torch.tensor(1.0, device="tpu")
    calls: list[Callable[[], Any]] = [
        lambda: aten.linspace.Scalar_Tensor(0.0, end, 5, device="tpu"),
        lambda: aten.logspace.Scalar_Tensor(0.0, end, 5, device="tpu"),
        lambda: aten.randperm(6, device="tpu"),
        lambda: aten.range.step(0, 5, 1, device="tpu"),
        lambda: aten.repeat_interleave.Tensor(repeats, output_size=6),
    ]
    for call in calls:
        yield torch.compile(call, backend="tpu")()


def random() -> Iterator[Any]:
    x = _values(4, 5)
    yield aten.bernoulli.Tensor(x, x)
    yield torch.binomial(x * 10 // 1, x)
    yield torch.poisson(x)
    yield aten._standard_gamma(x)
    yield aten._sample_dirichlet(x)
    yield torch.normal(x, 2.0)
    yield torch.normal(2.0, x)
    yield x.random_()
    yield x.random_(5)
    yield x.random_(2, 5)
    yield torch.randperm(6, device="tpu")
    yield torch.randperm(6, device="tpu", generator=torch.Generator("tpu"))
    yield torch.randperm(6, out=torch.empty(6, dtype=torch.int64, device="tpu"))


GROUPS: tuple[Callable[[], Iterator[Any]], ...] = (
    bits,
    numbers_beside_tensors,
    reductions,
    lists,
    steps,
    products,
    layers,
    indices,
    ranges,
    random,
    graphs,
)


@contextmanager
def _kept() -> Iterator[list[Call]]:
    """The calls that programs on the device are made of."""
    calls: list[Call] = []
    apply = registry.apply

    def keep(
        entry: Lowering,
        args: Sequence[Any],
        kwargs: Any,
        out: Any,
        compute_dtype: Any = None,
        key: Any = None,
    ) -> Any:
        shapes = jax.tree.map(shape_of, (list(args), kwargs))
        dtype = str(next(leaf for leaf in jax.tree.leaves((shapes, out)) if is_shape(leaf)).dtype)
        calls.append(Call(entry.name, dtype, *shapes, tuple(out), compute_dtype))
        return apply(entry, args, kwargs, out, compute_dtype, key)

    with mock.patch.object(registry, "apply", keep):
        yield calls


def device_calls(served: set[str]) -> list[Call]:
    """One call of each lowering and dtype that is reached from here and is not among those `served`."""
    found: dict[tuple[str, str], Call] = {}
    with _kept() as calls, torch.tpu.eager_mode("strict"):
        torch.manual_seed(0)
        for group in GROUPS:
            for _ in group():
                torch.tpu.flush()
        torch.tpu.synchronize()
    for call in calls:
        if call.lowering in LOWERINGS - served and not call.is_empty():
            found.setdefault((call.lowering, call.dtype), call)
    return list(found.values())
