"""Plot the gradient flow through a network, and highlight layers with vanishing and exploding gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.errors import GradcamError, to_pip_command
from gradcam.images.read import Pixels
from gradcam.inspection.flow import EXPLODING, MAX_NORM_RATIO, MIN_NORM_RATIO, NO_GRADIENT, VANISHING, GradientFlow
from gradcam.options import argument_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {VANISHING: "#2b6cb0", EXPLODING: "#c2410c", NO_GRADIENT: "#6b21a8", "NaN": "#b91c1c", "infinite": "#b91c1c"}
INK, MUTED, LINE, RING = "#1f2937", "#9ca3af", "#374151", "#0d9488"
DOTS_PER_INCH = 100
MAX_LAYER_LABELS = 72  # If there are more layers, only every second, third, ... layer is named below the axis.
INCHES_PER_LAYER, MIN_WIDTH_INCHES, MAX_WIDTH_INCHES = 0.19, 8.0, 18.0  # Width of the figure.
# Height of the plot, and additional height for each letter of the longest name below the plot.
PLOT_HEIGHT_INCHES, INCHES_PER_LETTER = 5.6, 0.042
MAX_NAME_LENGTH = 40  # Characters. Longer names lose their start, because the end of a name is more specific.
MAX_DECADES = 36  # Maximum range of the axis above and below the reference, in powers of ten.


def draw_gradients(flow: GradientFlow, *, title: str | None = None) -> Pixels:
    """Plot the norm of each layer's gradient, in order of execution.

    The line shows the gradient at each layer's output. A ring shows the gradient with respect to all parameters of a
    layer. The axis is logarithmic. The background is coloured where gradients vanish or explode. Zero and missing
    gradients are marked at the bottom, NaN and infinite gradients at the top.

    Parameters
    ----------
    flow : GradientFlow
        The result of `inspection.gradients`.
    title : str, default None
        The title. None means the name of the model's class, and the score.

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
    names = [_shorten(layer.name or f"({layer.type})") for layer in flow.layers]
    figure, axes = _new_axes(names)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    outputs = [math.nan if layer.activations is None else layer.activations.norm for layer in flow.layers]
    parameters = [layer.parameters_norm for layer in flow.layers]
    # The axis starts and ends at powers of ten, and covers all norms. It covers at least two decades above and below
    # the reference, so that small differences look small.
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
    ring: dict[str, Any] = {"color": RING, "ms": 4.6, "mfc": "none", "mew": 1.1}
    axes.plot(_hide_off_scale(parameters), "o", **ring, zorder=2, label="at its parameters")
    for verdicts, edge, marker, size, label in (
        ([NO_GRADIENT], low, "v", 6, "none, or exactly zero"),
        (["NaN", "infinite"], high, "X", 7, "NaN or infinite"),
    ):
        if indices := [index for index, layer in enumerate(flow.layers) if layer.verdict in verdicts]:
            style: dict[str, Any] = {"color": COLOURS[verdicts[0]], "ms": size, "ls": "none", "clip_on": False}
            axes.plot(indices, [edge] * len(indices), marker, **style, zorder=4, label=label)
    _label_layers(axes, names, [COLOURS.get(layer.verdict or "", INK) for layer in flow.layers])
    axes.set_title(title or _title(flow), loc="left", fontsize=12, color=INK, pad=32, parse_math=False)
    axes.set_ylabel("norm of the gradient", color=INK)
    axes.set_xlabel("layers in order of execution; the backward pass runs from right to left", color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=9, borderaxespad=0.8)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3])


def _new_axes(names: Sequence[str]) -> tuple[Figure, Axes]:
    """Create a figure and its axes without pyplot, which would store the figure globally and select a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        problem = f"Drawing gradients needs matplotlib: {to_pip_command('plots')}"
        advice = "Without matplotlib, you can still print the result of inspection.gradients()"
        raise GradcamError(f"{problem}. {advice}.") from error
    width = min(MAX_WIDTH_INCHES, max(MIN_WIDTH_INCHES, 1.5 + INCHES_PER_LAYER * len(names)))
    height = PLOT_HEIGHT_INCHES + INCHES_PER_LETTER * max(map(len, names))
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white", layout="tight")
    axes = figure.add_subplot(facecolor="white")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.grid(axis="y", color="#e5e7eb", lw=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _shade(axes: Axes, reference: float, low: float, high: float) -> None:
    axes.axhline(reference, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1, label="at the model's output")
    vanishing, exploding = min(high, reference * MIN_NORM_RATIO), max(low, reference * MAX_NORM_RATIO)
    for verdict, start, end, alignment, offset in (
        (VANISHING, low, vanishing, "top", -3),
        (EXPLODING, high, exploding, "bottom", 3),
    ):
        if low < end < high:
            axes.axhspan(start, end, color=COLOURS[verdict], alpha=0.10, lw=0, zorder=0)
            axes.annotate(
                verdict, (1, end), xycoords=("axes fraction", "data"), xytext=(-6, offset),
                textcoords="offset points", ha="right", va=alignment, color=COLOURS[verdict], fontsize=10,
            )  # fmt: skip


def _hide_off_scale(norms: Sequence[float]) -> list[float]:
    """Replace norms that a logarithmic axis cannot represent by NaN.

    Markers at the edges of the plot stand for such norms.
    """
    return [norm if 0 < norm < math.inf else math.nan for norm in norms]


def _label_layers(axes: Axes, names: Sequence[str], colours: Sequence[str]) -> None:
    step = math.ceil(len(names) / MAX_LAYER_LABELS)
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=7.5, parse_math=False)
    axes.tick_params(axis="both", color=MUTED, labelcolor=INK, length=3)
    axes.tick_params(axis="y", which="minor", left=False)
    for label, colour in zip(axes.get_xticklabels(), colours[::step]):
        label.set_color(colour)


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else "…" + name[1 - MAX_NAME_LENGTH :]


def _title(flow: GradientFlow) -> str:
    if flow.scores.numel() > 1:
        return f"{flow.model}: gradients of {flow.scores.numel()} scores"
    subject = "a score" if flow.classes is None else f"class {flow.classes.item()}"
    return f"{flow.model}: gradients of {subject}, {flow.scores.item():.4g}"
