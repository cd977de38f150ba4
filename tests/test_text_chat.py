"""Conversations and instructions: their tokens, which of them count, and how they are packed."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_models import byte_tokenizer, random_model
from text_data import BOS, EOS, ID, character_tokenizer, ids_of, write_lines
from transformers_models import tiny

from mmpreproj.backbones.lm.lm_head import check_packing, hidden_states
from mmpreproj.data.text import IGNORE, TextDataModule
from mmpreproj.data.text.chat import Chat, ChatEncoder
from mmpreproj.data.text.token_blocks import Mixture, PackedDocuments, best_fit
from mmpreproj.training.lm_loss import lm_loss

WHOLE = {"val_fraction": 0.0, "test_fraction": 0.0}
NAMES = {i: character for character, i in ID.items()} | {BOS: "<s>", EOS: "</s>"}

# Three ways in which published templates are built: ChatML's; one without names of roles, as Llama
# 2's; one that begins with BOS and ends with the last message. [[ and ]] stand where TRL's versions
# have {% generation %}.
TEMPLATES = {
    "chatml": "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "[[{{ m.content }}</s>]]{% else %}{{ m.content }}</s>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "llama": "{% for m in messages %}{% if m.role == 'assistant' %}[[{{ m.content }}</s>]]"
    "{% else %}<s>inst {{ m.content }} inst. {% endif %}{% endfor %}",
    "plain": "<s>{% for m in messages %}{% if m.role == 'assistant' %}bot. [[{{ m.content }}"
    "{{ '</s>' if loop.last else '' }}]]{% else %}me. {{ m.content }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}bot. {% endif %}",
}
MARK = {"[[": "{% generation %}", "]]": "{% endgeneration %}"}
DIALOGUE = [
    {"role": "user", "content": "is it so"},
    {"role": "assistant", "content": "it is"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so be it."},
]


def template(tmp_path, name, marked=True):
    text = TEMPLATES[name]
    for bracket, mark in MARK.items():
        text = text.replace(bracket, mark if marked else "")
    (tmp_path / "chat.jinja").write_text(text)
    return str(tmp_path / "chat.jinja")


def module(train, tmp_path, **keywords):
    data = TextDataModule(
        train, cache_dir=str(tmp_path / "cache"), **{**WHOLE, "block_size": 8, **keywords}
    )
    data.tokenizer = character_tokenizer()
    return data


def rows(tmp_path, *found, name="a.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(tmp_path / name)


def shown(data):
    """The tokens of the training split as text, what counts in brackets."""
    tokens = data.tokens("train")
    counts = np.ones(len(tokens.ids), bool) if tokens.scored is None else tokens.scored
    text = "".join(
        f"[{NAMES[i]}]" if c else NAMES[i] for i, c in zip(tokens.ids, counts, strict=True)
    )
    return text.replace("][", "")


def items(dataset):  # which begins again behind its end, with the next epoch
    return [dataset[i] for i in range(len(dataset))]


# Which tokens count

EXPECTED = {
    "chatml": "<s>user\nis it so</s>\n<s>assistant\n[it is</s>]\n<s>user\nwhy</s>\n<s>assistant\n"
    "[so be it.</s>]\n",
    "llama": "<s>inst is it so inst. [it is</s>]<s>inst why inst. [so be it.</s>]",
    "plain": "<s>me. is it so\nbot. [it is]\nme. why\nbot. [so be it.</s>]\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_messages_the_marked_answers_count_alone(tmp_path, name):
    path = rows(tmp_path, {"messages": DIALOGUE})
    how = {"chat_template_path": template(tmp_path, name)}
    assert shown(module(path, tmp_path, assistant_only_loss=True, **how)) == EXPECTED[name]
    everything = re.sub(r"[\[\]]", "", EXPECTED[name])
    assert shown(module(path, tmp_path, **how)) == f"[{everything}]"


def test_without_marks_the_answers_are_what_follows_the_prompt_for_them(tmp_path):
    path = rows(tmp_path, {"messages": DIALOGUE})
    for name, expected in EXPECTED.items():
        how = {"chat_template_path": template(tmp_path, name, marked=False)}
        data = module(path, tmp_path, assistant_only_loss=True, **how)
        if name == "plain":  # its end is another one once a message follows
            with pytest.raises(ValueError, match="a.jsonl, line 1 .*{% generation %}"):
                data.tokens("train")
        else:  # of ChatML with the line end that closes the message
            assert shown(data) == expected.replace("</s>]\n", "</s>\n]")


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_prompt_and_completion_the_completion_counts_alone(tmp_path, name):
    path = rows(tmp_path, {"prompt": DIALOGUE[:3], "completion": DIALOGUE[3:]})
    how = {"chat_template_path": template(tmp_path, name)}
    head, _, last = EXPECTED[name].rpartition("[")
    head, last = re.sub(r"[\[\]]", "", head), last.replace("]", "")  # to the end, as in TRL
    assert shown(module(path, tmp_path, **how)) == f"{head}[{last}]"
    assert shown(module(path, tmp_path, completion_only_loss=False, **how)) == f"[{head}{last}]"
    both = module(path, tmp_path, assistant_only_loss=True, **how)
    assert shown(both) == head + EXPECTED[name][EXPECTED[name].rindex("[") :]


def test_text_and_alpacas_rows_stand_between_bos_and_eos(tmp_path):
    path = rows(
        tmp_path, {"prompt": "is it so. ", "completion": "it is"}, {"prompt": "", "completion": "x"}
    )
    data = module(path, tmp_path, add_bos=True)
    assert shown(data) == "<s>is it so. [it is</s><s>x</s>]"
    path = rows(
        tmp_path, {"instruction": "add", "input": "one and one", "output": "two"}, name="b.jsonl"
    )
    how = {"chat_template_path": template(tmp_path, "llama")}
    assert shown(module(path, tmp_path, **how)) == "<s>inst add\n\none and one inst. [two</s>]"
    data = TextDataModule(path, tokenizer="bpe:257", cache_dir=str(tmp_path / "cache"), **WHOLE)
    text = data.tokenizer.decode(data.tokens("train").ids)
    assert text.endswith("### Input:\none and one\n\n### Response:\ntwo<|endoftext|>")
    assert data.tokens("train").scored.sum() == len("two") + 1
    facts = data.describe()["train"]  # of what counts
    assert (facts["n_words"], facts["n_bytes"]) == (1, 3)


def test_batches_have_no_target_where_nothing_counts(tmp_path):
    path = rows(tmp_path, {"prompt": "is it ", "completion": "so"})
    data = module(path, tmp_path, drop_last=False, batch_size=1)
    item = data.dataset("train")[0]
    assert item["targets"].tolist() == [IGNORE] * 5 + ids_of("so") + [EOS]
    data.train_dataloader()
    assert data.describe()["n_targets"]["train"] == 3


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": DIALOGUE}, "line 1 .*chat_template_path"),
        ({"messages": []}, "line 1 is empty"),
        ({"messages": "x"}, "line 1: expected text, or a list of messages"),
        ({"messages": [{"content": "x"}]}, "line 1: expected text, or a list of messages"),
        ({"prompt": "x", "completion": DIALOGUE}, "line 1: expected text, or a list"),
        ({"completion": "x", "prompt": None}, "line 1: expected text"),
        ({"question": "x"}, "line 1: no 'text' there, found .*messages"),
    ],
)
def test_what_is_no_conversation_names_its_row(tmp_path, row, message):
    with pytest.raises(ValueError, match=f"a.jsonl, {message}"):
        module(rows(tmp_path, row), tmp_path).tokens("train")


STOPS = {"qwen2_5": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
HEADS = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>")


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPS)
def test_what_counts_is_what_counts_in_trl(tmp_path, name):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    folder = Path(trl.__file__).parent / "chat_templates"
    stop = STOPS[name]
    tokenizer = byte_tokenizer(60, specials=("<s>", stop, "<pad>", *HEADS))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": stop, "pad_token": "<pad>"})
    model = tiny("llama", vocab_size=len(tokenizer))
    found = {
        "messages": ([{"messages": DIALOGUE}], True),
        "completion": ([{"prompt": DIALOGUE[:3], "completion": DIALOGUE[3:]}], False),
        "text": ([{"prompt": "is it so? ", "completion": " it is"}], False),
    }
    for case, (row, only) in found.items():
        # TRL puts its own marked template in place of this one
        tokenizer.chat_template = plain = (folder / f"{name}.jinja").read_text()
        how = {"assistant_only_loss": only, "max_length": None, "use_cpu": True, "report_to": []}
        args = trl.SFTConfig(str(tmp_path), **how)
        trainer = trl.SFTTrainer(
            model, args, train_dataset=datasets.Dataset.from_list(row), processing_class=tokenizer
        )
        expected = trainer.train_dataset[0]
        templates = [plain]
        if only:
            templates = [(folder / f"{name}_training.jinja").read_text()]
            # of Qwen's, TRL marks the line end behind "assistant" as well
            templates += [plain] if name != "qwen2_5" else []
        for template in templates:
            answers = ChatEncoder(tokenizer, None, tokenizer.eos_token_id, template, None, only)
            ids, counts = answers(Chat("x", row[0]))
            assert ids == expected["input_ids"], case
            labels = [i if c else IGNORE for i, c in zip(ids, counts, strict=True)]
            assert labels == expected["labels"], (case, template)


# Tables by column


@pytest.mark.parametrize("suffix, by", [("csv", ","), ("tsv", "\t")])
def test_csv_is_read_by_column(tmp_path, suffix, by):
    path = tmp_path / f"a.{suffix}"
    path.write_text(
        f'id{by}text\n1{by}"a{by} b\nc"\n007{by}{by}\n'.replace(f"{by}{by}\n", f"{by}\n")
    )
    assert list(module(str(path), tmp_path).documents("train")) == [f"a{by} b\nc"]
    assert list(module(str(path), tmp_path, text_key="id").documents("train")) == ["1", "007"]
    with pytest.raises(ValueError, match=f"a.{suffix}, row 0: no 'words' .*'id', 'text'"):
        module(str(path), tmp_path, text_key="words").tokens("train")
    path.write_bytes(b"text\nx,y\n" if suffix == "csv" else b"text\n\xff\n")
    with pytest.raises(ValueError, match=f"a.{suffix} cannot be read as CSV"):
        module(str(path), tmp_path).tokens("train")


# Documents apart


def test_documents_are_laid_into_blocks_by_best_fit():
    boxes = best_fit(np.array([3, 5, 2, 4, 2, 8]), 8)
    assert sorted(map(sorted, boxes)) == [[0, 1], [2, 3, 4], [5]]


def test_packed_documents_equal_each_alone(tmp_path):
    texts = ["a fox", "the dog is lazy.", "it jumps over", "x", "so it is"]
    data = module(
        write_lines(tmp_path / "a.jsonl", texts),
        tmp_path,
        block_size=20,
        batch_size=2,
        packing_strategy="bfd",
    )
    blocks = data.dataset("train")
    assert isinstance(blocks, PackedDocuments) and len(blocks) == 3
    batch = {k: torch.stack([b[k] for b in items(blocks)]) for k in blocks[0]}
    model = random_model("llama", vocab_size=32)
    check_packing(model)
    nll, n = lm_loss(
        model, batch["input_ids"], batch["targets"], position_ids=batch["position_ids"]
    )
    alone = [torch.tensor([[*ids_of(text), EOS]]) for text in texts]
    expected = sum(lm_loss(model, ids[:, :-1], ids[:, 1:])[0] for ids in alone)
    assert n == sum(map(len, texts)) == blocks.n_targets
    data.train_dataloader()  # the first word of a document is not predicted
    assert data.describe()["n_targets"]["train"] is None
    assert abs(nll.item() - expected.item()) < 1e-5 * expected.item()
    # and each token's hidden state
    found = hidden_states(model, batch["input_ids"], position_ids=batch["position_ids"])
    of_row = {tuple(ids[0, :-1].tolist()): hidden_states(model, ids[:, :-1])[0] for ids in alone}
    for row, states, positions in zip(
        batch["input_ids"], found, batch["position_ids"], strict=True
    ):
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(row)]
        first = tuple(row[: starts[1]].tolist())
        first = next(key for key in of_row if first[: len(key)] == key)  # padding may follow
        assert (states[: len(first)] - of_row[first]).abs().max() < 1e-5


def test_a_document_longer_than_a_block_is_cut_and_loses_no_target(tmp_path):
    text = "the quick brown fox jumps"
    data = module(write_lines(tmp_path / "a.jsonl", [text]), tmp_path, packing_strategy="bfd")
    blocks = items(data.dataset("train"))
    pairs = [
        pair
        for b in blocks
        for pair in zip(*(b[k].tolist() for k in ("input_ids", "targets")), strict=True)
    ]
    ids = [*ids_of(text), EOS]
    assert sorted(p for p in pairs if p[1] != IGNORE) == sorted(zip(ids, ids[1:], strict=False))
    assert all(b["position_ids"][0] == 0 for b in blocks)


def test_models_that_do_not_keep_documents_apart_are_refused():
    with pytest.raises(ValueError, match="BloomForCausalLM does not keep the documents .*wrapped"):
        check_packing(random_model("bloom"))


# Several sources


def test_sources_are_mixed_by_their_probabilities(tmp_path):
    for name, letter, n in (("a", "a", 30), ("b", "b", 200)):
        write_lines(tmp_path / f"{name}.jsonl", [letter * 80] * n)
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    data = module(names, tmp_path, probabilities=[0.75, 0.25], add_eos=False)
    mixture = data.dataset("train")
    # all 299 whole blocks of a, and a third as many of b
    assert isinstance(mixture, Mixture) and mixture.shares == [299, 99]
    drawn = [int(block["input_ids"][0]) for block in items(mixture)]
    assert (drawn.count(ID["a"]), drawn.count(ID["b"])) == (299, 99)
    # the second epoch goes on in b
    first, second = (mixture.parts[1][k]["input_ids"] for k in (0, 99))
    assert torch.equal(mixture[299]["input_ids"], first)
    assert torch.equal(mixture[len(mixture) + 299]["input_ids"], second)
    assert data.describe()["train"]["n_documents"] == 230
    for wrong in ([1.0], [0.5, 0.6], [1.0, 0.0]):
        with pytest.raises(
            ValueError, match="probabilities are one above 0 for each of the 2 names"
        ):
            module(names, tmp_path, probabilities=wrong)


@pytest.mark.slow
def test_a_run_on_packed_documents_checks_the_model_before_training(tmp_path):
    import lightning

    from mmpreproj.training import LanguageModel

    path = write_lines(tmp_path / "a.jsonl", ["so it is", "the dog is lazy."] * 30)
    for model_type, told in (("gpt_neox", None), ("bloom", "does not keep the documents")):
        data = TextDataModule(
            path,
            cache_dir=str(tmp_path / "cache"),
            block_size=24,
            batch_size=2,
            packing_strategy="bfd",
        )
        data.tokenizer = character_tokenizer()
        small = {"hidden_size": 16, "num_attention_heads": 2}
        small |= {"n_layer" if model_type == "bloom" else "num_hidden_layers": 1}
        module = LanguageModel(model_type=model_type, model_args=small)
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        if told:
            with pytest.raises(ValueError, match=told):
                trainer.fit(module, data)
            continue
        trainer.fit(module, data)
        assert trainer.global_step == 2
        figures = trainer.test(module, data, verbose=False)[0]
        assert figures["test/n"] == data.datasets["test"].n_targets
