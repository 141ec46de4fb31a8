"""Detectors of a user's own ultralytics, which is imported for nobody who does not ask for it: how they are read, loaded
and given pictures."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchvision.ops import batched_nms

from gradcam.errors import ModelError
from gradcam.families.base import Candidates, Detections, Detector, Seen, Watched
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import Batch, tensors

CACHED = ("shape", "anchors", "strides")  # what a head keeps of the last size that it met
PICTURE = 640  # pixels that networks are trained with, where nothing else is said
GREY = 114  # around the picture, of 255

# By model, what a person set, for all that reads it.
_thresholds: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


class YoloDetector(Detector):
    """A `DetectionModel` of ultralytics, such as the `.model` of a YOLO: versions 3 to 26, with or without masks or
    keypoints beside the boxes.

    `threshold`, `overlap`, `most`: the score above which a box counts, the intersection over union up to which two of
    one class stand side by side, and how many there are at most; as in its own predictions.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        super().__init__(model, prefix)
        self.threshold, self.overlap, self.most = _thresholds.get(model, 0.25), 0.7, 300

    @property
    def head(self) -> Any:
        """The last layer, which makes boxes of the levels of the pyramid."""
        layers: Any = self.model.model
        return layers[-1]

    @property
    def own_layers(self) -> Sequence[str]:
        """What the head reads: the levels of the pyramid, to be added up."""
        return [f"model.{index if index >= 0 else self.head.i + index}" for index in self.head.f]

    @property
    def own_layer(self) -> str:
        """The finest level. The others are made of it, so that it reaches boxes of all of them."""
        return self.own_layers[0]

    @property
    def own_labels(self) -> list[str]:
        names: Any = self.model.names
        return [str(names[index]) for index in range(len(names))]

    def set_threshold(self, threshold: float) -> None:
        self.threshold = _thresholds[self.model] = threshold

    def wrap(self, model: nn.Module) -> nn.Module:
        """Raises `ModelError` for a head whose boxes are read in another way."""
        kinds = [kind.__name__ for kind in type(self.head).__mro__]
        if "Detect" not in kinds or "OBB" in kinds:
            raise ModelError(
                f"{kinds[0]}, the head of this {type(self.model).__name__}, is not supported: expected a YOLO head with "
                "upright boxes. Pass a function of the model's output as the target."
            )
        return _Connected(model, self.watched(), self.head)

    def read(self, seen: Seen, batch: Batch) -> list[Detections]:
        if not self.head.end2end:
            return [self._suppress(*each) for each in self._list_all(seen)]
        rows = tensors(seen.last())[0]  # (N,M,6) or more: corners, score and label, the surest first
        sure = [own[own[:, 4] > self.threshold][: self.most] for own in rows]
        return [Detections(own[:, :4], own[:, 4], own[:, 5].detach().long()) for own in sure]

    def weigh(self, seen: Seen, batch: Batch, label: int | None) -> list[Candidates]:
        found = []
        for boxes, rated in self._list_all(seen):
            scores, labels = rated.max(1)
            if label is not None:
                scores, labels = rated[:, label], torch.full_like(labels, label)
            found.append(Candidates(boxes, scores, labels))
        return found

    def _suppress(self, boxes: Tensor, rated: Tensor) -> Detections:
        scores, labels = rated.max(1)
        rows = (scores > self.threshold).nonzero()[:, 0]
        kept = batched_nms(boxes[rows].detach(), scores[rows].detach(), labels[rows], self.overlap)
        rows = rows[kept[: self.most]]
        return Detections(boxes[rows], scores[rows], labels[rows])

    def _list_all(self, seen: Seen) -> Iterator[tuple[Tensor, Tensor]]:
        """For each picture all boxes (M,4) that the head has, and their scores (M,C)."""
        output, head = seen.last(), self.head
        if head.end2end:
            return zip(*self._decode(output[-1]["one2one"]))
        rows = tensors(output)[0].mT  # (N,M,4+C) or more: centre and sides, and scores
        centres, sides = rows[..., :2], rows[..., 2:4]
        corners = torch.cat([centres - sides / 2, centres + sides / 2], -1)
        return zip(corners, rows[..., 4 : 4 + head.nc])

    def _decode(self, raw: Any) -> tuple[Tensor, Tensor]:
        """Boxes (N,M,4) and scores (N,M,C) of what a branch of the head gave: how far each side is from the middle of its
        cell, in cells, and logits."""
        head = self.head
        if isinstance(raw, Mapping):
            levels, sides, logits = raw["feats"], raw["boxes"], raw["scores"]
        else:  # of earlier versions: both at each level
            levels, joined = raw, torch.cat([level.flatten(2) for level in raw], 2)
            sides, logits = joined.split((joined.shape[1] - head.nc, head.nc), 1)
        points, strides = [], []
        for level, stride in zip(levels, head.stride.tolist()):
            down, across = (
                torch.arange(cells, device=level.device, dtype=level.dtype) + 0.5 for cells in level.shape[2:]
            )
            points.append(torch.cartesian_prod(down, across).flip(1))
            strides.append(down.new_full((len(points[-1]), 1), stride))
        middles = torch.cat(points)
        before, behind = head.dfl(sides).mT.chunk(2, -1)
        return torch.cat([middles - before, middles + behind], -1) * torch.cat(strides), logits.sigmoid().mT


class _Connected(Watched):
    """A model whose head is connected with what it reads. Some versions detach that for the branch whose boxes they give,
    and what a head caches has no gradient where predictions made it."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], head: nn.Module) -> None:
        super().__init__(model, modules)
        self._heads = [head]  # in a list, which registers nothing

    def forward(self, *args: Any, **kwargs: Any) -> Seen:
        (head,) = self._heads
        with _without_cache(head), _Attached(head):
            return super().forward(*args, **kwargs)


class _Attached(TorchFunctionMode):
    """As long as it is entered, `detach` gives what came to a module as it is, in this thread."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._hooks, self._given = module, Hooks(), list[Tensor]()

    def __enter__(self) -> _Attached:
        self._hooks.__enter__().before_forward(self._module, self._keep)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__()
        self._given.clear()

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given[:] = tensors((args, kwargs))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.detach and any(args[0] is each for each in self._given):
            return args[0]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_cache(head: nn.Module) -> Iterator[None]:
    """Let a head make what it caches anew, and give it back what it had."""
    had = {name: vars(head)[name] for name in CACHED if name in vars(head)}
    head.shape = None  # type: ignore[assignment]  # no module and no tensor
    try:
        yield
    finally:
        for name in CACHED:
            vars(head).pop(name, None)
        vars(head).update(had)


@dataclass(frozen=True)
class Letterbox:
    """Pictures as these networks take them: resized to fit a square of `size` pixels, whatever their form, in the middle
    of it, with grey around.

    Parameters
    ----------
    size : int, default 640
        Pixels of each side, a multiple of 32.

    Examples
    --------
    >>> import numpy
    >>> from gradcam.families.yolo import Letterbox
    >>> letterbox = Letterbox(64)
    >>> letterbox(numpy.zeros((100, 200, 3), numpy.uint8)).shape, letterbox.window(100, 200)
    (torch.Size([3, 64, 64]), (16, 0, 32, 64))
    """

    size: int = PICTURE

    def __call__(self, image: NDArray[np.uint8]) -> Tensor:
        """An RGB array (H,W,3) as a tensor (3,size,size) in [0,1]."""
        top, left, height, width = self.window(*image.shape[:2])
        canvas = torch.full((3, self.size, self.size), float(GREY), dtype=torch.float32, device="cpu")
        picture = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float()
        # As the networks' own: between the nearest pixels, also where many become one.
        resized = F.interpolate(picture, (height, width), mode="bilinear", align_corners=False)
        canvas[:, top : top + height, left : left + width] = resized[0].round()
        return canvas / 255

    def region(self, height: int, width: int) -> tuple[int, int, int, int]:
        """All of a picture of that size."""
        return 0, 0, height, width

    def window(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Where a picture of that size lies on the square: top, left, height and width."""
        scale = min(self.size / height, self.size / width)
        rows, columns = (max(1, round(length * scale)) for length in (height, width))
        return (self.size - rows) // 2, (self.size - columns) // 2, rows, columns


def load_yolo(path: str | Path) -> tuple[nn.Module, list[str]]:
    """The network of a checkpoint of ultralytics, in evaluation mode and in float32, and its labels. ultralytics is the
    user's own (AGPL-3.0), and reads the file as a pickle, which may run code: take files that you trust. Raises
    `ModelError` where it is not installed, and for a file that is no network of its."""
    try:
        ultralytics: Any = importlib.import_module("ultralytics")
    except ImportError as error:
        raise ModelError(
            f"yolo:{path} needs ultralytics, which is not installed ({error}): pip install ultralytics, if its licence "
            "(AGPL-3.0) suits you."
        ) from error
    if not Path(path).is_file():  # ultralytics would look for one of that name on the web
        raise ModelError(f"There is no file {path}. Pass an ultralytics checkpoint, such as yolo:best.pt.")
    try:
        model = ultralytics.YOLO(str(path)).model
    except Exception as error:  # whatever it raises for files that are none of its
        raise ModelError(f"{path}: ultralytics cannot read it: {' '.join(str(error).split())}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path} is not a PyTorch model: use the checkpoint (.pt) that it was exported from.")
    return model.float().eval(), YoloDetector(model).own_labels
