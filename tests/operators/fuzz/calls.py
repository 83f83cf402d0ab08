"""The table of calls that programs are made of.

A template is a line's right-hand side. Its places are filled from the program's tensors:

    {x} a tensor         {f} a floating one    {n} an integer or bool one    {c} any but bool
    {y} one that broadcasts with the first      {v} the same with a shape equal to the first's
    {o} such a tensor, or a Python number       {s} a Python number          {m} a bool tensor like the first
    {d} one of its dims  {e} another            {k} a small integer          {p} a position along {d}
    {i} a vector of positions along {d}         {g} positions along {d}, shaped as the first
    {t} a dtype          {z} a shape of as many elements
    {sq} a square matrix {mat} a matrix         {vec} a vector

``rounds``: floating results may differ in their last digits. ``jumps``: a last digit of the input changes
more than that of the result, so that only exact inputs go in. ``writes``: it changes its first tensor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    template: str
    rounds: bool = False
    jumps: bool = False
    writes: bool = False


def _calls(text: str, **kinds: bool) -> list[Call]:
    return [Call(line.strip(), **kinds) for line in text.strip().splitlines() if line.strip()]


def _each(template: str, names: str, **kinds: bool) -> list[Call]:
    return [Call(template.replace("NAME", name), **kinds) for name in names.split()]


_EXACT_UNARY = "abs neg positive square isnan isinf isfinite bitwise_not conj conj_physical nan_to_num real"
_JUMPS_UNARY = "sgn sign ceil floor trunc round frac signbit isposinf isneginf logical_not"
_ROUNDS_UNARY = """exp log sqrt rsqrt sin cos tanh sigmoid erf erfc log1p expm1 log2 log10 exp2 atan asinh
sinh cosh acos asin acosh atanh tan lgamma digamma i0 sinc deg2rad rad2deg reciprocal erfinv angle"""
_ACTIVATIONS = "relu relu6 hardtanh leaky_relu softsign hardshrink softshrink"
_SMOOTH = "elu selu celu gelu silu mish softplus logsigmoid hardswish hardsigmoid tanhshrink"
_SPECIAL_FUNCTIONS = "entr ndtr log_ndtr i0e i1 i1e erfcx bessel_j0 bessel_j1"
_ARITHMETIC = "add sub mul maximum minimum fmax fmin"
_DIVIDING = "div true_divide"
_JUMPS_BINARY = """eq ne lt le gt ge floor_divide remainder fmod copysign nextafter heaviside
logical_and logical_or logical_xor"""
_BITS = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm"
_ROUNDS_BINARY = "atan2 hypot xlogy logaddexp logaddexp2 pow float_power"

CALLS: list[Call] = [
    *_each("torch.NAME({x})", _EXACT_UNARY),
    *_each("torch.NAME({x})", _JUMPS_UNARY, jumps=True),
    *_each("torch.NAME({x})", _ROUNDS_UNARY, rounds=True),
    *_each("F.NAME({x})", _ACTIVATIONS),
    *_each("F.NAME({x})", _SMOOTH, rounds=True),
    *_each("torch.special.NAME({x})", _SPECIAL_FUNCTIONS, rounds=True),
    *_each("torch.NAME({x}, {o})", "add sub mul"),
    *_each("torch.NAME({x}, {o})", "logical_and", jumps=True),
    *_each("torch.NAME({x}, {y})", _ARITHMETIC),
    *_each("torch.NAME({x}, {o})", _DIVIDING),
    *_each("torch.NAME({x}, {y})", _JUMPS_BINARY, jumps=True),
    *_each("torch.NAME({x}, {s})", "eq ne lt le gt ge floor_divide remainder fmod copysign", jumps=True),
    *_each("torch.NAME({n}, {y})", _BITS),
    *_each(
        "torch.NAME({n}, {s})", "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"
    ),
    *_each("torch.NAME({x}, {y})", _ROUNDS_BINARY, rounds=True),
    *_each("torch.NAME({x}, {s})", "pow xlogy float_power", rounds=True),
    *_each("torch.NAME({s}, {x})", "pow", rounds=True),
    *_calls("""
        {x} + {s}
        {x} - {s}
        {x} * {s}
        {s} + {x}
        {s} - {x}
        {s} * {x}
        {x} / {s}
        {s} / {x}
        {x} + {y}
        {x} * {y}
        {x} - {y}
        {n} & {y}
        {n} | {s}
        ~{n}
        -{x}
        torch.add({x}, {y}, alpha={s})
        torch.sub({x}, {o}, alpha={k})
        torch.rsub({x}, {s})
        torch.where({m}, {x}, {y})
        torch.where({m}, {x}, {s})
        torch.where({m}, {s}, {s})
        {x}.masked_fill({m}, {s})
        {x}.masked_fill({m}, torch.tensor({s}, device=device))
        torch.clamp({x}, {s}, {s})
        torch.clamp({x}, min={s})
        torch.clamp({x}, max={s})
        torch.clamp({x}, {y})
        torch.clamp_min({x}, {o})
        torch.clip({x}, {y}, {v})
        torch.result_type({x}, {o})
        {x}.clone()
        {x}.contiguous()
        {x}.new_full((2,), {s})
        {x}.new_zeros((2, 1))
        torch.full_like({x}, {s})
        torch.zeros_like({x})
        torch.ones_like({x}, dtype={t})
        torch.full((3,), {s}, device=device)
        torch.full((3,), {s}, dtype={t}, device=device)
        torch.tensor({s}, device=device)
        torch.tensor({s}, dtype={t}, device=device)
        torch.eye(3, dtype={t}, device=device)
        torch.arange({k}, device=device)
        torch.arange(1, 7, 2, dtype={t}, device=device)
        torch.arange({s}, {s}, {s}, device=device)
        torch.zeros((3,), dtype={t}, device=device)
        torch.ones((2, 3), dtype={t}, device=device)
        torch.scalar_tensor({s}, dtype={t}, device=device)
        torch.tril_indices(3, 3, device=device)
        torch.ops.aten.lift_fresh_copy({x})
    """),
    *_calls(
        """
        torch.where({x} > {y}, {x}, {y})
        ({x} > {s}) * {y}
        ({x} > 0).float() * {y}
        {x} == {s}
        {x} > {s}
        {x} != {y}
        {x} // {s}
        {x} % {s}
        {x} // {y}
        {x} % {y}
        {s} // {x}
        {s} % {x}
        torch.div({x}, {o}, rounding_mode="trunc")
        torch.div({x}, {o}, rounding_mode="floor")
        torch.round({f}, decimals=1)
        torch.isclose({x}, {v})
        torch.allclose({f}, {v})
        F.threshold({x}, {s}, {s})
        F.one_hot({n})
        F.one_hot({n}, 8)
        torch.bucketize({x}, torch.tensor([0, 1, 3], device=device))
        torch.searchsorted(torch.tensor([0.0, 1.0, 3.0], device=device), {f})
        torch.isin({x}, {y})
        torch.bincount({n})
        torch.histc({f}, 4, 0, 3)
        torch.unique({x})
        torch.unique({x}, return_inverse=True, return_counts=True)
        torch.unique_consecutive({x})
        torch.nonzero({x})
        torch.count_nonzero({x})
        torch.count_nonzero({x}, {d})
        torch.sort({x}, {d}, stable=True)
        torch.sort({x}, {d}, descending=True, stable=True)
        torch.sort({x}, {d})[0]
        torch.argsort({x}, {d}, stable=True)
        torch.msort({x})
        torch.topk({x}, 2, {d})[0]
        torch.topk({x}, 1, {d}, largest=False)[0]
        torch.kthvalue({x}, 1, {d})[0]
        torch.argmax({x})
        torch.argmax({x}, {d})
        torch.argmin({x}, {d}, keepdim=True)
        torch.max({x}, {d})
        torch.min({x}, {d})
        torch.median({x}, {d})
        torch.median({x})
        torch.nanmedian({x})
        torch.mode({x}, {d})[0]
        torch.cummax({x}, {d})
        torch.cummin({x}, {d})
        torch.aminmax({x}, dim={d})
        torch.quantile({f}, 0.5)
        {x}.bool()
        {x}.to({t})
        {x}.to({t})
        {x}.to({t})
        {x}.long()
        {x}.half()
        {x}.type({t})
        {x}.any()
        {x}.all({d})
        torch.any({x}, {d}, keepdim=True)
        torch.trapezoid({f})
        torch.equal({x}, {v})
        {x}.item()
        {x}.view(torch.int8)
        {x}.view(torch.int32)
        {x}.view(torch.float32)
        {x}.view(torch.uint8)
        {x}.tolist()
        F.max_pool1d({x}, 2, 1, return_indices=True)
    """,
        jumps=True,
    ),
    *_calls("""
        torch.amax({x}, {d})
        torch.amin({x})
        torch.max({x})
        torch.min({x})
        torch.flip({x}, ({d},))
        torch.roll({x}, {k}, {d})
        torch.roll({x}, {k})
        torch.rot90({x})
        torch.cat([{x}, {v}], {d})
        torch.cat([{x}, {x}], {d})
        torch.stack([{x}, {v}], {d})
        torch.hstack([{x}, {v}])
        torch.vstack([{x}, {v}])
        torch.tile({x}, (2,))
        {x}.repeat(2, 1, 1, 1)
        torch.repeat_interleave({x}, 2)
        torch.repeat_interleave({x}, 2, {d})
        torch.diff({x}, dim={d})
        torch.tril({mat})
        torch.triu({mat}, {k})
        torch.diag({vec})
        torch.diag_embed({x})
        torch.trace({mat})
        torch.outer({vec}, {v})
        torch.block_diag({mat}, {mat})
        torch.take({x}, {i})
        torch.index_select({x}, {d}, {i})
        torch.gather({x}, {d}, {g})
        torch.take_along_dim({x}, {g}, {d})
        torch.masked_select({x}, {m})
        {x}[{m}]
        {x}[{p}]
        {x}[-1]
        {x}[..., None]
        {x}[{i}]
        {x}[..., {i}]
        torch.index_fill({x}, {d}, {i}, {s})
        torch.index_copy({x}, {d}, {g}, {v})
        torch.scatter({x}, {d}, {g}, {v})
        torch.scatter({x}, {d}, {g}, {s})
        torch.masked_scatter({x}, {m}, {v})
        torch.select_scatter({x}, {s}, {d}, 0)
        torch.slice_scatter({x}, {v}, {d})
        F.pad({x}, (1, 1))
        F.pad({x}, (1, 2), value={s})
        F.pad({x}, (-1, 1))
        F.pad({x}, (1, 1), mode="reflect")
        F.pad({x}, (1, 1), mode="replicate")
        torch.meshgrid({vec}, {vec}, indexing="ij")
        torch.cartesian_prod({vec}, {vec})
        torch.combinations({vec})
        torch.complex({f}, {v})
        torch.view_as_real({x})
        torch.broadcast_tensors({x}, {y})
        torch.atleast_2d({x})
        torch.nn.functional.unfold({x}[None, None], 1)
        F.max_pool1d({x}, 2)

        F.pixel_shuffle({x}, 1)
        F.interpolate({x}[None, None], scale_factor=2)
        F.channel_shuffle({x}[None, None], 1)
        torch.frexp({f})
        torch.ldexp({x}, {y})
        torch.vander({vec}, 3)
        torch.cov({x})
        torch.addcmul({x}, {y}, {y}, value={s})
        torch.cross({mat}, {v}, dim=-1)
    """),
    *_calls(
        """
        torch.sum({x})
        torch.sum({x}, {d})
        torch.sum({x}, {d}, keepdim=True, dtype={t})
        {x}.sum(({d}, {e}))
        torch.mean({x})
        torch.mean({x}, {d})
        torch.prod({x})
        torch.prod({x}, {d})
        torch.nansum({x})
        torch.nanmean({x}, {d})
        torch.var({x})
        torch.std({x}, {d})
        torch.var({x}, {d}, correction=0)
        torch.logsumexp({x}, {d})
        torch.cumsum({x}, {d})
        torch.cumprod({x}, {d})
        torch.logcumsumexp({x}, {d})
        torch.norm({x})
        torch.linalg.vector_norm({x}, 1)
        torch.linalg.vector_norm({x}, inf, {d})
        torch.linalg.vector_norm({x}, 0)
        torch.lerp({x}, {y}, {s})
        torch.lerp({x}, {v}, {v})
        torch.addcdiv({x}, {y}, {y}, value={s})
        torch.softmax({x}, {d})
        torch.log_softmax({x}, {d})
        torch.softmax({x}, {d}, dtype=torch.float32)
        torch.matmul({x}, {v})
        torch.matmul({sq}, {v})
        torch.mm({sq}, {sq})
        torch.mv({sq}, {vec})
        torch.dot({vec}, {v})
        torch.vdot({vec}, {v})
        torch.addmm({sq}, {sq}, {sq}, beta={s}, alpha={s})
        torch.baddbmm({sq}[None], {sq}[None], {sq}[None])
        torch.einsum("ij,jk->ik", {sq}, {sq})
        torch.einsum("i,i->", {vec}, {v})
        torch.tensordot({x}, {v}, 1)
        torch.kron({mat}, {mat})
        torch.linalg.det({sq})
        torch.linalg.matrix_power({sq}, 2)
        torch.linalg.multi_dot([{sq}, {sq}, {sq}])
        torch.linspace({s}, {s}, 5, device=device)
        torch.linspace({s}, {s}, 5, dtype={t}, device=device)
        torch.logspace(0, 2, 4, dtype={t}, device=device)
        torch.scatter_add({x}, {d}, {g}, {v})
        torch.index_add({x}, {d}, {g}, {v})
        torch.scatter_reduce({x}, {d}, {g}, {v}, "amax")
        torch.scatter_reduce({x}, {d}, {g}, {v}, "prod")
        torch.scatter_reduce({x}, {d}, {g}, {v}, "mean", include_self=False)
        torch.index_reduce({x}, {d}, {g}, {v}, "amin")
        F.layer_norm({x}, (3,))
        F.rms_norm({x}, (3,))
        F.normalize({x}, dim={d})
        F.linear({x}, {v})
        F.mse_loss({x}, {v})
        F.l1_loss({x}, {v}, reduction="sum")
        F.smooth_l1_loss({x}, {v}, reduction="none")
        F.huber_loss({x}, {v})
        F.kl_div({x}, {v}, reduction="none")
        F.binary_cross_entropy_with_logits({x}, {v})
        F.cosine_similarity({x}, {v}, dim={d})
        F.avg_pool1d({x}, 2)
        F.adaptive_avg_pool1d({x}, 2)
        F.prelu({f}, torch.tensor([0.25], device=device))
        F.glu({x}, {d})
        F.embedding({n}, torch.ones(8, 2, device=device))
        F.conv1d({x}[None, None], torch.ones(1, 1, 2, dtype={x}.dtype, device=device))
        F.cross_entropy({mat}, torch.tensor([0, 1], device=device))
        F.interpolate({x}[None], size=5, mode="linear")
        torch.std_mean({x})
        torch.renorm({x}, 2, {d}, 1.0)
        torch.cdist({mat}, {mat})
        torch.fft.fft({x})
        torch.polar({f}, {v})
        torch.dist({x}, {v})
        torch.corrcoef({x})
        torch.cumulative_trapezoid({f})
    """,
        rounds=True,
    ),
    # ---- views
    *_calls("""
        {x}.reshape({z})
        {x}.view({z})
        {x}.transpose({d}, {e})
        {x}.mT
        {x}.t()
        {x}.flatten()
        {x}.ravel()
        {x}.squeeze()
        {x}.squeeze({d})
        {x}.unsqueeze({d})
        {x}.movedim({d}, {e})
        {x}.expand(2, *{x}.shape)
        {x}.expand(*{x}.shape[:-1], 3)
        {x}[::2]
        {x}[1:]
        {x}[..., :2]
        {x}[..., 1::2]
        {x}.select({d}, {p})
        {x}.narrow({d}, 0, 1)
        {x}.unfold({d}, 2, 1)
        {x}.diagonal()
        {x}.chunk(2, {d})[-1]
        {x}.split(2, {d})[0]
        {x}.unbind({d})[0]
        {x}.as_strided((2, 2), (1, 1))
        {x}.as_strided((2, 2), (2, 1), 1)
        {x}.as_strided((3,), (0,))
        {x}.detach()
        {x}.permute(*range({x}.dim())[::-1])
        torch.imag({x})
        {x}.unflatten(-1, (-1, 1))
        {x}.view_as({v})
        {x}.data
    """),
    # ---- writes
    *_each("{x}.NAME_({o})", "add sub mul div", writes=True),
    *_each("{x}.NAME_({y})", "add mul copy", writes=True),
    *_each("{x}.NAME_()", "neg abs zero square", writes=True),
    *_each("{x}.NAME_()", "ceil floor round trunc frac sgn logical_not", writes=True, jumps=True),
    *_each("{x}.NAME_()", "exp sqrt sigmoid tanh log reciprocal", writes=True, rounds=True),
    *_each("{x}.NAME_({y})", "eq lt ge remainder floor_divide fmod logical_and", writes=True, jumps=True),
    *_each("{n}.NAME_({y})", "bitwise_and bitwise_or bitwise_xor", writes=True),
    *_calls(
        """
        {x}.fill_({s})
        {x}.fill_({s})
        {x}.masked_fill_({m}, {s})
        {x}.index_fill_({d}, {i}, {s})
        {x}.scatter_({d}, {g}, {v})
        {x}.scatter_({d}, {g}, {s})
        {x}.index_copy_({d}, {i}, {x}.index_select({d}, {i}))
        {x}.copy_({o})
        {x}.copy_({y})
        {x}.t_()
        {x}.transpose_({d}, {e})
        {x}.squeeze_()
        {x}.unsqueeze_({d})
        {x}.clamp_({s}, {s})
        {x}.clamp_min_({s})
        {x}.fill_diagonal_({s})
        {x}.tril_()
        {x}.masked_scatter_({m}, {v})
        {x}.put_({i}, {i}.to({x}.dtype))
        {x}.__setitem__({p}, {s})
        {x}.__setitem__(slice(1, None), {s})
        {x}.__setitem__({m}, {s})
        {x}.__setitem__({m}, torch.tensor({s}, device=device))
        {x}.__setitem__({i}, {s})
        {x}.__setitem__((..., {i}), {y})
        {x}.__setitem__(..., {y})
        {x}.__setitem__(slice(None, None, 2), {y})
        {x}.addcmul_({y}, {y}, value={s})
        {x}.set_({v}.clone())
        {x}.resize_((2,))
        {x}.swapaxes_({d}, {e})
        {x}.nan_to_num_()
        {x}.heaviside_({v})
        {x}.pow_({k})
    """,
        writes=True,
    ),
    *_calls(
        """
        {x}.scatter_add_({d}, {g}, {v})
        {x}.index_add_({d}, {i}, {x}.index_select({d}, {i}))
        {x}.index_put_(({i},), {y}, accumulate=True)
        {x}.cumsum_({d})
        {x}.cumprod_({d})
        {x}.lerp_({v}, 0.25)
        {x}.addcdiv_({y}, {y})
        {x}.pow_({o})
        {x}.renorm_(2, {d}, 1.0)
    """,
        writes=True,
        rounds=True,
    ),
    # ---- out=
    *_each("torch.NAME({y}, {v}, out={x})", "add mul sub div maximum", writes=True),
    *_each(
        "torch.NAME({y}, {v}, out={x})",
        "eq lt ge floor_divide remainder fmod logical_and",
        writes=True,
        jumps=True,
    ),
    *_each("torch.NAME({y}, out={x})", "neg abs", writes=True),
    *_each("torch.NAME({y}, out={x})", "logical_not sgn", writes=True, jumps=True),
    *_each("torch.NAME({y}, out={x})", "exp sqrt sin log sigmoid", writes=True, rounds=True),
    *_calls(
        """
        torch.sum({y}, 0, out={x})
        torch.prod({y}, 0, out={x})
        torch.cumsum({y}, 0, out={x})
        torch.mean({y}, 0, out={x})
        torch.matmul({sq}, {sq}, out={x})
        torch.linspace(0, {s}, 3, out={x})
        torch.softmax({y}, 0, out={x})
    """,
        writes=True,
        rounds=True,
    ),
    *_calls(
        """
        torch.cat([{y}, {v}], out={x})
        torch.stack([{y}, {y}], out={x})
        torch.clamp({y}, {s}, {s}, out={x})
        torch.where({m}, {y}, {v}, out={x})
        torch.arange(3, out={x})
        torch.amax({y}, 0, out={x})
        torch.any({y}, out={x})
        torch.argmax({y}, 0, out={x})
        torch.index_select({y}, 0, {i}, out={x})
        torch.gather({y}, 0, {i}, out={x})
        torch.full((3,), {s}, out={x})
        torch.tril({y}, out={x})
        torch.bitwise_and({y}, {v}, out={x})
        torch.nonzero({y}, out={x})
        torch.pow({y}, 2, out={x})
        torch.diag({y}, out={x})
    """,
        writes=True,
        jumps=True,
    ),
]
