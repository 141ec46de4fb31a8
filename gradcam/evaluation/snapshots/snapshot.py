"""Snapshots: files with a model's predictions and small heatmaps, for later comparisons without the model."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from gradcam._version import __version__
from gradcam.batch.image_results import ExplainedImage, ExplainRequest, explain_batch
from gradcam.batch.pipeline import compute_items
from gradcam.batch.pool import choose_batch_size
from gradcam.batch.read_items import HashedItem, read_item
from gradcam.batch.save import describe_weights
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_method
from gradcam.errors import GradcamError, ImageError, ModelError, OutputError, describe_failure, format_fields, shorten
from gradcam.evaluation.explainers import StepCounter
from gradcam.evaluation.subject import check_probabilities
from gradcam.images.files import read_text_file, write_atomically
from gradcam.images.opencv import cv2
from gradcam.images.read import Pixels, Region
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.models.preprocess import Prepared
from gradcam.options import Progress, check_count, count_cores, keep_old_names
from gradcam.sources.collect import Inputs, list_inputs
from gradcam.sources.contents import InputImage
from gradcam.storage.disk import describe_os_error
from gradcam.storage.run_file import load_fields
from gradcam.targets.classes import ClassTarget

SCHEMA = 1
KIND = "gradcam snapshot"
TAKE_SNAPSHOT = " with gradcam diff MODEL IMAGE... --save FILE"  # appended to error messages


@dataclass(frozen=True)
class Origin:
    """The origin of heatmaps: the model, its classes, and how the model was explained.

    `weights` is the SHA-256 of the model's tensors, and `architecture` is the SHA-256 of the tensors' names and shapes.
    `score` is the explained score, such as "logit". `labels` is None if the class names are unknown. `versions` has the
    versions of gradcam and of the libraries that affect the numbers.
    """

    model: str
    weights: str
    architecture: str
    dtype: str
    preprocessing: str
    method: str
    layer: str
    score: str
    classes: int
    labels: tuple[str, ...] | None
    versions: Mapping[str, str]

    __repr__ = format_fields

    def label(self, index: int) -> str | None:
        return None if self.labels is None else self.labels[index]


@dataclass(frozen=True, eq=False)
class SnapshotEntry:
    """A model's result on one image.

    `predicted` is the most probable class, and `probability` its probability. The heatmap explains `explained_class`,
    which has `explained_probability`. `size` is the image's height and width. `region` is the part of the image that
    the model saw: top, left, height and width. `map`, float16 (h,w), is the heatmap of the region on the layer's grid,
    divided by the heatmap's maximum.
    """

    name: str
    sha256: str
    predicted: int
    probability: float
    explained_class: int
    explained_probability: float
    size: tuple[int, int]
    region: Region
    map: NDArray[np.float16]

    __repr__ = format_fields


@keep_old_names
@dataclass(frozen=True, eq=False)
class Snapshot:
    """A model's results on images: the predicted class, its probability, and a heatmap on the layer's grid.

    `take_snapshot` takes a snapshot, `read_snapshot` reads a saved snapshot, and `diff` compares a snapshot with a new
    model.

    Attributes
    ----------
    origin : Origin
        The model's name, the SHA-256 of its weights, the method, the layer, the classes and the library versions.
    entries : tuple of SnapshotEntry
        One result per image.
    failures : mapping of str to str
        Images that could not be explained, with the reason. Failures are not saved.

    Examples
    --------
    >>> import gradcam
    >>> snapshot = gradcam.evaluation.take_snapshot(gradcam.load_classifier(), "photos/")
    >>> snapshot
    Snapshot(2 images, gradcam at layer4 of efficientnet_lite0)
    >>> entry = snapshot.entries[0]
    >>> entry.name, entry.map.shape, snapshot.origin.label(entry.predicted)
    ('coffee.jpg', (7, 7), 'espresso')
    >>> snapshot.save("base.npz")
    """

    origin: Origin
    entries: tuple[SnapshotEntry, ...]
    failures: Mapping[str, str]

    def __repr__(self) -> str:
        count = f"{len(self.entries)} image{'' if len(self.entries) == 1 else 's'}"
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"Snapshot({count}{failed}, {self.origin.method} at {self.origin.layer} of {self.origin.model})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot to one file, atomically. The same snapshot always gives the same bytes.

        Parameters
        ----------
        path : str or path
            A file with any suffix. The format is NumPy's .npz, described in docs/howto/diff.md. An existing snapshot is
            replaced.

        Raises
        ------
        OutputError
            If the file cannot be written, or if it exists and is not a snapshot.
        """
        target, content = Path(path), io.BytesIO()
        check_snapshot_path(target)
        header = json.dumps({"kind": KIND, "schema": SCHEMA, **asdict(self.origin)})
        columns: Any = _to_columns(self.entries)
        np.savez_compressed(content, about=np.array(header), **columns)
        try:
            write_atomically(target, content.getvalue())
        except OSError as error:
            raise OutputError(f"{target}: cannot be written ({describe_os_error(error)})") from error


def check_snapshot_path(path: Path) -> None:
    """Raise `OutputError` if the folder does not exist, or if the path is an existing file that is not a snapshot."""
    if os.path.lexists(path):
        read_snapshot(path)
    elif not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist. Create the folder first")


def _to_columns(entries: Sequence[SnapshotEntry]) -> dict[str, NDArray[Any]]:
    """Return one array per field, with one row per image. The values of all maps are concatenated."""
    return {
        "names": np.array([entry.name for entry in entries], np.str_),
        "sha256": np.array([entry.sha256 for entry in entries], np.str_),
        "predicted": np.array([entry.predicted for entry in entries], np.int64),
        "probability": np.array([entry.probability for entry in entries], np.float32),
        "size": np.array([entry.size for entry in entries], np.int64).reshape(-1, 2),
        "region": np.array([entry.region for entry in entries], np.int64).reshape(-1, 4),
        "grid": np.array([entry.map.shape for entry in entries], np.int64).reshape(-1, 2),
        "maps": np.concatenate([np.zeros(0, np.float16), *(entry.map.ravel() for entry in entries)]),
    }


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot that `Snapshot.save` wrote.

    Parameters
    ----------
    path : str or path
        The file.

    Returns
    -------
    Snapshot
        The snapshot, without failures.

    Raises
    ------
    OutputError
        If the file cannot be read, is not a snapshot, or was written by a later version of gradcam.

    Examples
    --------
    >>> import gradcam
    >>> gradcam.evaluation.take_snapshot(gradcam.load_classifier(), "photos/").save("base.npz")
    >>> gradcam.evaluation.read_snapshot("base.npz")
    Snapshot(2 images, gradcam at layer4 of efficientnet_lite0)
    """
    try:
        content = read_text_file(path)
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except FileNotFoundError:
        raise OutputError(f"{path}: does not exist. Take a snapshot{TAKE_SNAPSHOT}") from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be read ({describe_os_error(error)})") from error
    except Exception as error:  # A damaged archive may raise any error. A plain .npy file cannot be used with `with`.
        raise OutputError(f"{path}: is not a snapshot, or is damaged ({type(error).__name__})") from error
    header = load_fields(str(arrays.pop("about", "")).encode("utf-8", "replace")) or {}
    if header.pop("kind", None) != KIND:
        raise OutputError(f"{path}: is not a snapshot. Take a snapshot{TAKE_SNAPSHOT}")
    if (schema := header.pop("schema", None)) != SCHEMA:
        raise OutputError(f"{path}: its schema is {shorten(schema)}, but this version of gradcam reads {SCHEMA}")
    if (fault := next(_find_faults(header, arrays), None)) is not None:
        raise OutputError(f"{path}: is damaged ({fault}). Take the snapshot again")
    labels = header["labels"]
    origin = Origin(**header | {"labels": None if labels is None else tuple(labels)})
    return Snapshot(origin, tuple(_to_rows(arrays)), {})


def _find_faults(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """Yield descriptions of faults. Stop after the first fault, because later checks rely on earlier checks."""
    texts = {"model", "weights", "architecture", "dtype", "preprocessing", "method", "layer", "score"}
    are_texts = all(isinstance(header.get(name), str) for name in texts)
    are_complete = header.keys() == texts | {"classes", "labels", "versions"}
    if not (are_texts and are_complete and isinstance(header["versions"], dict)):
        yield "its description of the model is incomplete"
    labels, count = header["labels"], header["classes"]
    if type(count) is not int or not (labels is None or (isinstance(labels, list) and len(labels) == count)):
        yield f"its labels do not match its {shorten(count)} classes"
    expected = _to_columns([])
    if set(arrays) != set(expected):
        yield f"its arrays are {', '.join(sorted(arrays))}"
    rows = len(arrays["names"]) if arrays["names"].ndim else -1
    for name, values in arrays.items():
        shape = (values.size,) if name == "maps" else (rows, *expected[name].shape[1:])
        if values.shape != shape or values.dtype.kind != expected[name].dtype.kind:
            yield f"{name} is {values.dtype} {values.shape}"
    if (arrays["grid"] < 1).any() or arrays["grid"].prod(1).sum() != len(arrays["maps"]):
        yield "its heatmaps do not have their recorded sizes"
    are_maps = ((arrays["maps"] >= 0) & (arrays["maps"] <= 1)).all()  # NaN is out of range
    are_classes = ((arrays["predicted"] >= 0) & (arrays["predicted"] < count)).all()
    are_regions = (arrays["region"][:, 2:] > 0).all()
    if not (are_maps and are_classes and are_regions and np.isfinite(arrays["probability"]).all()):
        yield "it contains invalid values"


def _to_rows(arrays: Mapping[str, NDArray[Any]]) -> Iterator[SnapshotEntry]:
    keys = ("names", "sha256", "predicted", "probability", "size", "region", "grid")
    start = 0
    for name, sha256, predicted, probability, size, region, grid in zip(*(arrays[key].tolist() for key in keys)):
        values = arrays["maps"][start : start + math.prod(grid)].reshape(grid).astype(np.float16)
        start += values.size
        prediction = predicted, probability
        yield SnapshotEntry(name, sha256, *prediction, *prediction, tuple(size), tuple(region), values)


@dataclass(frozen=True)
class ItemExplainer:
    """Explains images with one classifier, method and layer, in batches."""

    classifier: Classifier
    request: ExplainRequest
    layer: str
    batch_size: int
    workers: int

    @classmethod
    def create(
        cls,
        classifier: Classifier,
        *,
        method: str | Method | None = None,
        score: str = "logit",
        reshape: Any = None,
        batch_size: int | str = "auto",
        workers: int | None = None,
    ) -> Self:
        """Choose the layer and the batch size, and return the explainer.

        Raise `ModelError` if the model is not a classifier, and `GradcamError` if another setting is invalid.
        """
        if not isinstance(classifier, Classifier) or classifier.task != "classification":
            task = f"a model for {classifier.task}, " if isinstance(classifier, Classifier) else ""
            raise ModelError(f"Expected a classifier, received {task}{shorten(classifier)}.")
        check_probabilities(classifier.classes, classifier.activation)
        resolved_method = find_method(classifier.default_method if method is None else method)
        layer = classifier.layer_for(resolved_method) if resolved_method.has_layer else ""
        layers = {"layers": [layer] if layer else ()}
        request = ExplainRequest.of([resolved_method], ClassTarget(score=score), {"reshape": reshape}, "diff", **layers)
        size = choose_batch_size(classifier) if batch_size == "auto" else batch_size
        check_count(size, "batch_size", "an integer, 1 or more.")
        return cls(classifier, request, layer or "input", int(size), count_cores() if workers is None else workers)

    @cached_property
    def origin(self) -> Origin:
        classifier, labels = self.classifier, self.classifier.labels
        target, preprocess = cast(Any, self.request.target), cast(Any, classifier.preprocess)
        # These libraries affect the numbers. torchvision is left out, because importing torchvision takes seconds.
        versions = {"gradcam": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
        versions |= {"opencv": str(cv2.__version__), "pillow": PIL.__version__}
        dtype = str(find_input_dtype(classifier.model)).removeprefix("torch.")
        model = classifier.name, describe_weights(classifier)["sha256"], _hash_architecture(classifier), dtype
        # The repr of a user's preprocessing may contain a memory address, so the class name is used instead.
        preprocessing = repr(preprocess) if is_dataclass(preprocess) else type(preprocess).__qualname__
        explained = self.request.methods[0].name, self.layer, target.score
        classes = classifier.classes, None if labels is None else tuple(labels)
        return Origin(*model, preprocessing, *explained, *classes, versions)

    def explain(
        self, items: Sequence[InputImage], step: Callable[[], None], class_by_name: Mapping[str, int] | None = None
    ) -> Snapshot:
        """Explain the top class of each image, or the class in `class_by_name`. Call `step` after each image."""
        classes = {item.name: None for item in items} | {name: str(i) for name, i in (class_by_name or {}).items()}
        class_items = [replace(item, wanted=classes[item.name]) for item in items]
        failures: dict[str, str] = {}
        explain = partial(explain_batch, self.classifier, self.request)
        entries = tuple(self.run(explain, class_items, step, failures, finish=_to_entry, audit=True))
        return Snapshot(self.origin, entries, failures)

    def run(
        self, explain: Any, items: Sequence[InputImage], step: Any, failures: dict[str, str], **options: Any
    ) -> Iterator[Any]:
        """Explain images, and yield the results. Call `step` after each image, and add errors to `failures`."""
        options |= {"batch_size": self.batch_size, "workers": self.workers}
        for name, result in compute_items(self.classifier, explain, items, **options):
            step()
            if isinstance(result, str):
                failures[name] = result
            else:
                yield result


def _hash_architecture(classifier: Classifier) -> str:
    """Return the SHA-256 of the names and shapes of the model's tensors."""
    tensors = {key: tensor for key, tensor in classifier.model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    lines = [f"{key} {tuple(tensor.shape)}" for key, tensor in tensors.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _to_entry(fetched: HashedItem, result: ExplainedImage | GradcamError) -> tuple[str, SnapshotEntry | str]:
    name = fetched.item.name
    if isinstance(result, GradcamError):
        return name, describe_failure(name, result)
    (explanation,) = result.maps.values()
    values, prediction = explanation.maps[0, 0].float(), result.predictions[0]
    top = prediction.index, prediction.probability
    # The target is a class, so `classes` is not None.
    explained = int(explanation.classes[0, 0]), float(explanation.probability() or 0)  # type: ignore[index]
    map_ = (values / (float(values.max()) or 1.0)).numpy().astype(np.float16)
    size = result.picture.shape[:2]
    return name, SnapshotEntry(name, fetched.sha256 or "", *top, *explained, size, result.region, map_)


def take_snapshot(
    classifier: Classifier,
    inputs: Inputs,
    *,
    method: str | Method | None = None,
    score: str = "logit",
    reshape: Any = None,
    batch_size: int | str = "auto",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Snapshot:
    """Take a snapshot of a model's predictions and heatmaps, for a later comparison with a new model.

    Parameters
    ----------
    classifier : Classifier
        The model. Choose the target layer with `load_classifier(layer=...)`.
    inputs : path, URL or image, or several
        As in `gradcam.explain_files`. Classes in an input list are ignored: the top class is explained.
    method : str or Method, default None
        As in `gradcam.explain`.
    score : str, default "logit"
        As in `targets.ClassTarget`.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.
    batch_size : int or "auto", default "auto"
        As in `gradcam.explain_files`.
    workers : int, default None
        As in `gradcam.explain_files`.
    progress : callable, default None
        Called with the number of finished images and the total.

    Returns
    -------
    Snapshot
        The snapshot, with a line in `failures` for each image that could not be explained.

    Raises
    ------
    ModelError
        If the model is not a classifier.
    GradcamError
        As in `gradcam.explain_files`. These errors are raised before any image is read.

    Examples
    --------
    >>> import gradcam
    >>> snapshot = gradcam.evaluation.take_snapshot(gradcam.load_classifier(), ["photo.jpg", "other.png"])
    >>> [(entry.name, entry.map.shape) for entry in snapshot.entries]
    [('photo.jpg', (7, 7)), ('other.png', (7, 7))]
    """
    settings: Any = {"score": score, "reshape": reshape, "batch_size": batch_size, "workers": workers}
    explainer = ItemExplainer.create(classifier, method=method, **settings)
    items = list_inputs(inputs).items
    return explainer.explain(items, StepCounter(progress, total=len(items)).step)


def read_pixels(classifier: Classifier, item: InputImage) -> Pixels:
    """Read an image again, for drawing. Raise `ImageError` if the image can no longer be read."""
    prepared = read_item(classifier, replace(item, wanted=None)).picture
    if isinstance(prepared, Prepared):
        return prepared.reading.picture
    raise ImageError(str(prepared))
