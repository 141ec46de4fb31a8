"""Plot the gradient flow through a network, so that vanishing and exploding layers stand out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.errors import GradcamError, to_pip_command
from gradcam.images.read import Pixels
from gradcam.inspection.flow import (
    EXPLODING,
    MAX_NORM_RATIO,
    MIN_NORM_RATIO,
    NO_GRADIENT,
    VANISHING,
    GradientFlow,
    LayerGradients,
)
from gradcam.options import argument_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {VANISHING: "#2b6cb0", EXPLODING: "#c2410c", NO_GRADIENT: "#6b21a8", "NaN": "#b91c1c", "infinite": "#b91c1c"}
INK, MUTED, LINE = "#1f2937", "#9ca3af", "#374151"
DOTS_PER_INCH = 100
MAX_LAYER_LABELS = 72  # Layer names below the axis. With more layers, only every second, third, ... is named.
INCHES_PER_LAYER, MIN_WIDTH_INCHES, MAX_WIDTH_INCHES = 0.19, 8.0, 18.0  # Width of the figure.
# Height of the plot, and additional height for each letter of the longest name below the plot.
PLOT_HEIGHT_INCHES, INCHES_PER_LETTER = 5.6, 0.042
MAX_NAME_LENGTH = 40  # In characters. Of a longer name, only the end is shown, which is more specific.
MAX_DECADES = 36  # Range of the axis on each side of the reference, in powers of ten.


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
        raise argument_error(flow, "The flow", "the result of inspection.gradients(), with at least one layer.")
    figure, axes = _new_axes(flow.layers)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    outputs = [math.nan if layer.activations is None else layer.activations.norm for layer in flow.layers]
    parameters = [layer.parameters_norm for layer in flow.layers]
    # The limits are whole powers of ten around all norms, at least two decades from the reference, so that small
    # differences look small.
    middle = math.log10(flow.reference) if flow.reference else 0.0
    logs = [middle, *(math.log10(norm) for norm in outputs + parameters if 0 < norm < math.inf)]
    low = 10 ** (math.floor(max(middle - MAX_DECADES, min(*logs, middle - 2))) - 0.6)
    high = 10 ** (math.ceil(min(middle + MAX_DECADES, max(*logs, middle + 2))) + 0.6)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.7, len(flow.layers) - 0.3)
    if flow.reference:
        _shade(axes, flow.reference, low, high)
    axes.plot(_hide_off_scale(outputs), "-o", color=LINE, ms=3.6, lw=1.3, zorder=3, label="at the layer's output")
    axes.plot(
        _hide_off_scale(parameters),
        "o",
        color="#0d9488",
        ms=4.6,
        mfc="none",
        mew=1.1,
        zorder=2,
        label="at its parameters",
    )
    style: dict[str, Any] = {"ls": "none", "clip_on": False, "zorder": 4}
    without_gradient = [index for index, layer in enumerate(flow.layers) if layer.verdict == NO_GRADIENT]
    if without_gradient:
        axes.plot(
            without_gradient,
            [low] * len(without_gradient),
            "v",
            ms=6,
            color=COLOURS[NO_GRADIENT],
            label="none, or exactly zero",
            **style,
        )
    not_finite = [index for index, layer in enumerate(flow.layers) if layer.verdict in ("NaN", "infinite")]
    if not_finite:
        axes.plot(
            not_finite, [high] * len(not_finite), "X", ms=7, color=COLOURS["NaN"], label="NaN or infinite", **style
        )
    _name_layers(axes, flow.layers)
    axes.set_title(title or _title(flow), loc="left", fontsize=12, color=INK, pad=32, parse_math=False)
    axes.set_ylabel("norm of the gradient", color=INK)
    axes.set_xlabel("layers in order of execution; the gradient comes from the right", color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=9, borderaxespad=0.8)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3])


def _new_axes(layers: Sequence[LayerGradients]) -> tuple[Figure, Axes]:
    """Return a figure and its axes, made without pyplot, which would keep the figure and choose a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GradcamError(
            f"Drawing gradients needs matplotlib: {to_pip_command('plots')}. The numbers need no extra package."
        ) from error
    width = min(MAX_WIDTH_INCHES, max(MIN_WIDTH_INCHES, 1.5 + INCHES_PER_LAYER * len(layers)))
    height = PLOT_HEIGHT_INCHES + INCHES_PER_LETTER * max(len(_shorten(layer)) for layer in layers)
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white", layout="tight")
    axes = figure.add_subplot(facecolor="white")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.grid(axis="y", color="#e5e7eb", lw=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _shade(axes: Axes, reference: float, low: float, high: float) -> None:
    axes.axhline(reference, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1, label="at the model's output")
    for verdict, bottom, top in (
        (VANISHING, low, min(high, reference * MIN_NORM_RATIO)),
        (EXPLODING, max(low, reference * MAX_NORM_RATIO), high),
    ):
        if bottom < top:
            axes.axhspan(bottom, top, color=COLOURS[verdict], alpha=0.10, lw=0, zorder=0)
            edge, alignment = (top, "top") if verdict == VANISHING else (bottom, "bottom")
            axes.annotate(
                verdict, (1, edge), xycoords=("axes fraction", "data"), xytext=(-6, -3 if alignment == "top" else 3),
                textcoords="offset points", ha="right", va=alignment, color=COLOURS[verdict], fontsize=10,
            )  # fmt: skip


def _hide_off_scale(norms: Sequence[float]) -> list[float]:
    """Return the norms that fit on a logarithmic axis, and NaN for the others, which are marked at the axis' edges."""
    return [norm if 0 < norm < math.inf else math.nan for norm in norms]


def _name_layers(axes: Axes, layers: Sequence[LayerGradients]) -> None:
    step = math.ceil(len(layers) / MAX_LAYER_LABELS)
    indices = range(0, len(layers), step)
    axes.set_xticks(indices)
    axes.set_xticklabels([_shorten(layers[index]) for index in indices], rotation=90, fontsize=7.5, parse_math=False)
    axes.tick_params(axis="both", color=MUTED, labelcolor=INK, length=3)
    axes.tick_params(axis="y", which="minor", left=False)
    for index, label in zip(indices, axes.get_xticklabels()):
        label.set_color(COLOURS.get(layers[index].verdict or "", INK))


def _shorten(layer: LayerGradients) -> str:
    name = layer.name or f"({layer.type})"
    return name if len(name) <= MAX_NAME_LENGTH else "…" + name[1 - MAX_NAME_LENGTH :]


def _title(flow: GradientFlow) -> str:
    if flow.scores.numel() > 1:
        return f"{flow.model}: gradients of {flow.scores.numel()} scores"
    subject = "a score" if flow.classes is None else f"class {flow.classes.item()}"
    return f"{flow.model}: gradients of {subject}, {flow.scores.item():.4g}"
