"""What a run came to: measurements, one record a run, plots."""

from mmpreproj.analysis.records import mean_spread, read_record, wilson_interval, write_json
from mmpreproj.analysis.skip import skip_strength

__all__ = ["mean_spread", "read_record", "skip_strength", "wilson_interval", "write_json"]
