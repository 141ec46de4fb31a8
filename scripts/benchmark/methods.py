"""Time many methods together. gradcam computes all methods in one pass, other libraries one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmark.cases import NETWORKS, Case, build_model, make_case
from benchmark.contenders import BARE, Call, attach_bare
from benchmark.measuring import Settings, keep_freed_memory, report_progress, synchronise, take_turns, time_call
from benchmark.tables import Table, format_spread

NETWORK = "ResNet-50"
# For each of our methods, the class in the other library.
PYTORCH_GRAD_CAM = {
    "gradcam": "GradCAM",
    "gradcam-pp": "GradCAMPlusPlus",
    "xgradcam": "XGradCAM",
    "hirescam": "HiResCAM",
    "elementwise-gradcam": "GradCAMElementWise",
    "layercam": "LayerCAM",
    "finercam": "FinerCAM",
    "eigencam": "EigenCAM",
    "eigengradcam": "EigenGradCAM",
    "kpcacam": "KPCA_CAM",
    "fem": "FEM",
}
TORCHCAM = {"gradcam": "GradCAM", "gradcam-pp": "GradCAMpp", "xgradcam": "XGradCAM", "layercam": "LayerCAM"}


def compare_methods(settings: Settings) -> Iterator[Table]:
    """Time all single-pass methods for one class of each image."""
    keep_freed_memory()
    for device in settings.devices:
        yield tabulate_methods(device, settings)


def tabulate_methods(device: str, settings: Settings) -> Table:
    import gradcam

    one_pass = [name for name, method in gradcam.METHODS.items() if method.needs]
    first_order = [name for name in one_pass if "curvatures" not in gradcam.METHODS[name].needs]
    layer = NETWORKS[NETWORK].layer
    columns = {
        "gradcam, Grad-CAM only": partial(attach_ours, methods=["gradcam"]),
        f"gradcam, {len(first_order)} single-pass methods": partial(attach_ours, methods=first_order),
        "gradcam, these and Shapley-CAM": partial(attach_ours, methods=one_pass),
    }
    if "pytorch-grad-cam" not in settings.missing:
        columns[f"pytorch-grad-cam, {len(PYTORCH_GRAD_CAM)} methods"] = attach_pytorch_grad_cam
    if "torchcam" not in settings.missing:
        columns[f"torchcam, {len(TORCHCAM)} methods"] = attach_torchcam
    rows, raw = [], []
    for batch, rounds in settings.rounds.items():
        report_progress("methods", device, NETWORK, f"batch {batch}")
        case = make_case(build_model(NETWORK, device), layer, batch, 1, device)
        timed = {name: partial(time_attached, attach, case) for name, attach in {BARE: attach_bare, **columns}.items()}
        for call in timed.values():
            call()
        seconds = take_turns(timed, rounds)
        cells = [format_spread(np.divide(seconds[name], seconds[BARE])) for name in columns]
        rows.append([f"{NETWORK}, {layer}", str(batch), f"{1000 * float(np.median(seconds[BARE])):.0f} ms", *cells])
        raw.append({"device": device, "network": NETWORK, "layer": layer, "batch": batch, "seconds": seconds})
    counts = ", ".join(f"{rounds} at batch {batch}" for batch, rounds in settings.rounds.items())
    notes = [
        f"Multiples of the forward pass alone in the same round: medians (with quartiles) over the rounds, {counts}.",
        "gradcam: one call of compare(). Other libraries: one object per method, called one after another.",
    ]
    return Table(
        f"methods {device}", f"Many methods ({device})", ["network, layer", "batch", BARE, *columns], rows, notes, raw
    )


def time_attached(attach: object, case: Case) -> float:
    """Return the seconds of one call. Clearing `.grad` after the call is not timed."""
    device = case.images.device.type

    def run() -> None:
        call()
        synchronise(device)

    with attach(case) as call:
        synchronise(device)
        seconds = time_call(run)
    case.model.zero_grad(set_to_none=True)
    return seconds


@contextlib.contextmanager
def attach_ours(case: Case, *, methods: list[str]) -> Iterator[Call]:
    import gradcam

    yield lambda: gradcam.compare(case.model, case.images, layers=[case.layer], methods=methods, target=case.classes)


@contextlib.contextmanager
def attach_pytorch_grad_cam(case: Case) -> Iterator[Call]:
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    layers = [case.model.get_submodule(case.layer)]
    targets = [ClassifierOutputTarget(classes[0]) for classes in case.classes]

    def explain() -> None:
        for name in PYTORCH_GRAD_CAM.values():
            with getattr(pytorch_grad_cam, name)(model=case.model, target_layers=layers) as cam:
                cam(input_tensor=case.images, targets=None if name == "FinerCAM" else targets)

    yield explain


@contextlib.contextmanager
def attach_torchcam(case: Case) -> Iterator[Call]:
    from torchcam import methods

    def explain() -> None:
        for name in TORCHCAM.values():
            with getattr(methods, name)(case.model, case.layer) as cam:
                cam([classes[0] for classes in case.classes], case.model(case.images))

    yield explain
