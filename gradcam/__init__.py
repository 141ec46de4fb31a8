"""Where a vision model looked: Grad-CAM and its family, exact, at the price of one inference.

import gradcam

explanation = gradcam.explain(model, images, "layer4", target=281)     # any PyTorch model
explanation = gradcam.load_classifier().explain("photo.jpg")           # the one that comes with the package
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradcam._version import __version__

if TYPE_CHECKING:
    from gradcam import attributions as attributions
    from gradcam import evaluation as evaluation
    from gradcam import inspection as inspection
    from gradcam import targets as targets
    from gradcam.batch.output.manifest import read_manifest as read_manifest
    from gradcam.batch.streaming import explain_files as explain_files
    from gradcam.classifiers import Classifier as Classifier
    from gradcam.classifiers import load_classifier as load_classifier
    from gradcam.classifiers.comparison import panel as panel
    from gradcam.drawing import overlay as overlay
    from gradcam.errors import GradcamError as GradcamError
    from gradcam.errors import GradcamWarning as GradcamWarning
    from gradcam.explanation import Explanation as Explanation
    from gradcam.explanation import compare as compare
    from gradcam.explanation import explain as explain
    from gradcam.fusion import fuse as fuse
    from gradcam.images import read_image as read_image
    from gradcam.images import write_image as write_image
    from gradcam.listing import list_layers as list_layers
    from gradcam.methods import METHODS as METHODS
    from gradcam.target_layer import TargetLayer as TargetLayer

# Loaded when first asked for, so that `import gradcam` and `gradcam --help` need not wait for torch.
_HOMES = {
    "Classifier": "gradcam.classifiers",
    "Explanation": "gradcam.explanation",
    "GradcamError": "gradcam.errors",
    "GradcamWarning": "gradcam.errors",
    "METHODS": "gradcam.methods",
    "TargetLayer": "gradcam.target_layer",
    "attributions": "gradcam.attributions",
    "compare": "gradcam.explanation",
    "evaluation": "gradcam.evaluation",
    "explain": "gradcam.explanation",
    "explain_files": "gradcam.batch.streaming",
    "fuse": "gradcam.fusion",
    "inspection": "gradcam.inspection",
    "list_layers": "gradcam.listing",
    "load_classifier": "gradcam.classifiers",
    "overlay": "gradcam.drawing",
    "panel": "gradcam.classifiers.comparison",
    "read_image": "gradcam.images",
    "read_manifest": "gradcam.batch.output.manifest",
    "targets": "gradcam.targets",
    "write_image": "gradcam.images",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (names, all of them strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradcam' has no attribute '{name}'")
    home = importlib.import_module(_HOMES[name])
    value = home if home.__name__ == f"gradcam.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
