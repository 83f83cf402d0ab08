"""Activation functions and their derivatives; formulas as in PyTorch's ATen/native/cpu/Activation.cpp."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from tpu_backend.lowering.registry import NotLoweredError, lowering, stored

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_INVERSE_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_GELU_CUBIC = 0.044715


@lowering("relu", promote="result")
def relu(self):
    return jnp.maximum(self, 0)


@lowering("threshold", promote="result", fits={"threshold": "opmath", "value": "result"})
def threshold(self, threshold, value):
    return jnp.where(self <= threshold, jnp.asarray(value, self.dtype), self)


@lowering("threshold_backward", promote="result")
def threshold_backward(grad_output, self, threshold):
    return jnp.where(self <= threshold, 0, grad_output)


@lowering("sigmoid_backward", promote="result")
def sigmoid_backward(grad_output, output):
    return grad_output * jnp.conj((1 - output) * output)


@lowering("tanh_backward", promote="result")
def tanh_backward(grad_output, output):
    return grad_output * jnp.conj(1 - output * output)


@lowering("silu", promote="result")
def silu(self):
    return self * jax.nn.sigmoid(self)


@lowering("silu_backward", promote="result")
def silu_backward(grad_output, self):
    sigmoid = jax.nn.sigmoid(self)
    return grad_output * jnp.conj(sigmoid * (1 + self * (1 - sigmoid)))


@lowering("gelu", promote="result")
def gelu(self, *, approximate="none"):
    if approximate == "tanh":
        inner = _SQRT_2_OVER_PI * (self + _GELU_CUBIC * self**3)
        return 0.5 * self * (1 + jnp.tanh(inner))
    return 0.5 * self * (1 + jax.lax.erf(self * _SQRT_HALF))


@lowering("gelu_backward", promote="result")
def gelu_backward(grad_output, self, *, approximate="none"):
    if approximate == "tanh":
        tanh = jnp.tanh(_SQRT_2_OVER_PI * (self + _GELU_CUBIC * self**3))
        slope = _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * self * self)
        return grad_output * 0.5 * ((1 + tanh) + self * (1 - tanh * tanh) * slope)
    normal_cdf = 0.5 * (1 + jax.lax.erf(self * _SQRT_HALF))
    normal_pdf = jnp.exp(-0.5 * self * self) * _INVERSE_SQRT_2PI
    return grad_output * (normal_cdf + self * normal_pdf)


@lowering("mish", promote="result")
def mish(self):
    return self * jnp.tanh(jax.nn.softplus(self))


@lowering("mish_backward", promote="result")
def mish_backward(grad_output, self):
    sigmoid, tanh = jax.nn.sigmoid(self), jnp.tanh(jax.nn.softplus(self))
    return grad_output * (tanh + self * sigmoid * (1 - tanh * tanh))


@lowering("elu", promote="result", fits={"alpha": "opmath", "scale": "opmath", "input_scale": "opmath"})
def elu(self, alpha=1, scale=1, input_scale=1):
    return jnp.where(self > 0, self * scale, jnp.expm1(self * input_scale) * (alpha * scale))


@lowering("celu", promote="result", fits={"alpha": "opmath"})
def celu(self, alpha=1.0):
    return jnp.where(self > 0, self, jnp.expm1(self / alpha) * alpha)


@lowering("elu_backward", promote="result")
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    negative_part = alpha * scale
    if is_result:
        slope = input_scale * (self_or_result + negative_part)
    else:
        slope = input_scale * negative_part * jnp.exp(self_or_result * input_scale)
    return grad_output * jnp.where(self_or_result <= 0, slope, scale)


@lowering("leaky_relu", promote="result", fits={"negative_slope": "opmath"})
def leaky_relu(self, negative_slope=0.01):
    return jnp.where(self > 0, self, self * negative_slope)


@lowering("leaky_relu_backward", promote="result")
def leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    return jnp.where(self > 0, grad_output, grad_output * negative_slope)


@lowering("rrelu_with_noise_backward", promote="result")
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result):
    if training:
        return jnp.where(
            jnp.abs(upper - lower) > 1e-6,
            grad_output * noise,
            _mean_slope_grad(grad_output, self, lower, upper),
        )
    return _mean_slope_grad(grad_output, self, lower, upper)


def _mean_slope_grad(grad_output, self, lower, upper):
    return leaky_relu_backward(grad_output, self, (lower + upper) / 2, False)


@lowering("_prelu_kernel", promote="result")
def prelu(self, weight):
    return jnp.where(self > 0, self, weight * self)


@lowering("_prelu_kernel_backward", promote="result")
def prelu_backward(grad_output, self, weight):
    return (
        jnp.where(self > 0, grad_output, weight * grad_output),
        jnp.where(self > 0, 0, self * grad_output),
    )


@lowering("hardtanh", promote="result", static=("min_val", "max_val"))
def hardtanh(self, min_val=-1, max_val=1, *, out):
    dtype = out[0].dtype
    if not (_holds(dtype, min_val) and _holds(dtype, max_val)):
        raise NotLoweredError(
            "limits outside of the dtype: PyTorch refuses them, in its own words on the CPU"
        )
    if jnp.issubdtype(dtype, jnp.integer):
        min_val, max_val = int(min_val), int(max_val)
    return jnp.minimum(jnp.maximum(self, jnp.asarray(min_val, self.dtype)), jnp.asarray(max_val, self.dtype))


def _holds(dtype, number):
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min <= number <= jnp.iinfo(dtype).max
    return not math.isfinite(number) or abs(number) <= float(jnp.finfo(dtype).max)


@lowering("hardtanh_backward", promote="result")
def hardtanh_backward(grad_output, self, min_val, max_val):
    return jnp.where((self <= min_val) | (self >= max_val), 0, grad_output)


@lowering("hardsigmoid", promote="result")
def hardsigmoid(self):
    return jnp.clip(self + 3, 0, 6) / 6


@lowering("hardsigmoid_backward", promote="result")
def hardsigmoid_backward(grad_output, self):
    return jnp.where((self > -3) & (self < 3), grad_output / 6, 0)


@lowering("hardswish", promote="result")
def hardswish(self):
    return self * jnp.clip(self + 3, 0, 6) / 6


@lowering("hardswish_backward", promote="result")
def hardswish_backward(grad_output, self):
    middle = grad_output * (self / 3 + 0.5)
    return jnp.where(self <= -3, 0, jnp.where(self < 3, middle, grad_output))


@lowering("hardshrink", promote="result", fits={"lambd": "result"})
def hardshrink(self, lambd=0.5, *, out):
    lambd = stored(jnp.asarray(lambd, self.dtype), out[0].dtype)
    return jnp.where((self >= -lambd) & (self <= lambd), 0, self)


@lowering("hardshrink_backward", "softshrink_backward", promote="result")
def shrink_backward(grad_output, self, lambd):
    return jnp.where((self >= -lambd) & (self <= lambd), 0, grad_output)


@lowering("softshrink", promote="result")
def softshrink(self, lambd=0.5):
    shrunk = jnp.where(self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, 0))
    return jnp.where(jnp.isnan(self), self, shrunk)


@lowering("softplus", promote="result", fits={"beta": "opmath", "threshold": "opmath"})
def softplus(self, beta=1, threshold=20):
    return jnp.where(self * beta > threshold, self, jnp.log1p(jnp.exp(self * beta)) / beta)


@lowering("softplus_backward", promote="result")
def softplus_backward(grad_output, self, beta, threshold):
    return jnp.where(self * beta > threshold, grad_output, grad_output * jax.nn.sigmoid(self * beta))


@lowering("log_sigmoid_forward", promote="opmath")
def log_sigmoid_forward(self, *, out=None):
    """The buffer saves CPU kernels an exponential in backward; ours does not read it."""
    unused = jnp.zeros(out[1].shape) if out[1].shape != self.shape else jnp.exp(-jnp.abs(self))
    return jax.nn.log_sigmoid(self), unused


@lowering("log_sigmoid_backward", promote="result")
def log_sigmoid_backward(grad_output, self, buffer):
    return grad_output * jax.nn.sigmoid(-self)


@lowering("glu", promote="result")
def glu(self, dim=-1):
    value, gate = jnp.split(self, 2, axis=dim)
    return value * jax.nn.sigmoid(gate)


@lowering("glu_backward", promote="result")
def glu_backward(grad_output, self, dim, *, out):
    value, gate = jnp.split(self, 2, axis=dim)
    sigmoid = stored(jax.nn.sigmoid(gate), out[0].dtype)
    return jnp.concatenate([grad_output * sigmoid, grad_output * value * sigmoid * (1 - sigmoid)], axis=dim)
