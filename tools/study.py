"""Train the arms of a study with several seeds, and print what came out.

    python tools/study.py configs/studies/digits.yaml
    python tools/study.py configs/studies/cifar10.yaml --jobs 2 --data.root DATA

What follows the study's options goes to every run, as to tools/train.py, and is part of what a run
is: other settings are other runs, also for --summary. Finished runs are skipped and broken ones
resumed.
"""

import argparse
import functools
import signal
import sys
from pathlib import Path

from mmpreproj.analysis.plots import write
from mmpreproj.analysis.records import write_json
from mmpreproj.files import write_whole
from mmpreproj.studies.launch import run_study
from mmpreproj.studies.study import Study
from mmpreproj.studies.study_plots import arms_by_seed, frontier, skip_by_layer
from mmpreproj.studies.summary import choosing_title, markdown, summarise
from mmpreproj.training.console import run_tool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", help="a YAML file, such as those in configs/studies")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: 1)")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where run folders go")
    parser.add_argument("--summary", action="store_true", help="only sum up what has finished")
    options, arguments = parser.parse_known_args()
    if options.jobs < 1:
        parser.error(f"--jobs must be 1 or more, found {options.jobs}")
    # The runs are processes of their own: end as Ctrl-C does, and take them along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        codes = [run(study, options, arguments) for study in Study.read_all(options.study)]
    except ValueError as error:
        parser.error(str(error))
    return max(codes)


def run(study: Study, options: argparse.Namespace, arguments: list[str]) -> int:
    """Train what is missing of a study and sum it up; the exit code."""
    failed = []
    if not options.summary:
        train = [sys.executable, str(Path(__file__).with_name("train.py"))]
        tell = functools.partial(print, flush=True)
        failed = run_study(study, train, options.root, arguments, options.jobs, tell)
    rows = summarise(study, options.root, arguments)
    folder = options.root / study.name
    tried = [found["seconds"] for row in rows for found in row["candidates"]]
    if not any(row["seeds"] for row in rows) and not any(s is not None for s in tried):
        others = sorted(place.name for place in folder.glob("*-*/"))
        told = f"; {folder} has {', '.join(others)}" if others else ""
        print(f"no run of this study, with these settings, has finished{told}", file=sys.stderr)
        return 1
    table = markdown(study, rows)
    write_json(folder / "summary.json", {"study": study.name, "arms": rows})
    write_whole(folder / "summary.md", table)
    print(f"\n{table}\nwritten to {folder}: summary.json, summary.md", flush=True)
    pictures = {
        "summary.png": arms_by_seed(rows, study.name),
        "skip.png": skip_by_layer(rows, study.name),
    }
    if study.frontier is not None:
        title = f"{study.name}. {choosing_title(study)}; stars: final runs"
        learned, kept = study.frontier.learned, study.frontier.kept
        pictures["frontier.png"] = frontier(rows, learned, kept, title)
    drawn = [write(figure, folder / name).name for name, figure in pictures.items() if figure]
    print(f"drawn there: {', '.join(drawn)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
