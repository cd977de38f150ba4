"""Models of transformers with the method, saved whole and loaded again: to the bit."""

import copy
import json
import subprocess
import sys
import warnings

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from helpers import perturb  # noqa: E402
from transformers_models import CASES, inputs, outputs, randomise, tiny  # noqa: E402

import mmpreproj  # noqa: E402
from mmpreproj import PreProjConfig, attach, freeze_base, from_pretrained, preproj_modules  # noqa: E402

# Saving says where to load from; it is what some of these tests are about
pytestmark = pytest.mark.filterwarnings("ignore:.*holds a model with mmpreproj's method")


def attached(case="llama", **config):
    return perturb(attach(tiny(case), PreProjConfig(**config)))


@pytest.mark.parametrize("case", ["llama", "gemma2", "mixtral", "t5", "bert", "vit"])
def test_a_saved_model_comes_back_and_transformers_alone_refuses_it(case, tmp_path):
    model = attached(case, layers=[-1], skip_rank=3)
    x = inputs(model)
    with pytest.warns(UserWarning, match="load it with mmpreproj.from_pretrained"):
        model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert type(again).__name__ == CASES[case].model
    assert list(preproj_modules(again)) == list(preproj_modules(model))
    assert torch.equal(outputs(again, x), outputs(model, x))
    with pytest.raises(ValueError, match=r"mmpreproj.from_pretrained\(FOLDER_OR_NAME\)"):
        type(model).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"mmpreproj.from_pretrained\(FOLDER_OR_NAME\)"):
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_logits(tmp_path):
    model = attached()
    model.save_pretrained(tmp_path)
    x = inputs(model)
    torch.save({"x": x, "logits": outputs(model, x)}, tmp_path / "expected.pt")
    program = (
        "import sys, torch, mmpreproj\n"
        "assert 'transformers' not in sys.modules\n"
        "model = mmpreproj.from_pretrained(sys.argv[1])\n"
        "held = torch.load(sys.argv[1] + '/expected.pt')\n"
        "assert torch.equal(model(**held['x']).logits, held['logits'])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_what_is_saved_after_detach_is_the_base_again(tmp_path):
    model = attached()
    model.save_pretrained(tmp_path)
    mmpreproj.detach(model)
    assert type(model) is transformers.LlamaForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
    x = inputs(model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(outputs(again, x), outputs(model, x))
    with pytest.raises(ValueError, match="transformers' own from_pretrained loads it"):
        from_pretrained(tmp_path)


def test_the_whole_model_may_be_sharded_in_bfloat16_and_saved_again(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model = freeze_base(perturb(attach(base)), also=["lm_head"])
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    x = inputs(model)
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    assert (tmp_path / "one" / "model.safetensors.index.json").is_file()
    again = from_pretrained(tmp_path / "one", is_trainable=True)
    trains = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trains == {name for name, p in model.named_parameters() if p.requires_grad}
    again.save_pretrained(tmp_path / "two")
    mmpreproj.save(again, tmp_path / "adapter")
    twice = from_pretrained(tmp_path / "two")
    assert all(torch.equal(outputs(m, x), outputs(model, x)) for m in (again, twice))
    wide = from_pretrained(tmp_path / "two", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_an_adapter_folder_that_names_its_base_is_enough(tmp_path):
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    mmpreproj.save(perturb(attach(model)), tmp_path / "adapter")
    x = inputs(model)
    assert torch.equal(outputs(from_pretrained(tmp_path / "adapter"), x), outputs(model, x))
    nameless = perturb(attach(copy.deepcopy(base)))
    mmpreproj.save(nameless, tmp_path / "nameless")
    with pytest.raises(ValueError, match="does not name its base: build it"):
        from_pretrained(tmp_path / "nameless")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        from_pretrained(tmp_path / "absent")


def test_a_name_of_the_hub_is_taken_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("mmpreproj.hub_cache.reachable", lambda endpoint: False)
    model = attached()
    commit = "a" * 40
    (tmp_path / "models--me--trained" / "refs").mkdir(parents=True)
    (tmp_path / "models--me--trained" / "refs" / "main").write_text(commit)
    model.save_pretrained(tmp_path / "models--me--trained" / "snapshots" / commit)
    x = inputs(model)
    assert torch.equal(outputs(from_pretrained("me/trained"), x), outputs(model, x))
    with pytest.raises(ConnectionError, match="me/absent is no local folder"):
        from_pretrained("me/absent")


def test_a_folder_that_names_a_class_of_no_library_runs_nothing(tmp_path):
    attached().save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    for name in ("Trainer", "os.system", "MyOwn"):
        (tmp_path / "config.json").write_text(json.dumps(described | {"architectures": [name]}))
        with pytest.raises(ValueError, match=f"names '{name}', which is no model of transformers"):
            from_pretrained(tmp_path)


def test_pushing_to_the_hub_uploads_what_comes_back(tmp_path, monkeypatch):
    """The upload is stubbed: what would be sent is kept as a folder."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    sent = tmp_path / "sent"

    def commit(self, repo_id, operations, **_):
        for operation in operations:
            (sent / operation.path_in_repo).parent.mkdir(parents=True, exist_ok=True)
            with operation.as_file() as file:
                (sent / operation.path_in_repo).write_bytes(file.read())

    def card(*_, **__):
        raise EntryNotFoundError("no card yet")

    class Repository(str):
        repo_id = "me/model"

    monkeypatch.setattr(HfApi, "create_commit", commit)
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: Repository("me/model"))
    monkeypatch.setattr("huggingface_hub.ModelCard.load", card)
    model = attached()
    x = inputs(model)
    for push in (
        lambda: model.push_to_hub("me/model"),
        lambda: model.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="me/model"),
    ):
        push()
        assert torch.equal(outputs(from_pretrained(sent), x), outputs(model, x))
        with pytest.raises(ValueError, match="mmpreproj.from_pretrained"):
            transformers.AutoModelForCausalLM.from_pretrained(sent)
        assert "mmpreproj.from_pretrained(FOLDER)" in (sent / "README.md").read_text()
        for file in sent.iterdir():
            file.unlink()


def train(model, folder, steps, **arguments):
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).reshape(8, 8) % 90 + 3]
    arguments = {
        **{"max_steps": steps, "save_steps": 2, "per_device_train_batch_size": 2},
        **{"learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "disable_tqdm": True},
        **{"save_strategy": "steps", "logging_strategy": "no", "dataloader_pin_memory": False},
        **arguments,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **arguments)
    return transformers.Trainer(model, arguments, train_dataset=rows)


@pytest.mark.slow
def test_a_trainers_checkpoint_comes_back_resumes_and_holds_the_small_adapter(tmp_path):
    base = tiny("llama")
    model = freeze_base(attach(copy.deepcopy(base)))
    train(model, tmp_path / "run", 4).train()
    x = inputs(model)
    expected = outputs(model.eval(), x)
    assert not torch.allclose(expected, outputs(base, x))
    folder = tmp_path / "run" / "checkpoint-4"
    assert torch.equal(outputs(from_pretrained(folder), x), expected)
    small = mmpreproj.load(copy.deepcopy(base), folder)
    assert torch.equal(outputs(small, x), expected)

    resumed = freeze_base(attach(copy.deepcopy(base)))
    train(resumed, tmp_path / "run", 4).train(str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(outputs(resumed.eval(), x), expected)

    on = from_pretrained(folder, is_trainable=True)
    before = {name: p.detach().clone() for name, p in on.named_parameters()}
    train(on, tmp_path / "on", 2).train()
    moved = {name for name, p in on.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".preproj." in name}


def test_copies_and_pickles_of_an_attached_model_are_saved_too(tmp_path):
    model = attached("gemma2")
    x = inputs(model)
    torch.save(copy.deepcopy(model), tmp_path / "model.pt")
    torch.load(tmp_path / "model.pt", weights_only=False).save_pretrained(tmp_path / "folder")
    assert torch.equal(outputs(from_pretrained(tmp_path / "folder"), x), outputs(model, x))


def test_a_new_model_of_an_attached_models_class_is_a_base(tmp_path):
    model = attached()
    other = randomise(type(model)(model.config))
    other.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(outputs(again, x := inputs(model)), outputs(other.eval(), x))
