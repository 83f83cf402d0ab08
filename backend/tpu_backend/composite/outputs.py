"""Results into tensors that are given (``out=``), and one that PyTorch would only mark as zero."""

import warnings

import torch


def resize(out, shape):
    """Give `out` a shape, with PyTorch's warning where it has elements."""
    if out.numel():
        warnings.warn(
            "An output with one or more elements was resized since it had shape "
            f"{list(out.shape)}, which does not match the required output shape {list(shape)}. "
            "Resize it with out.resize_(0) to reuse it.",
            stacklevel=2,
        )
    return out.resize_(shape)


def assign(out, value):
    return (out if out.shape == value.shape else resize(out, value.shape)).copy_(value)


def narrow_copy(self, dim, start, length, *, out):
    return assign(out, self.narrow(dim, start, length))


def native_batch_norm(*args, out, save_mean, save_invstd):
    return tuple(map(assign, (out, save_mean, save_invstd), torch.native_batch_norm(*args)))


def efficient_zero_tensor(size, **options):
    """PyTorch's marks a tensor as zero, to skip arithmetic on it. XLA sees that for itself."""
    return torch.zeros(size, **options)


KERNELS = {
    "narrow_copy.out": narrow_copy,
    "native_batch_norm.out": native_batch_norm,
    "_native_batch_norm_legit.out": native_batch_norm,
    "_efficientzerotensor": efficient_zero_tensor,
}
