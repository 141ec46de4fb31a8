"""Damage the files of a run in many ways, and check that it resumes correctly or is refused with instructions.

    python -m tests.mutated_runs --count 100 --seed 0

After a refusal, the instructions are followed. The results are compared with those of an undamaged run: each image must
occur once, in its place, with its own results.
"""

import argparse
import json
import os
import random
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import Ended, find_unfinished, make_pictures, run, tree

SECONDS = 10.0  # a run on these few images that takes longer hangs
MEMORY = 300 * 2**20  # bytes beyond those of an undisturbed run
TYPED = ("batch", "photos", "-o", "out", "--device", "cpu", "--batch-size", "2")
RUN, MANIFEST, LOG = "run.json", "manifest.jsonl", "log.jsonl"
KEPT_FROM_BEFORE = ("gradcam", "versions", "device")  # fields of run.json that describe the start of a run

Mutate = Callable[[Path, random.Random], None]


def change_bytes(change: Callable[[bytes, random.Random], bytes]) -> Mutate:
    return lambda path, chance: _write(path, change(path.read_bytes(), chance))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def replace_by(make: Callable[[Path], object]) -> Mutate:
    def mutate(path: Path, chance: random.Random) -> None:
        path.unlink()
        make(path)

    return mutate


def change_json(change: Callable[[list[tuple[Any, Any]], random.Random], str | None]) -> Mutate:
    """Change one place of the JSON in the file, or in one of its lines."""

    def mutate(path: Path, chance: random.Random) -> None:
        is_lines = path.suffix == ".jsonl"
        parts = path.read_text().splitlines() if is_lines else [path.read_text()]
        i = chance.randrange(len(parts))
        data = json.loads(parts[i])
        text = change(list(_walk(data)), chance)
        parts[i] = json.dumps(data, indent=None if is_lines else 2)
        if text is not None:  # text that json.dumps would not write
            parts[i] = parts[i].replace('"@"', text)
        path.write_text("".join(f"{part}\n" for part in parts))

    return mutate


def _walk(value: Any) -> Any:
    """Return each place in a JSON value: a container and a key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _walk(value[key])


ODD = [None, True, False, -1, 0, 1.5, 10**400, "", "x", "../../x", "\x1b[2J", [], {}, [[]], {"a": [1]}, "ä" * 5000]


def change_value(places: list[tuple[Any, Any]], chance: random.Random) -> None:
    container, key = chance.choice(places)
    container[key] = chance.choice([item for item in ODD if item != container[key]])


def change_count(places: list[tuple[Any, Any]], chance: random.Random) -> None:
    numbers = [(where, key) for where, key in places if type(where[key]) is int]
    container, key = chance.choice(numbers)
    container[key] += chance.choice([-1, 1, 1000])


def delete_key(places: list[tuple[Any, Any]], chance: random.Random) -> None:
    container, key = chance.choice(places)
    del container[key]


def reorder_keys(places: list[tuple[Any, Any]], chance: random.Random) -> None:
    for container, _ in places:
        if isinstance(container, dict):
            items = list(container.items())
            chance.shuffle(items)
            container.clear()
            container.update(items)


def put_text(text: str) -> Callable[[list[tuple[Any, Any]], random.Random], str]:
    def change(places: list[tuple[Any, Any]], chance: random.Random) -> str:
        container, key = chance.choice(places)
        container[key] = "@"
        return text

    return change


def rename_image(places: list[tuple[Any, Any]], chance: random.Random) -> None:
    """Change the image of a record to another one, or remove it."""
    container = places[0][0]
    for key in ("image", "root"):
        if key in container:
            container[key] = chance.choice(["00.jpg", "more/01.jpg", "nobody's.jpg", "more/"])


def double_a_key(data: bytes, chance: random.Random) -> bytes:
    keys = list(re.finditer(rb'"(\w+)": (?:\d+|null|"[^"]*"),', data))
    at = chance.choice(keys)
    return data[: at.start()] + at[0].replace(b": ", b': "other", "x": ', 1) + data[at.start() :]


def flip(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def cut_out(data: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.sample(range(len(data)), 2))
    return data[:start] + data[min(end, start + chance.choice([1, 20, 2000])) :]


def put_in(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.choice([chance.randbytes(20), b"\n", b"\n\n", bytes(500), b"}", b'"']) + data[at:]


def shuffle_lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    chance.shuffle(lines)
    return b"".join(lines)


def double_lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines + chance.sample(lines, 2))


def drop_a_line(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def make_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    os.chdir(before)


def make_sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**34)


MUTATIONS: dict[str, Mutate] = {
    "cut off": change_bytes(lambda data, chance: data[: chance.randrange(len(data))]),
    "a flipped bit": change_bytes(flip),
    "bytes cut out": change_bytes(cut_out),
    "bytes put in": change_bytes(put_in),
    "another value": change_json(change_value),
    "another count": change_json(change_count),
    "a key deleted": change_json(delete_key),
    "keys in another order": change_json(reorder_keys),
    "a key twice": change_bytes(double_a_key),
    "another picture's name": change_json(rename_image),
    "nested deeply": change_json(put_text("[" * 100_000 + "]" * 100_000)),
    "NaN": change_json(put_text("NaN")),
    "beyond all floats": change_json(put_text("1e999")),
    "a number of 100,000 digits": change_json(put_text("9" * 100_000)),
    "a number of 4,000 digits": change_json(put_text("9" * 4000)),
    "a byte order mark": change_bytes(lambda data, _: b"\xef\xbb\xbf" + data),
    "UTF-16": change_bytes(lambda data, _: data.decode().encode("utf-16")),
    "Windows' ends of lines": change_bytes(lambda data, _: data.replace(b"\n", b"\r\n")),
    "empty": change_bytes(lambda *_: b""),
    "spaces": change_bytes(lambda *_: b" \n" * 5),
    "not text": change_bytes(lambda data, chance: chance.randbytes(len(data))),
    "zeros behind it": change_bytes(lambda data, _: data + bytes(5000)),
    "lines shuffled": change_bytes(shuffle_lines),
    "lines twice": change_bytes(double_lines),
    "a line dropped": change_bytes(drop_a_line),
    "another kind of JSON": change_bytes(
        lambda _, chance: chance.choice([b"[]\n", b"{}\n", b"null\n", b'"x"\n', b"1\n"])
    ),
    "16 GB of nothing": replace_by(make_sparse),
    "a folder": replace_by(Path.mkdir),
    "a FIFO": replace_by(os.mkfifo),
    "a socket": replace_by(make_socket),
    "a device": replace_by(lambda path: path.symlink_to("/dev/zero")),
    "a link to nowhere": replace_by(lambda path: path.symlink_to("nowhere")),
    "missing": replace_by(lambda path: None),
}


class BrokenGuarantee(Exception):
    """Raised if the package breaks a guarantee."""


@dataclass(frozen=True)
class Judge:
    """The results of an undisturbed run, and the resources that it used."""

    uninterrupted: dict[str, bytes]
    status: int
    memory: int
    patience: float

    def run(self, arguments: list[str], folder: Path) -> Ended:
        """Run gradcam, and check its time, its memory and that it prints no traceback."""
        ended = run(arguments, folder, seconds=self.patience)
        if ended is None:
            raise BrokenGuarantee(f"{arguments[0]}: hangs")
        if "Traceback" in ended.err or ended.status not in (0, 1, 2):
            raise BrokenGuarantee(f"{arguments[0]}: ends with {ended.status}:\n{ended.err}")
        if ended.memory > self.memory + MEMORY:
            raise BrokenGuarantee(
                f"{arguments[0]}: takes {ended.memory / 2**20:.0f} MB, and {self.memory / 2**20:.0f} undisturbed"
            )
        if any(len(line) > 600 for line in ended.err.splitlines()):
            raise BrokenGuarantee(f"a line of {max(map(len, ended.err.splitlines()))} characters: {ended.err[:300]}")
        return ended

    def judge(self, folder: Path, name: str) -> str:
        """Resume, follow the printed instructions, and check the complete run; return the first outcome."""
        path = folder / "out" / name
        before = path.read_bytes() if path.is_file() and path.stat().st_size < MEMORY else b""
        self.run(["report", "out"], folder)
        first = ""
        for _ in range(20):
            ended = self.run([TYPED[0], "--resume", *TYPED[1:]], folder)
            first = first or ("refused" if ended.status == 2 else "resumed")
            if ended.status != 2:
                self.compare(folder / "out", before if first == "resumed" else b"", ended)
                return first
            if not 1 <= len(ended.err.splitlines()) <= 2:
                raise BrokenGuarantee(f"refused in {len(ended.err.splitlines())} lines:\n{ended.err}")
            if self.follow(ended.err, folder):
                return first
        raise BrokenGuarantee(f"what is said leads nowhere:\n{ended.err}")

    def follow(self, message: str, folder: Path) -> bool:
        """Follow the instructions of the message; return whether nothing else has to be done."""
        if match := re.search(r"(\S+), line (\d+): .*repair the line, or remove it", message):
            path = folder / match[1]
            lines = path.read_bytes().split(b"\n")
            del lines[int(match[2]) - 1]
            path.write_bytes(b"\n".join(lines))
        elif match := re.search(r"(out/\S+): .*move it\b", message):
            path = folder / match[1]
            path.rename(folder / path.name)
        elif "--overwrite" in message:
            ended = self.run([TYPED[0], "--overwrite", *TYPED[1:]], folder)
            if ended.status != self.status:
                raise BrokenGuarantee(f"--overwrite, as it says, ends with {ended.status}:\n{ended.err}")
            self.compare(folder / "out", b"", ended)
            return True
        else:
            raise BrokenGuarantee(f"refused without a way out:\n{message}")
        return False

    def compare(self, out: Path, before: bytes, ended: Ended) -> None:
        """Raise `BrokenGuarantee` unless all results of the undamaged run are there, once and in their place.

        A line of `before` may remain as it was if its required fields are right: it may contain a user's own note.
        """
        if ended.status != self.status:
            raise BrokenGuarantee(f"resumed with status {ended.status}:\n{ended.err}")
        if find_unfinished(out):
            raise BrokenGuarantee(f"left half done: {find_unfinished(out)}")
        actual = {name: data for name, data in tree(out).items() if not name.startswith(("report", "index"))}
        ours = [json.loads(line) for line in actual.pop(MANIFEST).splitlines()]
        theirs = [json.loads(line) for line in self.uninterrupted[MANIFEST].splitlines()]
        if [our["image"] for our in ours] != [their["image"] for their in theirs]:
            raise BrokenGuarantee(f"the manifest has {[our['image'] for our in ours]}")
        changed = [(our, their) for our, their in zip(ours, theirs) if our != their]
        for our_record, their_record in changed:
            lines = [line for line in before.splitlines() if line.startswith(b"{") and _is_json(line)]
            is_kept = any(json.loads(line) == our_record for line in lines)
            if not is_kept or _summarise(our_record) != _summarise(their_record):
                raise BrokenGuarantee(f"a record is {our_record}\nand not {their_record}")
        if len(changed) > 1 and before:
            raise BrokenGuarantee(f"{len(changed)} records are others")
        self._compare_runs(json.loads(actual.pop(RUN)), json.loads(self.uninterrupted[RUN]), ended)
        expected = {name: data for name, data in self.uninterrupted.items() if name not in (RUN, MANIFEST)}
        if actual != expected:
            names = sorted(name for name in {**actual, **expected} if actual.get(name) != expected.get(name))
            raise BrokenGuarantee(f"files differ: {names}")

    def _compare_runs(self, ours: dict[str, Any], theirs: dict[str, Any], ended: Ended) -> None:
        names = {name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)}
        if names - set(KEPT_FROM_BEFORE) or (names - {"device"} and "different versions" not in ended.err):
            raise BrokenGuarantee(f"run.json differs in {names}: {ended.err}")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _summarise(record: dict[str, Any]) -> object:
    """Return the fields of a record that must be right, whatever was changed in it."""
    results = [[entry.get(kind) for kind in ("overlay", "map")] for entry in record["explained"]]
    return record["image"], record["status"], record["model"], results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    messages, names = Counter[str](), list(MUTATIONS)
    with tempfile.TemporaryDirectory() as place:
        base = Path(place, "base")
        make_pictures(base / "photos", 4)
        result = run(TYPED, base)
        assert result is not None
        assert result.status == 1, result.err
        undisturbed = run([TYPED[0], "--resume", *TYPED[1:]], base)
        assert undisturbed is not None
        judge = Judge(tree(base / "out"), result.status, result.memory, max(SECONDS, 8 * result.seconds))
        order = random.Random(args.seed)
        cases = [(target, name) for name in names for target in (RUN, MANIFEST)] + [(LOG, "a FIFO"), (LOG, "a folder")]
        order.shuffle(cases)
        for number in range(args.count):
            target, name = cases[number % len(cases)]
            path = Path(place, f"case-{number}")
            shutil.copytree(base, path)
            chance = random.Random(f"{args.seed} {number}")
            if target == MANIFEST and chance.random() < 0.5:  # the manifest of a run that was stopped
                lines = (path / "out" / MANIFEST).read_bytes().splitlines(keepends=True)
                (path / "out" / MANIFEST).write_bytes(b"".join(lines[:-2]))
            MUTATIONS[name](path / "out" / target, chance)
            try:
                messages[judge.judge(path, target)] += 1
            except BrokenGuarantee as error:
                messages["wrong"] += 1
                sys.stderr.write(f"{number}: {target}, {name}: {error}\n")
            shutil.rmtree(path)
    sys.stdout.write(f"seed {args.seed}: {', '.join(f'{count} {name}' for name, count in sorted(messages.items()))}\n")
    return int(messages["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
