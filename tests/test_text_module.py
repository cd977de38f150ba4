"""Blocks, loaders, ranks, and what the data module tells of itself."""

import math

import pytest
import torch
from text_data import BOS, EOS, character_tokenizer, ids_of, write_lines
from torch.utils.data import DistributedSampler

from mmpreproj.data.text import IGNORE, TextDataModule

TEXT = "the quick brown fox jumps over the lazy dog.\n"


@pytest.fixture
def path(tmp_path):
    lines = [TEXT[i % 20 :] for i in range(40)]
    (tmp_path / "a.txt").write_text("".join(lines))
    return str(tmp_path / "a.txt")


def module(path, tmp_path, tokenizer=None, **keywords):
    settings = {"block_size": 10, "batch_size": 4, "val_fraction": 0.1, "test_fraction": 0.1}
    data = TextDataModule(path, cache_dir=str(tmp_path / "cache"), **{**settings, **keywords})
    data.tokenizer = tokenizer or character_tokenizer()
    return data


def stream(data, part):
    """The tokens of a part by hand."""
    return [i for text in data.documents(part) for i in [*ids_of(text), EOS]]


# Blocks


def test_targets_are_the_following_tokens_shifted_once(path, tmp_path):
    data = module(path, tmp_path)
    expected = stream(data, "train")
    blocks = data.dataset("train")
    assert len(blocks) == (len(expected) - 1) // 10
    for i in (0, 1, len(blocks) - 1):
        assert blocks[i]["input_ids"].tolist() == expected[10 * i : 10 * i + 10]
        assert blocks[i]["targets"].tolist() == expected[10 * i + 1 : 10 * i + 11]


def test_a_model_that_knows_the_next_token_has_no_loss(path, tmp_path):
    data = module(path, tmp_path, test=write_alphabet(tmp_path), add_eos=False)
    for part in ("train", "test"):
        batch = next(iter(getattr(data, f"{part}_dataloader")()))
        inputs, targets = batch["input_ids"], batch["targets"]
        if part == "train":  # the text repeats itself: ask the stream
            flat = torch.tensor(stream(data, part))
            places = [int((flat.unfold(0, 10, 1) == row).all(1).nonzero()[0]) for row in inputs]
            known = torch.stack([flat[p + 1 : p + 11] for p in places])
        else:
            known = (inputs + 1) % 26
        logits = 100.0 * torch.nn.functional.one_hot(known, 32).float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE
        )
        assert loss < 1e-6


def write_alphabet(tmp_path):
    return write_lines(tmp_path / "alphabet.jsonl", ["abcdefghijklmnopqrstuvwxyz" * 3])


@pytest.mark.parametrize("n_tokens", [2, 10, 11, 12, 25, 31])
def test_evaluation_scores_every_token_but_the_first_once(tmp_path, n_tokens):
    text = ("abcdefghij" * 4)[: n_tokens - 1]
    test = write_lines(tmp_path / "t.jsonl", [text])
    train = write_lines(tmp_path / "a.jsonl", ["x" * 100])
    data = module(train, tmp_path, test=test)
    scored = []
    for batch in data.test_dataloader():
        assert batch["input_ids"].shape == batch["targets"].shape == (len(batch["targets"]), 10)
        scored += batch["targets"][batch["targets"] != IGNORE].tolist()
        assert int(batch["input_ids"].min()) >= 0 and int(batch["input_ids"].max()) < 32
    assert scored == [*ids_of(text), EOS][1:]  # the last of them a real EOS, which counts


def test_perplexity_of_a_uniform_model_is_its_vocabulary_for_any_block_size(path, tmp_path):
    for block_size in (3, 10, 1000):
        data = module(path, tmp_path, block_size=block_size)
        total = count = 0.0
        for batch in data.test_dataloader():
            logits = torch.zeros(*batch["targets"].shape, 32)
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
            ).item()
            count += int((batch["targets"] != IGNORE).sum())
        assert count == data.describe()["test"]["n_tokens"] - 1
        assert math.exp(total / count) == pytest.approx(32, rel=1e-5)


def test_a_text_too_short_for_a_block_is_an_error_with_both_numbers(tmp_path):
    short = write_lines(tmp_path / "a.jsonl", ["abcd", "efgh"])
    data = module(short, tmp_path, val_fraction=0.0, test_fraction=0.0)
    with pytest.raises(ValueError, match=r"train split has 10 tokens, fewer than the 11 .*=10"):
        data.train_dataloader()
    data = module(short, tmp_path, val_fraction=0.0, test_fraction=0.0, block_size=9)
    with pytest.raises(ValueError, match=r"1 training blocks on 1 process.* one batch of 4"):
        data.train_dataloader()


def test_max_train_tokens_takes_blocks_from_all_over_the_text(path, tmp_path):
    data = module(path, tmp_path, max_train_tokens=57)
    blocks, whole = data.dataset("train"), module(path, tmp_path).dataset("train")
    assert len(blocks) == 5
    expected = [0, len(whole) // 5, 2 * len(whole) // 5, 3 * len(whole) // 5, 4 * len(whole) // 5]
    for block, i in zip(blocks, expected, strict=False):
        assert torch.equal(block["input_ids"], whole[i]["input_ids"])
    assert data.describe()["train"]["n_tokens_used"] == 50
    assert data.describe()["train"]["n_tokens"] == len(stream(data, "train"))
    assert len(module(path, tmp_path, max_train_tokens=10**9).dataset("train")) == len(whole)


# Loaders


def seen(data, epochs=1):
    loader = data.train_dataloader()
    return [torch.cat([b["input_ids"] for b in loader]) for _ in range(epochs)]


def test_equal_seeds_give_equal_batches_with_any_number_of_workers(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    first = seen(module(path, tmp_path), epochs=2)
    again = seen(module(path, tmp_path, num_workers=2), epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(*first)  # another order in another epoch
    monkeypatch.setenv("PL_GLOBAL_SEED", "4")
    assert not torch.equal(first[0], seen(module(path, tmp_path))[0])


class Strategy:
    def barrier(self):
        self.waited = getattr(self, "waited", 0) + 1


class FakeTrainer:
    """As much of Lightning's Trainer as the data module looks at."""

    def __init__(self, world, rank):
        self.world_size, self.global_rank, self.strategy = world, rank, Strategy()
        self.state = type("State", (), {"fn": None})


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_evaluation_counts_each_block_once_over_all_processes(path, tmp_path, world):
    expected = None
    scored = []
    for rank in range(world):
        data = module(path, tmp_path)
        data.trainer = FakeTrainer(world, rank)
        dataset = data.test_dataloader().dataset
        assert len(dataset) % world == 0
        expected = stream(data, "test")
        # What Lightning puts in
        for i in DistributedSampler(dataset, world, rank, shuffle=False):
            targets = dataset[i]["targets"]
            scored += targets[targets != IGNORE].tolist()
    assert sorted(scored) == sorted(expected[1:])


def test_ranks_train_on_different_blocks(path, tmp_path):
    orders = []
    for rank in range(2):
        data = module(path, tmp_path)
        data.trainer = FakeTrainer(2, rank)
        loader = data.train_dataloader()
        orders.append([i % len(loader.dataset) for i in loader.sampler])
        # the first process tokenises, then all look for what it made
        assert data.trainer.strategy.waited == 1
    n = len(loader.dataset)
    assert set(orders[0]) | set(orders[1]) == set(range(n))
    assert len(set(orders[0]) & set(orders[1])) == n % 2


def test_parts_with_fraction_0_have_no_loader(path, tmp_path):
    data = module(path, tmp_path, val_fraction=0.0, test_fraction=0.0)
    data.setup()
    assert data.val_dataloader() == [] and data.test_dataloader() == []
    assert not data.has_split("val") and data.has_split("train")
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'valid'"):
        next(data.documents("valid"))


def test_a_held_out_part_without_text_is_an_error_at_the_start(tmp_path):
    (tmp_path / "a.txt").write_text("one line and nothing more")
    with pytest.raises(ValueError, match="no text for the val split"):
        module(str(tmp_path / "a.txt"), tmp_path).setup()


# The tokenizer


def test_without_a_tokenizer_loaders_say_how_to_set_one(path, tmp_path):
    data = TextDataModule(path, cache_dir=str(tmp_path / "cache"), block_size=10)
    assert not data.has_tokenizer
    data.prepare_data(), data.setup()  # the Lightning module may bring it later
    with pytest.raises(ValueError, match="no tokenizer yet: set data.tokenizer"):
        data.train_dataloader()
    data.tokenizer = character_tokenizer()
    assert len(data.train_dataloader()) > 0


def test_another_tokenizer_gives_other_tokens(path, tmp_path):
    data = module(path, tmp_path)
    first = data.dataset("train")[0]["input_ids"]
    data.tokenizer = character_tokenizer(shift=7)
    assert torch.equal(data.dataset("train")[0]["input_ids"], first + 7)


def test_a_tokenizer_of_its_own_is_loaded_from_its_folder(path, tmp_path):
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    data = TextDataModule(
        path, tokenizer=str(tmp_path / "tokenizer"), cache_dir=str(tmp_path / "c"), block_size=10
    )
    data.prepare_data(), data.setup()
    assert data.dataset("train")[0]["input_ids"].tolist() == stream(data, "train")[:10]
    assert data.describe()["tokenizer"]["name"] == str(tmp_path / "tokenizer")


def test_a_faulty_text_is_told_before_training(path, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8.*offset 3 "):
        module(path, tmp_path, test=str(tmp_path / "bad.txt")).prepare_data()


# What it tells


def test_the_start_of_training_names_its_text(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for i in range(5):
        (tmp_path / "texts" / f"{i}.txt").write_text(TEXT * (9 + i))
    module(str(tmp_path / "texts"), tmp_path).setup("fit")
    told = capsys.readouterr().out
    assert told.startswith("training text: ") and told.endswith("2.txt, … (5 in all)\n")
    TextDataModule(cache_dir=str(tmp_path / "cache")).setup("fit")
    assert "training text: the built-in sample" in capsys.readouterr().out


def test_describe_gives_the_counts_for_perplexities_per_word_and_byte(tmp_path):
    text = "one two three four five six seven eight\nnine tén"  # 10 words
    test = write_lines(tmp_path / "t.jsonl", [text])
    train = write_lines(tmp_path / "a.jsonl", ["x" * 100, "y"])
    data = module(train, tmp_path, test=test, val_fraction=0.0, add_bos=True)
    before = data.describe()
    assert before["train"]["n_tokens"] is None and before["files"] is None
    data.setup()
    facts = data.describe()
    assert facts["test"] == {
        "n_documents": 1,
        "n_tokens": len(text) + 2,
        "n_words": 10,
        "n_bytes": len(text) + 1,
    }
    assert facts["val"]["n_tokens"] is None
    assert (facts["val_fraction"], facts["test_fraction"]) == (0.0, None)  # text of its own
    assert facts["files"] == {"train": [train], "val": [], "test": [test]}
    assert facts["tokenizer"]["vocab_size"] == 32 and len(facts["tokenizer"]["hash"]) == 32
    assert facts["add_bos"] is True and facts["add_eos"] is True and facts["block_size"] == 10
    assert data.dataset("test")[0]["input_ids"][0] == BOS

    import json

    json.dumps(facts)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"block_size": 0}, "block_size must be 1 or more, got 0"),
        ({"eval_batch_size": 0}, "batch sizes must be 1 or more, got 4 and 0"),
        ({"num_workers": -1}, "num_workers must not be negative"),
        ({"val_fraction": 0.6, "test_fraction": 0.4}, "leave something to train on"),
        ({"test_fraction": -0.1}, "0 or more"),
        ({"max_train_tokens": 9}, "less than one block of 10"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(path, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        module(path, tmp_path, **settings)


def test_the_settings_are_plain_types_for_a_command_line(path):
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TextDataModule, "data")
    read = parser.parse_args([f"--data.train=[{path}]", "--data.tokenizer=bpe:300"])
    data = parser.instantiate(read).data
    assert data.names["train"] == [path] and data.block_size == 512


@pytest.mark.slow
def test_lightning_trains_and_tests_on_it(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Bigrams(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(300, 300)
            self.count, self.total = 0, 0.0

        def setup(self, stage):
            assert len(self.trainer.datamodule.tokenizer) == 300

        def training_step(self, batch, index):
            logits = self.table(batch["input_ids"])
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["targets"].flatten()
            )

        def validation_step(self, batch, index):
            pass

        def test_step(self, batch, index):
            logits, targets = self.table(batch["input_ids"]), batch["targets"].flatten()
            self.total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets, reduction="sum"
            ).item()
            self.count += int((targets != IGNORE).sum())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

    data = TextDataModule(tokenizer="bpe:300", block_size=64, cache_dir=str(tmp_path))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=60, accelerator="cpu", enable_model_summary=False, **quiet
    )
    model = Bigrams()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    assert model.count == data.describe()["test"]["n_tokens"] - 1
    assert model.total / model.count < 0.75 * math.log(300)  # it learned English bigrams
