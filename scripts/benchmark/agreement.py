"""How far our maps are those of the peers: what bears the same name, on the photographs that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.measuring import Settings, report_progress
from benchmark.quality import PICTURES
from benchmark.tables import Table, correlate

PEERS = ("pytorch-grad-cam", "torchcam", "captum")
SEVERAL = ("layer3", "layer4")
FEW = ("stem.0",)  # of 32 channels, for methods that take a pass for each of them, and behind an activation


@dataclass(frozen=True)
class Task:
    """What all are given: the images, each one's top class, and layers."""

    model: nn.Module
    images: Tensor
    classes: list[int]
    layers: tuple[str, ...]


Explain = Callable[[Task], Any]  # to one map for each image


def ours(task: Task, *, method: str = "gradcam", **options: Any) -> Tensor:
    import gradcam

    (layer,) = task.layers
    found = gradcam.explain(task.model, task.images, layer, method=method, target=task.classes, **options)
    return found.maps[:, 0]


def ours_at_the_pictures_size(task: Task, **options: Any) -> Tensor:
    import gradcam

    layers = list(task.layers)
    explained = gradcam.compare(
        task.model, task.images, layers=layers, methods=["gradcam"], target=task.classes, **options
    )
    return gradcam.fuse(explained).heatmaps[:, 0]


def ours_guided(task: Task) -> Tensor:
    import gradcam

    return gradcam.attributions.guided_backpropagation(task.model, task.images, target=task.classes).values[:, 0]


def pytorch_grad_cam(name: str, *, is_resized: bool = False, **options: Any) -> Explain:
    def explain(task: Task) -> Any:
        import pytorch_grad_cam
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        with getattr(pytorch_grad_cam, name)(task.model, list(map(task.model.get_submodule, task.layers))) as cam:
            if not is_resized:
                getattr(cam, "base_cam", cam).get_target_width_height = lambda images: None
            # Finer-CAM takes its own targets, of each image's top class.
            targets = None if name == "FinerCAM" else [ClassifierOutputTarget(index) for index in task.classes]
            return cam(task.images, targets=targets, **options)

    return explain


def pytorch_grad_cam_guided(task: Task) -> list[Tensor]:
    from pytorch_grad_cam import GuidedBackpropReLUModel

    guided = GuidedBackpropReLUModel(model=task.model, device=task.images.device)
    pairs = zip(task.images.split(1), task.classes)
    return [torch.as_tensor(guided(image, target_category=index)).movedim(-1, 0) for image, index in pairs]


def torchcam(name: str) -> Explain:
    def explain(task: Task) -> Any:
        import torchcam.methods

        with getattr(torchcam.methods, name)(task.model, *task.layers) as cam:
            return cam(task.classes, task.model(task.images))[0].detach()

    return explain


def captum(task: Task) -> Tensor:
    from captum.attr import LayerGradCam

    cam = LayerGradCam(task.model, task.model.get_submodule(*task.layers))
    return cam.attribute(task.images, target=torch.tensor(task.classes)).detach().relu()


def captum_guided(task: Task) -> Tensor:
    from captum.attr import GuidedBackprop

    return GuidedBackprop(task.model).attribute(task.images.clone().requires_grad_(), target=torch.tensor(task.classes))


@dataclass(frozen=True)
class Row:
    """What is ours, and what each peer has. `layers`: the method's default where it is None."""

    ours: Explain
    theirs: Mapping[str, Explain]
    layers: tuple[str, ...] | None = None


def same(method: str, *names: str, layers: tuple[str, ...] | None = None) -> Row:
    """A method and its class at pytorch-grad-cam, and perhaps at torchcam."""
    theirs = [pytorch_grad_cam(names[0]), *map(torchcam, names[1:])]
    return Row(partial(ours, method=method), dict(zip(PEERS, theirs)), layers)


ROWS = {
    "gradcam": Row(
        ours, {"pytorch-grad-cam": pytorch_grad_cam("GradCAM"), "torchcam": torchcam("GradCAM"), "captum": captum}
    ),
    "gradcam-pp": same("gradcam-pp", "GradCAMPlusPlus", "GradCAMpp"),
    "xgradcam": same("xgradcam", "XGradCAM", "XGradCAM"),
    "hirescam": same("hirescam", "HiResCAM"),
    "elementwise-gradcam": same("elementwise-gradcam", "GradCAMElementWise"),
    "layercam": same("layercam", "LayerCAM", "LayerCAM"),
    "finercam": same("finercam", "FinerCAM", "FinerCAM"),
    "shapleycam": same("shapleycam", "ShapleyCAM"),
    "eigencam": same("eigencam", "EigenCAM"),
    "eigengradcam": same("eigengradcam", "EigenGradCAM"),
    "kpcacam": same("kpcacam", "KPCA_CAM"),
    "fem": same("fem", "FEM"),
    "ablationcam": same("ablationcam", "AblationCAM", layers=FEW),
    "scorecam": same("scorecam", "ScoreCAM", "ScoreCAM", layers=FEW),
    'smoothing="eigen"': Row(
        partial(ours, smoothing="eigen"), {"pytorch-grad-cam": pytorch_grad_cam("GradCAM", eigen_smooth=True)}
    ),
    "gradcam, at image size": Row(
        ours_at_the_pictures_size, {"pytorch-grad-cam": pytorch_grad_cam("GradCAM", is_resized=True)}
    ),
    "two fused layers": Row(
        ours_at_the_pictures_size,
        {"pytorch-grad-cam": pytorch_grad_cam("GradCAM", is_resized=True)},
        layers=SEVERAL,
    ),
    'augmentation="flip-scale"': Row(
        partial(ours_at_the_pictures_size, augmentation="flip-scale"),
        {"pytorch-grad-cam": pytorch_grad_cam("GradCAM", is_resized=True, aug_smooth=True)},
    ),
    "guided backpropagation": Row(ours_guided, {"pytorch-grad-cam": pytorch_grad_cam_guided, "captum": captum_guided}),
}


def compare_agreement(settings: Settings) -> Iterator[Table]:
    """Maps of each library at the layer's own resolution, unless a row says otherwise, on the processor."""
    import gradcam

    classifier = gradcam.load_classifier(device="cpu")
    model = classifier.model.requires_grad_()  # theirs fail on a frozen one
    names = PICTURES.read_text(encoding="utf-8").split()
    images = classifier.batch([gradcam.read_image(PICTURES.parent / name) for name in names])
    classes = model(images).argmax(1).tolist()
    rows, raw = [], []
    for name, row in ROWS.items():
        report_progress("agreement", name)
        method = name if name in gradcam.METHODS else "gradcam"
        task = Task(model, images, classes, row.layers or (classifier.layer_for(method),))
        found = row.ours(task)
        cells = []
        for peer in PEERS:
            if peer in row.theirs and peer in settings.present:
                pairs = zip(found, row.theirs[peer](replace(task, images=task.images.clone())))
                correlations = [correlate(one, torch.as_tensor(other)) for one, other in pairs]
                raw.append({"what": name, "peer": peer, "correlations": correlations})
                low, high = f"{min(correlations):.3f}", f"{max(correlations):.3f}"
                cells.append(low if low == high else f"{low} to {high}")
            else:
                cells.append("not measured" if peer in row.theirs else "-")
        rows.append([name, " and ".join(task.layers), *cells])
    notes = [
        f"Correlation, lowest to highest, of the maps of {len(images)} photographs ({PICTURES.name}) for the top class.",
        f"{classifier.name}, each method at its default layer.",
    ]
    yield Table("agreement", "Agreement with other libraries", ["method", "layer", *PEERS], rows, notes, raw)
