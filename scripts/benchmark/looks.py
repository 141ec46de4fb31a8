"""How well a reader reads a heatmap from an overlay: gradcam's looks and those of other libraries, on 30 images.

The images are ten photographs in assets/, a crop of each, and each with rotated hues. The heatmaps are Grad-CAM of the
embedded classifier. A simulated reader finds the nearest colour on the colour bar for each pixel, and takes its value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

import gradcam
from benchmark.cases import ROOT, SEED
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table
from gradcam.images.draw import compute_colours, fill_look, find_colormap, list_colours, to_grey

PHOTOS = (
    *("cat_and_espresso.jpg", "chelsea.jpg", "coffee.jpg", "macaw.webp", "flower.jpg"),
    *("china.jpg", "rocket.jpg", "astronaut.jpg", "panda.webp", "koala.webp"),
)
SIDE = 448  # longer side of each image, in pixels
HUE_STEP = 97  # degrees; each photograph's hues are rotated by another multiple
PIXEL_STEP = 8  # The reader reads every eighth pixel of every eighth row.
HOT = 0.5  # Values from this one on are the hot region.
COLOUR_ERROR = 5.0  # Standard deviation of the reader's error in each coordinate of CIELAB; 2.3 is just noticeable.
LIGHTNESS_WEIGHTS = (1.0, 0.3, 0.1, 0.0)  # How much the reader minds a difference in lightness.
GREYS = (255, 128)  # The bar may be blended with white or with middle grey.
# Deuteranopia in linear RGB: Machado, Oliveira and Fernandes (2009), severity 1.0.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]], np.float32
)
VALUES = np.linspace(0, 1, 256, dtype=np.float32)[None]

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
Draw = Callable[[Pixels, Floats], Pixels]  # from an image and its heatmap to an overlay


@dataclass(frozen=True)
class Look:
    """A way to draw a heatmap over an image, and the colour bars that may stand beside it (256,3)."""

    draw: Draw
    bars: Mapping[str, Pixels]


@dataclass(frozen=True)
class Reading:
    """Mean error of the value, of the value in the hot region, and IoU of the hot region."""

    error: float
    hot_error: float
    overlap: float


def compare_looks(settings: Settings) -> Iterator[Table]:
    report_progress("looks: the heatmaps of 30 images")
    cases = list(list_cases())
    rows, raw = [], []
    for name, look in list_looks(settings).items():
        report_progress(f"looks: {name}")
        overlays = [look.draw(image, heatmap) for image, heatmap in cases]
        normal, deuteranope = (read(overlays, cases, look.bars, view) for view in (None, DEUTERANOPIA))
        kept = [measure_structure(overlay, image) for overlay, (image, _) in zip(overlays, cases)]
        outside, inside = (
            float(np.mean([ssim[(heatmap >= HOT) == hot].mean() for ssim, (_, heatmap) in zip(kept, cases)]))
            for hot in (False, True)
        )
        numbers = [normal.error, normal.hot_error, normal.overlap, deuteranope.hot_error, deuteranope.overlap]
        raw.append({"look": name, "numbers": [*numbers, outside, inside]})
        cells = [f"{value:.3f}" if k in (0, 1, 3) else f"{value:.2f}" for k, value in enumerate(numbers)]
        rows.append([name, *cells, f"{outside:.2f}", f"{inside:.2f}"])
    header = ["look", "error", "hot error", "hot IoU", "hot error, deuteranopia", "hot IoU, deuteranopia"]
    yield Table("looks", "Reading values from overlays", [*header, "SSIM outside", "SSIM inside"], rows, raw=raw)


def list_cases() -> Iterator[tuple[Pixels, Floats]]:
    """Yield 30 images and their heatmaps (H,W), rounded to 256 levels."""
    classifier = gradcam.load_classifier(fit="whole", device="cpu")
    for number, name in enumerate(PHOTOS, start=1):
        photo = gradcam.read_image(ROOT / "assets" / name)
        side = min(photo.shape[:2]) * 3 // 4
        top, left = (photo.shape[0] - side) // 2, (photo.shape[1] - side) // 3
        crop = photo[top : top + side, left : left + side]
        for image in (shrink(photo), shrink(crop), rotate_hues(shrink(photo), HUE_STEP * number)):
            heatmap = classifier.explain(image).heatmaps[0, 0].numpy()
            resized = cv2.resize(heatmap, image.shape[1::-1], interpolation=cv2.INTER_CUBIC).clip(0, 1)
            yield image, (np.rint(resized * 255) / 255).astype(np.float32)


def shrink(image: Pixels) -> Pixels:
    scale = SIDE / max(image.shape[:2])
    size = (round(image.shape[1] * scale), round(image.shape[0] * scale))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)


def rotate_hues(image: Pixels, degrees: float) -> Pixels:
    hsv = cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2HSV)
    hsv[..., 0] = (hsv[..., 0] + degrees) % 360
    return np.rint(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB) * 255).clip(0, 255).astype(np.uint8)


def list_looks(settings: Settings) -> dict[str, Look]:
    looks = {"**inferno on grey, grow to 0.8 (default)**": make_look()}
    looks["turbo on colour, fade to 0.5 (the earlier default)"] = make_look(base="color")
    for alpha in (0.7, 0.9):
        looks[f"turbo on colour, grow to {alpha}"] = make_look(base="color", blend="grow", alpha=alpha)
    for colormap, (blend, alpha) in itertools.product(
        ("inferno", "turbo", "plasma"), (("grow", 0.7), ("grow", 0.8), ("grow", 0.9), ("fade", 0.5), ("fade", 0.7))
    ):
        if (colormap, blend, alpha) != ("inferno", "grow", 0.8):
            looks[f"{colormap} on grey, {blend} to {alpha}"] = make_look(colormap=colormap, blend=blend, alpha=alpha)
    for colormap in ("magma", "viridis", "cividis"):
        looks[f"{colormap} on grey, grow to 0.8"] = make_look(colormap=colormap)
    looks["turbo on grey, uniform 0.5"] = make_look(colormap="turbo", blend="uniform", alpha=0.5)
    for base, colormap in (("gray", "turbo"), ("color", "turbo"), ("gray", "plasma")):
        draw = partial(draw_hues, base=base, colormap=colormap)
        name = f"{colormap} on {'grey' if base == 'gray' else 'colour'}, the photograph's lightness"
        looks[name] = Look(draw, {"full": full_bar(colormap)} | blend_bars(draw))
    return looks | list_peer_looks(settings)


def make_look(**look: Any) -> Look:
    def draw(image: Pixels, heatmap: Floats) -> Pixels:
        return gradcam.overlay(image, heatmap, region=(0, 0, *image.shape[:2]), **look)

    return Look(draw, {"full": full_bar(fill_look(**look)["colormap"])} | blend_bars(draw))


def draw_hues(image: Pixels, heatmap: Floats, *, base: str, colormap: str) -> Pixels:
    """Draw the hue and chroma of the colour map with the lightness of the image. The colours fade in up to 0.5."""
    colours, opacity = compute_colours(colormap, signed=False)
    levels, pixels = np.rint(heatmap * 255).astype(int), image if base == "color" else to_grey(image)
    mixed = to_lab(colours[levels])
    mixed[..., 0] = to_lab(pixels)[..., 0]
    coloured = cv2.cvtColor(mixed, cv2.COLOR_LAB2RGB).clip(0, 1) * 255
    return np.rint(pixels * (1 - opacity[levels]) + coloured * opacity[levels]).astype(np.uint8)


def list_peer_looks(settings: Settings) -> dict[str, Look]:
    looks = {}
    if "pytorch-grad-cam" in settings.present:
        from pytorch_grad_cam.utils.image import show_cam_on_image

        def draw_jet(image: Pixels, heatmap: Floats) -> Pixels:
            return np.asarray(show_cam_on_image(image.astype(np.float32) / 255, heatmap, use_rgb=True))

        # On a uniform image, the function's own scaling would change the bar. The bar is therefore blended by hand.
        bars = {"full": full_bar("jet")} | {f"{grey}": mix(full_bar("jet"), grey, 0.5) for grey in GREYS}
        looks["pytorch-grad-cam, `show_cam_on_image`"] = Look(draw_jet, bars)
    if "torchcam" in settings.present:
        from matplotlib import colormaps
        from PIL import Image
        from torchcam.utils import overlay_mask

        def draw_mask(image: Pixels, heatmap: Floats) -> Pixels:
            return np.asarray(overlay_mask(Image.fromarray(image), Image.fromarray(heatmap, mode="F")))

        squared = np.rint(colormaps["jet"](VALUES[0] ** 2)[:, :3] * 255).astype(np.uint8)
        looks["torchcam, `overlay_mask`"] = Look(draw_mask, {"full": squared} | blend_bars(draw_mask))
    if "captum" in settings.present:
        from matplotlib import colormaps

        greens = np.rint(colormaps["Greens"](VALUES[0])[:, :3] * 255).astype(np.uint8)
        bars = {"full": greens} | {f"{grey}": mix(greens, grey, 0.5) for grey in GREYS}
        looks["captum, `blended_heat_map`"] = Look(draw_captum, bars)
    return looks


def draw_captum(image: Pixels, heatmap: Floats) -> Pixels:
    """Let captum draw its blended heat map in a figure without margins, and return the figure's pixels."""
    import matplotlib.figure
    from captum.attr._utils.visualization import visualize_image_attr
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    height, width = heatmap.shape
    figure = matplotlib.figure.Figure(figsize=(width / 100, height / 100), dpi=100)
    canvas, axes = FigureCanvasAgg(figure), figure.add_axes((0, 0, 1, 1))
    visualize_image_attr(
        heatmap[..., None],
        image / 255,
        "blended_heat_map",
        "positive",
        (figure, axes),
        outlier_perc=0,
        use_pyplot=False,
    )
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def full_bar(colormap: str) -> Pixels:
    return list_colours(find_colormap(colormap)).astype(np.uint8)


def blend_bars(draw: Draw) -> dict[str, Pixels]:
    return {f"{grey}": draw(np.full((1, 256, 3), grey, np.uint8), VALUES)[0] for grey in GREYS}


def mix(colours: Pixels, grey: int, opacity: float) -> Pixels:
    return np.rint(colours * opacity + grey * (1 - opacity)).astype(np.uint8)


def read(
    overlays: list[Pixels], cases: list[tuple[Pixels, Floats]], bars: Mapping[str, Pixels], view: Floats | None
) -> Reading:
    """Read all overlays with each bar and each weight of the lightness. Return the reading with the smallest error."""
    readings = []
    for bar, weight in itertools.product(bars.values(), LIGHTNESS_WEIGHTS):
        rng, numbers = np.random.default_rng(SEED), []
        for overlay, (_, heatmap) in zip(overlays, cases):
            pixels = overlay[::PIXEL_STEP, ::PIXEL_STEP].reshape(-1, 3)
            truth = heatmap[::PIXEL_STEP, ::PIXEL_STEP].ravel()
            values = match(see(pixels, view), see(bar, view), weight, rng)
            hot, hot_values, error = truth >= HOT, values >= HOT, np.abs(values - truth)
            overlap = (hot & hot_values).sum() / (hot | hot_values).sum()
            numbers.append((error.mean(), error[hot].mean(), overlap))
        readings.append(Reading(*map(float, np.mean(numbers, axis=0))))
    return min(readings, key=lambda reading: reading.error)


def match(pixels: Floats, bar: Floats, weight: float, rng: np.random.Generator) -> Floats:
    """Return the value of the bar's nearest colour for each pixel (n,3)."""
    weights = np.array([weight, 1, 1], np.float32)
    seen = (to_lab(pixels) + rng.normal(0, COLOUR_ERROR, pixels.shape)) * weights
    colours = to_lab(bar) * weights
    return VALUES[0, ((colours**2).sum(1) - 2 * seen @ colours.T).argmin(1)]


def see(pixels: NDArray[Any], view: Floats | None) -> Floats:
    """Return colours as a reader with a defect of colour vision sees them."""
    if view is None:
        return pixels.astype(np.float32)
    unit = pixels.astype(np.float32) / 255
    linear = np.where(unit <= 0.04045, unit / 12.92, ((unit + 0.055) / 1.055) ** 2.4) @ view.T
    linear = linear.clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055).astype(np.float32) * 255


def to_lab(pixels: NDArray[Any]) -> Floats:
    rgb = (pixels.reshape(-1, 1, 3) / 255).astype(np.float32)
    return np.asarray(cv2.cvtColor(rgb, cv2.COLOR_RGB2LAB)).reshape(pixels.shape)


def measure_structure(overlay: Pixels, image: Pixels) -> NDArray[np.float64]:
    """Return the SSIM of the luminance at each pixel, with the paper's Gaussian window of 11 x 11 pixels."""
    x, y = (cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.float64) for pixels in (overlay, image))

    def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(cv2.GaussianBlur(values, (11, 11), 1.5))

    mean_x, mean_y = smooth(x), smooth(y)
    variance_x, variance_y = smooth(x * x) - mean_x**2, smooth(y * y) - mean_y**2
    covariance, c1, c2 = smooth(x * y) - mean_x * mean_y, (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return np.asarray(luminance * (2 * covariance + c2) / (variance_x + variance_y + c2))
