"""A prompt continued by a language model, for a person to look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmpreproj.backbones.modes import evaluating
from mmpreproj.evaluation.encoding import Encoder, max_length_of


@torch.no_grad()
def continue_text(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    seed: int | None = None,
    **generation: Any,
) -> str:
    """The prompt with its continuation by `generate()`, in eval mode.

    The prompt stands behind what the tokenizer puts before a text (BOS), and without what it puts
    behind one (EOS), which would end it.

    Args:
        tokens: how many to add at most; it stops earlier at the end-of-sequence token.
        seed: sample with it, leaving the generators as they were; None: greedy.
        generation: keywords of transformers' generate, such as temperature and top_p.

    Raises:
        ValueError: if the prompt has no tokens, or does not fit the model with what is to come; or
            the tokenizer is not the model's.
    """
    embeddings = model.get_input_embeddings().weight
    device = embeddings.device
    encoder = Encoder(tokenizer, max_length_of(model, tokenizer), embeddings.shape[0])
    ids = torch.tensor(encoder.encode([prompt]), dtype=torch.long, device=device)
    if not ids.shape[1]:
        raise ValueError("the prompt has no tokens; give it a word at least")
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None and ids.shape[1] + tokens > room:
        raise ValueError(
            f"the prompt's {ids.shape[1]} tokens and {tokens} new ones do not fit the model's "
            f"{room}"
        )
    settings: dict[str, Any] = {"do_sample": seed is not None, "max_new_tokens": tokens}
    settings["pad_token_id"] = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with evaluating(model), forked:
        if seed is not None:
            torch.manual_seed(seed)
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **{**settings, **generation}
        )
    return tokenizer.decode(out[0], skip_special_tokens=True)
