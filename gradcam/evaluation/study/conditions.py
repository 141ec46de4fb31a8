"""What is the same for all methods of a study, so that their numbers can be compared, and made again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from gradcam._version import __version__
from gradcam.batch.output.run_file import SCHEMA, describe_versions
from gradcam.batch.weights import describe_weights
from gradcam.classifiers import Classifier
from gradcam.classifiers.preparation import find_input_dtype
from gradcam.classifiers.preprocessing import Preprocessing
from gradcam.errors import show_fields
from gradcam.evaluation.study.plan import Plan
from gradcam.hashing import hash_file


@dataclass(frozen=True)
class Conditions:
    """Of one study.

    `weights`: the SHA-256 of the model's tensors. `target`: which class of each picture is explained, in words.
    `resizing`: from a picture to what the network takes, in words. `annotations`: the SHA-256 of what says where objects
    are, None without. `versions`: of whatever has a part in the numbers. `settings`: the rest of what they depend on.
    """

    model: str
    weights: str
    device: str
    precision: str
    layer: str
    score: str
    target: str
    resizing: str
    seed: int
    annotations: str | None
    versions: Mapping[str, str]
    settings: Mapping[str, Any] = field(repr=False)

    __repr__ = show_fields

    def to_fields(self) -> dict[str, Any]:
        """As they are written to files."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    def to_run(self, pictures: int) -> dict[str, Any]:
        """What a journal begins with, of the form of a batch's run.json: where all of it is alike, the numbers are."""
        counted = ("layer", "score", "target", "seed", "annotations", "precision")
        fields = {
            "schema": SCHEMA,
            "gradcam": self.versions["gradcam"],
            "versions": {name: version for name, version in self.versions.items() if name != "gradcam"},
            "device": self.device,
            "model": {"name": self.model, "weights": {"sha256": self.weights}},
            "settings": {name: getattr(self, name) for name in counted} | dict(self.settings),
            "pictures": pictures,
        }
        found: dict[str, Any] = json.loads(json.dumps(fields))
        return found


def describe_conditions(
    classifier: Classifier,
    plan: Plan,
    *,
    layer: str,
    score: str,
    target: str,
    reshape: Any,
    seed: int,
    annotations: Path | None,
) -> Conditions:
    """The conditions of a study. Raises `OSError` where the annotations cannot be read."""
    return Conditions(
        model=classifier.name,
        weights=describe_weights(classifier)["sha256"],
        device=str(classifier.device),
        precision=str(find_input_dtype(classifier.model)).removeprefix("torch."),
        layer=layer,
        score=score,
        target=target,
        resizing=describe_resizing(classifier.preprocess),
        seed=seed,
        annotations=None if annotations is None else hash_all(annotations),
        versions={"gradcam": __version__, **describe_versions()},
        settings={
            "activation": classifier.activation,
            "preprocessing": _describe_preprocess(classifier.preprocess),
            "reshape": reshape if isinstance(reshape, (str, type(None))) else repr(reshape),
            "methods": list(plan.names),
            "metrics": list(plan.metrics),
        },
    )


def describe_resizing(preprocess: Any) -> str:
    """What is done to a picture before the network sees it, for a sentence."""
    if not isinstance(preprocess, Preprocessing):
        return f"as {type(preprocess).__name__} does"
    size = " x ".join(map(str, preprocess.size))
    if isinstance(preprocess.resize, int):
        return f"shorter side to {preprocess.resize}, the central {size} of it, {preprocess.interpolation}"
    if preprocess.resize == preprocess.size:
        return f"the whole picture to {size}, {preprocess.interpolation}"
    resized = " x ".join(map(str, preprocess.resize))
    return f"the whole picture to {resized}, the central {size} of it, {preprocess.interpolation}"


def _describe_preprocess(preprocess: Any) -> Any:
    """Its values, or, of code that is not ours, its name: a repr may have an address in it."""
    is_ours = is_dataclass(preprocess) and not isinstance(preprocess, type)
    return asdict(preprocess) if is_ours else type(preprocess).__qualname__


def hash_all(path: Path) -> str:
    """The SHA-256 of a file, or of all files in a folder with their names. Raises `OSError`."""
    if not path.is_dir():
        return hash_file(path)
    digest = hashlib.sha256()
    for each in sorted(each for each in path.rglob("*") if each.is_file()):
        digest.update(f"{each.relative_to(path).as_posix()} {hash_file(each)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
