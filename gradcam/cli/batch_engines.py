"""Which engine a batch runs on, and what that changes of the rest."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli.preparation import load_model
from gradcam.cli.progress import how_to_go_on
from gradcam.cli.settings import ModelChoice, Settings

if TYPE_CHECKING:
    from gradcam.batch.engine import Engine
    from gradcam.classifiers import Classifier
    from gradcam.cli.batch_job import Typed


class Means:
    """What a batch is done with; to be closed. Once it is started, `engine` does the work.

    `device`: what models compute on, where that is not where this process's own is, which with Ray only answers questions.
    """

    def __init__(self, typed: Typed) -> None:
        self._typed = typed
        self._stack = contextlib.ExitStack()
        self.device: str | None = None
        self.engine: Engine

    def start(self) -> None:
        """Have the engine ready. Raises `ClusterError` and `click.UsageError`."""
        choice = self._typed.choice
        if choice.engine == "local":
            from gradcam.batch.engine import explain_here

            self.engine = explain_here
            return
        from gradcam.batch.cluster.engine import RayEngine
        from gradcam.batch.cluster.session import find_layout, joined

        model, layers = self._typed.settings.model, self._typed.settings.layers
        if model.device not in DEVICES:
            raise click.UsageError(
                f"--device is {model.device}, and Ray gives each actor its own: choose one of {', '.join(DEVICES)}."
            )
        if choice.actors_per_gpu > 1 and model.device == "cpu":
            raise click.UsageError("--actors-per-gpu is for GPUs, and --device is cpu: leave one of them out.")
        ray = self._stack.enter_context(joined(choice.address))
        self._stack.enter_context(self._last_words(ray))
        layout = find_layout(ray, model.device, choice.actors_per_gpu)
        self.device = layout.device
        load = partial(load_on, model, layers[0] if layers else None)
        self.engine = RayEngine(ray, layout, load, choice.workers)

    def _last_words(self, ray: Any) -> contextlib.AbstractContextManager[None]:
        from gradcam.batch.cluster.last_words import last_words
        from gradcam.batch.cluster.session import find_address

        text = f"Ray has ended, and this with it: its head is gone, or was told to end. {how_to_go_on()}"
        is_own = find_address(self._typed.choice.address) == "local"
        head = ray.get_runtime_context().gcs_address
        return last_words(head, text, is_own=is_own)

    def to_settings(self) -> Settings:
        """What was typed; with Ray, this process's own model is on the CPU."""
        settings = self._typed.settings
        return settings if self.device is None else replace(settings, model=replace(settings.model, device="cpu"))

    def close(self) -> None:
        """Let go of it."""
        self._stack.close()


DEVICES = ("auto", "cpu", "cuda")  # that Ray has


def load_on(choice: ModelChoice, layer: str | None, device: str) -> Classifier:
    """The model of that choice, on that device. Raises `GradcamError`."""
    return load_model(replace(choice, device=device), layer=layer)
