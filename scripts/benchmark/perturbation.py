"""Compare methods that run the model, or its last layers, many times, with the same number of bare passes."""

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
class PerturbationRun:
    """A method at a layer. `make_baseline(case)` returns the bare passes. `peers` are other libraries."""

    title: str
    method: str
    layer: str
    dtype: torch.dtype
    unit: str
    make_baseline: Callable[[Case], Call]
    peers: dict[str, Callable[[Case], contextlib.AbstractContextManager[Call]]]
    rounds: int


PASS_BATCH = 32  # The batch size of the bare passes. Larger batches are not faster.


def make_forward_pass(case: Case) -> Call:
    return make_passes(case.model, case.images)


def make_tail_passes(case: Case) -> Call:
    """Return a call that runs ResNet's `layer4` and all later layers, once per channel of `layer3`."""
    model: Any = case.model
    tail = nn.Sequential(model.layer4, model.avgpool, nn.Flatten(), model.fc)
    return make_passes(tail, torch.rand(256, 256, SIZE // 16, SIZE // 16))


def make_forward_passes(case: Case) -> Call:
    """Return a call that runs the full model, once per channel of `layer4`."""
    return make_passes(case.model, torch.randn(512, 3, SIZE, SIZE).to(case.images.dtype))


def make_passes(model: nn.Module, rows: Tensor) -> Call:
    def run() -> object:
        with torch.no_grad():
            return [model(batch) for batch in rows.split(PASS_BATCH)]

    return run


@contextlib.contextmanager
def attach_peers_ablation_cam(case: Case) -> Iterator[Call]:
    from pytorch_grad_cam import AblationCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(classes[0]) for classes in case.classes]
    with AblationCAM(model=case.model, target_layers=[case.model.get_submodule(case.layer)]) as cam:

        def explain() -> object:
            with contextlib.redirect_stderr(io.StringIO()):  # Hide the progress bar.
                return cam(input_tensor=case.images, targets=targets)

        yield explain


@contextlib.contextmanager
def attach_peers_score_cam(case: Case) -> Iterator[Call]:
    from torchcam.methods import ScoreCAM

    with ScoreCAM(case.model, case.layer) as cam:
        yield lambda: cam([classes[0] for classes in case.classes], case.model(case.images))


ABLATION_PEERS = {"pytorch-grad-cam": attach_peers_ablation_cam}


SCORE_PEERS = {"torchcam": attach_peers_score_cam}


RUNS = (
    PerturbationRun(
        "Ablation-CAM", "ablationcam", "layer4", torch.float32, "1 forward pass", make_forward_pass, ABLATION_PEERS, 15
    ),
    PerturbationRun(
        "Ablation-CAM",
        "ablationcam",
        "layer3",
        torch.float32,
        "256 passes of the tail",
        make_tail_passes,
        ABLATION_PEERS,
        5,
    ),
    PerturbationRun(
        "Score-CAM", "scorecam", "layer4", torch.float32, "512 forward passes", make_forward_passes, SCORE_PEERS, 2
    ),
    PerturbationRun(
        "Score-CAM", "scorecam", "layer4", torch.bfloat16, "512 forward passes", make_forward_passes, SCORE_PEERS, 1
    ),
)


def compare_perturbation(settings: Settings) -> Iterator[Table]:
    """Time one class of one image, with ResNet-18 on the CPU. Slow libraries run only in the first round."""
    keep_freed_memory()
    rows, raw = [], []
    skipped = (
        []
        if describe_bfloat16() != "no bf16 instructions"
        else ["bfloat16 is not measured: this CPU has no instructions for it."]
    )
    for run in RUNS:
        if skipped and run.dtype == torch.bfloat16:
            continue
        seconds = time_run(run, settings)
        baseline = seconds["beside"]
        cells = {
            name: format_multiples(
                [method_seconds / baseline_seconds for method_seconds, baseline_seconds in zip(values, baseline)]
            )
            for name, values in seconds.items()
        }
        dtype = str(run.dtype).removeprefix("torch.")
        baseline_cell = f"{run.unit}, {float(np.median(baseline)):.2f} s"
        peers = [cells.get(name, "-") for name in PERTURBATION_PEERS]
        rows.append([f"{run.title} at {run.layer}, {dtype}", baseline_cell, cells["gradcam"], *peers])
        raw.append({"method": run.method, "layer": run.layer, "dtype": dtype, "seconds": seconds})
    notes = [
        "Multiples of the baseline in the same round: medians (with quartiles), or a single round.",
        f"The baseline runs in batches of {PASS_BATCH}. No figure: the library has no such method, or takes many minutes.",
        *skipped,
    ]
    header = ["ResNet-18", "baseline", "gradcam", *PERTURBATION_PEERS]
    yield Table("perturbation cpu", "Perturbation methods (cpu)", header, rows, notes, raw)


def format_multiples(ratios: Sequence[float]) -> str:
    return format_spread(ratios) if len(ratios) > 1 else f"{ratios[0]:.2f}"


PERTURBATION_PEERS = ("pytorch-grad-cam", "torchcam")


def time_run(run: PerturbationRun, settings: Settings) -> dict[str, list[float]]:
    import gradcam

    torch.manual_seed(SEED)
    model = torchvision.models.resnet18().eval().to(run.dtype)
    case = make_case(model, run.layer, 1, 1, "cpu")
    case = replace(case, images=case.images.to(run.dtype))
    calls = {
        "beside": run.make_baseline(case),
        "gradcam": lambda: gradcam.explain(model, case.images, run.layer, method=run.method, target=case.classes),
    }
    rounds = min(run.rounds, settings.rounds.get(1, run.rounds))
    if rounds > 3:
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        report_progress(run.title, run.layer, run.dtype, f"round {number + 1} of {rounds}")
        with no_garbage_collection():
            for name in sorted(calls, reverse=bool(number % 2)):
                seconds[name].append(time_call(calls[name]))
            for name in run.peers if number == 0 else ():
                if name in settings.present:
                    with run.peers[name](case) as call:
                        seconds[name] = [time_call(call)]
    return seconds
