"""Cost of logging heatmaps while a model is trained: an epoch with one set of heatmaps, against an epoch without."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from benchmark.cases import SEED
from benchmark.measuring import Settings, keep_freed_memory, no_garbage_collection, report_progress
from benchmark.tables import Table, format_spread

STEPS, IMAGES, SIDE, CLASSES = 100, 8, 96, 10
PLAIN = "training step"
SINKS = {PLAIN: False, "PNG files": None, "TensorBoard": "tensorboard"}


def compare_callback(settings: Settings) -> Iterator[Table]:
    """Measure epochs of 100 steps, with the heatmaps of 8 images after the last step and without, in turns."""
    keep_freed_memory()
    rows, raw = [], []
    for batch, rounds in settings.rounds.items():
        trainings = {name: Training(batch, sink) for name, sink in SINKS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in SINKS}
        for number in range(rounds):
            report_progress("callback", "ResNet-18", f"batch {batch}", f"round {number + 1} of {rounds}")
            run_epochs(trainings, seconds)
        step = f"{1000 * float(np.median(seconds[PLAIN])) / STEPS:.0f} ms"
        for name in list(SINKS)[1:]:
            ratio = format_spread(np.divide(seconds[name], seconds[PLAIN]), 3)
            drawing = float(np.median(np.divide(trainings[name].drawing, seconds[PLAIN])))
            is_same = all(map(torch.equal, trainings[name].losses, trainings[PLAIN].losses))
            rows.append([f"ResNet-18, {name}", str(batch), step, ratio, f"{drawing:.1%}", "yes" if is_same else "no"])
        raw.append({"batch": batch, "seconds": seconds})
    notes = [
        f"CPU time of epochs of {STEPS} steps with images of {SIDE} x {SIDE} pixels, SGD with momentum. The default layer "
        "was chosen before the epoch. Medians (with quartiles) of the ratios in the rounds.",
    ]
    header = ["network, sink", "batch", PLAIN, "epoch with heatmaps", "share of the heatmaps", "same losses"]
    yield Table("callback cpu", "Heatmaps while training (cpu)", header, rows, notes, raw)


def run_epochs(trainings: dict[str, Training], seconds: dict[str, list[float]]) -> None:
    """Run an epoch of each training, step by step in turns, so that a slow moment of the machine affects all alike."""
    shuffled, totals, order = random.Random(SEED), dict.fromkeys(trainings, 0.0), list(trainings)
    with no_garbage_collection():
        for _ in range(STEPS):
            shuffled.shuffle(order)
            for name in order:
                totals[name] += trainings[name].step()
    for name, training in trainings.items():
        seconds[name].append(totals[name] + training.draw())


class Training:
    """A training whose heatmaps are logged to a sink, or not at all if the sink is False."""

    def __init__(self, batch: int, sink: Any) -> None:
        from gradcam.integrations import HeatmapLogger

        torch.manual_seed(SEED)
        self.model = torchvision.models.resnet18(num_classes=CLASSES).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.images = torch.randn(batch, 3, SIDE, SIDE)
        self.labels = torch.randint(0, CLASSES, (batch,))
        self.losses: list[Tensor] = []
        self.drawing: list[float] = []
        self.folder = tempfile.TemporaryDirectory()
        self.heatmaps = HeatmapLogger(torch.randn(IMAGES, 3, SIDE, SIDE), every_n_steps=STEPS, sink=sink or None)
        self.is_observed = sink is not False
        self.step()  # load all kernels
        if self.is_observed:
            self.heatmaps.start(self.model, folder=self.folder.name)
        self.losses.clear()

    def step(self) -> float:
        """Return the CPU time of a training step."""
        start = time.process_time()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        seconds = time.process_time() - start
        self.losses.append(loss.detach())
        return seconds

    def draw(self) -> float:
        """Return the CPU time of the heatmaps after the last step."""
        start = time.process_time()
        if self.is_observed:
            self.heatmaps.after_step(self.model, len(self.losses))
        self.drawing.append(time.process_time() - start)
        return self.drawing[-1]
