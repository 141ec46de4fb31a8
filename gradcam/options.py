"""Define the options of an explanation and their choices, and check the values of arguments.

This module does not import torch, so that the command line can print help and check options before torch is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any, TypedDict, TypeVar

from gradcam.errors import GradcamError, join_names, shorten

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

EVIDENCE = ("positive", "negative", "signed")
SMOOTHINGS = ("none", "eigen")
INTERPOLATIONS = ("bicubic", "bilinear", "nearest")

# The kinds of class scores that can be explained: see `gradcam.targets.ClassTarget`.
SCORES = ("logit", "probability", "contrast")

# Maps each value of the option `precision` to the PyTorch dtype in which the model computes.
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# The layouts of a layer's output, each with its axes: N images, C or D channels, and T tokens.
LAYOUTS = {"channels first": "(N,C,h,w)", "channels last": "(N,h,w,C)", "tokens": "(N,T,D)", "tokens first": "(T,N,D)"}

# The functions that convert logits to probabilities. "auto" is sigmoid for a single logit, and otherwise softmax.
# "none" and "applied" leave the model's outputs unchanged. "none" is for regression values, and for outputs that are
# already the probabilities of several classes. "applied" is for an output that is already a single probability.
ACTIVATIONS = ("auto", "softmax", "sigmoid", "none", "applied")

# Maps each kind of test-time augmentation to its views. A view is a pair: a factor for all pixel values, and True if
# the image is mirrored. The first view is the image itself.
AUGMENTATIONS: dict[str, tuple[tuple[float, bool], ...]] = {
    "none": ((1.0, False),),
    "flip": ((1.0, False), (1.0, True)),
    "flip-scale": tuple((factor, mirrored) for mirrored in (False, True) for factor in (1.0, 0.9, 1.1)),
}

# The tasks of models. The option `task` can also be "auto", which detects the task.
TASKS = ("classification", "regression", "detection", "segmentation", "matching", "captioning", "pose")

# The upper limits of options. More threads would hang the machine. PyTorch's generators accept no larger seeds.
MAX_WORKERS, MAX_BATCH_SIZE, MAX_COUNT, MAX_SEED = 1024, 2**16, 10**9, 2**63 - 1
MAX_MAGNITUDE = 10**6  # The limit for sides and coordinates in pixels, and for means and standard deviations.

EDGES = ("left", "top", "right", "bottom")  # The edges of a box.
AXES = ("x", "y")  # The coordinates of a keypoint.

# An edit blurs a part of an image, or fills the part with the mean colour or black. `EDIT_FORM` shows how users write
# an edit.
EDITS = ("blur", "mean", "erase")
EDIT_SHAPES = "KIND:RADIUS:X,Y+X,Y... (a brush stroke) or KIND:LEFT,TOP,RIGHT,BOTTOM (a window)"
EDIT_FORM = f"{EDIT_SHAPES}, in pixels; KIND is blur, mean (fill with the mean colour) or erase (fill with black)"

# `FIT_KINDS` are the parts of an image that can be explained: the centre crop of the model's preprocessing, the whole
# image, or tiles. `PREDICTIONS` are the inputs for predictions: the model's default crop ("own"), or the explained part
# ("seen").
FIT_KINDS = ("crop", "whole", "tiles")
PREDICTIONS = ("own", "seen")

# A layer's channels can be drawn in two orders. The colours of a channel are scaled to the maximum of the channel, or
# to the maximum of the layer.
CHANNEL_ORDERS = ("strongest", "index")
CHANNEL_SCALES = ("channel", "layer")

# The name of an environment variable that limits the pixels of an image. The option `--max-pixels` sets the variable.
# If the variable is not set, the memory for an image is limited instead.
MAX_PIXELS = "GRADCAM_MAX_PIXELS"

# `gradcam batch` can write these kinds of files for each image.
OUTPUT_KINDS = {
    "overlay": "the heatmap over the image",
    "heatmap": "the heatmap alone",
    "map": "the method's raw values, float32 (h,w), as .npy",
    "panel": "methods, layers and classes side by side",
    "mask": "the heatmap's regions above --box-threshold, as .png with the values 0 and 255",
    "boxes": "the boxes around these regions, in the record and on the overlay",
}
FORMATS = ("jpg", "png", "webp")

# `gradcam report` can write these formats. All except html export boxes.
REPORT_FORMATS = ("html", "coco", "yolo", "labelstudio")

# A box is drawn around the largest region of a heatmap, or around every region. In a region, the heatmap reaches
# `BOX_THRESHOLD` times its maximum. `scripts/bench --only boxes` measures the best threshold on the sample photographs.
BOX_METHODS = ("largest", "components")
BOX_THRESHOLD = 0.3
# These options of `gradcam.overlay` are also options of the command line and of panels, and are stored in run.json.
LOOK_OPTIONS = ("alpha", "colormap", "base", "blend")
# How the image under a heatmap is drawn (`base`), and the default options for each base. docs/benchmarks.md has the
# measurements.
BASES: dict[str, dict[str, Any]] = {
    "gray": {"alpha": 0.8, "colormap": "inferno", "blend": "grow"},
    "color": {"alpha": 0.5, "colormap": "turbo", "blend": "fade"},
}
# How the opacity depends on the value of the heatmap.
BLENDS = {
    "grow": "the opacity rises with the heatmap's value",
    "fade": "the opacity rises faster, reaches --alpha at half of the heatmap's maximum, and then stays the same",
    "uniform": "the opacity is the same everywhere",
}

# The devices on which `gradcam batch` can decode, resize, draw and encode images. "device" is experimental, so "auto"
# means "cpu".
PIXEL_DEVICES = ("auto", "cpu", "device")


Progress = Callable[[int, int], None]  # called with the number of finished passes and the total number of passes


class ExplainOptions(TypedDict, total=False):
    """The options of all explanations, documented as keyword arguments of `gradcam.explain`.

    A new option must be added here, to `DEFAULTS`, to the options of the command line, and to the docs.
    """

    join: str | None
    evidence: str
    augmentation: str
    smoothing: str
    interpolation: str
    reshape: Any
    memory_budget: int | None
    progress: Progress | None


DEFAULTS: ExplainOptions = {
    "join": None, "evidence": "positive", "augmentation": "none", "smoothing": "none",
    "interpolation": "bicubic", "reshape": None, "memory_budget": None, "progress": None,
}  # fmt: skip


def fill_options(options: ExplainOptions, function: str) -> ExplainOptions:
    """Check the given options, and return them together with the defaults of all other options.

    Raises `TypeError` for an unknown name; the message names `function`, the public function that was called. Raises
    `GradcamError` for a value that is invalid for every model.
    """
    if not options:
        return DEFAULTS.copy()
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    filled = DEFAULTS | options
    check_choice(filled["augmentation"], "augmentation", AUGMENTATIONS)
    check_choice(filled["interpolation"], "interpolation", INTERPOLATIONS)
    if filled["memory_budget"] is not None:
        check_count(filled["memory_budget"], "memory_budget", "a number of bytes, 1 or more.")
    check_progress(filled["progress"])
    return filled


ErrorType = type[GradcamError]


def argument_error(value: object, name: str, expected: str, error: ErrorType = GradcamError) -> GradcamError:
    """Return the error for an invalid value of the argument `name`."""
    return error(f"{name} is {shorten(value)}, expected {expected}")


def check_count(
    value: Any,
    name: str,
    expected: str = "a whole number, 1 or more.",
    *,
    least: int = 1,
    most: float = math.inf,
    error: ErrorType = GradcamError,
) -> int:
    """Return the value if it is an integer from `least` to `most`. Otherwise raise `error` with the text `expected`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise argument_error(value, name, expected, error)
    return value


def check_number(
    value: Any, name: str, expected: str, *, least: float = 0, most: float = math.inf, error: ErrorType = GradcamError
) -> float:
    """Return the value if it is a number from `least` to `most`. Otherwise raise `error` with the text `expected`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise argument_error(value, name, expected, error)
    return float(value)


def check_boxes(threshold: Any, method: Any = "largest") -> None:
    """Raise `GradcamError` unless the threshold and the method are valid for `images.regions.find_boxes`."""
    expected = "a share of the heatmap's maximum, above 0 and at most 1, such as 0.3."
    check_number(threshold, "The threshold of boxes", expected, least=math.ulp(0), most=1)
    check_choice(method, "The method of boxes", BOX_METHODS)


def check_progress(value: Any) -> None:
    """Raise `GradcamError` if the value cannot be called to report progress."""
    if value is not None and not callable(value):
        raise argument_error(value, "progress", "a function of two numbers: passes done, passes in total.")


def check_choice(value: Any, name: str, choices: Iterable[str], error: ErrorType = GradcamError) -> str:
    """Return the value if it is one of the choices. Otherwise raise `error`, which lists the choices."""
    if not isinstance(value, str) or value not in choices:
        raise argument_error(value, name, f"one of {join_names(choices)}.", error)
    return value


def import_function(function: str | Callable[..., Any], package: str) -> Callable[..., Any]:
    """Return the function. If `function` is a string "module:name", import the function from the package."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    full_name = f"{package}.{module}"
    return getattr(sys.modules.get(full_name) or importlib.import_module(full_name), name)


def count_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, given its CPU affinity and the quotas of its control groups.

    The result is at least 1. A fraction of a core counts as one core. `root` is the folder that contains `proc` and
    `sys`.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # This function exists only on Linux.
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _list_quotas(root))]))


def _list_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota of each control group of this process, as a number of cores."""
    mounts = root / "sys/fs/cgroup"
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Linux has two versions of control groups, and a machine may use both. In `proc/self/cgroup`, lines of version
        # 1 name controllers, and lines of version 2 do not.
        files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
        mount_points = (mounts / controllers, mounts / ("cpu" if controllers else "unified"))
        # The quotas of parent groups apply as well. In a container, the path of the group may exist only on the host.
        # The quota is then in the files at the mount point.
        group_path = PurePosixPath(path.lstrip("/"))
        names = [] if ".." in group_path.parts else [group_path, *group_path.parents]
        for folder in (mount / name for mount in mount_points for name in dict.fromkeys([*names, PurePosixPath()])):
            with contextlib.suppress(ValueError, ZeroDivisionError, OSError):  # The file may be missing, or hold "max".
                quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())
                if quota > 0:  # A quota of -1 means no limit.
                    yield quota / period


def accept_old_parameters(function: F) -> F:
    """Return a wrapper that also accepts the function's old parameter names as keywords."""
    from gradcam.renames import find_renamed, warn_of_old_name

    names = find_renamed("parameter", function.__qualname__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for old in names.keys() & kwargs.keys():
            new = names[old].new
            if new in kwargs:
                raise TypeError(f"{function.__name__}() got both {new}= and its old name {old}=: leave {old}= out.")
            warn_of_old_name(f"{function.__name__}({old}=...)", f"{new}=", names[old])
            kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def keep_old_names(cls: C) -> C:
    """Add old attributes and methods to a class as properties, and let its methods accept old parameter names."""
    from gradcam.renames import find_renamed, read_old_attribute

    for old, row in find_renamed("attribute", cls.__qualname__).items():
        read = functools.partial(read_old_attribute, name=old, level=3)
        setattr(cls, old, property(read, doc=f"Deprecated: use `{row.new}`."))
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType) and find_renamed("parameter", value.__qualname__):
            setattr(cls, name, accept_old_parameters(value))
    return cls
