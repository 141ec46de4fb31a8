"""Runs that are stopped at random moments, again and again, and resumed with the line that they print: nothing may be lost.

python -m tests.killed_runs --kills 50 --seed 0
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import Ended, Started, find_unfinished, make_pictures, run, tree

GENTLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KINDS = {
    "overlays": (), "maps": ("--save", "overlay", "--save", "map"), "report": ("--report",),
    "tars": ("--output-format", "webdataset"), "shard": ("--shard", "1/2"), "limit": ("--max-failures", "1%"),
}  # fmt: skip
TYPED = ("batch", "photos", "-o", "out", "--device", "cpu", "--batch-size", "3")
SECONDS = 300  # limit for one run on a busy machine


def list_records(folder: Path) -> dict[str, dict[str, object]]:
    """Return the records by image, from the complete lines of the manifests."""
    lines = [line for path in folder.glob("manifest*.jsonl") for line in path.read_bytes().splitlines(True)]
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    actual = {record["image"]: record for record in records}
    assert len(actual) == len(records), "a picture is recorded twice"
    return actual


@dataclass(frozen=True)
class State:
    """The contents of an output folder: its records by image, and the files that are unfinished or in no record."""

    records: dict[str, dict[str, object]]
    leftovers: set[str]


def read_state(folder: Path) -> State:
    records: dict[str, Any] = list_records(folder)
    results = [entry for record in records.values() for entry in record["explained"]]
    recorded = {result[kind] for result in results for kind in ("overlay", "map") if kind in result}
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names if "-gradcam." in name]
    results = {path.relative_to(folder).as_posix() for path in paths}
    return State(records, results - recorded | {*find_unfinished(folder)})


def check_stop(folder: Path, ended: Ended, number: int, before: State) -> None:
    """Check what must hold at once, before anybody resumes the run.

    A run that is stopped leaves nothing of its own behind. What an earlier one left that was killed by SIGKILL stays until
    a run comes to that image.
    """
    after = read_state(folder)
    assert "Traceback" not in ended.err, ended.err
    records = before.records.items()
    expected = {name for name, record in records if record["status"] == "ok" or number != signal.SIGKILL}
    assert expected <= set(after.records), f"records were lost: {expected - set(after.records)}"
    if number == signal.SIGKILL:
        return
    assert ended.status in (0, 1, 128 + number), f"the status is {ended.status}:\n{ended.err}"
    new_leftovers = after.leftovers - before.leftovers
    assert not new_leftovers, f"left without a record: {sorted(new_leftovers)}\n{ended.err}"


def find_line(ended: Ended) -> list[str] | None:
    """Return the arguments of the resume command that the run printed, without the name of the command."""
    lines = ended.err.rstrip().splitlines()
    is_told = len(lines) > 1 and lines[-2].endswith("To resume:")
    return shlex.split(lines[-1])[1:] if is_told else None


@dataclass(frozen=True)
class UninterruptedRun:
    """The results and the duration of an uninterrupted run."""

    files: dict[str, bytes]
    status: int
    seconds: float


def disturb(
    kind: str, photos: Path, uninterrupted: UninterruptedRun, chance: random.Random, counts: Counter[str]
) -> None:
    """Start a run, kill it up to three times, and resume it to its end."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "here")
        path.mkdir()
        shutil.copytree(photos, path / "photos")
        typed = [*TYPED, *KINDS[kind]]
        arguments = typed
        for _ in range(chance.randint(1, 3)):
            before = read_state(path / "out")
            number = chance.choice([signal.SIGKILL, *GENTLE])
            process = Started(arguments, path)
            is_running = wait_for(process, path / "out", chance, uninterrupted.seconds)
            if not is_running:
                counts["ended before"] += 1
                break
            process.send(number)
            ended = process.wait(SECONDS)
            assert ended is not None, f"{number.name}: it did not end"
            counts[number.name] += 1
            counts["kills"] += 1
            check_stop(path / "out", ended, number, before)
            line = find_line(ended)
            counts["lines to go on with"] += line is not None
            arguments = line or [*typed[:1], "--resume", *typed[1:]]
        for _ in range(3):  # A run with a failure limit stops once more.
            ended = run(arguments if "--resume" in arguments else [*arguments, "--resume"], path, seconds=SECONDS)
            assert ended is not None
            line = find_line(ended)
            if line is None:
                break
            arguments = line
        assert ended.status == uninterrupted.status, f"{ended.status}:\n{ended.err}"
        assert line is None, f"it goes on for ever:\n{ended.err}"
        assert not find_unfinished(path / "out"), find_unfinished(path / "out")
        compare(kind, tree(path / "out"), uninterrupted.files)


def compare(kind: str, actual: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Compare the files byte by byte; tar files may be split at the stops."""
    if kind == "tars":
        manifests = [item["manifest.jsonl"].splitlines() for item in (actual, expected)]
        names = [[json.loads(line)["image"] for line in lines] for lines in manifests]
        assert names[0] == names[1], names
        return
    names = {name for name in {**actual, **expected} if actual.get(name) != expected.get(name)}
    assert not names, f"not the same: {sorted(names)}"


def wait_for(process: Started, folder: Path, chance: random.Random, seconds: float) -> bool:
    """Wait for a random time or number of files; return whether the process is still running."""
    if chance.random() < 0.2:
        return process.wait(chance.uniform(0, seconds)) is None
    count = count_files(folder) + chance.randint(0, 40)
    deadline = time.monotonic() + SECONDS
    while count_files(folder) < count and time.monotonic() < deadline:
        if process.wait(0.002) is not None:
            return False
    return process.wait(chance.uniform(0, 0.2)) is None


def count_files(folder: Path) -> int:
    """Count the files of a folder, some of which may be removed meanwhile: `os.walk` skips those."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


def run_undisturbed(kind: str, folder: Path, photos: Path) -> UninterruptedRun:
    shutil.copytree(photos, folder / "photos")
    options = () if kind == "limit" else KINDS[kind]
    ended = run([*TYPED, *options], folder)
    assert ended is not None
    assert "Traceback" not in ended.err, ended.err
    return UninterruptedRun(tree(folder / "out"), ended.status, ended.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=36)
    args = parser.parse_args()
    chance, messages = random.Random(args.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        photos = Path(place, "photos")
        make_pictures(photos, args.pictures)
        uninterrupted_runs: dict[str, UninterruptedRun] = {}
        while messages["kills"] < args.kills:
            kind = list(KINDS)[messages["runs"] % len(KINDS)]
            if kind not in uninterrupted_runs:
                uninterrupted_runs[kind] = run_undisturbed(kind, Path(place, kind), photos)
            messages["runs"] += 1
            try:
                disturb(kind, photos, uninterrupted_runs[kind], chance, messages)
            except AssertionError as error:
                messages["lost"] += 1
                sys.stderr.write(f"run {messages['runs']} ({kind}): {error}\n")
    sys.stdout.write(f"seed {args.seed}: {', '.join(f'{count} {name}' for name, count in sorted(messages.items()))}\n")
    return int(messages["lost"] > 0)


if __name__ == "__main__":
    os.environ.pop("GRADCAM_TRACEBACK", None)
    sys.exit(main())
