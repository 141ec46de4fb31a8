"""Compare the maps of twenty boxes per image with the detector alone, and with another library's recipe."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from benchmark.cases import SEED
from benchmark.contenders import BARE, Call
from benchmark.measuring import Settings, keep_freed_memory, report_progress, synchronise, take_turns, time_call
from benchmark.tables import Table, format_spread

SIZE, BOXES = 400, 20
# For each model, the names of the classifier's last layer and of the option that limits the number of boxes.
DETECTORS = {
    "fasterrcnn_resnet50_fpn": ("roi_heads.box_predictor.cls_score", "box_detections_per_img"),
    "retinanet_resnet50_fpn": ("head.classification_head.cls_logits", "detections_per_img"),
}
INPUT_SIDES = (SIZE, 800)  # The model resizes images to these sides in pixels. 800 is the default.
OURS = f"gradcam, {BOXES} boxes per image"
EIGEN_CAM = "pytorch-grad-cam EigenCAM, one map per image"
ABLATION_CAM = "pytorch-grad-cam Ablation-CAM, one map per image"
ABLATED_SHARE = 0.01  # The timed run ablates this share of the channels.


def compare_detection(settings: Settings) -> Iterator[Table]:
    """Time the explanation of all boxes of images with a side of 400 pixels."""
    keep_freed_memory()
    for device in settings.devices:
        yield tabulate_detection(device, settings)


def tabulate_detection(device: str, settings: Settings) -> Table:
    rows, raw = [], []
    for name in DETECTORS:
        for side in INPUT_SIDES:
            for batch in settings.rounds:
                report_progress("detection", device, name, f"{side} px", f"batch {batch}")
                seconds = time_detector(name, side, batch, device, settings)
                cells = [format_spread(np.divide(seconds[OURS], seconds[BARE]))]
                absent = "not measured" if "pytorch-grad-cam" in settings.missing else "-"  # A dash means no recipe.
                peers = (seconds.get(peer) for peer in (EIGEN_CAM, ABLATION_CAM))
                cells += [
                    absent if peer_seconds is None else format_peer(peer_seconds, seconds[BARE])
                    for peer_seconds in peers
                ]
                bare = f"{1000 * float(np.median(seconds[BARE])):.0f} ms"
                rows.append([f"{name}, {side} px", str(batch), bare, *cells])
                raw.append({"device": device, "network": name, "side": side, "batch": batch, "seconds": seconds})
    notes = [
        f"Multiples of the detector alone in the same round, on images of {SIZE} px. The detector resizes them to the side "
        f"in the first column. The classifier's last layer is scaled so that scores differ; each image has {BOXES} boxes.",
        "gradcam returns a map for each box. pytorch-grad-cam's tutorial for Faster R-CNN returns one map per image. "
        "EigenCAM ignores the boxes. Ablation-CAM explains the sum of the scores of all boxes: its time is measured once, "
        f"with {100 * ABLATED_SHARE:.0f} % of one image's channels, and multiplied.",
    ]
    header = ["detector", "batch", BARE, OURS, EIGEN_CAM, ABLATION_CAM]
    return Table(f"detection {device}", f"Detector boxes ({device})", header, rows, notes, raw)


def format_peer(seconds: list[float], bare: list[float]) -> str:
    return format_spread(np.divide(seconds, bare)) if len(seconds) > 1 else f"{seconds[0] / float(np.median(bare)):.0f}"


def time_detector(name: str, side: int, batch: int, device: str, settings: Settings) -> dict[str, list[float]]:
    import gradcam

    model, pictures = build_detector(name, side, batch, device)

    def run_bare() -> Any:
        with torch.no_grad():
            return model(pictures)

    def explain() -> object:
        return gradcam.explain(model, pictures, target=gradcam.targets.Box(all))

    calls: dict[str, Call] = {BARE: run_bare, OURS: explain}
    has_peer = "pytorch-grad-cam" not in settings.missing and name.startswith("fasterrcnn")
    detections = run_bare()
    if has_peer:
        calls[EIGEN_CAM] = attach_peer("EigenCAM", model, pictures, detections)
    timed = {key: time_on(device, call) for key, call in calls.items()}
    for measure in timed.values():
        measure()
    seconds = take_turns(timed, settings.rounds[batch])
    if has_peer and side == SIZE:
        ablate = attach_peer("AblationCAM", model, pictures[:1], detections[:1])
        seconds[ABLATION_CAM] = [time_on(device, ablate)() * batch / ABLATED_SHARE]
    return seconds


def time_on(device: str, call: Call) -> Callable[[], float]:
    def run() -> None:
        call()
        synchronise(device)

    return lambda: time_call(run)


def build_detector(name: str, side: int, batch: int, device: str) -> tuple[nn.Module, list[Tensor]]:
    """Return the model and random images. In each image, the model detects the maximum number of boxes."""
    classifier, limit_option = DETECTORS[name]
    torch.manual_seed(SEED)
    build = torchvision.models.get_model_builder(name)
    model = build(weights=None, weights_backbone=None, min_size=side, **{limit_option: BOXES}).eval().to(device)
    pictures = [torch.rand(3, SIZE, SIZE, device=device) for _ in range(batch)]
    last, outputs = model.get_submodule(classifier), []
    # The initial weights give scores of nearly zero, so replace the weights.
    for module in model.get_submodule(classifier.rpartition(".")[0]).modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    with last.register_forward_hook(lambda module, args, output: outputs.append(output)), torch.no_grad():
        model(pictures)
        deviation = torch.cat([(output - spread_bias(last, output)).flatten() for output in outputs]).std()
        last.weight.div_(deviation)
        detections = model(pictures)
    if {len(boxes["scores"]) for boxes in detections} != {BOXES}:
        raise RuntimeError(
            f"{name} finds {[len(boxes['scores']) for boxes in detections]} boxes, expected {BOXES} in each image"
        )
    return model, pictures


def spread_bias(layer: Any, output: Tensor) -> Tensor:
    return layer.bias.reshape(-1, *[1] * (output.ndim - 2))


def attach_peer(method: str, model: nn.Module, pictures: list[Tensor], detections: list[dict[str, Tensor]]) -> Call:
    """Return the recipe of pytorch-grad-cam's tutorial on detection. Ablation-CAM ablates a share of the channels."""
    import pytorch_grad_cam
    from pytorch_grad_cam.ablation_layer import AblationLayerFasterRCNN
    from pytorch_grad_cam.utils.model_targets import FasterRCNNBoxScoreTarget
    from pytorch_grad_cam.utils.reshape_transforms import fasterrcnn_reshape_transform

    targets = [
        FasterRCNNBoxScoreTarget(image_detections["labels"], image_detections["boxes"].detach().cpu().numpy())
        for image_detections in detections
    ]
    ablation_options = {"ablation_layer": AblationLayerFasterRCNN(), "ratio_channels_to_ablate": ABLATED_SHARE}
    options = ablation_options if method == "AblationCAM" else {}
    images = torch.stack(pictures)

    def explain() -> object:
        cam_class = getattr(pytorch_grad_cam, method)
        with (
            cam_class(model, [model.backbone], reshape_transform=fasterrcnn_reshape_transform, **options) as cam,
            contextlib.redirect_stderr(io.StringIO()),  # Hide the progress bar.
        ):
            return cam(images, targets=targets)

    return explain
