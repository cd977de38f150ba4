"""Damaged and nonsensical files of every kind that is read: each gives a result, or a named error.

    python tools/fuzz.py                                 2,000 mutants of each kind: about an hour
    python tools/fuzz.py --kinds png mp4 --mutants 50
    python tools/fuzz.py --kinds png --only 137 --keep FOLDER     one again, with its traceback

A mutant follows from the seed, its kind and its number. Mutants are read in a forked process, under
a watch. These are failures: a crash; more than 20 s of computing, or 2 GiB above the idle process;
an error of a type that says nothing to a person (TypeError, KeyError, …), or that does not name the
file; code that is run, a file that is changed outside of the mutant's folder. The exit status is 1
if there are any. A record that --out names is gone on with.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from fuzzing.kinds import KINDS, Kind

from mmpreproj.files import write_whole

SECONDS, MEMORY = 20.0, 2 * 2**30
WAITS = 10  # times SECONDS, for what does not compute
SPARE = 2**30  # of address space above MEMORY: it is counted before it is used
LONGEST = 5000  # characters of a message
PACKAGES = ("torch", "timm", "pillow", "av", "pyarrow", "transformers", "gguf", "lightning")
GOOD = ("result", "named error")
STARTS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect"}
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link"}
HARMLESS = ("git", "uname")  # asked for the revision and the platform of a run's record

Found = dict[str, Any]
"""Of one mutant: its number, outcome, seconds and MiB; of an error also its type and message, and
the last line of the library that it went through."""


def run(name: str, numbers: Sequence[int], seed: int, folder: Path, loud: bool) -> Iterator[Found]:
    """What became of the mutants of a kind, in order.

    Args:
        folder: to write in. `mutant/` holds the last mutant.
        loud: show what is printed, and tracebacks.
    """
    paths = folder / "sound.json"
    if _wait(_fork(partial(_make, KINDS[name], paths), folder, loud=False)):
        raise RuntimeError(f"{name}: {(folder / 'output.txt').read_text()}")
    left = list(numbers)
    while left:
        reading, writing = os.pipe()
        sound = [Path(path) for path in json.loads(paths.read_text())]
        work = partial(_work, KINDS[name], sound, left, f"{seed} {name}", writing, loud)
        child = _fork(work, folder, loud)
        os.close(writing)
        hangs = True
        try:
            with os.fdopen(reading, "rb", buffering=0) as pipe:
                started, waits = _cpu(child), 0
                while waits < WAITS and _cpu(child) - started < SECONDS:
                    if not select.select([pipe], [], [], SECONDS)[0]:
                        waits += 1
                    elif line := pipe.readline():
                        yield json.loads(line)
                        left.pop(0)
                        started, waits = _cpu(child), 0
                    else:
                        hangs = False
                        break
        finally:
            if hangs:
                os.kill(child, signal.SIGKILL)
            status = _wait(child)
        if left:  # it ended over this one
            outcome, told = ("hang", "") if hangs else ("crash", f"status {status}")
            yield {"mutant": left.pop(0), "outcome": outcome, "message": told, "seconds": SECONDS}


def _fork(task: Callable[[Path], None], folder: Path, loud: bool) -> int:
    """A process that does the task in `folder`."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.chdir(folder)
        tempfile.tempdir = str(folder)
        sys.dont_write_bytecode = True
        caches = ("XDG_CACHE_HOME", "HOME", "MPLCONFIGDIR", "TMPDIR")
        os.environ.update(dict.fromkeys(caches, str(folder)), TOKENIZERS_PARALLELISM="false")
        torch.set_num_threads(1)
        if not loud:
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
        task(folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _cpu(child: int) -> float:
    """Seconds that a process has computed."""
    times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _make(kind: Kind, paths: Path, folder: Path) -> None:
    """The sound files, which can be read."""
    (folder / "sound").mkdir()
    found = kind.make(folder / "sound")
    for path in found:
        kind.read(Path(shutil.copy(path, _emptied(folder / "mutant"))))
    paths.write_text(json.dumps([str(path) for path in found]))


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _work(
    kind: Kind,
    paths: Sequence[Path],
    numbers: Sequence[int],
    seed: str,
    pipe: int,
    loud: bool,
    folder: Path,
) -> None:
    """Reads mutants, and writes a line about each to the pipe."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    space = _memory("VmSize") + MEMORY + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    events: list[str] = []
    sys.addaudithook(partial(_audit, events, str(folder)))
    sound, idle = [path.read_bytes() for path in paths], _memory("VmRSS")
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        which = rng.randrange(len(paths))
        path = _emptied(folder / "mutant") / f"m{number}{paths[which].suffix}"
        path.write_bytes(kind.mutant(which, sound, rng))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        events.clear()
        found: Found = {"mutant": number, "outcome": "result"}
        started = time.process_time()
        try:
            kind.read(path)
        except BaseException as error:
            found |= _about(error, (path.name, *kind.told))
            if loud:
                traceback.print_exc()
        found["seconds"] = round(time.process_time() - started, 3)
        found["mib"] = max(0, _memory("VmHWM") - idle) >> 20
        if found["mib"] << 20 > MEMORY:
            found["outcome"] = "memory"
        if events:
            found |= {"outcome": "escape", "message": events[0]}
        os.write(pipe, json.dumps(found).encode() + b"\n")


def _about(error: BaseException, names: Sequence[str]) -> Found:
    said, outcome = str(error), "named error"
    if isinstance(error, MemoryError):
        outcome = "memory"
    elif isinstance(error, UnicodeError) or not isinstance(
        error, (ValueError, OSError, ImportError)
    ):
        outcome = "traceback"
    elif not any(name in said for name in names):
        outcome = "unnamed"
    elif len(said) > LONGEST:
        outcome = "endless"
    lines = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(x.filename).name}:{x.lineno}" for x in lines if "/mmpreproj/" in x.filename]
    where = ours[-1] if ours else None
    kind = type(error).__name__
    return {"outcome": outcome, "error": kind, "where": where, "message": said[:300]}


def _audit(events: list[str], folder: str, event: str, args: tuple[Any, ...]) -> None:
    """Python tells of what is started, opened and changed; what is not to be is kept."""
    if event in STARTS and not Path(os.fsdecode(args[0])).name.startswith(HARMLESS):
        events.append(f"{event} {args[:2]}"[:200])
    opened = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if (opened or event in CHANGES and args[-1] == -1) and isinstance(args[0], str | bytes):
        place = os.path.abspath(os.fsdecode(args[0]))
        if not place.startswith((f"{folder}/", "/dev/", "/proc/self/")):
            events.append(f"{event} {place}")


def _memory(key: str) -> int:
    """Bytes of this process, as Linux calls them."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) << 10


# The record


def fuzz(names: Sequence[str], mutants: int, seed: int, out: Path | None) -> dict:
    """The record of all kinds; what `out` holds of them already is not done again."""
    about = {"seed": seed, "mutants": mutants, "seconds": SECONDS, "mib": MEMORY >> 20}
    about["versions"] = {package: version(package) for package in PACKAGES}
    record: dict[str, Any] = {**about, "kinds": {}}
    if out is not None and out.exists():
        before = json.loads(out.read_text())
        record["kinds"] = before["kinds"] if {**before, **about} == before else {}
    print(LINE.format("", "mutants", "result", "named", "failing", "slowest", "peak"), flush=True)
    for name in names:
        row = record["kinds"].setdefault(name, {"mutants": 0, "outcomes": {}, "errors": {}})
        numbers = range(row["mutants"], max(1, int(mutants * KINDS[name].share)))
        with tempfile.TemporaryDirectory(prefix="mmpreproj-fuzz-") as folder:
            for found in run(name, numbers, seed, Path(folder), loud=False) if numbers else ():
                again = f"python tools/fuzz.py --kinds {name} --seed {seed} --only "
                _count(row, found, again + str(found["mutant"]))
                if out is not None and (row["mutants"] % 50 == 0 or row["mutants"] == numbers.stop):
                    write_whole(out, json.dumps(record, indent=1) + "\n")
        good = [row["outcomes"].get(outcome, 0) for outcome in GOOD]
        peak = f"{row['mib']} MiB"
        bad, slowest = row["mutants"] - sum(good), f"{row['slowest']:.2f} s"
        print(LINE.format(name, row["mutants"], *good, bad, slowest, peak), flush=True)
    return record


LINE = "{:20} {:>8} {:>8} {:>8} {:>8} {:>9} {:>9}"


def _count(row: dict[str, Any], found: Found, again: str) -> None:
    row["mutants"] += 1
    for key, value in (("outcomes", found["outcome"]), ("errors", found.get("error"))):
        if value:
            row[key][value] = row[key].get(value, 0) + 1
    row["slowest"] = max(row.get("slowest", 0.0), found["seconds"])
    row["mib"] = max(row.get("mib", 0), found.get("mib", 0))
    if found["outcome"] not in GOOD:
        row.setdefault("failing", []).append({**found, "again": again})


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "fuzz.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {"nargs": "+", "choices": KINDS, "metavar": "KIND", "default": list(KINDS)}
    parser.add_argument("--kinds", **kinds, help=f"of {', '.join(KINDS)}; all")
    parser.add_argument("--mutants", type=int, default=2000, metavar="N", help="of a kind (2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one mutant, loudly")
    parser.add_argument("--out", type=Path, metavar="JSON", help="the record")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the file of --only")
    known = parser.parse_args(args)
    if known.only is not None:
        for name in known.kinds:
            with tempfile.TemporaryDirectory(prefix="mmpreproj-fuzz-") as folder:
                (found,) = run(name, [known.only], known.seed, Path(folder), loud=True)
                print(json.dumps(found, indent=1))
                if known.keep is not None:
                    shutil.copytree(Path(folder, "mutant"), known.keep / name, dirs_exist_ok=True)
        return 0
    record = fuzz(known.kinds, known.mutants, known.seed, known.out)
    failing = [(n, f) for n in known.kinds for f in record["kinds"][n].get("failing", ())]
    causes = collections.Counter(
        " ".join(filter(None, (n, f["outcome"], f.get("error"), f.get("where"))))
        for n, f in failing
    )
    for cause, count in causes.most_common():
        print(f"{count:5}  {cause}")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
