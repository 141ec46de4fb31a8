"""Load ultralytics' detectors, preprocess their images, and decode their outputs.

Users must install ultralytics (AGPL-3.0) themselves. Only the loading of a checkpoint imports ultralytics.
"""

from __future__ import annotations

import contextlib
import importlib
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
from torchvision.ops import batched_nms, box_convert

from gradcam.adapters.base import (
    MODEL,
    Candidates,
    Detections,
    DetectorAdapter,
    ModelRun,
    RecordingModel,
    to_candidates,
)
from gradcam.errors import ModelError
from gradcam.hooks.containers import Batch, list_tensors
from gradcam.hooks.hooks import Hooks

CACHED_ATTRIBUTES = ("shape", "anchors", "strides")  # A head caches these attributes for the last input size.
DEFAULT_SIZE = 640  # pixels: the usual training size
PADDING_VALUE = 114  # grey, on a scale from 0 to 255


class YoloDetector(DetectorAdapter):
    """An ultralytics `DetectionModel` (YOLO versions 3 to 26), which is the `model` of an `ultralytics.YOLO`.

    Masks and keypoints of the model are ignored. Detections are selected as in ultralytics' own predictions, by three
    limits. Scores must be above `threshold`. Two boxes of the same class have an intersection over union (IoU) of at
    most `max_overlap`. An image has at most `max_detections` boxes.
    """

    default_threshold = 0.25
    max_overlap = 0.7
    max_detections = 300

    @property
    def head(self) -> Any:
        """Return the last layer, which decodes boxes from the pyramid levels."""
        return self.model.model[-1]

    @property
    def own_layers(self) -> Sequence[str]:
        """Return the names of the pyramid levels that the head reads.

        The first level is the finest level. The first level affects all boxes, because the coarser levels are computed
        from the first level.
        """
        return [f"model.{index if index >= 0 else self.head.i + index}" for index in self.head.f]

    @property
    def own_labels(self) -> list[str]:
        names = self.model.names
        return [str(names[index]) for index in range(len(names))]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to run. Raise `ModelError` for a head that does not return upright boxes."""
        class_names = [base.__name__ for base in type(self.head).__mro__]
        if "Detect" not in class_names or "OBB" in class_names:
            head = f"{class_names[0]}, the head of this {type(self.model).__name__}, is not supported"
            advice = "expected a YOLO head with upright boxes. Pass a function of the model's output as the target."
            raise ModelError(f"{head}: {advice}")
        return _GraphKeepingModel(model, self.watched())

    def read(self, run: ModelRun, batch: Batch) -> list[Detections]:
        if not self.head.end2end:
            return [self._suppress(*scored_boxes) for scored_boxes in self._list_scored_boxes(run)]
        rows = list_tensors(run.last_output())[0]  # (N,M,6) or more: corners, score and label, by decreasing score
        detected = [image_rows[image_rows[:, 4] > self.threshold][: self.max_detections] for image_rows in rows]
        return [Detections(boxes[:, :4], boxes[:, 4], boxes[:, 5].detach().long()) for boxes in detected]

    def list_candidates(self, run: ModelRun, batch: Batch, label: int | None) -> list[Candidates]:
        return [to_candidates(boxes, scores, label) for boxes, scores in self._list_scored_boxes(run)]

    def _suppress(self, boxes: Tensor, class_scores: Tensor) -> Detections:
        scores, labels = class_scores.max(1)
        rows = (scores > self.threshold).nonzero()[:, 0]
        nms_indices = batched_nms(boxes[rows].detach(), scores[rows].detach(), labels[rows], self.max_overlap)
        rows = rows[nms_indices[: self.max_detections]]
        return Detections(boxes[rows], scores[rows], labels[rows])

    def _list_scored_boxes(self, run: ModelRun) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each image's boxes (M,4) and scores (M,C) before non-maximum suppression."""
        output, head = run.last_output(), self.head
        if head.end2end:
            return zip(*self._decode(output[-1]["one2one"]))
        rows = list_tensors(output)[0].mT  # (N,M,4+C) or more: centre, width and height, and scores
        return zip(box_convert(rows[..., :4], "cxcywh", "xyxy"), rows[..., 4 : 4 + head.nc])

    def _decode(self, output: Any) -> tuple[Tensor, Tensor]:
        """Decode boxes (N,M,4) and scores (N,M,C) from the output of one branch of the head.

        The output has logits and distances. Distances are from the centre of a cell to the sides of the cell's box,
        in units of cells.
        """
        head = self.head
        if isinstance(output, Mapping):
            levels, distances, logits = output["feats"], output["boxes"], output["scores"]
        else:  # Earlier versions return one tensor per pyramid level, with distances and logits.
            levels, joined = output, torch.cat([level.flatten(2) for level in output], 2)
            distances, logits = joined.split((joined.shape[1] - head.nc, head.nc), 1)
        points, strides = [], []
        for level, stride in zip(levels, head.stride.tolist()):
            dtype, device = level.dtype, level.device
            rows, columns = (torch.arange(cells, dtype=dtype, device=device) + 0.5 for cells in level.shape[2:])
            points.append(torch.cartesian_prod(rows, columns).flip(1))
            strides.append(rows.new_full((len(points[-1]), 1), stride))
        centres = torch.cat(points)
        to_top_left, to_bottom_right = head.dfl(distances).mT.chunk(2, -1)
        boxes = torch.cat([centres - to_top_left, centres + to_bottom_right], -1) * torch.cat(strides)
        return boxes, logits.sigmoid().mT


class _GraphKeepingModel(RecordingModel):
    """A wrapper that keeps the head connected to the graph of its inputs.

    Two causes can disconnect the head. Some versions of ultralytics detach the inputs of the branch that predicts the
    final boxes. Also, an earlier prediction may have cached tensors without a graph.
    """

    def forward(self, *args: Any, **kwargs: Any) -> ModelRun:
        model: Any = self._watched[MODEL]
        head = model.model[-1]
        with _without_cache(head), Hooks() as hooks, _SkipDetach() as mode:
            hooks.before_forward(head, mode.record_inputs)
            return super().forward(*args, **kwargs)


class _SkipDetach(TorchFunctionMode):
    """A mode in which `detach` has no effect on the recorded inputs of a module. Other threads are not affected."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: list[Tensor] = []

    def record_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs[:] = list_tensors((args, kwargs))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.detach and any(args[0] is tensor for tensor in self._inputs):
            return args[0]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_cache(head: nn.Module) -> Iterator[None]:
    """Make a head recompute its cached values, and restore the cache afterwards."""
    cached = {name: vars(head)[name] for name in CACHED_ATTRIBUTES if name in vars(head)}
    head.shape = None  # type: ignore[assignment]  # a plain attribute, not a module
    try:
        yield
    finally:
        for name in CACHED_ATTRIBUTES:
            vars(head).pop(name, None)
        vars(head).update(cached)


@dataclass(frozen=True)
class Letterbox:
    """Preprocessing of ultralytics: images are resized to fit a square, centred, and padded with grey.

    Parameters
    ----------
    size : int, default 640
        The length of each side in pixels, a multiple of 32.

    Examples
    --------
    >>> import numpy
    >>> from gradcam.adapters.yolo import Letterbox
    >>> letterbox = Letterbox(64)
    >>> letterbox(numpy.zeros((100, 200, 3), numpy.uint8)).shape, letterbox.window(100, 200)
    (torch.Size([3, 64, 64]), (16, 0, 32, 64))
    """

    size: int = DEFAULT_SIZE

    def __call__(self, image: NDArray[np.uint8]) -> Tensor:
        """Convert an RGB array (H,W,3) to a tensor (3,size,size) in [0,1]."""
        y0, x0, height, width = self.window(*image.shape[:2])
        canvas = torch.full((3, self.size, self.size), float(PADDING_VALUE), dtype=torch.float32, device="cpu")
        pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float()
        # As in ultralytics, there is no antialiasing, even if the image becomes smaller.
        resized = F.interpolate(pixels, (height, width), mode="bilinear", align_corners=False)
        canvas[:, y0 : y0 + height, x0 : x0 + width] = resized[0].round()
        return canvas / 255

    def region(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the image region that the network sees, which is the full image."""
        return 0, 0, height, width

    def window(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the position of an image of this size in the square: top, left, height and width."""
        scale = min(self.size / height, self.size / width)
        rows, columns = (max(1, round(length * scale)) for length in (height, width))
        return (self.size - rows) // 2, (self.size - columns) // 2, rows, columns


def load_yolo(path: str | Path) -> tuple[nn.Module, list[str]]:
    """Load an ultralytics checkpoint; return the network in evaluation mode and float32, and its class names.

    You must install ultralytics (AGPL-3.0) yourself. Load only files that you trust, because unpickling can run code.
    Raises `ModelError` if ultralytics is missing, or if the file is not an ultralytics network.
    """
    try:
        ultralytics: Any = importlib.import_module("ultralytics")
    except ImportError as error:
        advice = "pip install ultralytics, if its licence (AGPL-3.0) suits you."
        raise ModelError(f"yolo:{path} needs ultralytics, which is not installed ({error}): {advice}") from error
    if not Path(path).is_file():  # ultralytics would try to download a missing file.
        raise ModelError(f"There is no file {path}. Pass an ultralytics checkpoint, such as yolo:best.pt.")
    try:
        model = ultralytics.YOLO(str(path)).model
    except Exception as error:  # For other files, ultralytics raises errors of many types.
        raise ModelError(f"{path}: ultralytics cannot read it: {' '.join(str(error).split())}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path} is not a PyTorch model: use the checkpoint (.pt) that it was exported from.")
    return model.float().eval(), YoloDetector(model).own_labels
