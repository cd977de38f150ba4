"""The language model's Lightning module: its loss, what it counts, what a checkpoint is."""

import json
import math
import random

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from text_data import CHARACTERS, character_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mmpreproj
from mmpreproj.backbones.lm import load_language_model
from mmpreproj.data.text import TextDataModule
from mmpreproj.training import LanguageModel, load_run

LETTERS = [c for c in CHARACTERS if c not in "é"]


def llama(vocabulary=32, width=16):
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path):
    seed_everything(1, verbose=False)
    llama().save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def text(tmp_path):
    draw = random.Random(0)
    lines = ["".join(draw.choices("abcde ", k=23)) + "\n" for _ in range(60)]
    (tmp_path / "text.txt").write_text("".join(lines))
    return str(tmp_path / "text.txt")


def data(text, **keywords):
    settings = {"block_size": 16, "batch_size": 4, "val_fraction": 0.1, "test_fraction": 0.1}
    return TextDataModule(train=text, **{**settings, **keywords})


def trainer(folder, **keywords):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False}
    return Trainer(default_root_dir=folder, **{**settings, **quiet, **keywords})


def probe(base, **keywords):
    optimizer = {"opt": "adamw", "lr": 0.01, "weight_decay": 0.0}
    settings = {"preproj": {}, "freeze_base": True, "optimizer": optimizer}
    return LanguageModel(model=base, **{**settings, **keywords})


def hand_nll(model, loader):
    """Sum of -log p by the model's own full logits, in float64, and the number of targets."""
    total, n = 0.0, 0
    for batch in loader:
        logits = model(batch["input_ids"]).logits.double().log_softmax(-1)
        keep = batch["targets"] != -100
        picked = logits.gather(-1, batch["targets"].clamp_min(0)[..., None])[..., 0]
        total -= float(picked[keep].sum())
        n += int(keep.sum())
    return total, n


@torch.no_grad()
def test_perplexities_are_those_of_the_whole_logits_over_tokens_words_and_bytes(
    base, text, tmp_path
):
    module, texts = probe(base, preproj=None), data(text)
    running = trainer(tmp_path)
    running.test(module, texts, verbose=False)
    nll, n = hand_nll(AutoModelForCausalLM.from_pretrained(base), texts.test_dataloader())
    assert module.test_result["n"] == n == texts.describe()["test"]["n_tokens"] - 1
    figures = module.metrics(module.test_result)["perplexity"]
    held = "".join(texts.documents("test"))
    for unit, count in (("token", n), ("word", len(held.split())), ("byte", len(held.encode()))):
        assert figures[unit]["n"] == count
        assert figures[unit]["value"] == pytest.approx(math.exp(nll / count), rel=1e-5)


def test_a_part_of_the_test_part_has_no_perplexity_per_word(base, text, tmp_path):
    module = probe(base, preproj=None)
    trainer(tmp_path, limit_test_batches=1).test(module, data(text), verbose=False)
    figures = module.metrics(module.test_result)["perplexity"]
    assert figures["token"]["n"] == 64 and figures["word"] is None and figures["byte"] is None


def test_a_probe_moves_every_new_parameter_and_nothing_else(base, text, tmp_path):
    module = probe(base)
    module.configure_model()
    before = {name: p.clone() for name, p in module.model.named_parameters()}
    trainer(tmp_path, max_steps=3).fit(module, data(text))
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter, before[name]) != (".preproj." in name), name


@pytest.mark.slow
def test_training_from_scratch_learns_a_text_that_can_be_known(tmp_path):
    (tmp_path / "t.txt").write_text("abcde\n" * 400)
    texts = data(str(tmp_path / "t.txt"), tokenizer=None, batch_size=8)
    texts.tokenizer = character_tokenizer()
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = LanguageModel(
        model_type="gpt_neox",
        model_args={**small, "intermediate_size": 32, "max_position_embeddings": 32},
        preproj={},
        optimizer={"lr": 0.02},
    )
    trainer(tmp_path, max_epochs=6).fit(module, texts)
    losses = [row["val/loss"] for row in module.history]
    assert losses[-1] < 0.1 < losses[0]  # six characters in turn: log 6 is 1.8
    assert module.monitor == ("val/loss", "min")


def test_accumulating_gradients_is_the_larger_batch(base, text, tmp_path):
    weights = []
    for batch, steps in ((8, 1), (4, 2)):
        seed_everything(3, verbose=False)
        module = probe(base, optimizer={"opt": "momentum", "lr": 0.1, "momentum": 0.0})
        running = trainer(tmp_path, max_steps=2, accumulate_grad_batches=steps)
        running.fit(module, data(text, batch_size=batch))
        weights.append(torch.cat([p.flatten() for p in module.parameters() if p.requires_grad]))
    # The blocks of both come in the same order; only sums of float32 are grouped otherwise.
    assert torch.allclose(*weights, atol=1e-6)
    assert float(weights[0].abs().max()) > 1e-3


def test_a_probes_checkpoint_holds_what_trains_and_comes_back(base, text, tmp_path):
    module, running = probe(base), trainer(tmp_path, max_steps=3)
    running.fit(module, data(text))
    path = tmp_path / "last.ckpt"
    running.save_checkpoint(path)
    held = torch.load(path, weights_only=True)["state_dict"]
    assert held and all(".preproj." in name for name in held)
    loaded, _ = load_run(path)
    ids = torch.arange(12).reshape(1, 12)
    assert torch.equal(loaded(ids), module.eval()(ids))
    again = probe(base)
    longer = trainer(tmp_path, max_steps=5, max_epochs=2)
    longer.fit(again, data(text), ckpt_path=path, weights_only=True)
    assert again.trainer.global_step == 5

    llama().save_pretrained(base)  # other weights under the same name
    with pytest.raises(ValueError, match="trained on other weights"):
        load_run(path)


def test_a_new_models_checkpoint_brings_its_tokenizer(text, tmp_path):
    texts = data(text, tokenizer="bpe:300")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = LanguageModel(model_type="gpt_neox", model_args={**small, "intermediate_size": 32})
    running = trainer(tmp_path, max_steps=2)
    running.fit(module, texts)
    running.save_checkpoint(tmp_path / "last.ckpt")
    loaded, _ = load_run(tmp_path / "last.ckpt")
    assert loaded.tokenizer("bad cab").input_ids == texts.tokenizer("bad cab").input_ids
    ids = torch.tensor([texts.tokenizer("bad cab").input_ids])
    assert torch.equal(loaded(ids), module.eval()(ids))


def test_a_tokenizer_made_of_changed_text_is_refused_when_a_run_goes_on(text, tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"model_type": "gpt_neox", "model_args": {**small, "intermediate_size": 32}}
    running = trainer(tmp_path, max_steps=2)
    running.fit(LanguageModel(**settings), data(text, tokenizer="bpe:300"))
    path = tmp_path / "last.ckpt"
    running.save_checkpoint(path)
    same = LanguageModel(**settings)
    longer = {"ckpt_path": path, "weights_only": True}
    trainer(tmp_path, max_steps=3, max_epochs=2).fit(
        same, data(text, tokenizer="bpe:300"), **longer
    )
    assert same.trainer.global_step == 3
    with open(text, "r+") as file:  # as long as before, and as many merges, but other ones
        lines = file.read().translate(str.maketrans("abcde", "bcdea"))
        file.seek(0)
        file.write(lines)
    other = LanguageModel(**settings)
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        trainer(tmp_path, max_steps=3, max_epochs=2).fit(
            other, data(text, tokenizer="bpe:300"), **longer
        )


def test_the_adapter_folder_gives_the_trained_model_again(base, text, tmp_path, capsys):
    module, running = probe(base, prompts=["bad"], prompt_tokens=5), trainer(tmp_path, max_steps=3)
    running.fit(module, data(text))
    module.finish(tmp_path, module, None)
    fresh = load_language_model(base, preproj=tmp_path / "adapter").model
    ids = torch.arange(12).reshape(1, 12)
    assert torch.equal(fresh(ids).logits, module.eval()(ids))
    assert (tmp_path / "sample.txt").read_text().startswith("b a d")  # words by character
    assert "sample" in capsys.readouterr().out


def test_the_base_alone_is_evaluated_without_training(base, text, tmp_path):
    items = [{"context": "bad cab", "continuation": " ad"}, {"context": "a", "continuation": " be"}]
    source = tmp_path / "lambada.jsonl"
    source.write_text("".join(json.dumps(item) + "\n" for item in items))
    evaluations = {"lambada": {"task": "lambada", "source": str(source)}}
    module = probe(base, preproj=None, evaluations=evaluations)
    running = trainer(tmp_path, max_steps=0)
    running.fit(module, data(text))
    running.test(module, data(text), verbose=False)
    assert module.metrics(module.test_result)["tasks"]["lambada"]["accuracy"]["n"] == 2
    with pytest.raises(ValueError, match="nothing would train"):
        trainer(tmp_path, max_steps=1).fit(probe(base, preproj=None), data(text))


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"model": None}, "give either model"),
        ({"model_type": "llama"}, "give either model"),
        ({"model_args": {"hidden_size": 8}}, "model_args are for a new model"),
        ({"lora": {}}, "preproj or lora, not both"),
        ({"lora": {}, "preproj": None, "freeze_base": False}, "set freeze_base: true"),
        ({"ema_decay": 0.9}, "ema_decay=0.9"),
        ({"evaluations": {"a": {"task": "squad", "source": "x"}}}, "task must be one of"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_loaded(settings, told):
    with pytest.raises(ValueError, match=told):
        probe(**{"base": "nowhere", **settings} if "model" not in settings else {"base": None})


def test_what_is_wrong_with_an_evaluation_file_is_told_before_training(base, text, tmp_path):
    evaluations = {"lambada": {"task": "lambada", "source": "nowhere.jsonl"}}
    with pytest.raises(FileNotFoundError, match="'lambada': there is no file nowhere.jsonl"):
        trainer(tmp_path).fit(probe(base, evaluations=evaluations), data(text))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"context": "a"}\n')
    evaluations = {"lambada": {"task": "lambada", "source": str(bad)}}
    with pytest.raises(ValueError, match="'lambada': .*bad.jsonl"):
        trainer(tmp_path).fit(probe(base, evaluations=evaluations), data(text))


def test_a_failing_evaluation_leaves_the_others_and_the_figures(base, text, tmp_path):
    source = tmp_path / "piqa.jsonl"
    item = {"query": "a", "choices": ["b" * 100, "c"], "gold": 0}  # longer than the context
    source.write_text(json.dumps(item) + "\n")
    evaluations = {"piqa": {"task": "choices", "source": str(source)}}
    module = probe(base, preproj=None, evaluations=evaluations)
    with pytest.warns(UserWarning, match="'piqa' failed"):
        trainer(tmp_path).test(module, data(text), verbose=False)
    found = module.metrics(module.test_result)
    assert "error" in found["tasks"]["piqa"] and found["perplexity"]["token"]["n"] > 0
    assert any("failed" in row[1] for row in module.headline(found))


def test_counts_are_exact_in_a_model_of_half_precision(base, text, tmp_path):
    module, texts = probe(base, preproj=None), data(text, test_fraction=0.5)
    trainer(tmp_path, precision="bf16-true").test(module, texts, verbose=False)
    assert module.test_result["n"] == texts.describe()["test"]["n_tokens"] - 1  # above 256


def test_blocks_longer_than_the_context_are_refused(base, text, tmp_path):
    with pytest.raises(ValueError, match="blocks of 65 tokens do not fit the model's 64"):
        trainer(tmp_path).fit(probe(base), data(text, block_size=65))


def test_a_fault_in_the_test_part_is_told_before_training(base, text, tmp_path):
    with open(text, "ab") as file:
        file.write(b"bad \xe9 byte\n")
    with pytest.raises(ValueError, match="UTF-8"):
        trainer(tmp_path).fit(probe(base), data(text))


def test_a_tokenizer_with_other_numbers_than_the_models_is_refused(base, text, tmp_path):
    texts = data(text)
    texts.tokenizer = character_tokenizer(bos=False)
    with pytest.raises(ValueError, match="not the same as the model's"):
        trainer(tmp_path).fit(probe(base), texts)


def test_the_base_keeps_its_dropout_off_in_a_probe(base):
    module = probe(base)
    module.configure_model()
    module.train()
    modes = {name: m.training for name, m in module.model.named_modules()}
    assert modes[""] is False
    assert all(modes[name] for name in mmpreproj.preproj_modules(module.model))


def test_half_precision_leaves_rotary_frequencies_alone_and_its_average_moves(base, text, tmp_path):
    exact = llama().model.rotary_emb.inv_freq
    module = LanguageModel(model=base, ema_decay=0.9, optimizer={"lr": 1e-3})
    trainer(tmp_path, precision="bf16-true").fit(module, data(text))
    for model in (module.model, module.ema.module):
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    start = load_language_model(base, dtype="bfloat16").model.state_dict()
    now, average = module.model.state_dict(), module.ema.module.state_dict()
    moved = [name for name in start if not torch.equal(now[name], start[name])]
    assert len(moved) > 9 and not any(torch.equal(average[name], start[name]) for name in moved)
    module = LanguageModel(model=base, ema_decay=0.9)
    with pytest.raises(ValueError, match="ema_decay=0.9 does not work with weights in float16"):
        trainer(tmp_path, precision="16-true").fit(module, data(text))
