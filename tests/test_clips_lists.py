"""Lists of videos as people write them. Files need not exist to be listed."""

import os

import numpy as np
import pytest

from mmpreproj.data.video.video_lists import read_videos

KINETICS = "label,youtube_id,time_start,time_end,split\n"


def listed(tmp_path, text, name="list.txt", **keywords):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    videos = read_videos(path, **keywords)
    classes = videos.label_sets["class"]
    names = [os.path.relpath(videos.name(i), tmp_path) for i in range(len(videos))]
    return list(zip(names, [classes[t] for t in videos.targets[:, 0]], strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "My clips/shaking hands.mp4 3\nb.MKV 0\n",
        "My clips/shaking hands.mp4,3\nb.MKV,0\n",
        "My clips/shaking hands.mp4\t3\nb.MKV\t0",
        "My clips/shaking hands.mp4;3\nb.MKV; 0",
        '"My clips/shaking hands.mp4" 3\n"b.MKV" 0\n',
        "path,label\nMy clips/shaking hands.mp4,3\nb.MKV,0\n",
        "label,path\n3,My clips/shaking hands.mp4\n0,b.MKV\n",
        "path label\nMy clips/shaking hands.mp4 3\nb.MKV 0\n",
        "id,video,class\n7,My clips/shaking hands.mp4,3\n8,b.MKV,0\n",
        "My clips/shaking hands.mp4 3\r\nb.MKV 0\r\n\r\n",
        b"\xef\xbb\xbfMy clips/shaking hands.mp4 3\nb.MKV 0\n  \n",
        b"\xef\xbb\xbfpath,label\r\nMy clips/shaking hands.mp4,3\r\nb.MKV,0\r\n",
    ],
)
def test_lists_are_understood(tmp_path, text):
    assert listed(tmp_path, text) == [("My clips/shaking hands.mp4", "3"), ("b.MKV", "0")]


def test_quotes_keep_commas_in_a_path(tmp_path):
    text = '"a, b.mp4",0\nc.mp4,1\n'
    assert listed(tmp_path, text) == [("a, b.mp4", "0"), ("c.mp4", "1")]
    assert listed(tmp_path, "a,b.mp4 0\n") == [("a,b.mp4", "0")]


def test_labels_can_be_text_with_blanks(tmp_path):
    text = "a.mp4 shaking hands\nmy clip.mp4 opening bottle\nc.mp4 shaking hands\n"
    rows = listed(tmp_path, text)
    assert [label for _, label in rows] == ["shaking hands", "opening bottle", "shaking hands"]
    videos = read_videos(tmp_path / "list.txt")
    assert videos.label_sets == {"class": ["opening bottle", "shaking hands"]}  # sorted
    assert videos.targets[:, 0].tolist() == [1, 0, 1]


def test_class_numbers_are_indices_even_with_gaps(tmp_path):
    (tmp_path / "list.txt").write_text("a.mp4 10\nb.mp4 2\n")
    videos = read_videos(tmp_path / "list.txt")
    assert videos.targets[:, 0].tolist() == [10, 2]
    assert videos.label_sets["class"] == [str(i) for i in range(11)]


def test_several_columns_of_labels(tmp_path):
    (tmp_path / "l.csv").write_text("path,digit,direction\na.mp4,7,west\nb.mp4,0,east\n")
    videos = read_videos(tmp_path / "l.csv", label_columns=["digit", "direction"])
    assert videos.label_sets["direction"] == ["east", "west"]
    assert len(videos.label_sets["digit"]) == 8
    assert videos.targets.tolist() == [[7, 1], [0, 0]] and videos.targets.dtype == np.int64


@pytest.mark.parametrize(
    "text, message",
    [
        ("a.mp4 0\nb.mp4\n", r"list.txt, line 2: 'b.mp4' .*expected columns: path and label"),
        ("a.mp4,0\n\nb.mp4\n", "line 3: 1 columns .*2 are expected"),
        ("a.mp4,0\nc, d.mp4,1\n", "line 2: 3 columns .*quotes"),
        ("a.mp4,0\nb.mp4,\n", "line 2: .*empty"),
        ("a.mp4 120 3\n", "line 1: 2 numbers .*expected columns"),
        ("a.mp4,0,extra\n", "line 1: 3 columns"),
        ("hello world\n", "line 1: .*expected columns"),
        ("a.mp4 0\nb.mp4 waving\n", "mix numbers and text, for example '0' and 'waving'"),
        ("a.mp4 -1\n", "class numbers .*-1"),
        ("path,label\n", "no videos"),
        ("path,digit\na.mp4,3\n", "line 1: no column of labels among .*digit"),
        ("\n\n", "is empty"),
        (b"\xff\xfe\x00a", "not UTF-8"),
        (KINETICS.replace("label,", "") + "x,0,10,test\n", "no column of labels"),
        (KINETICS + "waving,abc,zero,10,train\n", "line 2: .*seconds"),
        (KINETICS + "waving,abc,0,10\n", "line 2: 4 columns"),
    ],
)
def test_what_is_not_understood_is_named_by_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        listed(tmp_path, text)


def test_columns_that_are_not_there_are_an_error(tmp_path):
    (tmp_path / "l.csv").write_text("path,digit\na.mp4,3\n")
    with pytest.raises(ValueError, match="no columns .*direction"):
        read_videos(tmp_path / "l.csv", label_columns=["digit", "direction"])
    (tmp_path / "l.txt").write_text("a.mp4 3\n")
    with pytest.raises(ValueError, match="first line that names the columns"):
        read_videos(tmp_path / "l.txt", label_columns=["digit"])


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


ROWS = (
    KINETICS.replace("\n", ",is_cc\n")
    + '"shaking hands",-ab_C1,4,14,train,0\n'
    + "abseiling,xyz,0,10,train,1\n"
)


@pytest.mark.parametrize(
    "folder", ["train", "train/class folder", "videos/deep"], ids=["beside", "classes", "anywhere"]
)
def test_kinetics_clips_are_found(tmp_path, folder):
    clip = tmp_path / folder / "-ab_C1_000004_000014.webm"
    touch(clip)
    (tmp_path / "train.csv").write_text(ROWS)
    videos = read_videos(tmp_path / "train.csv")
    assert videos.label_sets == {"class": ["abseiling", "shaking hands"]}
    assert videos.targets[:, 0].tolist() == [1, 0]
    assert os.path.samefile(videos.name(0), clip)
    assert os.path.basename(videos.name(1)) == "xyz_000000_000010.mp4"
    assert videos.missing().tolist() == [1]


def test_kinetics_annotations_can_lie_in_a_folder_of_their_own(tmp_path):
    touch(tmp_path / "train" / "xyz_000000_000010.mp4", tmp_path / "annotations" / "train.csv")
    (tmp_path / "annotations" / "train.csv").write_text(ROWS)
    videos = read_videos(tmp_path / "annotations" / "train.csv", root=tmp_path)
    assert videos.missing().tolist() == [0]


def test_the_folder_beside_a_list_comes_first(tmp_path):
    for place in ("train", "lists/train"):
        touch(tmp_path / place / "xyz_000000_000010.mp4")
    (tmp_path / "lists" / "train.csv").write_text(ROWS)
    videos = read_videos(tmp_path / "lists" / "train.csv", root=tmp_path)
    assert videos.name(1) == str(tmp_path / "lists" / "train" / "xyz_000000_000010.mp4")


def test_class_folders(tmp_path):
    touch(*(tmp_path / name for name in ("b/1.mp4", "b/deep/2.MOV", "a 1/3.webm", ".git/4.mp4")))
    (tmp_path / "b" / "notes.txt").touch()
    with pytest.warns(UserWarning, match="1 files .*notes.txt"):
        videos = read_videos(tmp_path)
    assert videos.label_sets == {"class": ["a 1", "b"]}
    names = [os.path.relpath(videos.name(i), tmp_path) for i in range(3)]
    assert names == ["a 1/3.webm", "b/1.mp4", "b/deep/2.MOV"]
    assert videos.targets[:, 0].tolist() == [0, 1, 1]


def test_class_folders_called_by_numbers_are_names(tmp_path):
    touch(tmp_path / "7" / "a.mp4", tmp_path / "spin" / "b.mp4")
    assert read_videos(tmp_path).label_sets == {"class": ["7", "spin"]}


def test_a_link_that_leads_back_up_ends(tmp_path):
    touch(tmp_path / "a" / "1.mp4")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    assert len(read_videos(tmp_path)) == 1


def test_empty_folders_and_absent_ones_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no class folders"):
        read_videos(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="no videos below"):
        read_videos(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_videos(tmp_path / "nowhere")


def test_relative_paths_start_from_the_root_not_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "l.txt").write_text(f"sub/a.mp4 0\n{tmp_path}/abs/b.mp4 1\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    videos = read_videos(tmp_path / "l.txt")
    assert videos.name(0) == str(tmp_path / "sub" / "a.mp4")
    assert videos.name(1) == str(tmp_path / "abs" / "b.mp4")
    videos = read_videos(tmp_path / "l.txt", root=tmp_path / "other")
    assert videos.name(0) == str(tmp_path / "other" / "sub" / "a.mp4")


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_stray_quote_swallows_no_line(tmp_path, delimiter):
    lines = ["a.mp4,3", '"b.mp4,1', "c.mp4,2", '"d.mp4,0']
    file = tmp_path / "list.csv"
    file.write_text("\n".join(lines).replace(",", delimiter))
    with pytest.raises(ValueError, match="line 2: a quote that opens there closes on line 4"):
        read_videos(file, tmp_path)


@pytest.mark.parametrize("start", ["nan", "inf", "x"])
def test_times_that_are_no_numbers_are_told_with_their_line(tmp_path, start):
    file = tmp_path / "train.csv"
    file.write_text(f"label,youtube_id,time_start,time_end,split\njump,abc,{start},10,train\n")
    with pytest.raises(ValueError, match="line 2: time_start and time_end are seconds"):
        read_videos(file, tmp_path)
