"""The flow of gradients through a network as a picture, on which vanishing and exploding layers are seen at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.errors import GradcamError, to_pip_command
from gradcam.images.read import Pixels
from gradcam.inspection.flow import EXPLODING, LEAST, MOST, NO_GRADIENT, VANISHING, GradientFlow, LayerGradients
from gradcam.options import refuse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {VANISHING: "#2b6cb0", EXPLODING: "#c2410c", NO_GRADIENT: "#6b21a8", "NaN": "#b91c1c", "infinite": "#b91c1c"}
INK, QUIET, LINE = "#1f2937", "#9ca3af", "#374151"
DOTS = 100  # per inch
MOST_NAMES = 72  # of layers below the axis; of more, every second, third, ...
INCHES, LEAST_INCHES, MOST_INCHES = 0.19, 8.0, 18.0  # of width: for each layer, and in all
HEIGHT, INCHES_OF_LETTER = 5.6, 0.042  # of height: of the plot, and for each letter of the longest name below it
LONGEST_NAME = 40  # characters; of longer ones the end is shown, which tells more
MOST_DECADES = 36  # of the axis on either side of the reference


def draw_gradients(flow: GradientFlow, *, title: str | None = None) -> Pixels:
    """Plot the norm of each layer's gradient, in order of execution.

    The line shows the gradient at each layer's output. A ring shows the gradients of all parameters of a layer
    together. The axis is logarithmic, and the background is coloured where gradients vanish or explode. Zero or missing
    gradients are marked at the bottom, NaN and infinite ones at the top.

    Parameters
    ----------
    flow : GradientFlow
        The result of `inspection.gradients`.
    title : str, default None
        The title. None names the model's class and the score.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    GradcamError
        If matplotlib is missing (extra `plots`), or if `flow` is not a `GradientFlow` with layers.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None)
    >>> flow = gradcam.inspection.gradients(model, torch.rand(1, 3, 64, 64), target=281)
    >>> gradcam.write_image("gradients.png", gradcam.inspection.draw_gradients(flow))
    """
    if not isinstance(flow, GradientFlow) or not flow.layers:
        raise refuse(flow, "The flow", "the result of inspection.gradients(), with at least one layer.")
    figure, axes = _new_axes(flow.layers)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    outputs = [math.nan if it.activations is None else it.activations.norm for it in flow.layers]
    parameters = [it.parameters_norm for it in flow.layers]
    # Whole powers of ten around all norms, and around two on either side of the reference, so that little looks little.
    middle = math.log10(flow.reference) if flow.reference else 0.0
    logs = [middle, *(math.log10(norm) for norm in outputs + parameters if 0 < norm < math.inf)]
    low = 10 ** (math.floor(max(middle - MOST_DECADES, min(*logs, middle - 2))) - 0.6)
    high = 10 ** (math.ceil(min(middle + MOST_DECADES, max(*logs, middle + 2))) + 0.6)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.7, len(flow.layers) - 0.3)
    if flow.reference:
        _shade(axes, flow.reference, low, high)
    axes.plot(_hide(outputs), "-o", color=LINE, ms=3.6, lw=1.3, zorder=3, label="at the layer's output")
    axes.plot(_hide(parameters), "o", color="#0d9488", ms=4.6, mfc="none", mew=1.1, zorder=2, label="at its parameters")
    style: dict[str, Any] = {"ls": "none", "clip_on": False, "zorder": 4}
    none = [place for place, it in enumerate(flow.layers) if it.verdict == NO_GRADIENT]
    if none:
        axes.plot(
            none, [low] * len(none), "v", ms=6, color=COLOURS[NO_GRADIENT], label="none, or exactly zero", **style
        )
    broken = [place for place, it in enumerate(flow.layers) if it.verdict in ("NaN", "infinite")]
    if broken:
        axes.plot(broken, [high] * len(broken), "X", ms=7, color=COLOURS["NaN"], label="NaN or infinite", **style)
    _name_layers(axes, flow.layers)
    axes.set_title(title or _title(flow), loc="left", fontsize=12, color=INK, pad=32, parse_math=False)
    axes.set_ylabel("norm of the gradient", color=INK)
    axes.set_xlabel("layers in order of execution; the gradient comes from the right", color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=9, borderaxespad=0.8)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3])


def _new_axes(layers: Sequence[LayerGradients]) -> tuple[Figure, Axes]:
    """A figure by itself: pyplot would keep it, and choose a display. Long names make it higher, not the plot lower."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GradcamError(
            f"Drawing gradients needs matplotlib: {to_pip_command('plots')}. The numbers need no extra package."
        ) from error
    width = min(MOST_INCHES, max(LEAST_INCHES, 1.5 + INCHES * len(layers)))
    height = HEIGHT + INCHES_OF_LETTER * max(len(_shorten(layer)) for layer in layers)
    figure = Figure(figsize=(width, height), dpi=DOTS, facecolor="white", layout="tight")
    axes = figure.add_subplot(facecolor="white")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.grid(axis="y", color="#e5e7eb", lw=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _shade(axes: Axes, reference: float, low: float, high: float) -> None:
    axes.axhline(reference, color=QUIET, lw=0.9, ls=(0, (4, 3)), zorder=1, label="at the model's output")
    for verdict, bottom, top in (
        (VANISHING, low, min(high, reference * LEAST)),
        (EXPLODING, max(low, reference * MOST), high),
    ):
        if bottom < top:
            axes.axhspan(bottom, top, color=COLOURS[verdict], alpha=0.10, lw=0, zorder=0)
            edge, side = (top, "top") if verdict == VANISHING else (bottom, "bottom")
            axes.annotate(
                verdict, (1, edge), xycoords=("axes fraction", "data"), xytext=(-6, -3 if side == "top" else 3),
                textcoords="offset points", ha="right", va=side, color=COLOURS[verdict], fontsize=10,
            )  # fmt: skip


def _hide(norms: Sequence[float]) -> list[float]:
    """What has a place on a logarithmic axis; the rest is marked at its edges."""
    return [norm if 0 < norm < math.inf else math.nan for norm in norms]


def _name_layers(axes: Axes, layers: Sequence[LayerGradients]) -> None:
    step = math.ceil(len(layers) / MOST_NAMES)
    places = range(0, len(layers), step)
    axes.set_xticks(places)
    axes.set_xticklabels([_shorten(layers[place]) for place in places], rotation=90, fontsize=7.5, parse_math=False)
    axes.tick_params(axis="both", color=QUIET, labelcolor=INK, length=3)
    axes.tick_params(axis="y", which="minor", left=False)
    for place, label in zip(places, axes.get_xticklabels()):
        label.set_color(COLOURS.get(layers[place].verdict or "", INK))


def _shorten(layer: LayerGradients) -> str:
    name = layer.name or f"({layer.type})"
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


def _title(flow: GradientFlow) -> str:
    if flow.scores.numel() > 1:
        return f"{flow.model}: gradients of {flow.scores.numel()} scores"
    what = "a score" if flow.classes is None else f"class {flow.classes.item()}"
    return f"{flow.model}: gradients of {what}, {flow.scores.item():.4g}"
