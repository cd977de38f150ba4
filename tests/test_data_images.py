"""Reading single image files of every awkward kind. Expected colours are worked out by hand."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageFile

from mmpreproj.data import UnreadableImage, load_image

RED, WHITE = (255, 0, 0), (255, 255, 255)


def near(pixel, expected, tolerance=0):
    return np.abs(np.subtract(pixel, expected)).max() <= tolerance


def test_cmyk_jpeg_of_a_red_square_is_red_not_inverted(tmp_path):
    # Full magenta and yellow ink on white paper look red.
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "x.jpg", quality=95)
    image = load_image(tmp_path / "x.jpg")
    assert image.mode == "RGB"
    assert near(image.getpixel((8, 8)), RED, 4)


def test_ycck_jpeg_of_a_red_square_is_red(tmp_path):
    # No writer of YCCK is at hand, so one is made: Adobe stores inks inverted, red as CMYK = (255,
    # 0, 0, 255). In YCCK # the decoder makes that from RGB = 255 - CMY = (0, 255, 255), cyan, which
    # JPEG's matrix puts at # Y = .587 * 255 + .114 * 255 = 179, Cb = 128 + (255 - 178.8) * .564 =
    # 171, Cr = 128 - 178.8 * .713 = 0. # Pillow inverts what it writes, and the "transform" byte of
    # the Adobe segment says CMYK (0) or YCCK (2).
    buffer = io.BytesIO()
    inverted = tuple(255 - v for v in (179, 171, 0, 255))
    Image.new("CMYK", (16, 16), inverted).save(buffer, "JPEG", quality=100, subsampling=0)
    data = bytearray(buffer.getvalue())
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    data[at] = 2
    (tmp_path / "x.jpg").write_bytes(data)
    assert near(load_image(tmp_path / "x.jpg").getpixel((8, 8)), RED, 6)


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)  # multiples of 257: 0, 1, 128, 255
    Image.fromarray(values).save(tmp_path / "x.png")
    assert np.asarray(load_image(tmp_path / "x.png", 1)).tolist() == [[0, 1, 128, 255]]
    assert np.asarray(load_image(tmp_path / "x.png", 3))[0, 2].tolist() == [128, 128, 128]


def test_float_tiff_is_refused_since_its_range_is_unknown(tmp_path):
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(UnreadableImage, match="x.tif.*float"):
        load_image(tmp_path / "x.tif")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_areas_become_white_whatever_colour_they_hide(tmp_path, mode, channels):
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    if mode == "P":
        palette = Image.new("P", (2, 1))
        palette.putpalette([255, 0, 0, 0, 0, 0])
        palette.putpixel((1, 0), 1)
        palette.save(tmp_path / "x.png", transparency=b"\x00\xff")
    else:
        image.convert(mode).save(tmp_path / "x.png")
    found = load_image(tmp_path / "x.png", channels)
    assert found.mode == {1: "L", 3: "RGB"}[channels]
    assert np.asarray(found).reshape(2, -1).tolist() == [[255] * channels, [0] * channels]


def test_half_transparent_red_is_pink(tmp_path):
    Image.new("RGBA", (1, 1), (255, 0, 0, 51)).save(tmp_path / "x.png")
    # 51/255 = 0.2 of red over 0.8 of white: 255, 204, 204
    assert near(load_image(tmp_path / "x.png").getpixel((0, 0)), (255, 204, 204), 1)


def test_a_single_transparent_colour_becomes_white(tmp_path):
    image = Image.new("RGB", (2, 1), (10, 20, 30))
    image.putpixel((1, 0), (1, 2, 3))
    image.save(tmp_path / "x.png", transparency=(1, 2, 3))
    found = load_image(tmp_path / "x.png")
    assert [found.getpixel((i, 0)) for i in (0, 1)] == [(10, 20, 30), WHITE]


def test_one_bit_image_is_black_and_white(tmp_path):
    image = Image.new("1", (2, 1), 0)
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "x.png")
    assert np.asarray(load_image(tmp_path / "x.png"))[0].tolist() == [[0] * 3, [255] * 3]


@pytest.mark.parametrize(
    "orientation, corner", [(1, (0, 0)), (3, (1, 1)), (6, (1, 0)), (8, (0, 1))]
)
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_exif_orientation_is_applied(tmp_path, orientation, corner, suffix):
    # White top left as stored. EXIF: 3 is upside down (to bottom right); 6 wants a quarter turn
    # clockwise (to top # right); 8 one anticlockwise (to bottom left).
    image = Image.new("RGB", (32, 16), "black")
    image.paste(WHITE, (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"x.{suffix}", exif=exif)
    found = load_image(tmp_path / f"x.{suffix}")
    assert found.size == ((32, 16) if orientation in (1, 3) else (16, 32))
    for x in (0, 1):
        for y in (0, 1):
            pixel = found.getpixel((4 + x * (found.width - 8), 4 + y * (found.height - 8)))
            assert near(pixel, WHITE if (x, y) == corner else (0, 0, 0), 12), (x, y)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_spoil_the_image(tmp_path):
    Image.new("RGB", (8, 8), RED).save(tmp_path / "x.jpg", exif=b"Exif\x00\x00II*\x00garbage")
    assert near(load_image(tmp_path / "x.jpg").getpixel((4, 4)), RED, 4)


def make_bad(folder, kind):
    path = folder / f"{kind}.jpg"
    if kind == "truncated":
        noise = np.random.RandomState(0).randint(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 6 // 10])
    elif kind == "text":
        path.write_text("<html>404 not found</html>")
    elif kind == "empty":
        path.touch()
    elif kind == "dangling":
        path.symlink_to(folder / "nowhere.jpg")
    return path


@pytest.mark.parametrize("kind", ["truncated", "text", "empty", "dangling"])
def test_unreadable_files_are_errors_that_name_them(tmp_path, kind):
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    path = make_bad(tmp_path, kind)
    with pytest.raises(UnreadableImage, match=str(path)):
        load_image(path)


def test_decompression_bomb_is_an_unreadable_image(tmp_path, monkeypatch):
    Image.new("L", (64, 64)).save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # an error from twice that
    with pytest.raises(UnreadableImage, match="DecompressionBomb"):
        load_image(tmp_path / "x.png")


def test_other_channel_counts_are_refused_naming_both(tmp_path):
    with pytest.raises(ValueError, match="takes 4 input channels.*3 .RGB. or 1 .grey."):
        load_image(tmp_path / "x.png", 4)


@pytest.mark.slow
def test_awkward_images_give_no_warnings(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 0])
    palette.save(tmp_path / "p.png", transparency=b"\x00\xff")
    Image.new("RGB", (8, 8)).save(
        tmp_path / "e.jpg", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff"
    )
    code = (
        "import sys\nfrom mmpreproj.data.image.image_files import load_image\n"
        "for path in sys.argv[1:]: load_image(path)"
    )
    paths = [str(tmp_path / "p.png"), str(tmp_path / "e.jpg")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
