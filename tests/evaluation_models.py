"""Toy tokenizers, and models whose every probability is known beforehand."""

import torch
import transformers
from helpers import perturb
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers_models import tiny

from mmpreproj import attach

TEXT = """The Answer came late in the evening, and nobody believed a word of the Answer.
What else could it be? A stone, a small stone; the old man held the small stone in his hand.
"""


@torch.no_grad()
def by_hand(model, tokenizer, context, continuation):
    """(sum of log-probabilities in float64, greedy, number) from the logits of all that is read."""
    before = tokenizer(context)["input_ids"]
    ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
    logits = model(ids[:, :-1]).logits[0, len(before) - 1 :].double()
    wanted = ids[0, len(before) :]
    picked = logits.log_softmax(-1).gather(1, wanted[:, None])
    return picked.sum().item(), bool((logits.argmax(-1) == wanted).all()), len(wanted)


def questions(n=4):
    """Contexts that are long enough to be shared, each with three continuations."""
    words = TEXT.split()
    contexts = [" ".join(words[i : i + 9 + i]) for i in range(n)]
    return [(c, end) for c in contexts for end in (" stone", " the old man", " be? A small stone")]


def byte_tokenizer(merges=0, bos=False, specials=("<s>", "</s>"), adds_bos=False, **keywords):
    """Byte-level BPE: 256 bytes, `merges` pairs learned from TEXT, then the special tokens.

    Args:
        bos: the tokenizer has BOS <s> and EOS </s>; adds_bos: it puts <s> first by default.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens(list(specials))
    if adds_bos:
        number = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", number)]
        )
    if bos:
        keywords |= {"bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **keywords)


def random_model(name="gpt_neox", tokenizer=None, perturbed=True, **config):
    """A tiny decoder with the method attached, its new weights random, for a tokenizer's ids."""
    rows = 330 if tokenizer is None else len(tokenizer)
    model = tiny(name, **{"vocab_size": rows, **config})
    return perturb(attach(model)) if perturbed else model


@torch.no_grad()
def bigram_model(table, positions=64):
    """A GPT-2 in which the next token's logits are table[token] ([V, V]), and nothing else."""
    return _lookup(table, len(table), positions, "wte")


@torch.no_grad()
def position_model(table, vocabulary):
    """A GPT-2 in which they are table[position in what it reads] ([P, V])."""
    return _lookup(table, vocabulary, len(table), "wpe")


def _lookup(table, vocabulary, positions, by):
    n = len(table)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=n, n_layer=1, n_head=1, n_positions=positions, n_inner=4,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.zero_()
    getattr(model.transformer, by).weight.copy_(torch.eye(n))
    # LayerNorm of a unit vector e is (e - 1/n) / deviation: undone by its weight and bias
    norm = model.transformer.ln_f
    norm.weight.fill_(((1 - 1 / n) / n + norm.eps) ** 0.5)
    norm.bias.fill_(1 / n)
    model.lm_head.weight.copy_(table.T)
    return model
