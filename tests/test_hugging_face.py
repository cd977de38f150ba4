"""docs/hugging_face.md as it stands, and the same ways held against exact logits."""

import copy
import json
import re
import warnings
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from helpers import perturb  # noqa: E402
from tokenizers import ByteLevelBPETokenizer  # noqa: E402
from training_data import tool_main  # noqa: E402

import mmpreproj  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*holds a model with mmpreproj's method", "ignore:the model carries mmpreproj's"
    ),
]
PAGE = Path(__file__).parents[1] / "docs" / "hugging_face.md"
NEEDS = ("trl", "torchao", "bitsandbytes", "accelerate", "peft", "datasets")
IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama, its tokenizer and a text, as the page has them."""
    folder = tmp_path_factory.mktemp("page")
    text = "once upon a time there was a house.\n" * 16
    (folder / "my_text.txt").write_text(text)
    letters = ByteLevelBPETokenizer()
    special = ["<end>", "<pad>"]
    letters.train([str(folder / "my_text.txt")], 258, show_progress=False, special_tokens=special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters._tokenizer, eos_token="<end>", pad_token="<pad>"
    )
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=128,
        eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "my_model")
    tokenizer.save_pretrained(folder / "my_model")
    return folder


def attached(folder, **keywords):
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "my_model", **keywords)
    expected = base(IDS).logits
    dtype = "bfloat16" if "quantization_config" in keywords else None
    model = mmpreproj.freeze_base(mmpreproj.attach(base, mmpreproj.PreProjConfig(dtype=dtype)))
    assert torch.equal(model(IDS).logits, expected)
    return perturb(model)


def check_comes_back(model, folder, **keywords):
    """Its adapter and the whole of it give the same logits, to the bit."""
    with torch.no_grad():
        expected = model.eval()(IDS).logits
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "my_model", **keywords)
        mmpreproj.save(model, folder / "adapter")
        assert torch.equal(mmpreproj.load(base, folder / "adapter")(IDS).logits, expected)
        model.save_pretrained(folder / "whole")
        assert torch.equal(mmpreproj.from_pretrained(folder / "whole")(IDS).logits, expected)


@pytest.mark.filterwarnings("ignore")
def test_every_block_of_the_page_runs(folder, monkeypatch):
    for module in NEEDS:
        pytest.importorskip(module)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        exec(compile(block, PAGE.name, "exec"), names)
    tokens = next(iter(names["found"].values())).generated_tokens
    assert names["expected"][0, -len(tokens) :].tolist() == tokens


def test_a_torchao_int8_base(folder):
    quantization = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    keywords = {"quantization_config": config, "dtype": torch.bfloat16}
    model = attached(folder, **keywords)
    model(IDS, labels=IDS).loss.backward()
    check_comes_back(model, folder, **keywords)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_bitsandbytes_base(bits, folder):
    pytest.importorskip("bitsandbytes")
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, **(four if bits == 4 else {})
    )
    keywords = {"quantization_config": config, "dtype": torch.bfloat16, "device_map": "cpu"}
    model = attached(folder, **keywords)
    model(IDS, labels=IDS).loss.backward()
    check_comes_back(model, folder, **keywords)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_base_of_torchs_dynamic_quantisation(folder):
    def base():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "my_model")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})

    model = base()
    expected = model(IDS).logits
    with pytest.raises(ValueError, match="packed weights .torch.qint8.: say which dtype"):
        mmpreproj.attach(model)
    mmpreproj.attach(model, mmpreproj.PreProjConfig(dtype="float32"))
    assert torch.equal(model(IDS).logits, expected)
    mmpreproj.save(perturb(model), folder / "dynamic")
    again = mmpreproj.load(base(), folder / "dynamic")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_an_offloaded_base_is_refused_before_anything_changes(folder):
    accelerate = pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "my_model")
    expected = model(IDS).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match="an offload hook"):
        mmpreproj.attach(model)
    assert not mmpreproj.preproj_modules(model) and torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("packing", [False, True])
def test_sft_comes_back_and_moves_nothing_but_the_method(packing, folder):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = attached(folder)
    before = copy.deepcopy(model.state_dict())
    texts = {"text": (folder / "my_text.txt").read_text().splitlines()}
    arguments = trl.SFTConfig(
        str(folder / f"sft{packing}"), max_steps=2, max_length=32, packing=packing, bf16=False,
        report_to="none", per_device_train_batch_size=2, use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "my_model")
    texts = datasets.Dataset.from_dict(texts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl.SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer).train()
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert moved == {name for name in before if ".preproj." in name}
    again = mmpreproj.from_pretrained(folder / f"sft{packing}" / "checkpoint-2")
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


def test_predict_continues_prompts_of_an_adapter_and_of_a_whole_model(folder, capsys):
    model = attached(folder)
    mmpreproj.save(model, folder / "adapter")
    model.save_pretrained(folder / "whole")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "my_model")
    tokenizer.save_pretrained(folder / "whole")
    prompt = tokenizer("once upon", return_tensors="pt")
    with torch.no_grad():
        made = model.eval().generate(**prompt, max_new_tokens=4, do_sample=False)[0]
    expected = tokenizer.decode(made, skip_special_tokens=True)
    for name in ("adapter", "whole"):
        table = folder / "texts.jsonl"
        options = ["--tokens", "4", "--table", str(table), "--device", "cpu"]
        assert tool_main("predict")([str(folder / name), "once upon", *options]) == 0
        assert json.loads(table.read_text()) == {"prompt": "once upon", "text": expected}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, folder):
    model = attached(folder).train()

    def gradients():
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
