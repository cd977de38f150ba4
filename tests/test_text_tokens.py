"""From text to tokens on disk: pieces, document borders, the cache, tokenizers."""

import io
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from text_data import BOS, EOS, character_tokenizer, ids_of, write_lines
from transformers import PreTrainedTokenizerFast

from mmpreproj.backbones.lm.lm_tokenizer import (
    borders,
    check_tokenizer,
    encode,
    tokenizer_hash,
    trained_bpe,
)
from mmpreproj.data.text import TextDataModule, text_sources
from mmpreproj.data.text.text_sources import Piece, decoded, in_pieces, open_sources
from mmpreproj.data.text.token_blocks import TokenFile, tokens_of

WHOLE = {"val_fraction": 0.0, "test_fraction": 0.0}


def module(train, folder, tokenizer=None, **keywords):
    data = TextDataModule(train, cache_dir=str(folder), **{**WHOLE, "block_size": 4, **keywords})
    data.tokenizer = tokenizer or character_tokenizer()
    return data


def pieces_of(text):
    data = text.encode()
    return list(in_pieces(decoded(io.BytesIO(data), 0, len(data), "x")))


def split_text(text):
    return [piece.text for piece in pieces_of(text)]


def visible(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# Pieces

AWKWARD = [
    "a",
    "é",
    "漢",
    "😀",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\u00a0",
    "\u3000",
    "word",
    "1",
    ".",
]


def texts(n):
    generator = random.Random(0)
    for _ in range(n):
        some = generator.sample(AWKWARD, generator.randint(1, len(AWKWARD)))
        yield "".join(generator.choices(some, k=generator.randint(1, 400)))


def test_pieces_are_the_whole_text(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "PIECE_SIZE", 32)
    for text in texts(300):
        (source,) = open_sources(write_lines(tmp_path / "a.jsonl", [text]), "text")
        for found in (split_text(text), [piece.text for piece in source.pieces(0, 1)]):
            assert "".join(found) == text.replace("\r\n", "\n").replace("\r", "\n")
            assert max(map(len, found)) <= 32 * (text_sources.MAX_PIECES_GROWN + 1)


PROSE = (
    'It was  — so they said —\n\n\nthe "best" of times,\tand\u00a0the worst; 3 000 x 12 = 36000.\n'
    "    if x:\n        y = 1\n\n\n\nNaïve café, 漢字かな。そして\nДля всех людей\n\n"
)


def test_tokens_of_pieces_are_those_of_the_whole_text(tmp_path, monkeypatch):
    text = "".join(PROSE[i:] + PROSE for i in range(0, 60, 7))
    tokenizer = trained_bpe(350, [text], tmp_path, "key")
    monkeypatch.setattr(text_sources, "PIECE_SIZE", 64)
    found = split_text(text)
    assert len(found) > 40
    ids = [i for piece in encode(tokenizer, found) for i in piece]
    assert ids == tokenizer(text)["input_ids"]


def test_a_mark_that_a_normalizer_puts_before_every_text_is_one_token_a_piece(monkeypatch):
    import tokenizers

    # Llama 2's rules: "▁" before the text, and for every space
    normalizers, words = tokenizers.normalizers, ["▁", "a", "b", "ab", "▁a", "▁ab"]
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    model = tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges)
    backend = tokenizers.Tokenizer(model)
    rules = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(rules)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    monkeypatch.setattr(text_sources, "PIECE_SIZE", 16)
    found = split_text("ab " * 40 + "ab")
    ids = [encode(tokenizer, [piece])[0] for piece in found]
    assert len(found) > 5 and {piece[:1] for piece in found[1:]} == {" "}
    without = ids[0] + [i for piece in ids[1:] for i in piece[1:]]
    assert without == encode(tokenizer, ["ab " * 40 + "ab"])[0] == [5] * 41
    assert {piece[0] for piece in ids[1:]} == {0}


def test_words_and_bytes_do_not_depend_on_where_pieces_end(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "PIECE_SIZE", 16)
    tokenizer = trained_bpe(257, ["a"], tmp_path, "key")
    for i, text in enumerate(texts(20)):
        normal = text.replace("\r\n", "\n").replace("\r", "\n")
        given = pieces_of(text)
        header = tokens_of(tmp_path / str(i), given, tokenizer, None, None, {}).header
        assert header["n_words"] == len(normal.split())
        assert header["n_bytes"] == len(normal.encode()) == header["n_tokens"]
        assert header["n_documents"] == 1


# Document borders


def test_documents_follow_each_other_with_bos_and_eos(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["ab c", "", "dé"])
    data = module(path, tmp_path / "cache", add_bos=True)
    tokens = data.tokens("train")
    expected = [BOS, *ids_of("ab c"), EOS, BOS, *ids_of("dé"), EOS]
    assert tokens.ids.tolist() == expected
    assert {k: tokens.header[k] for k in ("n_documents", "n_tokens", "n_words", "n_bytes")} == {
        "n_documents": 2,  # no document without text
        "n_tokens": 10,
        "n_words": 3,
        "n_bytes": 7,  # é has two
    }
    assert list(data.documents("train")) == ["ab c", "dé"]


@pytest.mark.parametrize(
    "tokenizer, bos, eos",
    [
        ({}, None, EOS),  # Pythia, GPT-2: a BOS that is not added
        ({"adds_bos": True}, BOS, EOS),  # Llama
        ({"bos": False}, None, EOS),
        ({"eos": False}, None, None),
        ({"bos": False, "eos": False}, None, None),
    ],
)
def test_bos_is_put_where_the_tokenizer_puts_it_and_eos_where_there_is_one(tokenizer, bos, eos):
    made = character_tokenizer(**tokenizer)
    assert made.pad_token_id is None
    assert borders(made, None, None) == (bos, eos)
    assert borders(made, False, False) == (None, None)
    assert encode(made, ["ab"]) == [[0, 1]]


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_border_token_that_is_not_there_cannot_be_asked_for(tmp_path, name):
    path = write_lines(tmp_path / "a.jsonl", ["ab"])
    data = module(
        path, tmp_path, character_tokenizer(bos=False, eos=False), **{f"add_{name}": True}
    )
    with pytest.raises(ValueError, match=f"add_{name}=true, but .* has no {name}_token"):
        data.setup()


def test_a_special_token_written_in_the_text_is_that_token(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["a</s>b"])
    assert module(path, tmp_path).tokens("train").ids.tolist() == [0, EOS, 1, EOS]


@pytest.mark.parametrize("shift, dtype", [(0, "<u2"), (65535 - EOS, "<u2"), (65536 - EOS, "<u4")])
def test_ids_take_two_bytes_where_they_fit(tmp_path, shift, dtype):
    path = write_lines(tmp_path / "a.jsonl", ["ab"])
    tokens = module(path, tmp_path, character_tokenizer(shift=shift)).tokens("train")
    assert tokens.ids.dtype == np.dtype(dtype)
    assert tokens.ids.tolist() == [shift, shift + 1, EOS + shift]
    assert tokens.path.stat().st_size == 3 * int(dtype[-1])


# The cache


def refuse(*arguments, **keywords):
    raise AssertionError("tokenised again")


def test_text_is_tokenised_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("ab cd\nef\n")
    first = module(str(tmp_path / "a.txt"), tmp_path / "cache").tokens("train")
    (tmp_path / "moved.txt").write_text("ab cd\nef\n")
    monkeypatch.setattr("mmpreproj.data.text.token_blocks.encode", refuse)
    again = module(str(tmp_path / "moved.txt"), tmp_path / "cache", block_size=2).tokens("train")
    assert again.path == first.path


@pytest.mark.parametrize("what", ["content", "tokenizer", "border", "part"])
def test_what_matters_gives_tokens_of_its_own(tmp_path, what):
    path = tmp_path / "a.txt"
    path.write_text("ab\ncd\nef\n")
    stat = path.stat()
    first = module(str(path), tmp_path / "cache").tokens("train")
    other = {}
    if what == "content":  # of the same size and age
        path.write_text("ab\ncd\neg\n")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if what == "tokenizer":
        other = {"tokenizer": character_tokenizer(shift=1)}
    if what == "border":
        other = {"add_eos": False}
    if what == "part":
        other = {"test_fraction": 0.4}
    second = module(str(path), tmp_path / "cache", **other).tokens("train")
    assert second.path != first.path
    assert second.ids.tolist() != first.ids.tolist()


def test_an_error_halfway_leaves_nothing_behind(tmp_path):
    def broken():
        yield Piece("ab", False, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokens_of(tmp_path / "t", broken(), character_tokenizer(), None, None, {})
    assert visible(tmp_path) == []


KILLED = """
import sys, time
from pathlib import Path
import mmpreproj.data.text
heavy = {"datasets", "pyarrow"} & set(sys.modules)
from mmpreproj.data.text.text_sources import Piece
from mmpreproj.data.text.token_blocks import tokens_of
from text_data import character_tokenizer
def pieces():
    yield Piece("ab" * (1 << 21), False, 1 << 22)
    print(f"written {sorted(heavy)}", flush=True)
    time.sleep(60)
tokens_of(Path(sys.argv[1]), pieces(), character_tokenizer(), None, None, {})
"""


@pytest.mark.slow
def test_a_killed_process_leaves_no_half_cache_and_its_rest_is_cleared(tmp_path):
    folder = tmp_path / "t"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["tests", "."])}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=Path(__file__).parent.parent,
        text=True,
    )
    assert (
        process.stdout.readline() == "written []\n"
    )  # and nothing imported that text does not need
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = visible(tmp_path)
    assert left.endswith(".tmp")
    tokens = tokens_of(folder, [Piece("ab", True, 2)], character_tokenizer(), None, None, {})
    assert tokens.ids.tolist() == [0, 1]
    assert visible(tmp_path) == ["t"]


def test_two_at_once_do_not_clash(tmp_path):
    both_write = threading.Barrier(2, timeout=20)
    found = []

    def given():
        yield Piece("ab ", False, 3)
        both_write.wait()
        yield Piece("cd", True, 2)

    def work():
        found.append(tokens_of(tmp_path / "t", given(), character_tokenizer(), None, EOS, {}))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tokens.ids.tolist() for tokens in found] == [[*ids_of("ab cd"), EOS]] * 2
    assert visible(tmp_path) == ["t"]


@pytest.mark.parametrize("damage", ["tokens.bin", "header.json"])
def test_a_damaged_cache_is_made_again(tmp_path, damage):
    path = write_lines(tmp_path / "a.jsonl", ["ab cd"])
    first = module(path, tmp_path / "cache").tokens("train")
    (first.path.parent / damage).write_bytes(b"")
    with pytest.warns(UserWarning, match="it is made again"):
        again = module(path, tmp_path / "cache").tokens("train")
    assert again.ids.tolist() == [*ids_of("ab cd"), EOS]
    assert len(visible(tmp_path / "cache")) == 1


def test_tokens_go_to_workers_by_name_not_by_content(tmp_path):
    given = [Piece("ab" * 50_000, True, 100_000)]
    tokens = tokens_of(tmp_path / "t", given, character_tokenizer(), None, None, {})
    assert len(tokens.ids) == 100_000
    data = pickle.dumps(tokens)
    assert len(data) < 2000
    assert np.array_equal(pickle.loads(data).ids, tokens.ids)
    assert not isinstance(tokens.ids, np.ndarray) or not tokens.ids.flags.writeable
    assert TokenFile(tmp_path / "t").n_tokens == 100_000


# Tokenizers


def test_more_embeddings_than_ids_are_fine_and_fewer_are_an_error():
    tokenizer = character_tokenizer()  # 32 ids
    check_tokenizer(tokenizer, 32)
    check_tokenizer(tokenizer, 96)
    with pytest.raises(ValueError, match="ids up to 31, the model 31 embedding rows"):
        check_tokenizer(tokenizer, 31)
    shifted = character_tokenizer(shift=60)  # still 32 of them, from 60 on
    with pytest.raises(ValueError, match="ids up to 91, the model 90 "):
        check_tokenizer(shifted, 90)


def test_the_hash_of_a_tokenizer_is_of_what_it_does(tmp_path):
    tokenizer = character_tokenizer()
    first = tokenizer_hash(tokenizer)
    tokenizer.pad_token = None
    tokenizer(["ab cd", "a"], truncation=True, max_length=2)  # leaves its mark in the backend
    assert tokenizer_hash(tokenizer) == first
    assert encode(tokenizer, ["abcd"]) == [[0, 1, 2, 3]]
    tokenizer.save_pretrained(tmp_path / "elsewhere")
    loaded = type(tokenizer).from_pretrained(tmp_path / "elsewhere")
    assert tokenizer_hash(loaded) == first
    assert tokenizer_hash(character_tokenizer(shift=1)) != first
    assert tokenizer_hash(character_tokenizer(eos=False)) != first


def test_a_bpe_is_made_from_the_training_part_alone_and_cached(tmp_path, monkeypatch):
    lines = ["the cat sat on the mat\n"] * 90 + ["zyxwvutsrqponmlkjihgfe\n"] * 10
    (tmp_path / "a.txt").write_text("".join(lines))
    settings = {"block_size": 4, "test_fraction": 0.05, "val_fraction": 0.05}

    def made(folder):
        data = TextDataModule(
            str(tmp_path / "a.txt"), tokenizer="bpe:280", cache_dir=str(folder), **settings
        )
        return data, data.tokenizer

    with pytest.warns(UserWarning, match="too short for 280 tokens: the tokenizer has 2"):
        data, tokenizer = made(tmp_path / "one")
    words = tokenizer.get_vocab()
    assert "Ġcat" in words and "zyxw" not in words and "zy" not in words
    assert set("".join(data.documents("test")).split()) == {"zyxwvutsrqponmlkjihgfe"}
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    with pytest.warns(UserWarning, match="too short"):
        _, again = made(tmp_path / "two")
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    assert data.describe()["tokenizer"]["name"] == "bpe:280"

    import tokenizers

    monkeypatch.setattr(tokenizers.Tokenizer, "from_str", refuse)
    monkeypatch.setattr(tokenizers.trainers, "BpeTrainer", refuse)
    with pytest.warns(UserWarning, match="too short"):
        _, cached = made(tmp_path / "one")
    assert tokenizer_hash(cached) == tokenizer_hash(tokenizer)


def test_a_bpe_has_the_size_asked_for_and_writes_any_text(tmp_path):
    text = "".join(PROSE * 3)
    tokenizer = trained_bpe(300, [text], tmp_path, "key")
    assert len(tokenizer) == 300 == len(tokenizer.get_vocab())
    for other in (text, "\x00 \u2028 😀 <unk>"):
        assert tokenizer.decode(encode(tokenizer, [other])[0]) == other


@pytest.mark.parametrize("name", ["bpe:", "bpe:many", "bpe:256", "bpe:-3"])
def test_a_bpe_size_that_cannot_be_is_refused_at_once(name):
    with pytest.raises(ValueError, match="expected bpe:SIZE with a size of 257 or more"):
        TextDataModule(tokenizer=name)


def test_header_tells_what_the_tokens_are_made_from(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["ab"])
    tokens = module(path, tmp_path / "cache").tokens("train")
    header = json.loads((tokens.path.parent / "header.json").read_text())
    assert header["tokenizer"] == tokenizer_hash(character_tokenizer())
    assert header["sources"][0][0] == "JsonLines"
    assert time.time() - tokens.path.stat().st_mtime < 600
