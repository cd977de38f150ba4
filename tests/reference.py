"""A vision transformer with the method in NumPy float64, written from the formulas alone.

Nothing here comes from timm or mmpreproj: it reads a state dict and follows, for every block,
    x̃ = x̂ + W_down · SiLU(W_up · x̂),   out = x + γ₁ · attention(x̃) + W_skip · x̃,
then the block's MLP, before which ỹ = ŷ + W_down · SiLU(W_up · ŷ) where it has weights of its own.
Expected values of the tests come from here.
"""

import numpy as np
from scipy.special import erf


def linear(x, w, name):
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def layer_norm(x, w, name, eps):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def softmax(x):
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def axial_angles(height, width, head_dim, temperature):
    """RoPE angles [T, head_dim / 2]: the first half of the pairs turns with x, the rest with y."""
    bands = temperature ** -(np.arange(head_dim // 4) / (head_dim // 4))
    y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    return np.concatenate([x.reshape(-1, 1) * bands, y.reshape(-1, 1) * bands], axis=1)


def rotate(x, sin, cos):
    """Turn the pairs (x[2i], x[2i+1]) of x [..., T, head_dim]; sin and cos [T, head_dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def attention(x, w, name, heads, rope, prefix):
    batch, tokens, width = x.shape
    qkv = linear(x, w, f"{name}.qkv").reshape(batch, tokens, 3, heads, width // heads)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    if rope is not None:
        q = np.concatenate([q[:, :, :prefix], rotate(q[:, :, prefix:], *rope)], axis=2)
        k = np.concatenate([k[:, :, :prefix], rotate(k[:, :, prefix:], *rope)], axis=2)
    scores = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(width // heads))
    mixed = (scores @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, width)
    return linear(mixed, w, f"{name}.proj")


def pre_project(x_hat, w, name):
    """x̃ before the attention or MLP at `name`; x̂ where it has no pre-projection."""
    new = f"{name}.preproj"
    if f"{new}.up.weight" not in w:
        return x_hat
    return x_hat + linear(silu(linear(x_hat, w, f"{new}.up")), w, f"{new}.down")


def gamma(w, block, number):
    for name in (f"{block}.gamma_{number}", f"{block}.ls{number}.gamma"):
        if name in w:
            return w[name]
    return 1.0


def block_output(x, w, block, heads, eps, rope=None, prefix=1):
    x_hat = layer_norm(x, w, f"{block}.norm1", eps)
    new = f"{block}.attn.preproj"
    x_tilde = pre_project(x_hat, w, f"{block}.attn")
    branch = attention(x_tilde, w, f"{block}.attn", heads, rope, prefix)
    x = x + gamma(w, block, 1) * branch
    if f"{new}.skip.weight" in w:
        x = x + linear(x_tilde, w, f"{new}.skip")
    y = pre_project(layer_norm(x, w, f"{block}.norm2", eps), w, f"{block}.mlp")
    hidden = gelu(linear(y, w, f"{block}.mlp.fc1"))
    return x + gamma(w, block, 2) * linear(hidden, w, f"{block}.mlp.fc2")


def patches(images, w, patch):
    batch, channels, height, width = images.shape
    grid = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    flat = grid.transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)
    kernel = w["patch_embed.proj.weight"]
    return flat @ kernel.reshape(len(kernel), -1).T + w["patch_embed.proj.bias"]


def vit_logits(images, w, depth, heads, patch, eps, rope=None):
    """Logits [B, classes] of a ViT with a class token, pooled by it.

    Args:
        images: [B, C, H, W].
        w: the state dict, as float64 arrays.
        rope: (sin, cos), each [T, head_dim / 2], or None.
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in w.items()}
    x = patches(np.asarray(images, dtype=np.float64), w, patch)
    position = w.get("pos_embed")
    if position is not None and position.shape[1] == x.shape[1]:
        x = x + position
    x = np.concatenate([np.broadcast_to(w["cls_token"], (len(x), 1, x.shape[2])), x], axis=1)
    if position is not None and position.shape[1] == x.shape[1]:
        x = x + position
    for index in range(depth):
        x = block_output(x, w, f"blocks.{index}", heads, eps, rope)
    return linear(layer_norm(x, w, "norm", eps)[:, 0], w, "head")
