"""The how-to pages: every block of code in them runs, in the order in which it stands there."""

import contextlib
import glob
import io
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import ByteLevelBPETokenizer
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    """What the pages say that there is, and the checkout's tools and configs."""
    for name in ("tools", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "mine.safetensors")
    digits = load_digits(n_class=3)
    for number, (pixels, label) in enumerate(zip(digits.images[:30], digits.target, strict=False)):
        name = ("zero", "one", "two")[label]
        path = tmp_path / "pictures" / ("train" if number < 24 else "test") / name
        path.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((pixels * 15).astype("uint8"))
        picture.save(path / f"{len(list(path.iterdir()))}.png")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = GPTNeoXConfig(
        vocab_size=256, num_hidden_layers=2, max_position_embeddings=128, **sizes
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "my_model")
    (tmp_path / "my_text.txt").write_text("once upon a time there was a house.\n" * 60)
    letters = ByteLevelBPETokenizer()  # of bytes alone
    letters.train([str(tmp_path / "my_text.txt")], vocab_size=256, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=letters._tokenizer).save_pretrained(
        tmp_path / "my_model"
    )
    return tmp_path


def commands(block):
    for line in block.replace("\\\n", " ").splitlines():
        python, *words = shlex.split(line)
        assert python == "python"
        yield [path for word in words for path in sorted(glob.glob(word)) or [word]]


@pytest.mark.slow
def test_every_block_of_the_pages_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    # In this order: the last page takes what the first has left.
    for page in ("finetune_timm", "probe_language_model", "run_to_python"):
        text = (ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8")
        names = {}
        for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
            if language == "python":
                exec(compile(block, f"{page}.md", "exec"), names)
                continue
            for words in commands(block):
                monkeypatch.setattr(sys, "argv", words)
                told = io.StringIO()
                with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(told):
                    runpy.run_path(words[0], run_name="__main__")
                assert not end.value.code, f"{shlex.join(words)}: {told.getvalue()}"


PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_of_a_page_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    paths = re.findall(r"`((?:mmpreproj|tests|configs|tools|docs)/[\w./]+)`", text)
    lost = [name for name in links if not (page.parent / name).exists()]
    assert not lost + [name for name in paths if not (ROOT / name).exists()]


def test_the_tests_that_the_page_of_reports_names_are_there():
    text = (ROOT / "docs/reports.md").read_text()
    rows = [row for row in text.splitlines() if re.match(r"\| [A-Z]\d\d ", row)]
    named = [found for row in rows for found in re.findall(r"`(test_\w+\.py)`: ([\w ]+)", row)]
    assert len(rows) == 74 and len(named) > 90
    for file, name in named:
        tests = (ROOT / "tests" / file).read_text()
        assert f"def test_{name.strip().replace(' ', '_')}(" in tests, (file, name)
