"""The files of a run in its output folder: a whole run's, or those of one shard of several that share the folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SHARD = r"(?:-([1-9]\d*)-of-([1-9]\d*))?"
# In a store, where nothing can be added to an object, a manifest is a folder of pieces with numbers, and so is a log.
OWN = re.compile(rf"(manifest|log){SHARD}(?:/(\d{{5,}}))?\.jsonl|run{SHARD}\.json")
FOLDER = re.compile(rf"(?:manifest|log){SHARD}")


@dataclass(frozen=True, order=True)
class Part:
    """A shard, counted from 1, of so many; 0 of 0 is a whole run."""

    of: int = 0
    index: int = 0

    @property
    def manifest(self) -> str:
        """The records' file."""
        return f"{self.records}.jsonl"

    @property
    def records(self) -> str:
        """The folder of the records' pieces, in a store."""
        return f"manifest{self._ending}"

    @property
    def run(self) -> str:
        """The file of the settings."""
        return f"run{self._ending}.json"

    @property
    def log(self) -> str:
        """The file of events and times."""
        return f"{self.events}.jsonl"

    @property
    def events(self) -> str:
        """The folder of the log's pieces, in a store."""
        return f"log{self._ending}"

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


def find_parts(names: Iterable[str]) -> list[Part]:
    """The parts whose manifest, or a piece of it, or run.json is among these names of an output folder."""
    matches = [match for name in names if (match := OWN.fullmatch(name)) and match[1] != "log"]
    return sorted({Part(int(match[3] or match[6] or 0), int(match[2] or match[5] or 0)) for match in matches})


def list_manifests(names: Iterable[str], part: Part) -> list[str]:
    """The part's manifest, and the pieces of one, in their order, as far as they are among these names."""
    return [part.manifest for name in names if name == part.manifest] + list_pieces(names, part.records)


def list_pieces(names: Iterable[str], folder: str) -> list[str]:
    """The pieces in such a folder, in the order of their numbers."""
    found = ((int(match[4]), name) for name, match in _match_pieces(names) if name.rpartition("/")[0] == folder)
    return [name for _, name in sorted(found)]


def name_piece(folder: str, number: int) -> str:
    """The name of a piece of a manifest, or of a log; numbers are counted from 1."""
    return f"{folder}/{number:05}.jsonl"


def find_last(names: Iterable[str], folder: str) -> int:
    """The highest number of a piece in such a folder; 0 where there is none."""
    return max((int(match[4]) for name, match in _match_pieces(names) if name.rpartition("/")[0] == folder), default=0)


def _match_pieces(names: Iterable[str]) -> Iterator[tuple[str, re.Match[str]]]:
    return ((name, match) for name in names if (match := OWN.fullmatch(name)) and match[4])
