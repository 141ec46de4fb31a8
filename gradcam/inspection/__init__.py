"""Looking inside a network: what its layers give, what comes back to them, and changing that; hooks that leave no trace.

features = gradcam.inspection.features(model, images, ["layer4", "avgpool"])

with gradcam.inspection.record(model, "layer*.conv1") as recorder:
    ...  # a step of training, or an epoch
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradcam.inspection.channels import activations as activations
    from gradcam.inspection.clipping import clip_gradients as clip_gradients
    from gradcam.inspection.discoveries import Discovery as Discovery
    from gradcam.inspection.discoveries import GradientWarning as GradientWarning
    from gradcam.inspection.discoveries import Watch as Watch
    from gradcam.inspection.editing import Edit as Edit
    from gradcam.inspection.editing import edit_gradients as edit_gradients
    from gradcam.inspection.extraction import features as features
    from gradcam.inspection.flow import GradientFlow as GradientFlow
    from gradcam.inspection.flow import gradients as gradients
    from gradcam.inspection.plot import draw_gradients as draw_gradients
    from gradcam.inspection.recorder import Recorder as Recorder
    from gradcam.inspection.recorder import record as record
    from gradcam.inspection.sheets import draw_activations as draw_activations
    from gradcam.inspection.statistics import Statistics as Statistics
    from gradcam.inspection.steps import Step as Step
    from gradcam.inspection.tracing import Call as Call
    from gradcam.inspection.tracing import Trace as Trace
    from gradcam.inspection.tracing import trace as trace
    from gradcam.inspection.verdicts import LayerGradients as LayerGradients
    from gradcam.inspection.verdicts import ParameterGradient as ParameterGradient
    from gradcam.inspection.watching import watch_gradients as watch_gradients

_HOMES = {
    "Call": "tracing",
    "Discovery": "discoveries",
    "Edit": "editing",
    "GradientFlow": "flow",
    "GradientWarning": "discoveries",
    "LayerGradients": "verdicts",
    "ParameterGradient": "verdicts",
    "Recorder": "recorder",
    "Statistics": "statistics",
    "Step": "steps",
    "Trace": "tracing",
    "Watch": "discoveries",
    "activations": "channels",
    "clip_gradients": "clipping",
    "draw_activations": "sheets",
    "draw_gradients": "plot",
    "edit_gradients": "editing",
    "features": "extraction",
    "gradients": "flow",
    "record": "recorder",
    "trace": "tracing",
    "watch_gradients": "watching",
}

__all__ = [*_HOMES]  # noqa: PLE0604  (names, all of them strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
