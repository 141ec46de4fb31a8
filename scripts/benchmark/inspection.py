"""Compare a recording with a bare training step, and the extraction of features with a forward pass."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from benchmark.cases import CLASSES, SEED, SIZE, build_model, make_case
from benchmark.contenders import BARE
from benchmark.measuring import Settings, keep_freed_memory, report_progress, synchronise, take_turns, time_call
from benchmark.tables import Table, format_spread

NETWORK, FEATURES, LAYER = "ResNet-18", "ResNet-50", "layer2"
TRAINING_STEP = "training step"
RECORD_INTERVAL = 10  # One step in this number of steps is recorded.

Attach = Callable[[nn.Module, list[str]], AbstractContextManager[object]]


def compare_inspection(settings: Settings) -> Iterator[Table]:
    """Time the recording of all convolutions during training, and the extraction of one layer's features."""
    keep_freed_memory()
    for device in settings.devices:
        yield tabulate_recording(device, settings)
        yield tabulate_features(device, settings)


def attach_nothing(model: nn.Module, layers: list[str]) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


def attach_ours(model: nn.Module, layers: list[str], **options: Any) -> AbstractContextManager[object]:
    from gradcam.inspection.recorder import record

    return record(model, layers, **options)


@contextlib.contextmanager
def attach_by_hand(model: nn.Module, layers: list[str]) -> Iterator[None]:
    """Attach handwritten hooks with one PyTorch call per statistic. The hooks fail before in-place operations."""
    statistics: list[list[Tensor]] = []

    def after_forward(module: nn.Module, args: object, output: Tensor) -> None:
        statistics.append(measure_by_hand(output.detach()))

    def after_backward(module: nn.Module, input_gradients: object, output_gradients: tuple[Tensor, ...]) -> None:
        statistics.append(measure_by_hand(output_gradients[0]))

    modules = [model.get_submodule(name) for name in layers]
    handles = [module.register_forward_hook(after_forward) for module in modules]
    handles += [module.register_full_backward_hook(after_backward) for module in modules]
    try:
        # The first layer's hook warns because its input, the images, requires no gradient.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            yield
    finally:
        for handle in handles:
            handle.remove()


def measure_by_hand(tensor: Tensor) -> list[Tensor]:
    zeros = (tensor == 0).float().mean()
    return [tensor.norm(), tensor.mean(), tensor.std(), zeros, tensor.abs().max(), tensor.isnan().any()]


# For each kind of recording, the function that attaches the recorder, and the number of steps to time.
RECORDINGS: dict[str, tuple[Attach, int]] = {
    TRAINING_STEP: (attach_nothing, 1),
    "statistics, every step": (attach_ours, 1),
    "hooks by hand, every step": (attach_by_hand, 1),
    "tensors, every step": (partial(attach_ours, keep="device", last=1), 1),
    f"{RECORD_INTERVAL} training steps": (attach_nothing, RECORD_INTERVAL),
    f"statistics, every {RECORD_INTERVAL}th step": (partial(attach_ours, every=RECORD_INTERVAL), RECORD_INTERVAL),
}


def tabulate_recording(device: str, settings: Settings) -> Table:
    torch.manual_seed(SEED)
    model = torchvision.models.resnet18().train().to(device)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    rows, raw = [], []
    for batch, rounds in settings.rounds.items():
        report_progress("recording", device, NETWORK, f"batch {batch}")
        images = torch.randn(batch, 3, SIZE, SIZE, device=device)
        labels = torch.randint(0, CLASSES, (batch,), device=device)
        step = partial(train, model, optimizer, images, labels)
        timed = {
            name: partial(time_steps, partial(attach, model, layers), step, steps, device)
            for name, (attach, steps) in RECORDINGS.items()
        }
        for call in timed.values():
            call()
        seconds = take_turns(timed, rounds)
        baselines = {steps: name for name, (attach, steps) in RECORDINGS.items() if attach is attach_nothing}
        cells = [
            format_spread(np.divide(seconds[name], seconds[baselines[steps]]))
            for name, (attach, steps) in RECORDINGS.items()
            if attach is not attach_nothing
        ]
        rows.append([NETWORK, str(batch), f"{1000 * float(np.median(seconds[TRAINING_STEP])):.0f} ms", *cells])
        raw.append({"device": device, "network": NETWORK, "batch": batch, "seconds": seconds})
    notes = [
        f"Activations and gradients of {len(layers)} convolutions, as multiples of training steps without recording in the "
        "same round: medians (with quartiles) over the rounds, "
        f"{describe_rounds(settings)}. SGD with momentum, cross-entropy, training mode.",
        "Statistics: norm, mean, standard deviation, share of zeros, largest absolute value, NaN, infinities. By hand: the "
        "same except infinities, in float32. Tensors: snapshots of the latest step, on the device.",
    ]
    header = [
        "network",
        "batch",
        TRAINING_STEP,
        *(name for name, (attach, _) in RECORDINGS.items() if attach is not attach_nothing),
    ]
    return Table(f"recording {device}", f"Recording a training ({device})", header, rows, notes, raw)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def time_steps(
    attach: Callable[[], AbstractContextManager[object]], step: Callable[[], None], steps: int, device: str
) -> float:
    """Return the seconds of this number of steps. Attaching and removing the hooks is not timed."""

    def run() -> None:
        for _ in range(steps):
            step()
        synchronise(device)

    with attach():
        synchronise(device)
        return time_call(run)


def tabulate_features(device: str, settings: Settings) -> Table:
    """Compare a pass that stops after an early layer with a full forward pass."""
    from gradcam.inspection.extraction import features

    model = build_model(FEATURES, device)
    rows, raw = [], []
    for batch, rounds in settings.rounds.items():
        report_progress("features", device, FEATURES, LAYER, f"batch {batch}")
        case = make_case(model, LAYER, batch, 1, device)

        def forward(images: Tensor = case.images) -> object:
            with torch.no_grad():
                return model(images)

        calls = {BARE: forward, "features": partial(features, model, case.images, [LAYER])}
        timed = {name: partial(time_synchronised, call, device) for name, call in calls.items()}
        for call in timed.values():
            call()
        seconds = take_turns(timed, rounds)
        ratio = format_spread(np.divide(seconds["features"], seconds[BARE]))
        rows.append([f"{FEATURES}, {LAYER}", str(batch), f"{1000 * float(np.median(seconds[BARE])):.0f} ms", ratio])
        raw.append({"device": device, "network": FEATURES, "layer": LAYER, "batch": batch, "seconds": seconds})
    notes = [
        "Multiples of the whole forward pass in the same round: medians (with quartiles) over the rounds, "
        f"{describe_rounds(settings)}."
    ]
    header = ["network, layer", "batch", BARE, "features"]
    return Table(f"features {device}", f"Features of a layer ({device})", header, rows, notes, raw)


def time_synchronised(call: Callable[[], object], device: str) -> float:
    def run() -> None:
        call()
        synchronise(device)

    synchronise(device)
    return time_call(run)


def describe_rounds(settings: Settings) -> str:
    return ", ".join(f"{rounds} at batch {batch}" for batch, rounds in settings.rounds.items())
