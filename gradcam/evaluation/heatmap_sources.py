"""Sources of heatmaps to evaluate: CAM methods, custom functions, and control maps."""

# The command line's help lists these methods. This module does not import torch, because the import takes seconds.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gradcam import plugins
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_method, suggest_names
from gradcam.errors import GradcamError, shorten
from gradcam.options import import_function

if TYPE_CHECKING:
    from torch import Tensor, nn

# A function of a model, images (N,C,H,W) and classes (N,) that returns heatmaps (N,H,W), from any library.
ExplainFunction = Callable[["nn.Module", "Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class Control:
    """A control map: a heatmap that is computed without the model, to compare explanations with.

    Attributes
    ----------
    name : str
        The control map's name.
    summary : str
        A one-line description.
    function : str or callable
        A function from images (N,C,H,W) and a seed to heatmaps (N,H,W). A string "module:name" is imported on first
        use.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import CONTROLS
    >>> blob = CONTROLS["centre"]
    >>> blob.make(torch.rand(2, 3, 64, 64), 0).shape
    torch.Size([2, 64, 64])
    """

    name: str
    summary: str
    function: str | Callable[[Tensor, int], Tensor] = field(repr=False)

    @property
    def make(self) -> Callable[[Tensor, int], Tensor]:
        """Return the function that maps images (N,C,H,W) and a seed to heatmaps (N,H,W); import it if necessary."""
        return import_function(self.function, __package__)


@dataclass(frozen=True)
class CustomFunction:
    """A custom function of a model, images (N,C,H,W) and classes (N,) that returns heatmaps (N,H,W)."""

    name: str
    function: ExplainFunction = field(repr=False)
    needs: ClassVar[tuple[str, ...]] = ()  # A custom function takes no recorded activations or gradients.
    place: ClassVar[str] = "own"


CONTROLS: dict[str, Control] = {
    control.name: control
    for control in (
        Control("random", "noise on a 7 x 7 grid", "explainers:make_random"),
        Control("centre", "a blob in the centre of every image", "explainers:make_centre"),
        Control("edges", "the image's Sobel edges", "explainers:make_edges"),
        Control("constant", "1 at every pixel", "explainers:make_constant"),
    )
}
Explainable = Method | Control | CustomFunction


def find_explainable(source: Any, *other_names: str) -> Explainable:
    """Find a method or control map by name, or wrap a custom function in `CustomFunction`.

    A name may also be `FILE.py:NAME`, or an entry point of an installed package. Raise `GradcamError` if the name is
    unknown. The message suggests similar names, including `other_names`.
    """
    name = source.strip() if isinstance(source, str) else ""
    if name.lower() in CONTROLS:
        return CONTROLS[name.lower()]
    is_plugin = plugins.is_custom(name) or (name in plugins.list_entry_points("methods") and name not in METHODS)
    loaded = plugins.load_plugin("methods", name) if is_plugin else source
    if isinstance(loaded, (Method, Control, CustomFunction)):
        return loaded
    if callable(loaded):
        return CustomFunction(getattr(loaded, "__name__", type(loaded).__name__), loaded)
    if is_plugin:
        raise GradcamError(f"{name} is {shorten(loaded)}, expected a method or a function that returns heatmaps.")
    try:
        return find_method(name)
    except GradcamError:
        names = [*METHODS, *other_names, *CONTROLS, *plugins.list_entry_points("methods")]
        raise GradcamError(f"There is no method or control {shorten(source)}. {suggest_names(name, names)}") from None
