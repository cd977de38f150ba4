"""Language models with the method in NumPy float64, written from the formulas alone.

Nothing here comes from transformers or mmpreproj: a state dict is read, and every block follows
    x̃ = x̂ + W_down · SiLU(W_up · x̂),   out = x + branch(attention(x̃)) + W_skip · x̃.
Expected values of the tests come from here. Shapes: B batch, T tokens, D width, H heads.
"""

import numpy as np
from reference import gelu, layer_norm, linear, pre_project, rotate, silu, softmax


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rms_norm(x, w, name, eps, offset=0.0):
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return scaled * (offset + w[f"{name}.weight"])


def rotary_angles(tokens, dim, base=10000.0):
    """RoPE angles [T, dim / 2]."""
    return np.arange(tokens)[:, None] * base ** -(np.arange(0, dim, 2) / dim)


def rotate_halves(x, sin, cos):
    """Turn the pairs (x[i], x[i + n / 2]) of the first n dimensions; sin and cos [T, n / 2]."""
    n = 2 * sin.shape[-1]
    pairs = np.stack([x[..., : n // 2], x[..., n // 2 : n]], axis=-1).reshape(*x.shape[:-1], n)
    turned = rotate(pairs, sin, cos)
    return np.concatenate([turned[..., 0::2], turned[..., 1::2], x[..., n:]], axis=-1)


def split_heads(x, heads):
    """[B, T, H · d] -> [B, H, T, d]"""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attend(q, k, v, scale, cap=None, window=None):
    """Causal attention of [B, H, T, d] -> [B, T, H · d]; k and v may have fewer heads than q."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * scale
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    tokens = q.shape[2]
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (distance >= 0) & (distance < (window or tokens))
    mixed = softmax(np.where(seen, scores, -np.inf)) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(len(q), tokens, -1)


def skip(x_tilde, w, attention):
    return linear(x_tilde, w, f"{attention}.preproj.skip")


def rotary_attention(x, w, name, heads, rope, scale, **kwargs):
    """q, k and v from matrices of their own; rope is (sin, cos)."""
    q, k, v = (split_heads(linear(x, w, f"{name}.{p}_proj"), heads[p]) for p in ("q", "k", "v"))
    q, k = rotate_halves(q, *rope), rotate_halves(k, *rope)
    return linear(attend(q, k, v, scale, **kwargs), w, f"{name}.o_proj")


def llama(ids, w, depth, heads, kv_heads, eps, rope):
    """Logits [B, T, vocabulary]."""
    x = w["model.embed_tokens.weight"][ids]
    heads = {"q": heads, "k": kv_heads, "v": kv_heads}
    scale = (x.shape[-1] // heads["q"]) ** -0.5
    for index in range(depth):
        block = f"model.layers.{index}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        x_tilde = pre_project(rms_norm(x, w, f"{block}.input_layernorm", eps), w, attention)
        a = rotary_attention(x_tilde, w, attention, heads, rope, scale)
        x = x + a + skip(x_tilde, w, attention)
        y = pre_project(rms_norm(x, w, f"{block}.post_attention_layernorm", eps), w, mlp)
        gated = silu(linear(y, w, f"{mlp}.gate_proj")) * linear(y, w, f"{mlp}.up_proj")
        x = x + linear(gated, w, f"{mlp}.down_proj")
    return linear(rms_norm(x, w, "model.norm", eps), w, "lm_head")


def gemma2(ids, w, depth, heads, kv_heads, eps, rope, query_scalar, cap, final_cap, window):
    """Logits [B, T, vocabulary]. Even layers see `window` tokens; every branch is normed."""
    embedding = w["model.embed_tokens.weight"]
    x = embedding[ids] * np.sqrt(embedding.shape[1])
    heads = {"q": heads, "k": kv_heads, "v": kv_heads}
    for index in range(depth):
        block = f"model.layers.{index}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"

        def norm(x, name, block=block):
            return rms_norm(x, w, f"{block}.{name}_layernorm", eps, offset=1.0)

        x_tilde = pre_project(norm(x, "input"), w, attention)
        seen = {"cap": cap, "window": window if index % 2 == 0 else None}
        a = rotary_attention(x_tilde, w, attention, heads, rope, query_scalar**-0.5, **seen)
        x = x + norm(a, "post_attention") + skip(x_tilde, w, attention)
        y = pre_project(norm(x, "pre_feedforward"), w, mlp)
        gated = gelu_tanh(linear(y, w, f"{mlp}.gate_proj")) * linear(y, w, f"{mlp}.up_proj")
        x = x + norm(linear(gated, w, f"{mlp}.down_proj"), "post_feedforward")
    logits = rms_norm(x, w, "model.norm", eps, offset=1.0) @ embedding.T
    return final_cap * np.tanh(logits / final_cap)


def gpt_neox(ids, w, depth, heads, eps, rope, parallel):
    """Logits [B, T, vocabulary]. q, k and v of one head stand together in one matrix."""
    x = w["gpt_neox.embed_in.weight"][ids]
    scale = (x.shape[-1] // heads) ** -0.5
    for index in range(depth):
        block = f"gpt_neox.layers.{index}"
        attention = f"{block}.attention"
        x_tilde = pre_project(layer_norm(x, w, f"{block}.input_layernorm", eps), w, attention)
        fused = split_heads(linear(x_tilde, w, f"{attention}.query_key_value"), heads)
        q, k, v = np.split(fused, 3, axis=-1)
        mixed = attend(rotate_halves(q, *rope), rotate_halves(k, *rope), v, scale)
        behind = x + linear(mixed, w, f"{attention}.dense") + skip(x_tilde, w, attention)
        read = x if parallel else behind
        y = layer_norm(read, w, f"{block}.post_attention_layernorm", eps)
        y = pre_project(y, w, f"{block}.mlp")
        y = gelu(linear(y, w, f"{block}.mlp.dense_h_to_4h"))
        x = behind + linear(y, w, f"{block}.mlp.dense_4h_to_h")
    return linear(layer_norm(x, w, "gpt_neox.final_layer_norm", eps), w, "lm_head")


def conv1d(x, w, name):
    """GPT-2 keeps its matrices as [inputs, outputs]."""
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def gpt2(ids, w, depth, heads, eps):
    """Logits [B, T, vocabulary], by the embedding's own matrix."""
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: ids.shape[1]]
    scale = (x.shape[-1] // heads) ** -0.5
    for index in range(depth):
        block = f"transformer.h.{index}"
        attention = f"{block}.attn"
        x_tilde = pre_project(layer_norm(x, w, f"{block}.ln_1", eps), w, attention)
        fused = np.split(conv1d(x_tilde, w, f"{attention}.c_attn"), 3, axis=-1)
        mixed = attend(*(split_heads(part, heads) for part in fused), scale)
        x = x + conv1d(mixed, w, f"{attention}.c_proj") + skip(x_tilde, w, attention)
        y = pre_project(layer_norm(x, w, f"{block}.ln_2", eps), w, f"{block}.mlp")
        y = gelu_tanh(conv1d(y, w, f"{block}.mlp.c_fc"))
        x = x + conv1d(y, w, f"{block}.mlp.c_proj")
    return layer_norm(x, w, "transformer.ln_f", eps) @ w["transformer.wte.weight"].T
