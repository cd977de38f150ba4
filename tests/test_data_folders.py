"""Class folders: mapping, unreadable images, loaders. Every image is one flat, telling colour."""

import warnings

import pytest
import torch
from PIL import Image

from mmpreproj.data import AugmentConfig, FolderSource, ImageFolderDataModule, UnreadableImage

CONFIG = {
    "input_size": (3, 8, 8),
    "interpolation": "bilinear",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
    "crop_pct": 1.0,
    "crop_mode": "center",
}
PLAIN = AugmentConfig(no_aug=True)


def fill(folder, n, value=0, suffix="png"):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        Image.new("RGB", (10, 10), (value, i, 0)).save(folder / f"{i:03d}.{suffix}")


def four_classes(root):
    """Classes of colour 0, 10, 20, 30: ten images each to train on, five each to report."""
    for k, name in enumerate("abcd"):
        fill(root / "train" / name, 10, 10 * k)
        fill(root / "val" / name, 5, 10 * k)
    return root


@pytest.fixture
def tree(tmp_path):
    return four_classes(tmp_path)


def module(root, stage=None, **keywords):
    keywords = {"num_workers": 0, "batch_size": 4, "augment": PLAIN, **keywords}
    data = ImageFolderDataModule(str(root), **keywords)
    data.setup(stage)
    data.data_config = CONFIG
    return data


def all_of(loader):
    batches = list(loader)
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])


def test_parts_have_the_expected_sizes_and_share_nothing(tree):
    data = module(tree, val_fraction=0.2)
    assert (data.split_size("train"), data.split_size("val"), data.split_size("test")) == (
        32,
        8,
        20,
    )
    assert data.classes == ["a", "b", "c", "d"] and data.num_classes == 4
    names = {split: {part[0].name(i) for i in part[1]} for split, part in data._parts.items()}
    assert not names["train"] & names["val"]
    _, targets = all_of(data.val_dataloader())
    assert torch.bincount(targets).tolist() == [2, 2, 2, 2]


def test_targets_follow_the_colours_of_their_class(tree):
    data = module(tree)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        images, targets = all_of(loader)
        assert images.dtype == torch.uint8
        assert torch.equal(images[:, 0, 4, 4].long(), 10 * targets)


def test_pixels_are_normalised_after_the_transfer(tree):
    data = module(tree)
    batch = next(iter(data.test_dataloader()))
    images, _ = data.on_after_batch_transfer(batch, 0)
    expected = (batch[0].double() / 255 - 0.5) / 0.25
    assert images.dtype == torch.float32
    assert (images.double() - expected).abs().max() < 1e-6


def test_prediction_sees_what_evaluation_sees(tree):
    data = module(tree)
    images, targets = data.on_after_batch_transfer(next(iter(data.test_dataloader())), 0)
    with Image.open(data._parts["test"][0].name(0)) as image:
        assert torch.equal(data.eval_transform()(image), images[0])


def test_loaders_without_the_models_configuration_say_so(tree):
    data = module(tree)
    data.data_config = None
    with pytest.raises(ValueError, match="data_config"):
        data.train_dataloader()


# Class mapping


def test_class_missing_in_test_keeps_the_ids_of_the_others(tree):
    for path in (tree / "val" / "c").iterdir():
        path.unlink()
    with pytest.warns(UserWarning, match="test split has no images of 'c'"):
        data = module(tree)
    images, targets = all_of(data.test_dataloader())
    assert sorted(set(targets.tolist())) == [0, 1, 3]
    assert torch.equal(images[:, 0, 4, 4].long(), 10 * targets)


def test_extra_class_in_test_is_an_error(tree):
    fill(tree / "val" / "e", 1)
    with pytest.raises(ValueError, match="does not know: 'e'"):
        module(tree)


def test_present_but_empty_test_folder_is_an_error(tree):
    for folder in (tree / "val").iterdir():
        for path in folder.iterdir():
            path.unlink()
    with pytest.raises(ValueError, match="no images below"):
        module(tree)


def test_hidden_folders_and_files_are_ignored(tree):
    fill(tree / "train" / ".ipynb_checkpoints", 2)
    fill(tree / "val" / ".cache", 2)
    (tree / "train" / "a" / ".hidden.png").write_text("no image")
    fill(tree / "train" / "a" / ".thumbnails", 2)
    data = module(tree)
    assert data.classes == ["a", "b", "c", "d"]
    assert data.split_size("train") + data.split_size("val") == 40


def test_classes_of_a_checkpoint_are_reused(tree):
    data = module(tree, "test", classes=["d", "c", "b", "a"])
    images, targets = all_of(data.test_dataloader())
    assert torch.equal(images[:, 0, 4, 4].long(), 10 * (3 - targets))
    assert data.split_size("train") is None  # training images are not needed
    with pytest.raises(ValueError, match="does not know: 'd'"):
        module(tree, "test", classes=["a", "b", "c"])


def test_empty_class_folder_in_training_is_an_error(tree):
    (tree / "train" / "aa").mkdir()
    with pytest.raises(ValueError, match="no images to train on in class folder 'aa'"):
        module(tree)


# Which folders


def test_missing_root_and_missing_split_are_named(tree):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        module(tree / "nowhere")
    with pytest.raises(FileNotFoundError, match="no folder 'training'.*'train', 'val'"):
        module(tree, train_split="training")


def test_test_folder_is_the_only_labelled_one_or_must_be_said(tree):
    (tree / "test").mkdir()
    Image.new("RGB", (4, 4)).save(tree / "test" / "0.png")  # unlabelled, as ImageNet's
    assert module(tree).describe()["test_split"] == "val"
    fill(tree / "test" / "a", 3)
    with pytest.raises(ValueError, match=r"\['val', 'test'\].*test_split"):
        module(tree)
    with pytest.warns(UserWarning, match="no images of"):
        assert module(tree, test_split="test").split_size("test") == 3


def test_no_test_folder_names_the_candidates(tree):
    (tree / "val").rename(tree / "holdout")
    with pytest.raises(ValueError, match="none of .*'val', 'validation', 'test'"):
        module(tree)


def test_val_split_replaces_the_held_out_part(tree):
    for name in "abcd":
        fill(tree / "test" / name, 3)
    data = module(tree, val_split="val")
    assert [data.split_size(s) for s in ("train", "val", "test")] == [40, 20, 12]


@pytest.mark.parametrize(
    "splits", [{"val_split": "val", "test_split": "val"}, {"test_split": "train"}]
)
def test_parts_with_the_same_images_are_refused(tree, splits):
    with pytest.raises(ValueError, match="would be the same images"):
        module(tree, **splits)


def test_nothing_held_out_gives_no_validation_loader(tree):
    data = module(tree, val_fraction=0.0)
    assert data.val_dataloader() == []
    assert data.split_size("train") == 40


def test_source_follows_links_ignores_other_files_and_sorts(tmp_path):
    fill(tmp_path / "elsewhere" / "deep", 2)
    fill(tmp_path / "data" / "b", 1, suffix="JPEG")
    (tmp_path / "data" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "b" / "notes.txt").write_text("x")
    with pytest.warns(UserWarning, match="1 files .*notes.txt"):
        source = FolderSource(tmp_path / "data")
    assert source.classes == ["a", "b"]
    assert [source.name(i)[len(str(tmp_path)) :] for i in range(3)] == [
        "/data/a/deep/000.png",
        "/data/a/deep/001.png",
        "/data/b/000.JPEG",
    ]


# Unreadable images


def spoil(tree):
    bad = [tree / "train" / "b" / "003.png", tree / "val" / "c" / "001.png"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:40])
    return [str(path) for path in bad]


def test_unreadable_training_image_is_replaced_counted_and_named_once(tree):
    bad, _ = spoil(tree)
    data = module(tree, val_fraction=0.0)
    loader = data.train_dataloader()
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            images, targets = all_of(loader)
            assert len(targets) == 40
            # The next of its class, file 004, takes its place
            assert torch.bincount(targets).tolist() == [10, 10, 10, 10]
            files = images[targets == 1][:, 1, 4, 4].tolist()
            assert sorted(files) == [0, 1, 2, 4, 4, 5, 6, 7, 8, 9]
    assert [bad in str(w.message) for w in caught] == [True]
    assert data.describe()["n_unreadable"] == {"train": 1}
    assert data.describe()["unreadable"] == {"train": [bad]}


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_test_image_is_marked_and_n_unchanged(tree, workers):
    _, bad = spoil(tree)
    data = module(tree, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [data.on_after_batch_transfer(b, 0) for b in data.test_dataloader()]
    targets = torch.cat([t for _, t in batches])
    assert targets.tolist() == [0] * 5 + [1] * 5 + [2, -4, 2, 2, 2] + [3] * 5
    assert torch.cat([i for i, _ in batches])[11].abs().max() == 0
    assert data.describe()["unreadable"] == {"test": [bad]}  # found out by a worker, known here


@pytest.mark.parametrize("loader", ["train_dataloader", "test_dataloader"])
def test_unreadable_image_can_be_an_error_that_names_it(tree, loader):
    bad = spoil(tree)[loader == "test_dataloader"]
    data = module(tree, bad_images="error", val_fraction=0.0)
    with pytest.raises(UnreadableImage, match=bad):
        list(getattr(data, loader)())


def test_many_unreadable_images_in_a_row_are_an_error(tree):
    fill(tree / "train" / "e", 60)
    fill(tree / "val" / "e", 1)
    for path in (tree / "train").rglob("*.png"):
        path.write_bytes(b"")
    data = module(tree, val_fraction=0.0)
    with pytest.raises(ValueError, match="50 training images in a row"), pytest.warns(UserWarning):
        next(iter(data.train_dataloader()))


def test_warnings_about_unreadable_images_stop_at_twenty(tree):
    for path in (tree / "train").rglob("*.png"):
        path.write_bytes(b"")
    data = module(tree, val_fraction=0.0)
    dataset = data.dataset("train")
    with pytest.warns(UserWarning) as caught, pytest.raises(ValueError):
        dataset[0]
    assert len(caught) == 20 and "without a message" in str(caught[-1].message)
    assert int(dataset.bad.sum()) == 40


# What is told


def test_images_beside_class_folders_and_a_single_class_are_told(tree):
    fill(tree / "train", 2)
    with pytest.warns(UserWarning, match="2 images lie in .*train' beside its class folders"):
        data = module(tree)
        data.setup("fit")
    assert data.describe()["n_train"] + data.describe()["n_val"] == 40
    assert data.describe()["val_fraction"] and data.describe()["val_split"] is None
    for split in ("train", "val"):
        fill(tree / "one" / split / "a", 4)
    with pytest.warns(UserWarning, match=r"train has one class \(class: 'a'\)"):
        module(tree / "one").setup("validate")
