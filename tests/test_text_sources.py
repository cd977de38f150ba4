"""Text files, tables and data sets: what is read, what is refused, what is held out."""

import bz2
import gzip
import json
import lzma
import re
import socket
import time

import pytest
from text_data import write_lines

from mmpreproj.data.text import TextDataModule, text_sources
from mmpreproj.data.text.text_sources import open_sources, sample_documents

HALVES = {"val": 0.25, "test": 0.25}


def parts(train, val=None, test=None, fractions=HALVES, key="text"):
    fractions = {f"{split}_fraction": fraction for split, fraction in fractions.items()}
    data = TextDataModule(train, val, test, text_key=key, **fractions)
    assert list(data.ranges) == ["train", "val", "test"]  # read now: faults show here
    return data


def read(name, key="text"):
    """Documents of everything that a name stands for."""
    whole = parts(name, fractions={"val": 0.0, "test": 0.0}, key=key)
    return list(whole.documents("train"))


# Plain text


@pytest.mark.parametrize(
    "written, expected",
    [
        (b"one\ntwo\n", "one\ntwo\n"),
        (b"one\r\ntwo\rthree\r\n", "one\ntwo\nthree\n"),
        (b"\xef\xbb\xbfone", "one"),
        ("naïve 😀\u2028\u00a0x".encode(), "naïve 😀\u2028\u00a0x"),
    ],
)
def test_text_is_read_as_utf8_with_one_kind_of_line_end(tmp_path, written, expected):
    (tmp_path / "a.txt").write_bytes(written)
    assert read(str(tmp_path / "a.txt")) == [expected]


@pytest.mark.parametrize("offset", [0, 7, 1000, 4321])
def test_invalid_utf8_is_an_error_with_file_and_byte_offset(tmp_path, monkeypatch, offset):
    monkeypatch.setattr(text_sources, "PIECE_SIZE", 256)
    data = bytearray(b"abc defg\n" * 600)
    data[offset] = 0xE9  # é in latin-1
    (tmp_path / "latin.txt").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=rf"latin\.txt is not UTF-8.*0xe9 at offset {offset} "):
        read(str(tmp_path / "latin.txt"))


def test_a_character_cut_off_at_the_end_of_the_file_is_invalid(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc \xf0\x9f\x98")
    with pytest.raises(ValueError, match="offset 4 "):
        read(str(tmp_path / "a.txt"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", [b"", b" \n\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_an_empty_file_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{name} is empty")):
        parts(str(tmp_path / name))


@pytest.mark.parametrize("suffix, opener", [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_packed_files_are_unpacked(tmp_path, suffix, opener):
    with opener.open(tmp_path / f"a.txt.{suffix}", "wb") as file:
        file.write(b"one\ntwo\nthree\nfour\n")
    with opener.open(tmp_path / f"b.jsonl.{suffix}", "wb") as file:
        file.write(b'{"text": "five"}\n')
    assert read(str(tmp_path)) == ["one\ntwo\nthree\nfour\n", "five"]
    held = parts(str(tmp_path / f"a.txt.{suffix}"))
    assert list(held.documents("test")) == ["four\n"]  # from the first line after byte 14.25


def test_a_damaged_packed_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one two three " * 99)[:30])
    with pytest.raises(ValueError, match=r"a\.txt\.gz cannot be unpacked"):
        parts(str(tmp_path / "a.txt.gz"))


# Tables


def test_rows_of_json_lines_are_documents(tmp_path):
    texts = ["one\r\ntwo", "a line \u2028 separator", "", "é"]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "n": 1}, ensure_ascii=False) for text in texts]
    path.write_bytes(("\ufeff" + "\r\n\n".join(lines)).encode())
    assert read(str(path)) == ["one\ntwo", "a line \u2028 separator", "é"]


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": "a"', r"line 3 is not JSON: .*delimiter"),
        (b'{"body": "a", "id": 1}', r"line 3: no 'text' there, found \['body', 'id'\].*text_key"),
        (b'{"text": 7}', r"line 3: 'text' is int '7', where text is expected"),
        (b'{"text": null}', r"line 3: 'text' is missing \(null\)"),
        (b'["a"]', r"line 3 is list"),
        (b'{"text": "\\ud800"}', r"line 3: character 0 is .*surrogate"),
        (b'{"text": "\xe9"}', r"line 3 is not UTF-8: byte 0xe9 at offset 10 of the line"),
    ],
)
def test_a_bad_line_of_json_is_an_error_with_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, " + message):
        read(str(path))


def test_a_wrong_column_shows_before_anything_is_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["x"], key="body")
    with pytest.raises(ValueError, match=r"line 1: no 'text' there, found \['body'\]"):
        parts(path)
    assert read(path, key="body") == ["x"]


def test_parquet_rows_are_documents_across_row_groups(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"row {i}" for i in range(20)]
    table = pa.table({"text": texts, "id": list(range(20))})
    path = str(tmp_path / "a.parquet")
    parquet.write_table(table, path, row_group_size=3)
    assert read(path) == texts
    held = parts(path)
    assert list(held.documents("train")) == texts[:10]
    assert list(held.documents("val")) == texts[10:15]
    assert list(held.documents("test")) == texts[15:]
    with pytest.raises(ValueError, match=r"no 'body' there, found \['id', 'text'\]"):
        parts(path, key="body")


def test_a_missing_text_in_parquet_is_an_error_with_the_row(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = str(tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": ["a", "b", None]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: 'text' is missing \(null\)"):
        read(path)


def test_what_is_no_parquet_is_an_error_that_names_it(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_text("not a table")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet"):
        parts(str(tmp_path / "a.parquet"))


def test_a_folder_of_hugging_face_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = [f"row {i}" for i in range(8)]
    rows = datasets.Dataset.from_dict({"text": [*texts, "not chosen"]}).select(range(8))
    rows.save_to_disk(tmp_path / "rows")
    assert read(str(tmp_path / "rows")) == texts
    assert list(parts(str(tmp_path / "rows")).documents("val")) == texts[4:6]

    splits = datasets.DatasetDict({"train": rows, "test": rows})
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"several data sets.*splits/test, .*splits/train"):
        parts(str(tmp_path / "splits"))
    assert read(str(tmp_path / "splits" / "test")) == texts


# Names


def test_a_folder_gives_its_text_files_in_order_and_tells_of_others(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("c.txt", "b/z.md", "a.rst", ".hidden/x.txt", ".y.txt"):
        (tmp_path / name).write_text(name)
    assert read(str(tmp_path)) == ["a.rst", "c.txt", "b/z.md"]
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.warns(UserWarning, match=r"1 files below .* left out.*picture\.png"):
        assert len(read(str(tmp_path))) == 3


def test_globs_and_lists_are_taken_and_any_suffix_is_text(tmp_path):
    for name in ("a.log", "b.log", "c.txt"):
        (tmp_path / name).write_text(name)
    assert read([str(tmp_path / "*.log"), str(tmp_path / "c.txt")]) == ["a.log", "b.log", "c.txt"]
    with pytest.raises(ValueError, match=r"a\.log is named twice"):
        read([str(tmp_path / "a.log"), str(tmp_path / "*.log")])


def test_folders_that_a_glob_gives_are_read_as_named_ones_are(tmp_path):
    (tmp_path / "sub/deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.md", "sub/.hidden.txt", "z.log"):
        (tmp_path / name).write_text(name)
    assert read(str(tmp_path / "*")) == ["a.txt", "sub/b.txt", "sub/deep/c.md", "z.log"]
    assert read(str(tmp_path / "s*")) == ["sub/b.txt", "sub/deep/c.md"]
    assert read(str(tmp_path / "*.txt")) == ["a.txt"]
    # each once, whether the pattern gives it or a folder that it is in
    every = ["a.txt", "sub/b.txt", "sub/deep/c.md", "z.log"]
    assert read(str(tmp_path / "**")) == every
    with pytest.warns(UserWarning, match=r"1 files below .* left out.*z\.log"):
        assert read(f"{tmp_path}/**/") == every[:-1]
    (tmp_path / "sub/p.png").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"1 files below .* left out.*p\.png"):
        assert read(str(tmp_path / "s*")) == ["sub/b.txt", "sub/deep/c.md"]
    with pytest.raises(FileNotFoundError, match="no file fits the pattern"):
        parts(str(tmp_path / "e*"))


def test_folders_of_hugging_face_datasets_are_sources_wherever_they_lie(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["row 0", "row 1"]}).save_to_disk(tmp_path / "in/rows")
    (tmp_path / "in/a.txt").write_text("a")
    for name in ("in", "in/*", "in/**", "**", "*", "in/r*/"):
        expected = ["row 0", "row 1"] if name == "in/r*/" else ["a", "row 0", "row 1"]
        assert read(f"{tmp_path}/{name}") == expected, name
    rows = datasets.Dataset.from_dict({"text": ["x"]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "in/splits")
    with pytest.raises(ValueError, match=r"several data sets.*splits/test, .*splits/train"):
        parts(str(tmp_path / "in/*"))


@pytest.mark.parametrize(
    "name, message",
    [("none.txt", "no such file or folder"), ("*.none", "no file fits the pattern")],
)
def test_what_is_not_there_is_an_error_that_says_what_can_be_named(tmp_path, name, message):
    with pytest.raises(FileNotFoundError, match=f"{message}.*hf:NAME"):
        parts(str(tmp_path / name))


def test_a_folder_without_text_is_an_error(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"no text in .*\.txt.*a\.png"):
        parts(str(tmp_path))


# Held-out parts


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_each_part_of_a_text_file_is_contiguous_and_starts_at_a_line(tmp_path, end):
    lines = [f"line {i:03d}" for i in range(100)]
    path = tmp_path / "a.txt"
    path.write_bytes("".join(line + end for line in lines).encode())
    held = parts(str(path), fractions={"val": 0.1, "test": 0.055})
    text = {part: "".join(held.documents(part)).split("\n")[:-1] for part in held.ranges}
    # A line has 8 bytes and its end. Test is from byte 0.945 of all, so from line 94.5; val from
    # line 84.5. Both start with the next line.
    assert text == {"train": lines[:85], "val": lines[85:95], "test": lines[95:]}


def test_each_file_and_each_table_gives_its_own_end(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(8)))
    write_lines(tmp_path / "b.jsonl", [f"row {i}" for i in range(4)])
    held = parts(str(tmp_path))
    assert list(held.documents("train")) == ["0\n1\n2\n3\n", "row 0", "row 1"]
    assert list(held.documents("val")) == ["4\n5\n", "row 2"]
    assert list(held.documents("test")) == ["6\n7\n", "row 3"]


def test_text_of_its_own_leaves_the_training_text_whole(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\nc\nd\n")
    (tmp_path / "v.txt").write_text("v\n")
    held = parts(str(tmp_path / "a.txt"), val=str(tmp_path / "v.txt"))
    assert [list(held.documents(part)) for part in held.ranges] == [["a\nb\nc\n"], ["v\n"], ["d\n"]]


def test_the_same_text_under_another_name_is_refused_in_another_part(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n")
    (tmp_path / "copy.txt").write_text("a\nb\n")
    with pytest.raises(
        ValueError, match=r"copy\.txt of the test split has the content of .*a\.txt"
    ):
        parts(str(tmp_path / "a.txt"), test=str(tmp_path / "copy.txt"))


def test_text_too_short_to_hold_anything_out_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("all in one line")
    held = parts(str(tmp_path / "a.txt"))
    held.require("train")
    with pytest.raises(ValueError, match="no text for the val split: val_fraction=0.25"):
        held.require("val")


# The built-in sample


def test_no_long_paragraph_of_the_sample_is_in_two_parts():
    held = parts(None, fractions={"val": 0.05, "test": 0.05})
    text = {part: list(held.documents(part)) for part in held.ranges}
    sizes = {part: sum(map(len, texts)) for part, texts in text.items()}
    assert sum(sizes.values()) == sum(map(len, sample_documents())) > 300_000
    assert all(0.04 < sizes[part] / sum(sizes.values()) < 0.06 for part in ("val", "test"))
    found = {
        part: {
            " ".join(paragraph.split())
            for document in texts
            for paragraph in re.split(r"\n{2,}", document)
            if len(" ".join(paragraph.split())) >= 40
        }
        for part, texts in text.items()
    }
    assert len(found["test"]) > 20
    assert not found["train"] & found["test"] and not found["train"] & found["val"]
    assert not found["val"] & found["test"]


# The hub


def test_a_data_set_of_the_hub_without_a_network_is_told_quickly(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)

    def refuse(*arguments, **keywords):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=r"hf:no/such:x: .* cannot be reached.*parquet"):
        parts("hf:no/such:x")
    assert time.monotonic() - start < 20
    assert datasets.config.HF_HUB_OFFLINE is False


def test_offline_mode_is_named(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set"):
        parts("hf:no/such")


def test_a_data_set_of_the_hub_is_asked_for_by_name_config_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*arguments, **keywords):
        asked.append((arguments, keywords))
        return datasets.Dataset.from_dict({"text": [f"{keywords['split']} {i}" for i in range(4)]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("hf:a/b")[0] == "train 0"
    held = parts("hf:a/b:raw", val="hf:a/b:raw:validation", test="hf:a/b::test")
    assert [next(held.documents(part)) for part in held.ranges] == [
        "train 0",
        "validation 0",
        "test 0",
    ]
    # no trust_remote_code among the keywords
    assert asked == [
        (("a/b", None), {"split": "train"}),
        (("a/b", "raw"), {"split": "train"}),
        (("a/b", "raw"), {"split": "validation"}),
        (("a/b", None), {"split": "test"}),
    ]


def test_a_data_set_that_needs_code_is_refused_with_the_way_out(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("mmpreproj.hub_cache.reachable", lambda endpoint: True)

    def load(*arguments, **keywords):
        raise RuntimeError("Dataset scripts are no longer supported, but found b.py")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=r"found b\.py\. Its code is not run: use the parquet"):
        parts("hf:a/b")


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ImportError, match=r"a\.parquet needs pyarrow: .*pip install -e '\.\[text\]'"
    ):
        open_sources(str(tmp_path / "a.parquet"), "text")


def test_what_is_no_text_says_so_before_a_part_that_is_empty_for_it(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\x7fELF\x02\xff\xfe" + bytes(100))
    with pytest.raises(ValueError, match="a.txt is not UTF-8: byte 0xff at offset 5"):
        parts(str(tmp_path / "a.txt")).require("val")
