"""What a model made of pictures, a class and a small map for each, in one file: to compare with when the model is gone."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from gradcam._version import __version__
from gradcam.batch.findings import PictureResult, Request, find
from gradcam.batch.pipeline import compute_items
from gradcam.batch.pool import choose_batch_size
from gradcam.batch.read import Fetched
from gradcam.batch.save import describe_weights
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_method
from gradcam.errors import GradcamError, ModelError, OutputError, describe_failure, shorten, show_fields
from gradcam.evaluation.explainers import Counter
from gradcam.evaluation.subject import check_probabilities
from gradcam.images.files import read_text_file, write_whole
from gradcam.images.opencv import cv2
from gradcam.images.read import Region
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.options import Progress, check_count, count_cores, keep_old_names
from gradcam.sources.contents import Item
from gradcam.sources.list import Inputs, list_inputs
from gradcam.storage.disk import describe_os_error
from gradcam.storage.run_file import load_fields
from gradcam.targets.classes import ClassTarget

SCHEMA = 1
KIND = "gradcam snapshot"


@dataclass(frozen=True)
class Origin:
    """Where maps come from: the model, its classes, and how it was explained.

    `weights`: the SHA-256 of its tensors. `architecture`: the same of their names and shapes alone. `dtype`: what it
    computes in. `preprocessing`: how pictures are prepared for it. `score`: the number of the class that is explained.
    `labels`: None where nobody knows them. `versions`: of gradcam and of whatever has a part in the numbers."""

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

    __repr__ = show_fields

    def label(self, index: int) -> str | None:
        return None if self.labels is None else self.labels[index]


@dataclass(frozen=True, eq=False)
class Seen:
    """What a model made of one picture. `predicted`: its most probable class. `explained`: the class of the map, and
    `share`, its probability. `size`: the picture's height and width; `region`: the pixels that the network saw: top,
    left, height and width. `map`: float16 (h,w) on the layer's grid, over that region, divided by its largest value."""

    name: str
    sha256: str
    predicted: int
    probability: float
    explained: int
    share: float
    size: tuple[int, int]
    region: Region
    map: NDArray[np.float16]

    __repr__ = show_fields


@keep_old_names
@dataclass(frozen=True, eq=False)
class Snapshot:
    """A model's results on images: the predicted class, its probability, and a heatmap on the layer's grid.

    `take_snapshot` takes a snapshot, `read_snapshot` reads it from a file, and `diff` compares a new model with it.

    Attributes
    ----------
    origin : Origin
        The model's name, the SHA-256 of its weights, the method, the layer, the classes and the library versions.
    entries : tuple of Seen
        One result per image.
    failures : mapping of str to str
        Images that could not be explained, with the reason. They are not saved.

    Examples
    --------
    >>> import gradcam
    >>> found = gradcam.evaluation.take_snapshot(gradcam.load_classifier(), "photos/")
    >>> found
    Snapshot(2 images, gradcam at layer4 of efficientnet_lite0)
    >>> found.entries[0].name, found.entries[0].map.shape, found.origin.label(found.entries[0].predicted)
    ('coffee.jpg', (7, 7), 'espresso')
    >>> found.save("base.npz")
    """

    origin: Origin
    entries: tuple[Seen, ...]
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
        place = Path(path)
        check_place(place)
        about = {"kind": KIND, "schema": SCHEMA, **asdict(self.origin)}
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, values in {"about": np.array(json.dumps(about)), **_to_columns(self.entries)}.items():
                array = io.BytesIO()
                np.lib.format.write_array(array, values, allow_pickle=False)
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), array.getvalue(), zipfile.ZIP_DEFLATED)
        try:
            write_whole(place, content.getvalue())
        except OSError as error:
            raise OutputError(f"{place}: cannot be written ({describe_os_error(error)})") from error


def check_place(path: Path) -> None:
    """Raises `OutputError` where a snapshot cannot be written: its folder is not there, or a file is that is no snapshot."""
    if os.path.lexists(path):
        read_snapshot(path)
    elif not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist. Create it first")


def _to_columns(pictures: Sequence[Seen]) -> dict[str, NDArray[Any]]:
    """An array for each fact, a row for each picture; the values of all maps one after another."""
    return {
        "names": np.array([it.name for it in pictures], np.str_),
        "sha256": np.array([it.sha256 for it in pictures], np.str_),
        "predicted": np.array([it.predicted for it in pictures], np.int64),
        "probability": np.array([it.probability for it in pictures], np.float32),
        "size": np.array([it.size for it in pictures], np.int64).reshape(-1, 2),
        "region": np.array([it.region for it in pictures], np.int64).reshape(-1, 4),
        "grid": np.array([it.map.shape for it in pictures], np.int64).reshape(-1, 2),
        "maps": np.concatenate([np.zeros(0, np.float16), *(it.map.ravel() for it in pictures)]),
    }


KINDS = {"names": "U", "sha256": "U", "probability": "f", "maps": "f"}  # of NumPy; all others are whole numbers


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
            found = {name: np.asarray(file[name]) for name in file.files}
    except FileNotFoundError:
        raise OutputError(
            f"{path}: does not exist. Take a snapshot with gradcam diff MODEL IMAGE... --save FILE"
        ) from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be read ({describe_os_error(error)})") from error
    except Exception as error:  # ValueError, BadZipFile, zlib.error, EOFError, and what a plain .npy has no context for
        raise OutputError(f"{path}: is not a snapshot, or is damaged ({type(error).__name__})") from error
    about = load_fields(str(found.pop("about", "")).encode("utf-8", "replace")) or {}
    if about.pop("kind", None) != KIND:
        raise OutputError(f"{path}: is not a snapshot. Take one with gradcam diff MODEL IMAGE... --save FILE")
    if (schema := about.pop("schema", None)) != SCHEMA:
        raise OutputError(f"{path}: has schema {shorten(schema)}, but this version of gradcam reads {SCHEMA}")
    if (fault := next(_find_faults(about, found), None)) is not None:
        raise OutputError(f"{path}: is damaged, {fault}. Take the snapshot again")
    labels = about["labels"]
    origin = Origin(**about | {"labels": None if labels is None else tuple(labels)})
    return Snapshot(origin, tuple(_to_rows(found)), {})


def _find_faults(about: Mapping[str, Any], found: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """What is missing, or is nothing that `save` writes, for a sentence; what comes later needs what comes first."""
    texts = ("model", "weights", "architecture", "dtype", "preprocessing", "method", "layer", "score")
    if set(about) != {field.name for field in fields(Origin)} or not all(isinstance(about[it], str) for it in texts):
        yield "its description of the model is incomplete"
    if not isinstance(about["versions"], dict):
        yield "its versions are missing"
    labels, count = about["labels"], about["classes"]
    if type(count) is not int or not (labels is None or (isinstance(labels, list) and len(labels) == count)):
        yield f"its labels do not match its {shorten(count)} classes"
    expected = _to_columns([])
    if set(found) != set(expected):
        yield f"its arrays are {', '.join(sorted(found))}"
    pictures = len(found["names"]) if found["names"].ndim else -1
    for name, values in found.items():
        shape = (values.size,) if name == "maps" else (pictures, *expected[name].shape[1:])
        if values.shape != shape or values.dtype.kind != KINDS.get(name, "i"):
            yield f"{name} is {values.dtype} {values.shape}"
    if (found["grid"] < 1).any() or found["grid"].prod(1).sum() != len(found["maps"]):
        yield "its heatmaps do not fit their grids"
    are_maps = ((found["maps"] >= 0) & (found["maps"] <= 1)).all()  # NaN fails both
    are_classes = ((found["predicted"] >= 0) & (found["predicted"] < count)).all()
    if not (
        are_maps and are_classes and np.isfinite(found["probability"]).all() and (found["region"][:, 2:] > 0).all()
    ):
        yield "it contains invalid values"


def _to_rows(found: Mapping[str, NDArray[Any]]) -> Iterator[Seen]:
    ends = found["grid"].prod(1).cumsum()
    for i, (name, end) in enumerate(zip(found["names"], ends)):
        grid = found["grid"][i]
        predicted, probability = int(found["predicted"][i]), float(found["probability"][i])
        size, region = (tuple(map(int, found[key][i])) for key in ("size", "region"))
        values = found["maps"][end - grid.prod() : end].reshape(grid).astype(np.float16)
        sha256 = str(found["sha256"][i])
        yield Seen(str(name), sha256, predicted, probability, predicted, probability, size, region, values)  # type: ignore[arg-type]  # of two and of four


@dataclass(frozen=True)
class Look:
    """How a model looks at pictures: all that is computed here. `reshape`: as in `gradcam.explain`. `batch_size`,
    `workers`: as in `explain_files`."""

    classifier: Classifier
    request: Request
    layer: str
    batch_size: int
    workers: int

    @classmethod
    def of(
        cls,
        classifier: Classifier,
        *,
        method: str | Method | None,
        score: str,
        reshape: Any,
        batch_size: int | str,
        workers: int | None,
    ) -> Self:
        """Raises `GradcamError` for what does not fit, and `ModelError` for a model of another task."""
        if not isinstance(classifier, Classifier) or classifier.task != "classification":
            task = f"a model for {classifier.task}, " if isinstance(classifier, Classifier) else ""
            raise ModelError(f"Expected a classifier, received {task}{shorten(classifier)}.")
        check_probabilities(classifier.classes, classifier.activation)
        chosen = find_method(classifier.default_method if method is None else method)
        layer = classifier.layer_for(chosen) if chosen.has_layer else ""
        layers = {"layers": [layer] if layer else ()}
        request = Request.of([chosen], ClassTarget(score=score), {"reshape": reshape}, "diff", **layers)
        size = choose_batch_size(classifier) if batch_size == "auto" else batch_size
        check_count(size, "batch_size", "an integer, 1 or more.")
        return cls(classifier, request, layer or "input", int(size), count_cores() if workers is None else workers)

    @cached_property
    def origin(self) -> Origin:
        classifier, labels = self.classifier, self.classifier.labels
        target, preprocess = cast(Any, self.request.target), cast(Any, classifier.preprocess)
        # Of gradcam, and of what reads pictures and computes; without torchvision, which takes seconds to import.
        versions = {"gradcam": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
        versions |= {"opencv": str(cv2.__version__), "pillow": PIL.__version__}
        return Origin(
            classifier.name,
            describe_weights(classifier)["sha256"],
            _hash_architecture(classifier),
            str(find_input_dtype(classifier.model)).removeprefix("torch."),
            # Of code that is not ours, its name: a repr may have an address in it.
            repr(preprocess) if is_dataclass(preprocess) else type(preprocess).__qualname__,
            self.request.methods[0].name,
            self.layer,
            target.score,
            classifier.classes,
            None if labels is None else tuple(labels),
            versions,
        )

    def at(
        self, items: Iterable[Item], wanted: Mapping[str, int] | None = None
    ) -> Generator[Seen | Failure, None, None]:
        """What is seen in each picture, in order; of each the map of its most probable class, or of the one that is
        wanted in the picture of that name."""
        chosen = None if wanted is None else {name: str(index) for name, index in wanted.items()}
        asked = (replace(item, wanted=None if chosen is None else chosen.get(item.name)) for item in items)
        return compute_items(
            self.classifier,
            partial(find, self.classifier, self.request),
            asked,
            finish=_to_seen,
            batch_size=self.batch_size,
            workers=self.workers,
            audit=True,
        )


@dataclass(frozen=True)
class Failure:
    """A picture that could not be explained, and a line that names it and says why."""

    name: str
    reason: str


def _hash_architecture(classifier: Classifier) -> str:
    """The SHA-256 of the names and shapes of the model's tensors."""
    tensors = {key: it for key, it in classifier.model.state_dict().items() if isinstance(it, torch.Tensor)}
    return hashlib.sha256("\n".join(f"{key} {tuple(it.shape)}" for key, it in tensors.items()).encode()).hexdigest()


def _to_seen(fetched: Fetched, found: PictureResult | GradcamError) -> Seen | Failure:
    if isinstance(found, GradcamError):
        return Failure(fetched.item.name, describe_failure(fetched.item.name, found))
    (explanation,) = found.maps.values()
    values, top = explanation.maps[0, 0].float(), found.predictions[0]
    largest = float(values.max())
    height, width = found.picture.shape[:2]
    return Seen(
        fetched.item.name,
        fetched.sha256 or "",
        top.index,
        top.probability,
        int(explanation.classes[0, 0]),  # type: ignore[index]  # a class is explained
        float(explanation.probability() or 0),
        (height, width),
        found.region,
        (values / (largest or 1.0)).numpy().astype(np.float16),
    )


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
        As in `gradcam.explain_files`. Classes in a list are ignored: the top class is explained.
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
    >>> found = gradcam.evaluation.take_snapshot(gradcam.load_classifier(), ["photo.jpg", "other.png"])
    >>> [(it.name, it.map.shape) for it in found.entries]
    [('photo.jpg', (7, 7)), ('other.png', (7, 7))]
    """
    look = Look.of(classifier, method=method, score=score, reshape=reshape, batch_size=batch_size, workers=workers)
    items = list_inputs(inputs).items
    counter = Counter(progress, total=len(items))
    return collect(look, items, counter.step)


def collect(
    look: Look, items: Sequence[Item], step: Callable[[], None], wanted: Mapping[str, int] | None = None
) -> Snapshot:
    """All that is seen in these pictures, as `Look.at` sees it. `step`: called after each."""
    pictures, failures = [], {}
    for found in look.at(items, wanted):
        step()
        if isinstance(found, Failure):
            failures[found.name] = found.reason
        else:
            pictures.append(found)
    return Snapshot(look.origin, tuple(pictures), failures)
