"""A video transformer with the method in NumPy float64, joint and divided.

Like `reference.py`, whose attention, norms and MLP it uses, it reads a state dict and follows the
formulas alone. Tokens and pairs are visited one at a time: slow, and hard to get wrong alike.
"""

import numpy as np
from reference import attention, block_output, gelu, layer_norm, linear, pre_project


def angles(grid, head_dim, temperature=100.0, time=True):
    """RoPE angles [T · H · W, head_dim / 2] of a grid (T, H, W), pair by pair.

    With time: n = head_dim // 6 pairs an axis, x from pair 0, y from pair h = head_dim // 4, t in
    the pairs that x and y leave, from the first. Without: x the first h pairs, y the next h.
    """
    pairs, half = head_dim // 2, head_dim // 2 // 2
    count = head_dim // 6 if time else half
    x_pairs = list(range(count))
    y_pairs = [half + index for index in range(count)]
    t_pairs = [p for p in range(pairs) if p not in x_pairs + y_pairs][:count] if time else []
    table = np.zeros((int(np.prod(grid)), pairs))
    for token, coordinates in enumerate(np.ndindex(*grid)):
        for chosen, coordinate in zip((t_pairs, y_pairs, x_pairs), coordinates, strict=True):
            for index, pair in enumerate(chosen):
                table[token, pair] = coordinate / temperature ** (index / half)
    return table


def time_angles(frames, head_dim, temperature=100.0):
    """RoPE angles [T, head_dim / 2] of time attention: every pair turns with t."""
    pairs = head_dim // 2
    return np.array(
        [[t / temperature ** (pair / pairs) for pair in range(pairs)] for t in range(frames)]
    )


def tubelets(clips, w, size, patch):
    """[B, C, T, H, W] -> [B, N, D] and the grid, one tubelet at a time."""
    kernel, bias = w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]
    batch, _, frames, height, width = clips.shape
    grid = (frames // size, height // patch, width // patch)
    tokens = []
    for t, y, x in np.ndindex(*grid):
        cut = clips[
            :,
            :,
            t * size : (t + 1) * size,
            y * patch : (y + 1) * patch,
            x * patch : (x + 1) * patch,
        ]
        tokens.append(cut.reshape(batch, -1) @ kernel.reshape(len(kernel), -1).T + bias)
    return np.stack(tokens, axis=1), grid


def with_method(x_hat, w, name, heads, rope, prefix):
    """attention(x̃) + W_skip · x̃ of one self-attention."""
    new = f"{name}.preproj"
    x_tilde = pre_project(x_hat, w, name)
    out = attention(x_tilde, w, name, heads, rope, prefix)
    if f"{new}.skip.weight" in w:
        out = out + linear(x_tilde, w, f"{new}.skip")
    return out


def divided_output(x, w, block, heads, eps, grid, prefix, space_rope, time_rope):
    """Time attention of every place on its own, then space attention of every frame on its own."""
    frames, places = grid[0], grid[1] * grid[2]
    x = x.copy()
    normed = layer_norm(x, w, f"{block}.temporal_norm", eps)
    for place in range(places):
        chosen = [prefix + t * places + place for t in range(frames)]
        branch = with_method(
            normed[:, chosen], w, f"{block}.temporal_attn", heads, time_rope, prefix=0
        )
        x[:, chosen] += branch
    normed = layer_norm(x, w, f"{block}.norm1", eps)
    for t in range(frames):
        chosen = list(range(prefix)) + [prefix + t * places + p for p in range(places)]
        branch = with_method(normed[:, chosen], w, f"{block}.attn", heads, space_rope, prefix)
        x[:, chosen[prefix:]] += branch[:, prefix:]
        x[:, :prefix] += branch[:, :prefix] / frames
    y = pre_project(layer_norm(x, w, f"{block}.norm2", eps), w, f"{block}.mlp")
    hidden = gelu(linear(y, w, f"{block}.mlp.fc1"))
    return x + linear(hidden, w, f"{block}.mlp.fc2")


def turned(table):
    return np.sin(table), np.cos(table)


def video_logits(clips, w, depth, heads, eps, size=2, patch=16, divided=False, time=True):
    """Logits [B, classes]; pooled by the class token if there is one, else by the average.

    Args:
        clips: [B, C, T, H, W].
        w: the state dict.
        time: whether time rotates.
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in w.items()}
    x, grid = tubelets(np.asarray(clips, dtype=np.float64), w, size, patch)
    head_dim = x.shape[-1] // heads
    tokens = [w[name][0] for name in ("cls_token", "reg_token") if name in w]
    prefix = sum(map(len, tokens))
    x = np.stack([np.concatenate([*tokens, clip]) for clip in x])
    for index in range(depth):
        block = f"blocks.{index}"
        if divided:
            space = turned(angles((1, *grid[1:]), head_dim, time=False))
            along = turned(time_angles(grid[0], head_dim)) if time else None
            x = divided_output(x, w, block, heads, eps, grid, prefix, space, along)
        else:
            rope = turned(angles(grid, head_dim, time=time))
            x = block_output(x, w, block, heads, eps, rope, prefix)
    x = layer_norm(x, w, "norm", eps)
    return linear(x[:, 0] if "cls_token" in w else x[:, prefix:].mean(1), w, "head")
