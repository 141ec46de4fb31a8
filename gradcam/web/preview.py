"""Draw the first heatmap of a page for readers without JavaScript, and as a preview image for chats."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, OutputError, shorten
from gradcam.images.read import Pixels, Region
from gradcam.images.write import encode_image, shrink_to_fit

COLORMAP = "turbo"
FIRST_MAP_SIDE = 160  # Longer side in pixels of the heatmap that is visible without JavaScript.
MAX_PREVIEW_SIDE = 1200  # Chats show at most about 1,200 pixels, and ignore files of several megabytes.


def enlarge_positive(values: NDArray[np.float32] | None, rows: int, columns: int) -> NDArray[np.float32] | None:
    """Resize the positive values of a map, and divide them by their maximum, as the page's script does.

    Returns None if no value is positive.
    """
    from gradcam.images.draw import resize

    if values is None or not (values > 0).any():
        return None
    heatmap: NDArray[np.float32] = resize(np.maximum(values, 0), max(1, rows), max(1, columns)).clip(0)
    return heatmap / max(heatmap.max(), np.finfo(np.float32).tiny)


def encode_first_map(values: NDArray[np.float32] | None, size: tuple[int, int], region: Region) -> bytes | None:
    """Draw the positive values of a map (h,w) as a transparent PNG to lay over an image; None if no value is positive.

    `size` is the (height, width) of the image. `region` is the region of the image that the map covers.
    """
    from gradcam.images.draw import compute_colours

    scale = FIRST_MAP_SIDE / max(size)
    height, width = (max(1, round(side * scale)) for side in size)
    top, left = min(round(region[0] * scale), height - 1), min(round(region[1] * scale), width - 1)
    bottom, right = round((region[0] + region[2]) * scale), round((region[1] + region[3]) * scale)
    heatmap = enlarge_positive(values, bottom - top, right - left)
    if heatmap is None:
        return None
    colours, opacity = compute_colours(COLORMAP, signed=False)
    table = np.concatenate([colours, 127.5 * opacity], 1).round().astype(np.uint8)
    canvas = np.zeros((height, width, 4), np.uint8)
    canvas[top : top + heatmap.shape[0], left : left + heatmap.shape[1]] = table[
        np.rint(255 * heatmap).astype(np.uint8)
    ]
    return encode_image(canvas, ".png")


def draw_preview(image: Pixels, values: NDArray[np.float32] | None, region: Region) -> Pixels:
    """Draw the positive values of a map over the image, in a size that chats accept as a preview."""
    from gradcam.images.draw import overlay

    heatmap = enlarge_positive(values, *region[2:])
    pixels = image if heatmap is None else overlay(image, heatmap, region=region, base="color", outline=True)
    return shrink_to_fit(pixels, MAX_PREVIEW_SIDE)


def check_address(url: str) -> str:
    """Return the address unchanged. Raise `GradcamError` if it is not an absolute http or https address."""
    try:
        parts = urlsplit(url)
        is_absolute = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # The port or the IPv6 address is malformed.
        is_absolute = False
    if not is_absolute or not url.isprintable() or set(url) & set(' "<>\\^`{|}'):
        problem = f"{shorten(url)} is not an absolute URL"
        raise GradcamError(f"{problem}: give a URL such as https://example.org/photo.html.")
    return url


def find_addresses(url: str, path: Path) -> dict[str, Any]:
    """Return the addresses of a page and of its preview image. If `url` ends in "/", the file name is added."""
    is_folder = urlsplit(check_address(url)).path[-1:] in ("", "/")
    address = urljoin(url, quote(os.fsencode(path.name))) if is_folder else url
    return {"url": address, "image_url": urljoin(address, quote(os.fsencode(path.with_suffix(".png").name)))}


def find_preview_file(path: Path) -> Path:
    """Return the path for the preview image of a page. Raise `OutputError` if an unrelated file has this path."""
    preview = path.with_suffix(".png")
    if os.path.lexists(preview) and not _is_named(preview, path):
        problem = f"{preview} exists already, and is not the preview of an earlier {path.name}"
        raise OutputError(f"{problem}: choose another name for the page, or remove that file.")
    return preview


def _is_named(preview: Path, path: Path) -> bool:
    """Return whether an existing page at `path` uses this preview image."""
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError):
        return False
    return f'/{quote(os.fsencode(preview.name))}"><meta name="twitter:card"' in text
