"""The files of a run in its output folder: a whole run's, or those of one shard of several that share the folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RECORDS = re.compile(r"(?:manifest{0}\.jsonl|run{0}\.json)".format(r"(?:-([1-9]\d*)-of-([1-9]\d*))?"))


@dataclass(frozen=True, order=True)
class Part:
    """A shard, counted from 1, of so many; 0 of 0 is a whole run."""

    of: int = 0
    index: int = 0

    @property
    def manifest(self) -> str:
        """The records' file."""
        return f"manifest{self._ending}.jsonl"

    @property
    def run(self) -> str:
        """The file of the settings."""
        return f"run{self._ending}.json"

    @property
    def log(self) -> str:
        """The file of events and times."""
        return f"log{self._ending}.jsonl"

    @property
    def lock(self) -> str:
        """The file that is locked while a process is at work. It stays there: taking it away could free it for two."""
        return f".gradcam{self._ending}.lock"

    @property
    def temporary(self) -> str:
        """The folder of files that are not whole yet."""
        return f".gradcam-partial{self._ending}"

    def tar(self, number: int) -> str:
        """One of the tars of the results, counted from 1."""
        return f"results{self._ending}-{number:06}.tar"

    def find_tars(self, names: Iterable[str]) -> list[int]:
        """The numbers of those that are among these names, in order."""
        tar = re.compile(rf"results{self._ending}-(\d{{6,}})\.tar")
        return sorted(int(match[1]) for name in names if (match := tar.fullmatch(name)))

    @property
    def _ending(self) -> str:
        return f"-{self.index}-of-{self.of}" if self.of else ""

    def __str__(self) -> str:
        return f"shard {self.index}/{self.of}" if self.of else "a run without shards"


def find_parts(folder: Path) -> list[Part]:
    """The parts whose manifest or run.json is in the folder. Raises `OSError`."""
    with os.scandir(folder) as entries:
        found = [match for entry in entries if (match := RECORDS.fullmatch(entry.name))]
    numbers = [[int(number) for number in match.groups() if number] or [0, 0] for match in found]
    return sorted({Part(of, index) for index, of in numbers})
