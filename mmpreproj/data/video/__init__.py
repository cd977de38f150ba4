"""Video data: exact frames of any file, Kinetics, class folders and lists, clips and views."""

from mmpreproj.data.labelled_files import FileList
from mmpreproj.data.video.clips import VideoAugment
from mmpreproj.data.video.decode import UnreadableVideo, VideoInfo, probe, read_frames
from mmpreproj.data.video.moving_digits import (
    MovingDigits,
    MovingDigitsDataModule,
    write_moving_digits,
)
from mmpreproj.data.video.video_lists import read_videos
from mmpreproj.data.video.video_module import VideoDataModule

__all__ = [
    "FileList",
    "MovingDigits",
    "MovingDigitsDataModule",
    "UnreadableVideo",
    "VideoAugment",
    "VideoDataModule",
    "VideoInfo",
    "probe",
    "read_frames",
    "read_videos",
    "write_moving_digits",
]
