"""Compare our maps with the maps of other libraries, for methods of the same name, on the photographs in assets/."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.cases import ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.quality import PICTURES
from benchmark.tables import Table, correlate

PEERS = ("pytorch-grad-cam", "torchcam", "captum")
IN_PLACE_SCENES, IN_PLACE_SEED = 24, 51
FUSED_LAYERS = ("layer3", "layer4")
SHALLOW_LAYERS = (
    "stem.0",
)  # Methods that run one pass per channel use this layer, because the layer has only 32 channels.


@dataclass(frozen=True)
class Task:
    """The input of every library: the images, the top class of each, and the layers."""

    model: nn.Module
    images: Tensor
    classes: list[int]
    layers: tuple[str, ...]


Explain = Callable[[Task], Any]  # Returns one map per image.


def explain_with_gradcam(task: Task, *, method: str = "gradcam", **options: Any) -> Tensor:
    import gradcam

    (layer,) = task.layers
    explanation = gradcam.explain(task.model, task.images, layer, method=method, target=task.classes, **options)
    return explanation.maps[:, 0]


def explain_at_image_size(task: Task, **options: Any) -> Tensor:
    import gradcam

    layers = list(task.layers)
    explained = gradcam.compare(
        task.model, task.images, layers=layers, methods=["gradcam"], target=task.classes, **options
    )
    return gradcam.fuse(explained).heatmaps[:, 0]


def run_guided_backpropagation(task: Task) -> Tensor:
    import gradcam

    return gradcam.attributions.guided_backpropagation(task.model, task.images, target=task.classes).values[:, 0]


def adapt_pytorch_grad_cam(name: str, *, is_resized: bool = False, **options: Any) -> Explain:
    def explain(task: Task) -> Any:
        import pytorch_grad_cam
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        with getattr(pytorch_grad_cam, name)(task.model, list(map(task.model.get_submodule, task.layers))) as cam:
            if not is_resized:
                getattr(cam, "base_cam", cam).get_target_width_height = lambda images: None
            # Finer-CAM chooses targets for the top class of each image by itself.
            targets = None if name == "FinerCAM" else [ClassifierOutputTarget(index) for index in task.classes]
            return cam(task.images, targets=targets, **options)

    return explain


def run_pytorch_grad_cam_guided(task: Task) -> list[Tensor]:
    from pytorch_grad_cam import GuidedBackpropReLUModel

    guided = GuidedBackpropReLUModel(model=task.model, device=task.images.device)
    pairs = zip(task.images.split(1), task.classes)
    return [torch.as_tensor(guided(image, target_category=index)).movedim(-1, 0) for image, index in pairs]


def adapt_torchcam(name: str) -> Explain:
    def explain(task: Task) -> Any:
        import torchcam.methods

        with getattr(torchcam.methods, name)(task.model, *task.layers) as cam:
            return cam(task.classes, task.model(task.images))[0].detach()

    return explain


def explain_with_captum(task: Task) -> Tensor:
    from captum.attr import LayerGradCam

    cam = LayerGradCam(task.model, task.model.get_submodule(*task.layers))
    return cam.attribute(task.images, target=torch.tensor(task.classes)).detach().relu()


def run_captum_guided(task: Task) -> Tensor:
    from captum.attr import GuidedBackprop

    return GuidedBackprop(task.model).attribute(task.images.clone().requires_grad_(), target=torch.tensor(task.classes))


@dataclass(frozen=True)
class Row:
    """A method: our function, and the functions of other libraries. If `layers` is None, the default layer is used."""

    explain: Explain
    peers: Mapping[str, Explain]
    layers: tuple[str, ...] | None = None


def make_row(method: str, *names: str, layers: tuple[str, ...] | None = None) -> Row:
    """Return the row of a method. `names` are its class in pytorch-grad-cam and, optionally, its class in torchcam."""
    peers = [adapt_pytorch_grad_cam(names[0]), *map(adapt_torchcam, names[1:])]
    return Row(partial(explain_with_gradcam, method=method), dict(zip(PEERS, peers)), layers)


ROWS = {
    "gradcam": Row(
        explain_with_gradcam,
        {
            "pytorch-grad-cam": adapt_pytorch_grad_cam("GradCAM"),
            "torchcam": adapt_torchcam("GradCAM"),
            "captum": explain_with_captum,
        },
    ),
    "gradcam-pp": make_row("gradcam-pp", "GradCAMPlusPlus", "GradCAMpp"),
    "xgradcam": make_row("xgradcam", "XGradCAM", "XGradCAM"),
    "hirescam": make_row("hirescam", "HiResCAM"),
    "elementwise-gradcam": make_row("elementwise-gradcam", "GradCAMElementWise"),
    "layercam": make_row("layercam", "LayerCAM", "LayerCAM"),
    "finercam": make_row("finercam", "FinerCAM", "FinerCAM"),
    "shapleycam": make_row("shapleycam", "ShapleyCAM"),
    "eigencam": make_row("eigencam", "EigenCAM"),
    "eigengradcam": make_row("eigengradcam", "EigenGradCAM"),
    "kpcacam": make_row("kpcacam", "KPCA_CAM"),
    "fem": make_row("fem", "FEM"),
    "ablationcam": make_row("ablationcam", "AblationCAM", layers=SHALLOW_LAYERS),
    "scorecam": make_row("scorecam", "ScoreCAM", "ScoreCAM", layers=SHALLOW_LAYERS),
    'smoothing="eigen"': Row(
        partial(explain_with_gradcam, smoothing="eigen"),
        {"pytorch-grad-cam": adapt_pytorch_grad_cam("GradCAM", eigen_smooth=True)},
    ),
    "gradcam, at image size": Row(
        explain_at_image_size, {"pytorch-grad-cam": adapt_pytorch_grad_cam("GradCAM", is_resized=True)}
    ),
    "two fused layers": Row(
        explain_at_image_size,
        {"pytorch-grad-cam": adapt_pytorch_grad_cam("GradCAM", is_resized=True)},
        layers=FUSED_LAYERS,
    ),
    'augmentation="flip-scale"': Row(
        partial(explain_at_image_size, augmentation="flip-scale"),
        {"pytorch-grad-cam": adapt_pytorch_grad_cam("GradCAM", is_resized=True, aug_smooth=True)},
    ),
    "guided backpropagation": Row(
        run_guided_backpropagation, {"pytorch-grad-cam": run_pytorch_grad_cam_guided, "captum": run_captum_guided}
    ),
}


def compare_agreement(settings: Settings) -> Iterator[Table]:
    """Compare the libraries' maps on the CPU. The maps have the layer's resolution, unless a row says otherwise."""
    import gradcam

    classifier = gradcam.load_classifier(device="cpu")
    model = classifier.model.requires_grad_()  # The other libraries fail on a frozen model.
    names = PICTURES.read_text(encoding="utf-8").split()
    images = classifier.batch([gradcam.read_image(PICTURES.parent / name) for name in names])
    classes = model(images).argmax(1).tolist()
    rows, raw = [], []
    for name, row in ROWS.items():
        report_progress("agreement", name)
        method = name if name in gradcam.METHODS else "gradcam"
        task = Task(model, images, classes, row.layers or (classifier.layer_for(method),))
        maps = row.explain(task)
        cells = []
        for peer in PEERS:
            if peer in row.peers and peer in settings.present:
                pairs = zip(maps, row.peers[peer](replace(task, images=task.images.clone())))
                correlations = [correlate(heatmap, torch.as_tensor(peer_map)) for heatmap, peer_map in pairs]
                raw.append({"what": name, "peer": peer, "correlations": correlations})
                low, high = f"{min(correlations):.3f}", f"{max(correlations):.3f}"
                cells.append(low if low == high else f"{low} to {high}")
            else:
                cells.append("not measured" if peer in row.peers else "-")
        rows.append([name, " and ".join(task.layers), *cells])
    notes = [
        f"Correlation, lowest to highest, of the maps of {len(images)} photographs ({PICTURES.name}) for the top class.",
        f"{classifier.name}, each method at its default layer.",
    ]
    yield Table("agreement", "Agreement with other libraries", ["method", "layer", *PEERS], rows, notes, raw)
    yield compare_in_place(settings)


def compare_in_place(settings: Settings) -> Table:
    """Compare Grad-CAM at a convolution whose output a ReLU overwrites in place."""
    import gradcam

    sys.path.insert(0, str(ROOT))  # Makes `tests` importable.
    from tests import drawn
    from tests.drawn import peers
    from tests.drawn.pictures import draw_scenes, to_images

    report_progress("agreement", "a ReLU in place")
    model, images = drawn.load("vgg11"), to_images(list(draw_scenes(IN_PLACE_SEED, IN_PLACE_SCENES)))
    classes, layer = model(images).argmax(1), peers.find_last_convolution(model)
    explanation = gradcam.explain(model, images, layer, method="gradcam", target=classes.tolist())
    exact = peers.scale_to_one(explanation.maps[:, 0])
    rows, raw = [], []
    for name, explain in {"by hand": peers.explain_by_hand, **peers.PEERS}.items():
        if name in settings.missing:
            rows.append([name, *["not measured"] * 3])
            continue
        maps = peers.scale_to_one(explain(model, images, classes).float())
        deviations = (maps - exact).abs().amax((1, 2))
        cells = [format_deviation(float(value)) for value in (deviations.median(), deviations.max())]
        rows.append([name, *cells, f"{(deviations > 1e-4).sum()} of {len(images)}"])
        raw.append({"peer": name, "deviations": deviations.tolist()})
    notes = [f"Narrow VGG11, {layer}, {len(images)} drawn scenes, seed {IN_PLACE_SEED}, highest-scoring class."]
    header = ["Grad-CAM of", "median deviation", "largest deviation", "deviates by more than 1e-4"]
    return Table("inplace", "A ReLU that works in place", header, rows, notes, raw)


def format_deviation(value: float) -> str:
    return f"{value:.1g}" if value < 1e-2 else f"{value:.2f}"
