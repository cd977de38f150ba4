"""Train the arms of a study with several seeds, and print what came out.

    python tools/study.py configs/studies/digits.yaml
    python tools/study.py configs/studies/cifar10.yaml --jobs 2 --data.root DATA

What follows the study's options goes to every run, as to tools/train.py, and is part of what a run
is: other settings are other runs, also for --summary. Finished runs are skipped and broken ones
resumed.
"""

import argparse
import signal
import sys
from pathlib import Path

from mmpreproj.analysis.plots import write
from mmpreproj.analysis.records import write_json
from mmpreproj.analysis.running import run_study, train_command
from mmpreproj.analysis.study import Study
from mmpreproj.analysis.study_plots import arms_by_seed, frontier, skip_by_layer
from mmpreproj.analysis.summary import choosing_title, markdown, summarise
from mmpreproj.training.cli import run_tool


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
        study = Study.read(options.study)
        failed = []
        if not options.summary:
            failed = run_study(
                study,
                train_command(),
                options.root,
                arguments,
                options.jobs,
                tell=lambda line: print(line, flush=True),
            )
        rows = summarise(study, options.root, arguments)
    except ValueError as error:
        parser.error(str(error))
    folder = options.root / study.name
    if not any(row["seeds"] or _tried(row) for row in rows):
        others = sorted(place.name for place in folder.glob("*-*/"))
        told = f"; {folder} has {', '.join(others)}" if others else ""
        print(f"no run of this study, with these settings, has finished{told}", file=sys.stderr)
        return 1
    table = markdown(study, rows)
    write_json(folder / "summary.json", {"study": study.name, "arms": rows})
    (folder / "summary.md").write_text(table, encoding="utf-8")
    print(f"\n{table}\nwritten to {folder}: summary.json, summary.md", flush=True)
    pictures = {
        "summary.png": arms_by_seed(rows, study.name),
        "skip.png": skip_by_layer(rows, study.name),
    }
    if study.frontier is not None:
        title = f"{study.name}. {choosing_title(study)}; stars: final runs"
        pictures["frontier.png"] = frontier(
            rows, study.frontier.learned, study.frontier.kept, title
        )
    drawn = [write(figure, folder / name).name for name, figure in pictures.items() if figure]
    print(f"drawn there: {', '.join(drawn)}")
    return 1 if failed else 0


def _tried(row: dict) -> bool:
    return any(found["seconds"] is not None for found in row["candidates"])


if __name__ == "__main__":
    sys.exit(run_tool(main))
