"""The data module over moving digits, the default: see moving_digits.py for what the videos are."""

from typing import Any

from mmpreproj.data.video.module import VideoDataModule
from mmpreproj.data.video.moving_digits import (
    DIRECTIONS,
    MovingDigits,
    opposite,
    write_moving_digits,
)
from mmpreproj.data.video.transforms import VideoAugment


class MovingDigitsDataModule(VideoDataModule):
    """Handwritten digits that move in eight directions: videos with two label sets, "digit" and
    "direction". The files are written when training starts, once, and read like any other videos.

    Args:
        root: their folder; None: one of the cache's, see `MovingDigits.root`.
        videos: what they are like; None: the defaults.
        stride: of dense clips, in frames. At the default's speed, steps of 2 hide directions, and
            steps of 3 turn them around.
        augment: training augmentation; None: none. Mirror images are refused: they would turn
            directions, and digits into other shapes.
        batch_size: clips in a training batch, on each process.
        num_workers: worker processes of each loader.
        progress: show a bar while the files are written; None: on a terminal.
        keywords: those of VideoDataModule.
    """

    def __init__(
        self,
        root: str | None = None,
        videos: MovingDigits | None = None,
        stride: int = 1,
        augment: VideoAugment | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
        progress: bool | None = None,
        **keywords: Any,
    ):
        self.videos = videos or MovingDigits()
        self.progress = progress
        augment = augment or VideoAugment(no_aug=True)
        if not augment.no_aug and augment.hflip > 0:
            raise ValueError(
                f"a mirror image moves in another direction and is no digit: set augment.hflip to "
                f"0, got {augment.hflip}"
            )
        super().__init__(
            root=str(self.videos.root()) if root is None else root,
            train="train",
            val="val",
            test="test",
            label_columns=["digit", "direction"],
            stride=stride,
            augment=augment,
            batch_size=batch_size,
            num_workers=num_workers,
            **keywords,
        )

    opposites = {"direction": {name: opposite(name) for name in DIRECTIONS}}
    """Of each label set, the class of a video that is played backwards."""

    def prepare_data(self) -> None:
        write_moving_digits(self.root, self.videos, self.progress)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "videos": self.videos.facts()}
