"""Who can make the maps that are judged: methods, a user's functions, and controls, which know nothing of the model."""

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gradcam import plugins
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_method, offer
from gradcam.errors import GradcamError, shorten
from gradcam.options import load_late

if TYPE_CHECKING:
    from torch import Tensor, nn

# From a model, images (N,C,H,W) and a class of each (N,) to heatmaps (N,H,W): a method, of ours or of anybody.
Explain = Callable[["nn.Module", "Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class Control:
    """A control map: a heatmap that explains nothing, made without the model.

    Attributes
    ----------
    name : str
        The control map's name.
    summary : str
        A one-line description.
    function : str or callable
        A function from images (N,C,H,W) and a seed to heatmaps (N,H,W). "module:name" is imported at its first use.

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
    function: str | Callable[[Tensor, int], Tensor] = field(repr=False)  # "module:name" is imported at its first use

    @property
    def make(self) -> Callable[[Tensor, int], Tensor]:
        """The function, imported: from images (N,C,H,W) and a seed to heatmaps (N,H,W)."""
        return load_late(self.function, __package__)


@dataclass(frozen=True)
class OwnFunction:
    """A user's function of a model, images (N,C,H,W) and classes (N,) that gives heatmaps (N,H,W), of any library."""

    name: str
    function: Explain = field(repr=False)
    needs: ClassVar[tuple[str, ...]] = ()  # nobody knows what it runs
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
Explained = Method | Control | OwnFunction


def find_explained(wanted: Any, *others: str) -> Explained:
    """A method or a control by its name, or one itself; any other function is somebody's own. `others`: what else might
    have been meant. A name may be `FILE.py:NAME`, or an installed package's. Raises `GradcamError` for others."""
    name = wanted.strip() if isinstance(wanted, str) else ""
    if name.lower() in CONTROLS:
        return CONTROLS[name.lower()]
    is_brought = plugins.is_own(name) or (name in plugins.installed("methods") and name not in METHODS)
    brought = plugins.load("methods", name) if is_brought else wanted
    if isinstance(brought, (Method, Control, OwnFunction)):
        return brought
    if callable(brought):
        return OwnFunction(getattr(brought, "__name__", type(brought).__name__), brought)
    if is_brought:
        raise GradcamError(f"{name} is {shorten(brought)}, expected a method or a function that returns heatmaps.")
    try:
        return find_method(name)
    except GradcamError:
        known = [*METHODS, *others, *CONTROLS, *plugins.installed("methods")]
        raise GradcamError(f"There is no method or control {shorten(wanted)}. {offer(name, known)}") from None
