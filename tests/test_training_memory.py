"""What a run's record says of its memory."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
def test_peak_memory_is_this_processs_and_not_that_of_the_one_that_started_it():
    child = "from mmpreproj.analysis.records import peak_memory; print(peak_memory()['rss'])"
    parent = (
        "import subprocess, sys\n"
        "held = b'x' * 2**31\n"
        f'print(subprocess.check_output([sys.executable, "-c", {child!r}], text=True))\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, check=True
    )
    assert 2**26 < int(done.stdout) < 2**31
