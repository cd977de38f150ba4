"""Video data: exact frames of any file, Kinetics, class folders and lists, clips and views."""

from mmpreproj.data.video.decode import UnreadableVideo, VideoInfo, probe, read_frames
from mmpreproj.data.video.lists import VideoList, read_videos
from mmpreproj.data.video.module import VideoDataModule
from mmpreproj.data.video.moving_digits import MovingDigits, write_moving_digits
from mmpreproj.data.video.moving_digits_module import MovingDigitsDataModule
from mmpreproj.data.video.transforms import VideoAugment

__all__ = [
    "MovingDigits",
    "MovingDigitsDataModule",
    "UnreadableVideo",
    "VideoAugment",
    "VideoDataModule",
    "VideoInfo",
    "VideoList",
    "probe",
    "read_frames",
    "read_videos",
    "write_moving_digits",
]
