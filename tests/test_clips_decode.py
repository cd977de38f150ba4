"""Frames read from files, against a plain sequential PyAV decode of the same files."""

import contextlib
import os
import sys
import types
from pathlib import Path

import av
import numpy as np
import pytest
from clip_files import (
    counter_frame,
    number_of,
    reference_frames,
    set_rotation,
    write_audio_only,
    write_clip,
    write_sound,
)

from mmpreproj.data.video import UnreadableVideo, decode, decord_reader, probe, read_frames
from mmpreproj.data.video.decode import VideoFile

X264 = "b-adapt=0:scenecut=0"
HEVC = "log-level=none:keyint=10:bframes=4"
KINDS = {
    "h264 b-frames.mp4": {"gop": 10, "options": {"x264-params": f"{X264}:bframes=3"}},
    "h264 pyramid.mkv": {"options": {"x264-params": f"{X264}:bframes=7:b-pyramid=strict"}},
    "h264 open gop.mp4": {"options": {"x264-params": f"{X264}:open-gop=1:bframes=3:keyint=8"}},
    "h264 open gop.ts": {"options": {"x264-params": f"{X264}:open-gop=1:bframes=3:keyint=8"}},
    "h264 refresh.mp4": {"options": {"x264-params": "intra-refresh=1:bframes=0:keyint=10"}},
    "h264 interlaced.mp4": {"options": {"x264-params": f"{X264}:interlaced=1:bframes=2"}},
    "h264 without times.avi": {"options": {"x264-params": f"{X264}:bframes=3"}},
    "h264 10 bit.mp4": {"pix_fmt": "yuv420p10le"},
    "h264 audio longer.mp4": {"audio_seconds": 1.5},
    "h264 vfr.mp4": {"times": [60 * i if i < 15 else 900 + 20 * (i - 15) for i in range(30)]},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": HEVC}},
    "hevc layers.mkv": {
        "codec": "libx265",
        "options": {"x265-params": f"{HEVC}:temporal-layers=3"},
    },
    "hevc 10 bit.mp4": {
        "codec": "libx265",
        "pix_fmt": "yuv420p10le",
        "options": {"x265-params": HEVC},
    },
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"cpu-used": "8", "deadline": "realtime"}},
    "vp9 without duration.webm": {
        "codec": "libvpx-vp9",
        "options": {"cpu-used": "8", "deadline": "realtime"},
        "container_options": {"live": "1"},
    },
    "vp8 hidden frames.webm": {
        "codec": "libvpx",
        "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "4"},
    },
    "mpeg4.avi": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mpeg2.mpg": {"codec": "mpeg2video", "rate": 25, "options": {"bf": "2"}},
}


def textured(i, width, height):
    """A counter frame with a moving square and noise, which no two encodings predict alike."""
    frame = counter_frame(i, width, height)
    noise = np.random.default_rng(i).integers(0, 40, (height // 4, width, 3), dtype=np.uint8)
    frame[height // 4 : height // 2] += noise
    return frame


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Writes a kind of clip once. Skips where PyAV's FFmpeg lacks the encoder."""
    folder = tmp_path_factory.mktemp("kinds")

    def get(name):
        path = folder / name
        if not path.exists():
            settings = dict(KINDS[name])
            codec = settings.get("codec", "libx264")
            if codec not in av.codecs_available:
                pytest.skip(f"this PyAV has no encoder {codec}")
            write_clip(path, n=30, frame=textured, **settings)
        return path

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_frames_equal_a_sequential_decode(clips, name):
    path = clips(name)
    expected = reference_frames(path)
    assert len(expected) == 30
    assert probe(path).n_frames == 30
    rng = np.random.default_rng(0)
    for numbers in [[i] for i in range(30)] + [rng.integers(0, 30, 6).tolist() for _ in range(8)]:
        for number, frame in zip(numbers, read_frames(path, numbers), strict=True):
            # the same decoder and the same conversion: there is no rounding to allow for
            assert np.array_equal(frame, expected[number]), (name, numbers, number)


@pytest.mark.parametrize("name", ["h264 b-frames.mp4", "h264 open gop.mp4", "hevc.mp4"])
def test_a_frame_shows_its_number(clips, name):
    assert [number_of(frame) for frame in read_frames(clips(name), range(30))] == [*range(30)]


def test_several_decoder_threads_give_the_same_frames(clips):
    for name in ("h264 b-frames.mp4", "hevc.mp4"):
        numbers = [3, 11, 12, 29]
        one = read_frames(clips(name), numbers, threads=1)
        assert np.array_equal(one, read_frames(clips(name), numbers, threads=3))


def test_decoding_starts_at_the_last_key_frame_and_ends_with_the_last_frame(tmp_path):
    options = {"x264-params": f"{X264}:bframes=0"}
    path = write_clip(tmp_path / "a.mp4", 50, gop=10, options=options)
    with VideoFile(str(path), threads=1) as file:
        assert file.tidy and file.n_frames == 50
        runs = lambda numbers: file._runs({file.times[i] for i in numbers})  # noqa: E731
        assert runs([13, 17]) == [(10, 18)]
        assert runs([3, 35, 38]) == [(0, 4), (30, 39)]  # nothing sampled in between: left out
        assert runs([8, 9, 10, 12]) == [(0, 13)]  # goes on across a key frame


@pytest.mark.parametrize("name", ["h264 open gop.mp4", "h264 pyramid.mkv", "hevc layers.mkv"])
def test_ordinary_files_are_not_decoded_from_the_start(clips, monkeypatch, name):
    def never(self, indices):
        raise AssertionError("decoded from the start")

    path = clips(name)
    expected = reference_frames(path)
    monkeypatch.setattr(VideoFile, "_read_in_order", never)
    for numbers in ([4], [29, 11], [9, 17, 23], [*range(20, 27)]):
        for number, frame in zip(numbers, read_frames(path, numbers), strict=True):
            assert np.array_equal(frame, expected[number])


def test_number_of_frames_is_what_the_sampler_is_given(clips):
    seen = []
    read_frames(clips("h264 audio longer.mp4"), lambda n: seen.append(n) or [n - 1])
    assert seen == [30]


def test_times_that_disagree_with_the_order_of_frames_are_not_believed(clips, monkeypatch):
    # as if FFmpeg's guesses for AVI were stored times
    monkeypatch.setattr(decode, "STATES_TIMES", {"avi"})
    path = clips("h264 without times.avi")
    expected = reference_frames(path)
    with VideoFile(str(path), threads=1) as file:
        assert file.tidy
    assert all(
        np.array_equal(read_frames(path, [i, 29]), [expected[i], expected[29]]) for i in range(30)
    )


def test_large_files_are_read_in_two_passes_with_the_same_frames(clips, monkeypatch):
    numbers = [25, 3, 14]
    for name in ("h264 b-frames.mp4", "mpeg4.avi"):
        expected = read_frames(clips(name), numbers)
        monkeypatch.setattr(decode, "MAX_HELD", 1000)
        assert np.array_equal(read_frames(clips(name), numbers), expected)
        monkeypatch.undo()


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_rotated_files_are_read_upright(tmp_path, turn):
    # What is stored is the upright frame turned back, as a phone held sideways does
    def stored(i, width, height):
        return np.rot90(
            counter_frame(i, *((height, width) if turn % 180 else (width, height))), turn // 90
        ).copy()

    path = set_rotation(write_clip(tmp_path / "a.mp4", 6, size=(96, 64), frame=stored), turn)
    frames = read_frames(path, [0, 4, 5])
    size = (64, 96) if turn % 180 else (96, 64)
    assert frames.shape == (3, size[1], size[0], 3)
    assert [number_of(frame) for frame in frames] == [0, 4, 5]
    assert frames[0][4, 4, 0] > 150  # the corner mark, which only upright is top left
    expected = reference_frames(path)
    assert np.array_equal(frames[1], expected[4])
    info = probe(path)
    assert (info.rotation, info.width, info.height) == (turn, *size)


def test_a_mirrored_file_is_mirrored_back(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 3, size=(96, 64))
    plain = read_frames(path, [2])
    assert np.array_equal(read_frames(set_rotation(path, "mirror"), [2]), plain[:, :, ::-1])


def test_probe_tells_the_facts(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 25, size=(80, 48), gop=10, rate=25)
    info = probe(path)
    assert (info.width, info.height, info.fps, info.codec) == (80, 48, 25.0, "h264")
    assert info.key_frames[0] == 0 and info.seekable


def test_odd_sizes_keep_all_columns(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 2, size=(70, 50))  # rows of 210 bytes are padded inside
    assert np.array_equal(read_frames(path, [1])[0], reference_frames(path)[1])


@pytest.mark.parametrize("number", [-1, 20])
def test_a_number_outside_the_video_is_an_error(tmp_path, number):
    path = write_clip(tmp_path / "a.mp4", 20)
    with pytest.raises(IndexError, match=f"frame {number} .*20 frames"):
        read_frames(path, [0, number])


# Files that cannot be read


def bad_files(folder):
    """Name -> (path, what the message says)."""
    good = write_clip(folder / "good.mp4", 20).read_bytes()
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("not a video\n" * 50)
    (folder / "list.mp4").write_bytes(b"#EXTM3U\n\0http://localhost/a.ts\n")
    (folder / "noise.mp4").write_bytes(bytes(range(256)) * 9)
    (folder / "short.mp4").write_bytes(good[: len(good) // 2])  # its index is at the end
    (folder / "folder.mp4").mkdir()
    return {
        "missing": (folder / "missing.mp4", "No such file"),
        "empty": (folder / "empty.mp4", "empty"),
        "text": (folder / "text.mp4", "not a video file, but text"),
        "playlist": (folder / "list.mp4", "not a video file, but text"),
        "noise": (folder / "noise.mp4", "not a video file, or"),
        "audio": (write_audio_only(folder / "audio.mp4"), "no video stream .*audio"),
        "short": (folder / "short.mp4", "index is missing"),
        "folder": (folder / "folder.mp4", "folder"),
    }


def test_an_unreadable_file_is_named_with_the_likely_reason(tmp_path):
    for path, reason in bad_files(tmp_path).values():
        with pytest.raises(UnreadableVideo, match=f"{path.name}.*{reason}"):
            read_frames(path, [0])
        with pytest.raises(UnreadableVideo, match=f"{path.name}.*{reason}"):
            probe(path)


def damaged_clip(path, first_bad=12):
    """A clip whose packets from one on are rubbish, so that a full decode fails there."""
    write_clip(path, 20, options={"x264-params": "bframes=0"})
    with av.open(str(path)) as file:
        places = [(p.pos, p.size) for p in file.demux(video=0) if p.size]
    data = bytearray(path.read_bytes())
    for position, size in places[first_bad:]:
        data[position : position + size] = b"\xff" * size
    path.write_bytes(data)
    return path


def test_a_damaged_file_is_refused_by_the_frame_where_a_full_decode_fails(tmp_path):
    path = damaged_clip(tmp_path / "a.mp4")
    expected = []
    with pytest.raises(av.FFmpegError), av.open(str(path)) as file:
        for frame in file.decode(video=0):
            expected.append(frame.to_ndarray(format="rgb24"))
    with pytest.raises(UnreadableVideo, match=f"damaged after frame {len(expected)} of 20"):
        read_frames(path, [2, 15])
    # what comes before is sound
    assert np.array_equal(read_frames(path, [2])[0], expected[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h264 b-frames.mp4", "hevc.mp4"])
@pytest.mark.parametrize("seed", range(8))
def test_where_the_data_are_damaged_frames_are_still_those_of_a_sequential_decode(
    clips, tmp_path, name, seed
):
    path, rng = tmp_path / name, np.random.default_rng(seed)
    data = bytearray(clips(name).read_bytes())
    with av.open(str(clips(name))) as file:
        packets = [p for p in file.demux(video=0) if p.size][1:]
    for number in rng.choice(len(packets), 1 + seed % 3, replace=False):
        packet = packets[number]
        data[packet.pos + int(rng.integers(packet.size // 3, packet.size - 1))] ^= 255
    path.write_bytes(data)
    expected, made_up, fails = [], [], False
    try:
        with av.open(str(path)) as file:
            file.streams.video[0].thread_count = 1  # slices in threads hide damage differently
            for frame in file.decode(video=0):
                expected.append(frame.to_ndarray(format="rgb24"))
                made_up.append(frame.is_corrupt)
    except av.FFmpegError:
        fails = True
        with pytest.raises(UnreadableVideo, match=f"damaged after frame {len(expected)} of"):
            probe(path)
    else:
        assert probe(path).n_frames == len(expected)
    if not fails and len(expected) < 30:
        return  # frames were dropped, of which only a full decode knows
    for i, frame in enumerate(expected):
        try:
            assert np.array_equal(read_frames(path, [i])[0], frame), i
            assert not made_up[i]
        except UnreadableVideo:
            assert fails or made_up[i]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_a_file_that_breaks_off_has_the_frames_before_that(tmp_path, suffix):
    index_first = {"movflags": "faststart"} if suffix == "mp4" else {}
    in_order = {"x264-params": "bframes=0"}
    path = write_clip(tmp_path / f"a.{suffix}", 40, options=in_order, container_options=index_first)
    expected, data = reference_frames(path), path.read_bytes()
    numbers = []
    for size in range(len(data) * 3 // 4, len(data), 97):
        path.write_bytes(data[:size])
        n = probe(path).n_frames
        numbers.append(n)
        found = read_frames(path, [0, n // 2, n - 1])
        for frame, i in zip(found, (0, n // 2, n - 1), strict=True):
            assert number_of(frame) == i and (i or np.array_equal(frame, expected[0]))
    assert numbers == sorted(numbers) and len(set(numbers)) > 5


@pytest.mark.parametrize("decoder", ["auto", "decord"])
def test_of_several_video_streams_the_default_one_is_read(tmp_path, decoder):
    if decoder == "decord":
        pytest.importorskip("decord")
    path = tmp_path / "two.mp4"
    with av.open(str(path), "w") as out:
        streams = [out.add_stream("libx264", rate=10) for _ in range(2)]
        for stream, default in zip(streams, (0, av.stream.Disposition.default), strict=True):
            stream.width = stream.height = 64
            stream.pix_fmt, stream.disposition = "yuv420p", default
        for i in [200, 201, *range(12)]:  # a preview, and the film
            frame = av.VideoFrame.from_ndarray(counter_frame(i), format="rgb24")
            out.mux(streams[i < 200].encode(frame))
        for stream in streams:
            out.mux(stream.encode())
    found = read_frames(path, lambda n: range(n), decoder)
    assert [number_of(frame) for frame in found] == list(range(12))


def test_a_frame_that_the_decoder_made_up_is_not_used(tmp_path):
    path = write_clip(tmp_path / "a.avi", 10, options={"x264-params": "bframes=0:keyint=30"})
    data = path.read_bytes()
    with av.open(str(path)) as file:
        packet = [p for p in file.demux(video=0) if p.size][4]
    for at in range(packet.size - 1, 0, -1):  # a place at which it is concealed, not refused
        changed = bytearray(data)
        changed[packet.pos + at] ^= 255
        path.write_bytes(changed)
        with contextlib.suppress(av.FFmpegError), av.open(str(path)) as file:
            file.streams.video[0].thread_count = 1
            frames = list(file.decode(video=0))
            if frames[4].is_corrupt:
                break
    else:
        pytest.skip("this FFmpeg refuses what it finds damaged")
    with pytest.raises(UnreadableVideo, match="frame 4 is damaged, and what it shows is made up"):
        read_frames(path, [0, 4])
    assert number_of(read_frames(path, [0])[0]) == 0


def test_a_song_with_a_cover_picture_is_not_a_video(tmp_path):
    path = tmp_path / "song.mp4"
    with av.open(str(path), "w") as out:
        sound = out.add_stream("aac", rate=16000, layout="mono")
        cover = out.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 64, "yuvj420p"
        try:
            cover.disposition = av.stream.Disposition.attached_pic
        except (AttributeError, TypeError):
            pytest.skip("this PyAV cannot mark a cover picture")
        out.mux(cover.encode(av.VideoFrame.from_ndarray(counter_frame(1), format="rgb24")))
        out.mux(cover.encode())
        write_sound(out, sound, 0.3)
    assert len(reference_frames(path)) == 1  # to FFmpeg it is a video stream
    with pytest.raises(UnreadableVideo, match="no video stream"):
        read_frames(path, [0])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_file_stays_open(clips, tmp_path):
    paths = [clips("h264 b-frames.mp4"), clips("mpeg4.avi"), damaged_clip(tmp_path / "a.mp4")]

    def open_files():
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return {os.path.realpath(link) for link in links}

    for path in paths:
        try:
            read_frames(path, [15])
        except UnreadableVideo:
            pass
        assert str(path.resolve()) not in open_files()


# Decoders


def test_decord_can_be_chosen(clips):
    pytest.importorskip("decord")
    path = clips("h264 b-frames.mp4")
    numbers = [7, 2, 29]
    # decord converts colours by another build of FFmpeg: a level of rounding is allowed for
    difference = read_frames(path, numbers, "decord").astype(int) - read_frames(path, numbers)
    assert np.abs(difference).max() <= 2


def test_decord_names_an_unreadable_file(tmp_path):
    pytest.importorskip("decord")
    for path, _ in bad_files(tmp_path).values():
        with pytest.raises(UnreadableVideo, match=path.name):
            read_frames(path, [0], "decord")


def test_another_decord_than_decord2_is_warned_about(monkeypatch):
    old = types.ModuleType("decord")
    old.__version__, old.__file__ = "0.6.0", "somewhere"
    old.logging = types.SimpleNamespace(QUIET=-8, set_level=lambda level: None)
    monkeypatch.setitem(sys.modules, "decord", old)
    decord_reader._decord.cache_clear()
    with pytest.warns(UserWarning, match="0.6.0.*decord2"):
        decord_reader._decord()
    decord_reader._decord.cache_clear()


@pytest.mark.parametrize("package, decoder", [("av", "auto"), ("decord", "decord")])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, package, decoder):
    path = write_clip(tmp_path / "a.mp4", 2)
    monkeypatch.setitem(sys.modules, package, None)
    for module in (decord_reader._decord, decode.pyav):
        module.cache_clear()
    with pytest.raises(ImportError, match=r"pip install -e '\.\[video\]'"):
        read_frames(path, [0], decoder)


def test_an_unknown_decoder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'auto', 'pyav' or 'decord'"):
        read_frames(tmp_path / "a.mp4", [0], "opencv")
