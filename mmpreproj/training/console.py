"""What the tools say on the screen, and where it cannot be said."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["print_table", "quieten", "run_tool"]

# Hints of Lightning's that do not apply here, each for the reason given. Nothing else is silenced.
NOT_APPLICABLE = (
    r"The '.*_dataloader' does not have many workers",  # num_workers is in the config, on purpose
    r"The number of training batches \(.*\) is smaller than the logging interval",  # means are
    r"Found \d+ module\(s\) in eval mode at the start of training",  # the frozen base, the average
    r"Using `DistributedSampler` with the dataloaders",  # padding is marked, and never counted
    r"Checkpoint directory .* exists and is not empty",  # a resumed run's own
    r"Experiment logs directory .* exists and is not empty",  # it holds config.yaml; none is lost
    r".*Trainer already configured with model summary callbacks",
    r"Total length of `list` across ranks is zero",  # no validation split, as the config says
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own call of torch
    r"You're resuming from a checkpoint that ended before the epoch ended",  # see Reproducible
)


def quieten() -> None:
    """Leave out the hints that do not apply, and Lightning's advertisements."""
    for message in NOT_APPLICABLE:
        warnings.filterwarnings("ignore", message=message)
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addFilter(lambda record: "Tip: For seamless" not in record.getMessage())


def print_table(title: str, rows: list[list[str]], columns: list[str] | None = None) -> None:
    """Columns that stand below each other, under a title."""
    rows = [columns, *rows] if columns else rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}")
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join(cells).rstrip(), flush=True)


def run_tool(main: Callable[[], Any]) -> int:
    """Run a tool's `main`; what its user can mend is told in one line, without a traceback.

    What is printed cannot end it, on a narrow terminal or into a pipe that was closed.

    Returns: the exit status. MMPREPROJ_TRACEBACK=1 shows where an error came from.
    """
    shown, told = Patient(sys.stdout), Patient(sys.stderr)
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(told):
        try:
            status = main()
        except (ValueError, OSError, ImportError) as error:
            if os.environ.get("MMPREPROJ_TRACEBACK"):
                raise
            said = str(error)
            if re.match(r"Caught \w+ in DataLoader worker", said):  # with the worker's traceback
                said = re.sub(r"^[\w.]+: ", "", said.strip().splitlines()[-1])
            print(f"error: {said}", file=sys.stderr)
            print("(MMPREPROJ_TRACEBACK=1 shows where it came from)", file=sys.stderr, flush=True)
            return 2
    return status if isinstance(status, int) else 0


class Patient:
    """A stream that shows what it can, and is silent where nobody reads it any more."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As a stream's; a character that it has not is a question mark."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        with self._silent():
            self.stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """As a stream's."""
        with self._silent():
            self.stream.flush()

    @contextlib.contextmanager
    def _silent(self) -> Any:
        try:
            yield
        except BrokenPipeError:  # what is still held would fail again when Python ends
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        except (OSError, ValueError):  # no space; closed
            pass
