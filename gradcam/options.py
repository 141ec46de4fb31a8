"""The options of an explanation, what there is to choose from, and how arguments are checked, in Python as in the shell.

No torch is imported here: the shell reads these before there is anything to compute.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any, TypedDict, TypeVar

from gradcam.errors import GradcamError, join_names, shorten
from gradcam.renames import Rename, find_renamed, warn_of_old_name

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

EVIDENCE = ("positive", "negative", "signed")
SMOOTHINGS = ("none", "eigen")

# Which number of a class is explained: see `gradcam.targets.ClassTarget`.
SCORES = ("logit", "probability", "contrast")

# What the model computes in, and what PyTorch calls it.
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# How a layer's output may lie: (N,C,h,w), (N,h,w,C), (N,T,D) and (T,N,D).
LAYOUTS = ("channels first", "channels last", "tokens", "tokens first")

# How logits become probabilities: together (softmax), each for itself (sigmoid), or not at all: "none" for probabilities and
# values, "applied" for a single probability. "auto" is softmax, or sigmoid for a single logit.
ACTIVATIONS = ("auto", "softmax", "sigmoid", "none", "applied")

# The views of an image that are explained together: what it is multiplied by, and whether it is mirrored. The first is
# the image.
AUGMENTATIONS: dict[str, tuple[tuple[float, bool], ...]] = {
    "none": ((1.0, False),),
    "flip": ((1.0, False), (1.0, True)),
    "flip-scale": tuple((factor, mirrored) for mirrored in (False, True) for factor in (1.0, 0.9, 1.1)),
}

# What models do with a picture; "auto" is read off the model.
TASKS = ("classification", "regression", "detection", "segmentation", "matching", "captioning", "pose")

# The most that options take. More threads than this hang the machine; larger seeds do not fit into PyTorch's generators.
MAX_WORKERS, MAX_BATCH_SIZE, MAX_COUNT, MAX_SEED = 1024, 2**16, 10**9, 2**63 - 1
MAX_MAGNITUDE = 10**6  # of sides and coordinates, in pixels, and of means and standard deviations

EDGES = ("left", "top", "right", "bottom")  # of a box
AXES = ("x", "y")  # of a keypoint

# What takes the place of a part of a picture: a strong blur, its mean colour, black; and how such an edit is written.
EDITS = ("blur", "mean", "erase")
EDIT_FORM = (
    "KIND:RADIUS:X,Y+X,Y... (a brush stroke) or KIND:LEFT,TOP,RIGHT,BOTTOM (a window), in pixels; KIND is blur, mean or "
    "erase"
)

# What of a picture the network is shown: its own preprocessing's centre, all of it, or windows over it; and by which of
# them it is classified.
FITS = ("crop", "whole", "tiles")
PREDICTIONS = ("own", "seen")

# Which channels of a layer come first, and what each one's largest value is measured by.
CHANNEL_ORDERS = ("strongest", "index")
CHANNEL_SCALES = ("channel", "layer")

# Of the environment: how many pixels a picture may have, whatever memory it takes to read; `--max-pixels` sets it.
MAX_PIXELS = "GRADCAM_MAX_PIXELS"

# What `gradcam batch` writes of a picture, and as what.
SAVED = {
    "overlay": "the heatmap over the image",
    "heatmap": "the heatmap alone",
    "map": "the method's raw values, float32 (h,w), as .npy",
    "panel": "methods, layers and classes side by side",
}
FORMATS = ("jpg", "png", "webp")

# Where `gradcam batch` decodes, resizes, draws and encodes. "device" is experimental, so "auto" means "cpu".
PIXELS = ("auto", "cpu", "device")


Progress = Callable[[int, int], None]  # called with the passes done, and the number of all


class ExplainOptions(TypedDict, total=False):
    """How something is explained, wherever that is done: all of these are keyword arguments of `gradcam.explain`. They
    are documented there. An option is added here, with its default below, to the shell's options, and to the docs."""

    join: str | None
    evidence: str
    augmentation: str
    smoothing: str
    reshape: Any
    memory_budget: int | None
    progress: Progress | None


DEFAULTS: ExplainOptions = {
    "join": None,
    "evidence": "positive",
    "augmentation": "none",
    "smoothing": "none",
    "reshape": None,
    "memory_budget": None,
    "progress": None,
}


def fill_options(given: ExplainOptions, function: str) -> ExplainOptions:
    """All options, those that were not given with their defaults. Raises `TypeError` as a call of `function` would, and
    `GradcamError` for what can be refused whatever is explained."""
    for name in given:
        if name not in DEFAULTS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    filled = DEFAULTS | given
    check_choice(filled["augmentation"], "augmentation", AUGMENTATIONS)
    if filled["memory_budget"] is not None:
        check_count(filled["memory_budget"], "memory_budget", "a number of bytes, 1 or more.")
    check_progress(filled["progress"])
    return filled


@dataclass(frozen=True)
class Fit:
    """One of `FITS`; `side`: of a window, in the picture's pixels, None for as many as the network takes."""

    kind: str
    side: int | None = None

    def __str__(self) -> str:
        return self.kind if self.side is None else f"{self.kind}:{self.side}"


def to_fit(given: Any) -> Fit:
    """ "crop", "whole", "tiles" or "tiles:512". Raises `GradcamError` for anything else."""
    kind, _, side = given.partition(":") if isinstance(given, str) else ("", "", "")
    if kind not in FITS or (side and (kind != "tiles" or not side.isdecimal() or not 1 <= int(side) <= MAX_MAGNITUDE)):
        raise GradcamError(
            f"fit is {shorten(given)}, expected {join_names(FITS)}, or 'tiles:512' for tiles of 512 image pixels."
        )
    return Fit(kind, int(side) if side else None)


def to_fit_word(text: str) -> str:
    """Return a fit as it is written. Raises `GradcamError` for anything else."""
    return str(to_fit(text))


Kind = type[GradcamError]


def refuse(value: object, name: str, expected: str, error: Kind = GradcamError) -> GradcamError:
    """The error for an argument of that name."""
    return error(f"{name} is {shorten(value)}, expected {expected}")


def check_count(
    value: Any,
    name: str,
    expected: str = "a whole number, 1 or more.",
    *,
    least: int = 1,
    most: float = math.inf,
    error: Kind = GradcamError,
) -> int:
    """A whole number in this range, ends included. Raises `error`, which ends with what was `expected`, otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refuse(value, name, expected, error)
    return value


def check_number(
    value: Any, name: str, expected: str, *, least: float = 0, most: float = math.inf, error: Kind = GradcamError
) -> float:
    """A finite number in this range, ends included. Raises `error`, which ends with what was `expected`, otherwise."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise refuse(value, name, expected, error)
    return float(value)


def check_progress(value: Any) -> None:
    """Raises `GradcamError` for what cannot be told of passes."""
    if value is not None and not callable(value):
        raise refuse(value, "progress", "a function of two numbers: passes done, passes in total.")


def check_choice(value: Any, name: str, known: Iterable[str], error: Kind = GradcamError) -> str:
    """One of the known words. Raises `error`, which lists them, for anything else."""
    if not isinstance(value, str) or value not in known:
        raise refuse(value, name, f"one of {join_names(known)}.", error)
    return value


# joblib and loky look at the mount's own quota alone, and psutil at none: the limit of a Slurm step, a systemd slice or a
# group around either lies in the process's own groups, which nothing but these lines follows.


def count_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use, by its CPU affinity and its control groups' quotas (part of a core counts as
    one); at least 1. `root`: where `proc` and `sys` are."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _list_quotas(root))]))


def _list_quotas(root: Path) -> Iterator[float]:
    """How many cores each control group that this process is in may use, where it has a limit."""
    mounts = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2, at times beside version 1
            places, files = (mounts, mounts / "unified"), ["cpu.max"]
        elif "cpu" in controllers.split(","):
            places, files = (mounts / controllers, mounts / "cpu"), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # A group may be limited by any that it is in. In a container the path may be the host's, of which only the mount
        # itself is there.
        inside = PurePosixPath(path.lstrip("/"))
        names = [] if ".." in inside.parts else [inside, *inside.parents]
        for folder in (mount / name for mount in places for name in dict.fromkeys([*names, PurePosixPath()])):
            with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", and what is not there
                quota, period = map(int, " ".join(_read_text(folder / file) for file in files).split())
                if quota > 0:  # -1 is no limit
                    yield quota / period


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def accept_old_parameters(function: F) -> F:
    """Let a function also take its old parameter names, as keywords."""
    names = find_renamed("parameter", function.__qualname__)
    if not names:
        raise LookupError(f"{function.__qualname__} has no renamed parameters: leave the decorator out")

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


def keep_old_names(kind: C) -> C:
    """Give a class its old attributes and methods as properties, and its methods their old parameters."""
    for row in find_renamed("attribute", kind.__qualname__).values():
        setattr(kind, row.old, _make_alias(kind.__name__, row))
    for name, value in list(vars(kind).items()):
        if isinstance(value, FunctionType) and find_renamed("parameter", value.__qualname__):
            setattr(kind, name, accept_old_parameters(value))
    return kind


def _make_alias(owner: str, row: Rename) -> property:
    def read(self: Any) -> Any:
        warn_of_old_name(f"{owner}.{row.old}", row.new, row)
        return getattr(self, row.new)

    return property(read, doc=f"Deprecated: use `{row.new}`.")


def load_late(function: str | Callable[..., Any], package: str) -> Callable[..., Any]:
    """Return a function, or import the one that is called "module:name" in a package."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{package}.{module}"), name)
    return found
