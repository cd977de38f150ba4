"""Data through timm's readers: folders, tar files, torchvision."""

import pickle
import tarfile

import pytest
import torch
from PIL import Image
from test_data_folders import CONFIG, all_of, fill

from mmpreproj.data import AugmentConfig, TimmDataModule


def module(**keywords):
    keywords = {
        "num_workers": 0,
        "batch_size": 4,
        "augment": AugmentConfig(no_aug=True),
        **keywords,
    }
    data = TimmDataModule(**keywords)
    data.setup()
    data.data_config = CONFIG
    return data


@pytest.fixture
def tree(tmp_path):
    for k, name in enumerate("abc"):
        fill(tmp_path / "train" / name, 10, 10 * k)
        fill(tmp_path / "validation" / name, 4, 10 * k)
    return tmp_path


@pytest.mark.parametrize("name", ["", "torch/image_folder"])
def test_folders_are_split_and_labelled_as_elsewhere(tree, name):
    data = module(name=name, root=str(tree))
    assert [data.split_size(s) for s in ("train", "val", "test")] == [27, 3, 12]
    assert data.classes == ["a", "b", "c"]
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        images, targets = all_of(loader)
        assert torch.equal(images[:, 0, 4, 4].long(), 10 * targets)


@pytest.mark.parametrize("name", ["", "torch/image_folder"])
def test_unreadable_and_awkward_images_follow_the_same_rules(tree, name):
    (tree / "validation" / "b" / "001.png").write_bytes(b"")
    Image.new("RGBA", (10, 10), (9, 9, 9, 0)).save(tree / "validation" / "b" / "002.png")
    data = module(name=name, root=str(tree))
    with pytest.warns(UserWarning, match="001.png"):
        images, targets = all_of(data.test_dataloader())
    assert targets.tolist() == [0] * 4 + [1, -3, 1, 1] + [2] * 4
    assert images[6].min() == 255  # transparent: white


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_tar_files_are_read_by_several_workers(tree, workers):
    for split in ("train", "validation"):
        with tarfile.open(tree / f"{split}.tar", "w") as tar:
            tar.add(tree / split, arcname=".")
    data = module(
        root=str(tree / "train.tar"), test_root=str(tree / "validation.tar"), num_workers=workers
    )
    assert [data.split_size(s) for s in ("train", "val", "test")] == [27, 3, 12]
    data.dataset("test")[0]  # read here first: workers must not share the open file
    for loader in (data.train_dataloader(), data.test_dataloader()):
        images, targets = all_of(loader)
        assert torch.equal(images[:, 0, 4, 4].long(), 10 * targets)
    pickle.dumps(data.dataset("train"))


def test_training_and_test_on_the_same_folder_are_refused(tree):
    (tree / "train").rename(tree / "other")
    (tree / "validation").rename(tree / "another")
    with pytest.raises(ValueError, match="same images"):
        module(root=str(tree))


def test_class_order_of_the_test_part_does_not_matter(tree):
    fill(tree / "validation" / "d", 1)
    with pytest.raises(ValueError, match="does not know: 'd'"):
        module(root=str(tree))


def test_streams_need_a_validation_split_of_their_own():
    with pytest.raises(ValueError, match="stream.*val_split"):
        TimmDataModule(name="wds/x", root="/nowhere")


def test_folders_need_a_root():
    with pytest.raises(ValueError, match="root"):
        TimmDataModule(name="torch/cifar10")


def test_what_timm_cannot_open_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot open the train part.*nowhere"):
        module(root=str(tmp_path / "nowhere"))
