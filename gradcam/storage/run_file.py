"""run.json: what made the records of a manifest, so that they can be made again, and a resumed run stays of one piece."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcam._version import __version__
from gradcam.errors import OutputError, shorten
from gradcam.images.files import read_text_file
from gradcam.plugins import fingerprint
from gradcam.renames import RUN, add_new_keys, add_old_keys
from gradcam.storage.store import Store

SCHEMA = 1
NO_LAYERS = ("input", "attention")
NAMED, LONGEST = 5, 160  # differences in a sentence, and characters of a value in it
WAY_OUT = "restore the original file, or start again with --overwrite"
SHARD = r"(?:-([1-9]\d*)-of-([1-9]\d*))?"
# In a store, where nothing can be added to an object, a manifest is a folder of pieces with numbers, and so is a log.
OWN = re.compile(rf"(manifest|log){SHARD}(?:/(\d{{5,}}))?\.jsonl|run{SHARD}\.json")
FOLDER = re.compile(rf"(?:manifest|log){SHARD}")


def _naming(form: str) -> Any:
    return property(lambda part: form.format(part.ending))


@dataclass(frozen=True, order=True)
class ShardFiles:
    """A shard, counted from 1, of so many; 0 of 0 is a whole run. In a store, `records` and `events` are the folders of
    a manifest's and a log's pieces. `lock` stays there, as taking it away could free it for two."""

    of: int = 0
    index: int = 0

    manifest, records = _naming("manifest{}.jsonl"), _naming("manifest{}")
    log, events = _naming("log{}.jsonl"), _naming("log{}")
    run, lock, temporary = _naming("run{}.json"), _naming(".gradcam{}.lock"), _naming(".gradcam-partial{}")

    def tar(self, number: int) -> str:
        """One of the tars of the results, counted from 1."""
        return f"results{self.ending}-{number:06}.tar"

    def find_tars(self, names: Iterable[str]) -> list[int]:
        """The numbers of those that are among these names, in order."""
        tar = re.compile(rf"results{self.ending}-(\d{{6,}})\.tar")
        return sorted(int(match[1]) for name in names if (match := tar.fullmatch(name)))

    @property
    def ending(self) -> str:
        return f"-{self.index}-of-{self.of}" if self.of else ""

    def __str__(self) -> str:
        return f"shard {self.index}/{self.of}" if self.of else "a run without shards"


def find_shard_files(names: Iterable[str]) -> list[ShardFiles]:
    """The parts whose manifest, or a piece of it, or run.json is among these names of an output folder."""
    matches = [match for name in names if (match := OWN.fullmatch(name)) and match[1] != "log"]
    return sorted({ShardFiles(int(match[3] or match[6] or 0), int(match[2] or match[5] or 0)) for match in matches})


def list_manifests(names: Iterable[str], part: ShardFiles) -> list[str]:
    """The part's manifest, and the pieces of one, in their order, as far as they are among these names."""
    return [part.manifest for name in names if name == part.manifest] + list_pieces(names, part.records)


def list_pieces(names: Iterable[str], folder: str) -> list[str]:
    """The pieces in such a folder, in the order of their numbers."""
    return [name for _, name in _number_pieces(names, folder)]


def name_piece(folder: str, number: int) -> str:
    """The name of a piece of a manifest, or of a log; numbers are counted from 1."""
    return f"{folder}/{number:05}.jsonl"


def find_last(names: Iterable[str], folder: str) -> int:
    """The highest number of a piece in such a folder; 0 where there is none."""
    return max((number for number, _ in _number_pieces(names, folder)), default=0)


def _number_pieces(names: Iterable[str], folder: str) -> list[tuple[int, str]]:
    matches = ((name, OWN.fullmatch(name)) for name in names if name.rpartition("/")[0] == folder)
    return sorted((int(match[4]), name) for name, match in matches if match and match[4])


@dataclass(frozen=True)
class Run:
    """What a run does. There are no times in it: the same run gives the same file. `settings`: whatever changes the
    results or their names, as values that JSON has. `images`: how many there are to do. `resolved`: the layers,
    methods, layouts and output that the package chose, as far as they are known."""

    device: str
    model: str
    weights: Mapping[str, Any]
    settings: Mapping[str, Any]
    inputs: Sequence[str]
    root: str | None
    images: int
    left_out: int
    resolved: Mapping[str, Any] = field(default_factory=dict)

    def to_fields(self) -> dict[str, Any]:
        made = {"schema": SCHEMA, "gradcam": __version__, "versions": describe_versions(), "device": self.device}
        fields = made | vars(self) | {"model": {"name": self.model, "weights": self.weights}}
        del fields["weights"]
        record: dict[str, Any] = json.loads(json.dumps(add_old_keys(RUN, fields)))
        return record


def describe_files(brought: Mapping[str, object]) -> dict[str, Any]:
    """`{"files": {NAME: {"file", "sha256"}}}` of what is written in files of the user's own; nothing without any."""
    files = {name: fingerprint(each) for name, each in brought.items()}
    own = {name: file for name, file in files.items() if file is not None}
    return {"files": own} if own else {}


def encode_run(fields: Mapping[str, Any]) -> bytes:
    """The contents of run.json."""
    return json.dumps(fields, indent=2).encode() + b"\n"


def read_run(path: Path) -> dict[str, Any]:
    """What is in a run.json. Raises as `decode_run`, and `OSError`."""
    return decode_run(read_text_file(path), str(path))


def decode_run(data: bytes, where: str) -> dict[str, Any]:
    """What is in these contents of a run.json. Raises `OutputError` for what is none, or is of another schema."""
    found = load_fields(data)
    if found is None or "schema" not in found:
        raise OutputError(f"{where}: does not contain the settings of a run: {WAY_OUT}")
    if found["schema"] != SCHEMA or isinstance(found["schema"], (bool, float)):
        raise OutputError(
            f"{where}: its schema is {shorten(found['schema'])}, but this version of gradcam reads {SCHEMA}: continue with "
            "the version that wrote it, or start again with --overwrite"
        )
    found.setdefault("resolved", {})  # Earlier versions wrote none.
    fault = find_fault(found, FIELDS)
    if fault is not None:
        raise OutputError(f"{where}: was changed, {fault}: {WAY_OUT}")
    return found


def load_fields(data: bytes) -> dict[str, Any] | None:
    """The object in this JSON; None where it is anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return add_new_keys(RUN, found) if isinstance(found, dict) else None


# What must be there.
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "gradcam": str,
    "versions": dict,
    "device": str,
    "model": dict,
    "settings": dict,
    "inputs": list,
    "root": (str, type(None)),
    "images": int,
    "left_out": int,
    "resolved": dict,
}


def find_fault(found: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these fields that is missing, or is nothing that a run writes, for a sentence."""
    for name in names:
        if name not in found:
            return f"it has no {name}"
        if not isinstance(found[name], FIELDS[name]):
            return f"its {name} is {shorten(found[name])}"
    return None


def keep_beginning(fields: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return run.json of a resumed run: the versions that it began with are kept, and all that was resolved."""
    resolved = {**earlier["resolved"], **fields["resolved"]}
    return {**fields, **{name: earlier.get(name) for name in ("gradcam", "versions", "device")}, "resolved": resolved}


def list_places(places: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the layers and the methods of results, by (layer, method); some methods explain no layer."""
    layers, methods = map(dict.fromkeys, zip(*places))
    return {"layers": [layer for layer in layers if layer not in NO_LAYERS], "methods": list(methods)}


def list_differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where two runs would not give the same results: "name: earlier → now" for each difference."""
    # An earlier version resolved less than this one, and so does a detector that finds nothing in noise.
    resolved = _dict(earlier.get("resolved")).keys() & _dict(now.get("resolved")).keys()
    before, after = _to_compare(earlier, resolved), _to_compare(now, resolved)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    origins = [_dict(_dict(fields.get("model")).get("weights")).get("of") for fields in (earlier, now)]
    if "precision" in names and "file" not in origins:
        names = [name for name in names if name != "weights"]  # the same ones give another hash when they are rounded
    found = [f"{_cut(name)}: {_cut(before.get(name))} → {_cut(after.get(name))}" for name in names]
    return found if len(found) <= NAMED else [*found[:NAMED], f"and {len(found) - NAMED} more"]


def _cut(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) <= LONGEST else value[: LONGEST - 3] + "..."


def list_notes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a person should know who goes on with the earlier run, although nothing speaks against it."""
    before = {"gradcam": str(earlier.get("gradcam"))} | {
        name: str(version) for name, version in _dict(earlier.get("versions")).items()
    }
    after = {"gradcam": now["gradcam"], **now["versions"]}
    changed = [f"{name} {_cut(before.get(name))} → {after[name]}" for name in after if before.get(name) != after[name]]
    notes = []
    if changed:
        notes.append(
            f"The earlier run used different versions ({', '.join(changed)}): results may differ in the last digits."
        )
    if earlier.get("images") != now["images"]:
        notes.append(
            f"The input had {shorten(earlier.get('images'))} images and now has {now['images']}: new images are added, "
            "and existing records are kept."
        )
    return notes


def _to_compare(fields: Mapping[str, Any], resolved: Collection[str]) -> dict[str, str]:
    model = _dict(fields.get("model"))
    settings = {**_dict(fields.get("settings")), **{name: fields["resolved"][name] for name in resolved}}
    counted = {
        "model": model.get("name"),
        "weights": _dict(model.get("weights")).get("sha256"),
        "device": str(fields.get("device")).partition(":")[0],  # one of several alike gives the same
        "output_format": "files",  # of runs from before there was another one
        **dict(_flatten(settings)),
        # Where the pictures are counts, not how that was said; what has no root has nothing else to tell it by.
        "input": fields.get("root") or fields.get("inputs"),
    }
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in counted.items()
    }


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def describe_root(root: Path | Store | None, folder: Path | Store) -> str | None:
    """Where the input's names start from, as seen from the output folder: it holds when both are moved together. Of a
    store it is the URL; from a store, a folder of this machine can be told by its absolute path alone."""
    if root is None or isinstance(root, Store):
        return root.url if root else None
    here = os.path.realpath(root)
    if isinstance(folder, Path):
        with contextlib.suppress(ValueError):  # on another drive
            here = os.path.relpath(here, os.path.realpath(folder))
    return Path(here).as_posix()


def describe_versions() -> dict[str, str]:
    """The versions of whatever has a part in the numbers."""
    import numpy as np
    import PIL
    import torch
    import torchvision

    from gradcam.images.opencv import cv2

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "opencv": str(cv2.__version__),
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }
