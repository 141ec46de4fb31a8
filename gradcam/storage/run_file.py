"""Read, write and compare run.json, which records the settings of a run.

With this file, users can repeat a run. A resumed run uses the file to check that its settings have not changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradcam._version import __version__
from gradcam.errors import OutputError, shorten
from gradcam.plugins import fingerprint
from gradcam.renames import RUN, add_new_keys, add_old_keys

if TYPE_CHECKING:
    from gradcam.storage.store import Store

SCHEMA = 1
NON_LAYER_NAMES = ("input", "attention")
# Earlier versions drew all heatmaps with these options, and did not record the options.
EARLIER_LOOK = {"base": "color", "blend": "fade"}
# Limits for an error message: the number of differences, and the length of a value.
MAX_DIFFERENCES, MAX_VALUE_CHARS = 5, 160
RECOVERY_ADVICE = "restore the original file, or start again with --overwrite"
SHARD_PATTERN = r"(?:-([1-9]\d*)-of-([1-9]\d*))?"
# In a store, nothing can be appended to an object. Manifests and logs in a store are therefore folders of numbered
# pieces.
RUN_FILE = re.compile(rf"(manifest|log){SHARD_PATTERN}(?:/(\d{{5,}}))?\.jsonl|run{SHARD_PATTERN}\.json")
PIECE_FOLDER = re.compile(rf"(?:manifest|log){SHARD_PATTERN}")


def _name_by(template: str) -> Any:
    return property(lambda shard: template.format(shard.ending))


@dataclass(frozen=True, order=True)
class ShardFiles:
    """The file names of a shard. Shards are counted from 1. Shard 0 of 0 stands for a run without shards.

    In a store, `records` and `events` are the folders for the pieces of a manifest and a log. The file `lock` is never
    removed, because after a removal, two processes could hold the lock at the same time.
    """

    of: int = 0
    index: int = 0

    manifest, records = _name_by("manifest{}.jsonl"), _name_by("manifest{}")
    log, events = _name_by("log{}.jsonl"), _name_by("log{}")
    run, lock, temporary = _name_by("run{}.json"), _name_by(".gradcam{}.lock"), _name_by(".gradcam-partial{}")

    def tar(self, number: int) -> str:
        """Return the name of the tar of results with this number, counted from 1."""
        return f"results{self.ending}-{number:06}.tar"

    def find_tars(self, names: Iterable[str]) -> list[int]:
        """Return the sorted numbers of the tars among these names."""
        tar = re.compile(rf"results{self.ending}-(\d{{6,}})\.tar")
        return sorted(int(match[1]) for name in names if (match := tar.fullmatch(name)))

    @property
    def ending(self) -> str:
        return f"-{self.index}-of-{self.of}" if self.of else ""

    def __str__(self) -> str:
        return f"shard {self.index}/{self.of}" if self.of else "a run without shards"


def find_shards(names: Iterable[str]) -> list[ShardFiles]:
    """Return the shards that have a manifest, a piece of a manifest, or a run.json among these names."""
    matches = [match for name in names if (match := RUN_FILE.fullmatch(name)) and match[1] != "log"]
    return sorted({ShardFiles(int(match[3] or match[6] or 0), int(match[2] or match[5] or 0)) for match in matches})


def list_manifests(names: Iterable[str], shard: ShardFiles) -> list[str]:
    """Return the names of the shard's manifest and of its sorted pieces, if they are among these names."""
    return [shard.manifest for name in names if name == shard.manifest] + list_pieces(names, shard.records)


def list_pieces(names: Iterable[str], folder: str) -> list[str]:
    """Return the names of the pieces in a folder, sorted by their numbers."""
    return [name for _, name in _number_pieces(names, folder)]


def name_piece(folder: str, number: int) -> str:
    """Return the name of a piece of a manifest or a log. Pieces are numbered from 1."""
    return f"{folder}/{number:05}.jsonl"


def find_last_piece_number(names: Iterable[str], folder: str) -> int:
    """Return the highest number of a piece in a folder, or 0 if there is none."""
    return max((number for number, _ in _number_pieces(names, folder)), default=0)


def _number_pieces(names: Iterable[str], folder: str) -> list[tuple[int, str]]:
    matches = ((name, RUN_FILE.fullmatch(name)) for name in names if name.rpartition("/")[0] == folder)
    return sorted((int(match[4]), name) for name, match in matches if match and match[4])


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, for run.json. Times are left out, so that equal settings give equal files.

    `settings` contains all options that change the results or their names, as JSON values. `images` is the number of
    images to explain. `resolved` contains the layers, methods, layouts and output that gradcam chose, if these choices
    are known before the run.
    """

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
        versions = {"schema": SCHEMA, "gradcam": __version__, "versions": describe_versions(), "device": self.device}
        fields = versions | vars(self) | {"model": {"name": self.model, "weights": self.weights}}
        del fields["weights"]
        record: dict[str, Any] = json.loads(json.dumps(add_old_keys(RUN, fields)))
        return record


def fingerprint_user_files(objects: Mapping[str, object]) -> dict[str, Any]:
    """Return `{"files": {NAME: {"file", "sha256"}}}` for objects defined in the user's own files, or an empty dict."""
    user_files = {name: file for name, item in objects.items() if (file := fingerprint(item)) is not None}
    return {"files": user_files} if user_files else {}


def encode_run(fields: Mapping[str, Any]) -> bytes:
    """Return the contents of run.json."""
    return json.dumps(fields, indent=2).encode() + b"\n"


def decode_run(data: bytes, source: str) -> dict[str, Any]:
    """Return the fields of run.json. Raises `OutputError` if the data is not a run.json, or has another schema."""
    fields = load_fields(data)
    if fields is None or "schema" not in fields:
        raise OutputError(f"{source}: does not contain the settings of a run: {RECOVERY_ADVICE}")
    if fields["schema"] != SCHEMA or isinstance(fields["schema"], (bool, float)):
        problem = f"its schema is {shorten(fields['schema'])}, but this version of gradcam reads {SCHEMA}"
        advice = "continue with the version that wrote it, or start again with --overwrite"
        raise OutputError(f"{source}: {problem}: {advice}")
    fields.setdefault("resolved", {})  # Earlier versions did not write this field.
    fault = describe_invalid_field(fields, FIELD_TYPES)
    if fault is not None:
        raise OutputError(f"{source}: was changed ({fault}): {RECOVERY_ADVICE}")
    return fields


def load_fields(data: bytes) -> dict[str, Any] | None:
    """Return the fields of a JSON object, or None if the data is not a JSON object."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return add_new_keys(RUN, fields) if isinstance(fields, dict) else None


# The required fields of run.json, and their types.
FIELD_TYPES: dict[str, Any] = {"gradcam": str, "versions": dict, "device": str, "model": dict, "settings": dict}
FIELD_TYPES |= {"inputs": list, "root": (str, type(None)), "images": int, "left_out": int, "resolved": dict}


def describe_invalid_field(fields: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return a message about the first field that is missing or has a wrong type, or None if all fields are valid."""
    for name in names:
        if name not in fields:
            return f"it has no {name}"
        if not isinstance(fields[name], FIELD_TYPES[name]):
            return f"its {name} is {shorten(fields[name])}"
    return None


def merge_resumed_run(fields: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a resumed run's run.json.

    The versions and the device are those of the earlier run. `resolved` contains the choices of both runs.
    """
    resolved = {**earlier["resolved"], **fields["resolved"]}
    return {**fields, **{name: earlier.get(name) for name in ("gradcam", "versions", "device")}, "resolved": resolved}


def list_layers_and_methods(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the layers and the methods of (layer, method) pairs. Leave out names that are not layers."""
    layers, methods = map(dict.fromkeys, zip(*pairs))
    return {"layers": [layer for layer in layers if layer not in NON_LAYER_NAMES], "methods": list(methods)}


def list_differences(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return "name: earlier → now" for each setting that makes the results of two runs differ."""
    # Compare only the choices that both runs recorded in `resolved`. A run may record fewer choices for two reasons: an
    # earlier version of gradcam, or a detector that detects nothing in the noise image.
    resolved = _to_dict(earlier.get("resolved")).keys() & _to_dict(current.get("resolved")).keys()
    before, after = _to_comparable(earlier, resolved), _to_comparable(current, resolved)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    origins = [_to_dict(_to_dict(fields.get("model")).get("weights")).get("of") for fields in (earlier, current)]
    if "precision" in names and "file" not in origins:
        # If the precision differs, the hashes of the weights differ even for the same weights, because values are
        # rounded.
        names = [name for name in names if name != "weights"]
    differences = [f"{_truncate(name)}: {_truncate(before.get(name))} → {_truncate(after.get(name))}" for name in names]
    if len(differences) > MAX_DIFFERENCES:
        differences[MAX_DIFFERENCES:] = [f"and {len(differences) - MAX_DIFFERENCES} more"]
    return differences


def _truncate(text: str | None) -> str:
    if text is None:
        return "nothing"
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def list_resume_notes(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return notes about harmless differences from the earlier run, which do not prevent resuming it."""
    before = {"gradcam": earlier.get("gradcam"), **_to_dict(earlier.get("versions"))}
    before = {name: str(version) for name, version in before.items()}
    after = {"gradcam": current["gradcam"], **current["versions"]}
    names = [name for name in after if before.get(name) != after[name]]
    changed = ", ".join(f"{name} {_truncate(before.get(name))} → {after[name]}" for name in names)
    notes = []
    if changed:
        notes.append(f"The earlier run used different versions ({changed}): results may differ in the last digits.")
    if earlier.get("images") != current["images"]:
        counts = f"The input had {shorten(earlier.get('images'))} images and now has {current['images']}"
        notes.append(f"{counts}: new images are added, and existing records are kept.")
    return notes


def _to_comparable(fields: Mapping[str, Any], resolved: Collection[str]) -> dict[str, str]:
    model = _to_dict(fields.get("model"))
    settings = _to_dict(fields.get("settings")) | {name: fields["resolved"][name] for name in resolved}
    values = {
        "model": model.get("name"),
        "weights": _to_dict(model.get("weights")).get("sha256"),
        "device": str(fields.get("device")).partition(":")[0],  # cuda:0 and cuda:1 give the same results.
        # Earlier versions had only this output format and this interpolation, and did not record them.
        "output_format": "files",
        "interpolation": "bicubic",
        **EARLIER_LOOK,
        **dict(flatten(settings, ".")),
        # Compare the root folder of the images instead of the inputs, because users can write the same folder in
        # several ways. If there is no root folder, compare the inputs.
        "input": fields.get("root") or fields.get("inputs"),
    }
    dump = partial(json.dumps, ensure_ascii=False)
    return {name: value if isinstance(value, str) else dump(value) for name, value in values.items()}


def flatten(settings: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of nested settings. A name consists of all its keys, joined by the separator."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flatten(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def _to_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def describe_root(root: Path | Store | None, folder: Path | Store) -> str | None:
    """Return the path of the input root relative to the output folder, so that both folders can be moved together.

    If the root is in a store, return its URL. If only the output is in a store, return an absolute path.
    """
    if not isinstance(root, Path):
        return None if root is None else root.url
    path = os.path.realpath(root)
    if isinstance(folder, Path):
        with contextlib.suppress(ValueError):  # On Windows, folders on different drives have no relative path.
            path = os.path.relpath(path, os.path.realpath(folder))
    return Path(path).as_posix()


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the numerical results."""
    import numpy as np
    import PIL
    import torch
    import torchvision

    from gradcam.images.opencv import cv2

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {"torchvision": str(torchvision.__version__), "opencv": str(cv2.__version__)}
    return versions | {"numpy": np.__version__, "pillow": PIL.__version__}
