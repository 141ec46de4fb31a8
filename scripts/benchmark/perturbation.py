"""Methods that run the tail, or the model, again: each beside the passes that it cannot do without."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from benchmark.cases import SEED, SIZE, Case, make_case
from benchmark.contenders import Call
from benchmark.environment import describe_bfloat16
from benchmark.measuring import Settings, keep_freed_memory, no_garbage_collection, report_progress, time_call
from benchmark.tables import Table, format_spread


@dataclass(frozen=True)
class Rerun:
    """A method at a layer; `beside(case)` gives the passes that it is compared with, `peers` those who have the method."""

    title: str
    method: str
    layer: str
    dtype: torch.dtype
    unit: str
    beside: Callable[[Case], Call]
    peers: dict[str, Callable[[Case], contextlib.AbstractContextManager[Call]]]
    rounds: int


RERUN_BATCH = 32  # rows of a batch of bare passes; larger ones are not faster


def one_forward_pass(case: Case) -> Call:
    return run_all(case.model, case.images)


def tail_passes(case: Case) -> Call:
    """ResNet's `layer4` and what follows, once for each channel of `layer3`."""
    model: Any = case.model
    tail = nn.Sequential(model.layer4, model.avgpool, nn.Flatten(), model.fc)
    return run_all(tail, torch.rand(256, 256, SIZE // 16, SIZE // 16))


def forward_passes(case: Case) -> Call:
    """The whole of it, once for each channel of `layer4`."""
    return run_all(case.model, torch.randn(512, 3, SIZE, SIZE).to(case.images.dtype))


def run_all(model: nn.Module, rows: Tensor) -> Call:
    def run() -> object:
        with torch.no_grad():
            return [model(batch) for batch in rows.split(RERUN_BATCH)]

    return run


@contextlib.contextmanager
def attach_peers_ablation_cam(case: Case) -> Iterator[Call]:
    from pytorch_grad_cam import AblationCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(classes[0]) for classes in case.classes]
    with AblationCAM(model=case.model, target_layers=[case.model.get_submodule(case.layer)]) as cam:

        def explain() -> object:
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
                return cam(input_tensor=case.images, targets=targets)

        yield explain


@contextlib.contextmanager
def attach_peers_score_cam(case: Case) -> Iterator[Call]:
    from torchcam.methods import ScoreCAM

    with ScoreCAM(case.model, case.layer) as cam:
        yield lambda: cam([classes[0] for classes in case.classes], case.model(case.images))


ABLATION_PEERS = {"pytorch-grad-cam": attach_peers_ablation_cam}


SCORE_PEERS = {"torchcam": attach_peers_score_cam}


RERUNS = (
    Rerun(
        "Ablation-CAM", "ablationcam", "layer4", torch.float32, "1 forward pass", one_forward_pass, ABLATION_PEERS, 15
    ),
    Rerun(
        "Ablation-CAM", "ablationcam", "layer3", torch.float32, "256 passes of the tail", tail_passes, ABLATION_PEERS, 5
    ),
    Rerun("Score-CAM", "scorecam", "layer4", torch.float32, "512 forward passes", forward_passes, SCORE_PEERS, 2),
    Rerun("Score-CAM", "scorecam", "layer4", torch.bfloat16, "512 forward passes", forward_passes, SCORE_PEERS, 1),
)


def compare_perturbation(settings: Settings) -> Iterator[Table]:
    """ResNet-18, one image, one class; on the CPU. The slow peers take their turn in the first round only."""
    keep_freed_memory()
    rows, raw = [], []
    skipped = (
        []
        if describe_bfloat16() != "no bf16 instructions"
        else ["bfloat16 is not measured: this CPU has no instructions for it."]
    )
    for rerun in RERUNS:
        if skipped and rerun.dtype == torch.bfloat16:
            continue
        seconds = time_rerun(rerun, settings)
        beside = seconds["beside"]
        cells = {
            name: format_multiples([own / other for own, other in zip(values, beside)])
            for name, values in seconds.items()
        }
        kind = str(rerun.dtype).removeprefix("torch.")
        base = f"{rerun.unit}, {float(np.median(beside)):.2f} s"
        peers = [cells.get(name, "-") for name in PERTURBATION_PEERS]
        rows.append([f"{rerun.title} at {rerun.layer}, {kind}", base, cells["gradcam"], *peers])
        raw.append({"method": rerun.method, "layer": rerun.layer, "dtype": kind, "seconds": seconds})
    notes = [
        "Multiples of the baseline in the same round: medians (with quartiles), or a single round.",
        f"The baseline runs in batches of {RERUN_BATCH}. No figure: the library has no such method, or takes many minutes.",
        *skipped,
    ]
    header = ["ResNet-18", "baseline", "gradcam", *PERTURBATION_PEERS]
    yield Table("perturbation cpu", "Perturbation methods (cpu)", header, rows, notes, raw)


def format_multiples(ratios: Sequence[float]) -> str:
    return format_spread(ratios) if len(ratios) > 1 else f"{ratios[0]:.2f}"


PERTURBATION_PEERS = ("pytorch-grad-cam", "torchcam")


def time_rerun(rerun: Rerun, settings: Settings) -> dict[str, list[float]]:
    import gradcam

    torch.manual_seed(SEED)
    model = torchvision.models.resnet18().eval().to(rerun.dtype)
    case = make_case(model, rerun.layer, 1, 1, "cpu")
    case = replace(case, images=case.images.to(rerun.dtype))
    calls = {
        "beside": rerun.beside(case),
        "gradcam": lambda: gradcam.explain(model, case.images, rerun.layer, method=rerun.method, target=case.classes),
    }
    rounds = min(rerun.rounds, settings.rounds.get(1, rerun.rounds))
    if rounds > 3:
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        report_progress(rerun.title, rerun.layer, rerun.dtype, f"round {number + 1} of {rounds}")
        with no_garbage_collection():
            for name in sorted(calls, reverse=bool(number % 2)):
                seconds[name].append(time_call(calls[name]))
            for name in rerun.peers if number == 0 else ():
                if name in settings.present:
                    with rerun.peers[name](case) as call:
                        seconds[name] = [time_call(call)]
    return seconds
