"""Joining, repeating, rearranging, padding. Pure views never come here: they are geometry, not operations."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_backend.lowering.dims import wrap_dim
from tpu_backend.lowering.registry import is_16_bit, lowering, stored


@lowering("cat")
def cat(tensors, dim=0, out=None):
    dtype = out[0].dtype
    # PyTorch's legacy: a tensor of shape (0,) joins anything.
    parts = [tensor.astype(dtype) for tensor in tensors if tensor.shape != (0,)]
    if not parts:
        return jnp.zeros(out[0].shape, dtype)
    return jnp.concatenate(parts, axis=wrap_dim(dim, parts[0].ndim))


@lowering("stack", "_stack")
def stack(tensors, dim=0, out=None):
    return jnp.stack([tensor.astype(out[0].dtype) for tensor in tensors], axis=dim)


@lowering("flip")
def flip(self, dims):
    return jnp.flip(self, [wrap_dim(dim, self.ndim) for dim in dims]) if self.ndim else self


@lowering("roll", runtime=("shifts",))
def roll(self, shifts, dims=()):
    """Shifts are inputs of the program: an augmentation draws one a step."""
    if self.size == 0 or self.ndim == 0:
        return self
    if not dims:
        return jnp.roll(self, shifts[0])
    for shift, dim in zip(shifts, dims, strict=True):
        self = jnp.roll(self, shift, dim)
    return self


@lowering("repeat")
def repeat(self, repeats):
    return jnp.tile(self, tuple(repeats))


def _diagonals(self):
    """Of each element of the matrices (..., m, n), on which diagonal it lies: (m, n)."""
    shape = self.shape[-2:]
    return lax.broadcasted_iota(jnp.int64, shape, 1) - lax.broadcasted_iota(jnp.int64, shape, 0)


@lowering("tril", runtime=("diagonal",))
def tril(self, diagonal=0):
    return jnp.where(_diagonals(self) <= diagonal, self, jnp.zeros((), self.dtype))


@lowering("triu", runtime=("diagonal",))
def triu(self, diagonal=0):
    return jnp.where(_diagonals(self) >= diagonal, self, jnp.zeros((), self.dtype))


@lowering("block_diag")
def block_diag(tensors, out=None):
    dtype = out[0].dtype
    return jax.scipy.linalg.block_diag(*(jnp.atleast_2d(tensor.astype(dtype)) for tensor in tensors))


@lowering("pixel_shuffle")
def pixel_shuffle(self, upscale_factor):
    r = upscale_factor
    *batch, channels, height, width = self.shape
    blocks = self.reshape(*batch, channels // (r * r), r, r, height, width)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return blocks.transpose(order).reshape(*batch, channels // (r * r), height * r, width * r)


@lowering("pixel_unshuffle")
def pixel_unshuffle(self, downscale_factor):
    r = downscale_factor
    *batch, channels, height, width = self.shape
    blocks = self.reshape(*batch, channels, height // r, r, width // r, r)
    n = len(batch)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return blocks.transpose(order).reshape(*batch, channels * r * r, height // r, width // r)


@lowering("channel_shuffle")
def channel_shuffle(self, groups):
    batch, channels, *rest = self.shape
    return self.reshape(batch, groups, channels // groups, *rest).swapaxes(1, 2).reshape(self.shape)


# ---- padding


def _pad_pairs(pad, ndim):
    """PyTorch lists (before, after) from the last dim backwards; XLA wants every dim from the first."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@lowering("constant_pad_nd", fits={"value": "written"})
def constant_pad_nd(self, pad, value=0):
    value = jnp.asarray(value).astype(self.dtype)
    return lax.pad(self, value, [(before, after, 0) for before, after in _pad_pairs(pad, self.ndim)])


def _edge_pad(self, pairs):
    """A gather of clamped positions: negative padding may crop a dim to nothing, then extend it."""
    for axis, (before, after) in enumerate(pairs):
        if (before, after) != (0, 0):
            size = self.shape[axis]
            self = jnp.take(self, np.arange(-before, size + after).clip(0, size - 1), axis=axis, mode="clip")
    return self


def _reflect_pad(self, pairs):
    crop = tuple(slice(max(-before, 0), n - max(-after, 0)) for n, (before, after) in zip(self.shape, pairs))
    return jnp.pad(self[crop], [(max(before, 0), max(after, 0)) for before, after in pairs], mode="reflect")


def _border_pad(pad_pairs):
    def pad_(self, padding):
        return pad_pairs(self, _pad_pairs(padding, self.ndim))

    def pad_backward(grad_output, self, padding):
        if is_16_bit(self.dtype):  # added up in the dtype of the gradient, as on the CPU
            sources = pad_(jnp.arange(self.size).reshape(self.shape), padding)
            total = jnp.zeros(self.size, self.dtype).at[sources.reshape(-1)].add(grad_output.reshape(-1))
            return total.reshape(self.shape)
        return jax.vjp(lambda value: pad_(value, padding), self)[1](grad_output)[0]

    return pad_, pad_backward


for _mode, _function in {"reflection": _reflect_pad, "replication": _edge_pad}.items():
    _pad, _pad_backward = _border_pad(_function)
    for _rank in (1, 2, 3):
        lowering(f"{_mode}_pad{_rank}d")(_pad)
        lowering(f"{_mode}_pad{_rank}d_backward")(_pad_backward)

# ---- sliding windows


@lowering("unfold_backward")
def unfold_backward(grad_in, input_sizes, dim, size, step):
    """Added up in the dtype of the gradient, as on the CPU."""
    axis = wrap_dim(dim, len(input_sizes))
    values = grad_in if input_sizes else grad_in.reshape(1, 1)
    starts = jnp.arange(values.shape[axis], dtype=jnp.int32) * step
    positions = starts[:, None] + jnp.arange(size, dtype=jnp.int32)
    values = jnp.moveaxis(values, -1, axis + 1)
    target = jnp.zeros(tuple(input_sizes) or (1,), grad_in.dtype)
    return target.at[(slice(None),) * axis + (positions,)].add(values).reshape(tuple(input_sizes))


def _im2col(image, kernel_size, dilation, padding, stride):
    """(N, C, H, W) to (N, C * kh * kw, windows); one strided slice an offset inside the kernel."""
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = kernel_size, dilation, padding, stride
    padded = jnp.pad(image, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    batch, channels, height, width = padded.shape
    rows = (height - dh * (kh - 1) - 1) // sh + 1
    columns = (width - dw * (kw - 1) - 1) // sw + 1
    patches = [
        padded[
            :, :, i * dh : i * dh + (rows - 1) * sh + 1 : sh, j * dw : j * dw + (columns - 1) * sw + 1 : sw
        ]
        for i, j in itertools.product(range(kh), range(kw))
    ]
    return jnp.stack(patches, axis=2).reshape(batch, channels * kh * kw, rows * columns)


@lowering("im2col")
def im2col(self, kernel_size, dilation, padding, stride):
    image = self if self.ndim == 4 else self[None]
    columns = _im2col(image, kernel_size, dilation, padding, stride)
    return columns if self.ndim == 4 else columns[0]


@lowering("col2im", promote="opmath")
def col2im(self, output_size, kernel_size, dilation, padding, stride, *, out):
    """The windows added up, one offset inside the kernel after the other, rounded to 16 bit each time."""
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = kernel_size, dilation, padding, stride
    height, width = (size + 2 * p for size, p in zip(output_size, padding, strict=True))
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1
    patches = (self if self.ndim == 3 else self[None]).reshape(
        -1, self.shape[-2] // (kh * kw), kh, kw, rows, columns
    )
    total = jnp.zeros((*patches.shape[:2], height, width), self.dtype)
    for i, j in itertools.product(range(kh), range(kw)):
        below = height - i * dh - (rows - 1) * sh - 1
        right = width - j * dw - (columns - 1) * sw - 1
        spread = [(0, 0, 0), (0, 0, 0), (i * dh, below, sh - 1), (j * dw, right, sw - 1)]
        placed = lax.pad(patches[:, :, i, j], np.zeros((), self.dtype), spread)
        total = stored(total + placed, out[0].dtype)
    result = total[:, :, ph : height - ph, pw : width - pw]
    return result if self.ndim == 3 else result[0]


@lowering("diag_embed")
def diag_embed(self, offset=0, dim1=-2, dim2=-1):
    ndim = self.ndim + 1
    size = self.shape[-1] + abs(offset)
    rows = jnp.arange(self.shape[-1]) + max(-offset, 0)
    columns = jnp.arange(self.shape[-1]) + max(offset, 0)
    square = jnp.zeros((*self.shape[:-1], size, size), self.dtype).at[..., rows, columns].set(self)
    dim1, dim2 = dim1 % ndim, dim2 % ndim
    return jnp.moveaxis(square, (-2, -1), (dim1, dim2))


@lowering("affine_grid_generator")
def affine_grid_generator(theta, size, align_corners):
    def positions(count):
        steps = jnp.linspace(-1, 1, count, dtype=theta.dtype) if count > 1 else jnp.zeros(1, theta.dtype)
        return steps if align_corners else steps * (count - 1) / count

    axes = [positions(count) for count in size[2:]]
    grids = jnp.meshgrid(*axes, indexing="ij")
    base = jnp.stack([*grids[::-1], jnp.ones_like(grids[0])], axis=-1)  # x is the last dim
    return jnp.einsum("...k,njk->n...j", base, theta, precision=lax.Precision.HIGHEST)
