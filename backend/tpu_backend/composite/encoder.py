"""nn.MultiheadAttention and nn.TransformerEncoderLayer in evaluation.

PyTorch's CPU and CUDA have one kernel for each; here are the operators that it stands for.
"""

import math

import torch
import torch.nn.functional as F

from tpu_backend.on_cpu import on_cpu


def _attend(x, num_heads, projections, mask=None, mask_type=None):
    """Self-attention of (B, L, E), and its weights (B, heads, L, L).

    True in `mask` leaves a position out. By type: 0 (L, L), 1 (B, L) of keys, 2 (B, heads, L, L).
    """
    qkv_weight, qkv_bias, weight, bias = projections
    batch, length, width = x.shape
    per_head = F.linear(x, qkv_weight, qkv_bias).view(batch, length, 3, num_heads, width // num_heads)
    query, key, value = per_head.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, L, width / heads)
    scores = query.div(math.sqrt(width // num_heads)) @ key.transpose(-2, -1)
    if mask is not None:
        mask = mask.to(torch.bool)
        scores = scores.masked_fill(mask[:, None, None] if mask_type == 1 else mask, -math.inf)
    weights = scores.softmax(-1)
    attended = (weights @ value).transpose(1, 2).reshape(batch, length, width)
    return F.linear(attended, weight, bias), weights


def native_multi_head_attention(query, key, value, embed_dim, num_heads, *rest):
    if query is not key or key is not value:
        op = torch.ops.aten._native_multi_head_attention.default
        return on_cpu(op, query, key, value, embed_dim, num_heads, *rest)
    projections, options = rest[:4], rest[4:]
    mask, need_weights, average_weights, mask_type = options + (None, True, True, None)[len(options) :]
    output, weights = _attend(query, num_heads, projections, mask, mask_type)
    if not need_weights:
        return output, None
    return output, weights.mean(1) if average_weights else weights


def transformer_encoder_layer(src, embed_dim, num_heads, *rest):
    projections, (use_gelu, norm_first, eps), rest = rest[:4], rest[4:7], rest[7:]
    norm_weights, (weight_1, bias_1, weight_2, bias_2), masks = rest[:4], rest[4:8], rest[8:]

    def norm_1(x):
        return F.layer_norm(x, x.shape[-1:], *norm_weights[:2], eps)

    def norm_2(x):
        return F.layer_norm(x, x.shape[-1:], *norm_weights[2:], eps)

    def attention(x):
        return _attend(x, num_heads, projections, *masks)[0]

    def feed_forward(x):
        hidden = F.linear(x, weight_1, bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), weight_2, bias_2)

    if norm_first:
        attended = src + attention(norm_1(src))
        return attended + feed_forward(norm_2(attended))
    attended = norm_1(src + attention(src))
    return norm_2(attended + feed_forward(attended))


def nested_tensor_from_mask_left_aligned(t, mask):
    """nn.TransformerEncoder asks before it makes nested tensors of a padded batch. The device has none: the
    batch stays padded.
    """
    return False


def nested_tensor_from_mask(t, mask, mask_check=True):
    raise NotImplementedError(
        "nested tensors are not on the tpu device: leave nn.TransformerEncoder's mask_check on, or pass "
        "enable_nested_tensor=False"
    )


KERNELS = {
    "_native_multi_head_attention": native_multi_head_attention,
    "_transformer_encoder_layer_fwd": transformer_encoder_layer,
    "_nested_tensor_from_mask": nested_tensor_from_mask,
    "_nested_tensor_from_mask_left_aligned": nested_tensor_from_mask_left_aligned,
}
