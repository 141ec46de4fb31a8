"""Build the interactive page of one image and its heatmaps, as HTML that needs no other file."""

from __future__ import annotations

import base64
import html
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from gradcam._version import __version__
from gradcam.errors import GradcamError, OutputError, escape_controls, format_fields
from gradcam.images.read import Pixels, Region
from gradcam.images.write import encode_image, shrink_to_fit, write_image
from gradcam.options import keep_old_names
from gradcam.renames import PAGE, OldKeys, find_old_names
from gradcam.web.preview import draw_preview, encode_first_map, find_addresses, find_preview_file
from gradcam.web.render import render_standalone, to_data_url, write_page

SCHEMA = 2
MAX_IMAGE_SIDE = 1600  # Limit for the longer side of the embedded image, in pixels.
QUALITY = 88
COLORMAPS = ("turbo", "viridis", "cividis", "grey")  # cividis and grey are suitable for colour-blind readers.
STYLES = ("style.css", "page.css")
HEAD_SCRIPTS = ("theme.js", "ratio.js")
PAGE_SCRIPTS = ("common.js", "maps.js", "list.js", "place.js", "page.js")
VERBS = {
    "class": "to say", "box": "to find", "missed": "for a box it missed:", "mask": "to segment", "text": "to match",
    "like": "to match", "word": "to write", "keypoint": "to locate", "score": "for",
}  # fmt: skip
MAX_FIRST_ROWS = 12  # Names that are listed if JavaScript is off.
NOTEBOOK_HEIGHT = 760  # Height of a page in a notebook, in pixels.

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class PageTargets:
    """The targets that a page explains, such as classes (the most probable first), boxes, masks or sentences.

    Each attribute except `kind` is None or has one entry per target.

    Attributes
    ----------
    kind : str
        "class", "score" for a target that is a function, or `kind` of `targets.Instance`.
    names : sequence of str
        Display names.
    indices : sequence of int or None
        Class indices; None for a target without a class index.
    shares : sequence of float or None
        Confidence of the model, from 0 to 1. The entry is None if the model reports no confidence.
    boxes : sequence or None
        Left, top, right and bottom of each box, in pixels of the image.
    words : sequence or None
        Options of `gradcam run` that select the target. The entry is None if no option selects the target. The
        attribute is None for classes, because the index is enough.
    code : sequence or None
        Python expression for each target.
    masks : sequence or None
        Mask (h,w) of each target, bool, for the whole image. The longer side is at most 256 pixels.
    areas : sequence or None
        Fraction of the image that each mask covers, from 0 to 1.
    values : sequence or None
        Cosine similarity of each sentence or reference image.
    texts : sequence or None
        Each word as the caption contains it, including spaces.

    Examples
    --------
    >>> import gradcam
    >>> targets: gradcam.web.page.PageTargets = gradcam.page("photo.jpg", layers=["layer4"]).targets
    >>> targets.kind, targets.names[0], targets.indices[0]
    ('class', 'Egyptian cat', 285)
    """

    kind: str
    names: Sequence[str]
    indices: Sequence[int | None]
    shares: Sequence[float | None]
    boxes: Sequence[Sequence[float] | None] | None = None
    words: Sequence[Sequence[str] | None] | None = None
    code: Sequence[str | None] | None = None
    masks: Sequence[NDArray[np.bool_] | None] | None = None
    areas: Sequence[float | None] | None = None
    values: Sequence[float | None] | None = None
    texts: Sequence[str] | None = None

    def format_amount(self, position: int) -> str:
        """Return the text next to a target's name: its confidence, area or similarity; "" if the target has none.

        Parameters
        ----------
        position : int
            Position of the target.

        Returns
        -------
        str
            Text such as "58 %".
        """
        columns = (self.shares, self.values, self.areas)
        share, value, area = (None if column is None else _round(column[position]) for column in columns)
        share = share if area is None or self.kind != "mask" else area
        return f"{value:.3f}" if share is None and value is not None else "" if share is None else _to_percent(share)

    def to_data(self) -> dict[str, Any]:
        """Convert the targets to JSON values.

        Returns
        -------
        dict
            The entry "targets", as described in `docs/reference/page.md`.
        """
        data: dict[str, Any] = {"kind": self.kind, "names": list(map(escape_controls, self.names))}
        data |= {"indices": list(self.indices), "shares": list(map(_round, self.shares))}
        for name in ("boxes", "words", "code"):
            if (column := getattr(self, name)) is not None:
                data[name] = [list(value) if isinstance(value, (tuple, list)) else value for value in column]
        converters: dict[str, Any] = {"masks": encode_mask, "areas": _round, "values": _round, "texts": escape_controls}
        for name, convert in converters.items():
            if (column := getattr(self, name)) is not None:
                data[name] = [None if value is None else convert(value) for value in column]
        return data


@keep_old_names
@dataclass(frozen=True, eq=False)
class MapSet:
    """The maps of all targets by one method at one layer, in float32.

    Maps are stored as values or, to save memory, as weights of channels.

    Attributes
    ----------
    layer : str
        The layer's dotted name, or "input", or "attention".
    method : str
        The method's name.
    evidence : str
        "signed" if the maps may be negative, otherwise "positive".
    maps : array (K,h,w) or None
        The values; None if `weights` and `channels` are set.
    weights : array (K,C) or None
        The weight of each channel for each target.
    channels : array (C,h,w) or None
        The channels. The map of a target is the sum of the channels, weighted by the target's weights.
    targets : sequence of int or None
        Positions in `Page.targets` of the targets that have a map. None if all targets have a map.

    Examples
    --------
    >>> import gradcam
    >>> maps: gradcam.web.page.MapSet = gradcam.page("photo.jpg", layers=["layer2"]).maps[0]
    >>> maps.weights.shape, maps.channels.shape
    ((1000, 40), (40, 28, 28))
    """

    layer: str
    method: str
    evidence: str
    maps: Floats | None = None
    weights: Floats | None = None
    channels: Floats | None = None
    targets: Sequence[int] | None = None

    __repr__ = format_fields

    def find_map(self, position: int) -> Floats | None:
        """Return the map (h,w) of the target at a position in `Page.targets`; None if the target has no map."""
        rows = None if self.targets is None else list(self.targets)
        if rows is not None and position not in rows:
            return None
        row = position if rows is None else rows.index(position)
        if self.maps is not None:
            return self.maps[row]
        assert self.weights is not None
        assert self.channels is not None
        return np.tensordot(self.weights[row], self.channels, 1)

    def find_strongest(self) -> float:
        """Return the largest value in all maps; 0 if no value is positive."""
        if self.maps is not None:
            return float(self.maps.max(initial=0))
        assert self.weights is not None
        assert self.channels is not None
        cells = self.channels.reshape(len(self.channels), -1)
        # The maps are computed in parts, because all maps together may take hundreds of megabytes.
        parts = np.array_split(cells, max(1, cells.shape[1] // 256), 1)
        return max(float((self.weights @ part).max(initial=0)) for part in parts)

    def to_data(self, total: int) -> dict[str, Any]:
        """Convert the maps to quantised JSON values, either as weights and channels or as values, whichever is smaller.

        Parameters
        ----------
        total : int
            Number of targets on the page.

        Returns
        -------
        dict
            An entry of "maps", as described in `docs/reference/page.md`.
        """
        data: dict[str, Any] = {"layer": self.layer, "method": self.method, "evidence": self.evidence}
        data["strongest"] = float(f"{self.find_strongest():.6g}")
        maps, weights, channels = self.maps, self.weights, self.channels
        if weights is not None and channels is not None:
            data["grid"] = list(channels.shape[1:])
            if len(weights) * channels[0].size <= 2 * weights.size + channels.size:
                maps = np.tensordot(weights, channels, 1)
        if maps is not None:
            data |= {"grid": list(maps.shape[1:]), "maps": quantise_rows(maps.reshape(len(maps), -1))}
        elif weights is not None and channels is not None:
            data["weights"] = quantise_rows(weights, "int16")
            data["channels"] = quantise_rows(channels.reshape(len(channels), -1))
        is_all = self.targets is None or list(self.targets) == list(range(total))
        return data | {"targets": None if is_all else [int(position) for position in self.targets or ()]}


@keep_old_names
@dataclass(frozen=True, eq=False)
class Page:
    """An interactive HTML page of one image and its heatmaps. It needs no server and no network.

    `gradcam.page` makes a page with the maps of all classes, and `explanation.page()` makes a page of one explanation.
    Notebooks display a page automatically.

    Attributes
    ----------
    name : str
        Name of the image.
    image : array (H,W,3)
        The image, RGB, uint8.
    region : (int, int, int, int)
        The region of the image that was the model's input, in pixels: top, left, height, width.
    model : str
        Name of the model.
    targets : PageTargets
        The targets that the maps explain.
    maps : sequence of MapSet
        The maps, one entry per layer and method.
    total : int
        Number of classes of the model; `targets` may hold fewer.
    words : sequence of str
        Command-line options that select the model.
    code : str
        Python expression that loads the model.
    reshape : str, sequence of int or None
        The `reshape` argument for the layer's output, if one was given.
    notes : sequence of str
        Notes for the reader.
    first : int
        Position of the target that is displayed first.
    verdict : mapping or None
        Result of a check, with the keys "outcome", "tests" and "summary".
    link : str or None
        Path of the gallery, relative to the page.
    edits : sequence of str
        Edits of the image, as arguments of ``gradcam run --edit``.

    Examples
    --------
    >>> import gradcam
    >>> page = gradcam.page("photo.jpg", layers=["layer4"])
    >>> len(page.targets.names), page.maps[0].maps.shape
    (1000, (1000, 7, 7))
    >>> page.save("photo.html")
    >>> page.to_data()["schema"]
    2
    """

    name: str
    image: Pixels = field(repr=False)
    region: Region
    model: str
    targets: PageTargets = field(repr=False)
    maps: Sequence[MapSet] = field(repr=False)
    total: int = 0
    words: Sequence[str] = ()
    code: str = "gradcam.load_classifier()"
    reshape: str | Sequence[int] | None = None
    notes: Sequence[str] = ()
    first: int = 0
    verdict: Mapping[str, Any] | None = field(default=None, repr=False)
    link: str | None = None
    edits: Sequence[str] = ()

    __repr__ = format_fields

    def with_verdict(self, verdict: Mapping[str, Any]) -> Self:
        """Return a copy of the page with the result of a check.

        Parameters
        ----------
        verdict : mapping
            A mapping with the keys "outcome", "summary" and "tests". Each test has the keys "question", "outcome" and
            "reason".

        Returns
        -------
        Page
            The copy.
        """
        return replace(self, verdict=verdict)

    def to_data(self) -> dict[str, Any]:
        """Convert the page to JSON values, as described in `docs/reference/page.md`.

        Returns
        -------
        dict
            The image as JPEG and the quantised maps, both in base64, and all names and settings.
        """
        view = encode_image(shrink_to_fit(self.image, MAX_IMAGE_SIDE), ".jpg", QUALITY)
        height, width = self.image.shape[:2]
        data = {
            "schema": SCHEMA,
            "version": __version__,
            "image": {"name": escape_controls(self.name), "width": width, "height": height}
            | {"source": to_data_url(view)},
            "region": list(map(int, self.region)),
            "model": {
                "name": escape_controls(self.model),
                "classes": self.total,
                "words": list(self.words),
                "code": self.code,
                "reshape": self.reshape,
            },
            "targets": self.targets.to_data(),
            "maps": [map_set.to_data(len(self.targets.names)) for map_set in self.maps],
            "first": self.first,
            "notes": list(map(escape_controls, self.notes)),
            "verdict": None if self.verdict is None else dict(self.verdict),
            "link": self.link,
            "edits": list(self.edits),
        }
        return OldKeys(PAGE, data)

    def to_html(self) -> str:
        """Render the page as HTML.

        Returns
        -------
        str
            The whole document, including styles, scripts, image and maps.
        """
        return self._render()

    def _render(self, **addresses: str) -> str:
        """Return the HTML. If the addresses "url" and "image_url" are given, add tags for previews in chats."""
        data, targets = self.to_data(), self.targets
        source = data["image"].pop("source")  # The <img> element has the image, so the data does not.
        first_map = encode_first_map(self.maps[0].find_map(self.first), self.image.shape[:2], self.region)
        names, texts = data["targets"]["names"], data["targets"].get("texts")
        first_name = (texts[self.first].strip() if texts else "") or names[self.first]
        values = {
            "data": data,
            "source": source,
            "first_map": None if first_map is None else to_data_url(first_map, "image/png"),
            "headline": _write_headline(targets.kind, first_name, targets.format_amount(self.first)),
            "facts": f"{self.maps[0].method} at {self.maps[0].layer}",
            "rows": [f"{name} {targets.format_amount(i)}" for i, name in enumerate(names[:MAX_FIRST_ROWS])],
            "tables": {name: encode_colormap(name) for name in COLORMAPS},
            "verbs": VERBS,
            "title": escape_controls(os.path.basename(self.name)),
        }
        scripts = {"script": HEAD_SCRIPTS, "own": PAGE_SCRIPTS}
        return render_standalone("page.html.j2", styles=STYLES, scripts=scripts, **values, **addresses)

    def save(self, path: str | os.PathLike[str], *, url: str | None = None) -> None:
        """Write the page to a file. A failed write leaves no partial file.

        Parameters
        ----------
        path : str or path
            The file, ending in ``.html`` or ``.htm``. The folder of the file must exist.
        url : str, default None
            The address at which you will publish the page, or the address of the folder, ending in "/". If `url` is
            given, the overlay of the first heatmap is written as a PNG file with the same name in the same folder.
            Chats show this file as a preview, because the page's Open Graph tags name it. Publish both files.

        Raises
        ------
        GradcamError
            If the suffix is neither ``.html`` nor ``.htm``, or `url` is not an absolute http or https address.
        OutputError
            If a file cannot be written, or if the PNG file would replace a file that is not the page's old preview.

        Examples
        --------
        >>> import gradcam
        >>> page = gradcam.page("photo.jpg", layers=["layer4"])
        >>> page.save("shared.html", url="https://example.org/pages/")
        >>> gradcam.read_image("shared.png").shape
        (640, 800, 3)
        """
        file = Path(path)
        if file.suffix.lower() not in (".html", ".htm"):
            raise GradcamError(f"{os.fspath(path)}: expected a file name that ends in .html.")
        addresses = {} if url is None else find_addresses(url, file)
        if not file.parent.is_dir():
            raise OutputError(f"{os.fspath(path)}: cannot be written: the folder {file.parent} does not exist")
        preview = None if url is None else find_preview_file(file)
        write_page(file, self._render(**addresses))
        if preview is not None:
            write_image(preview, draw_preview(self.image, self.maps[0].find_map(self.first), self.region))

    def _repr_html_(self) -> str:
        """Return a sandboxed iframe with the page, whose scripts cannot access the notebook."""
        return (
            f'<iframe srcdoc="{html.escape(self.to_html())}" sandbox="allow-scripts allow-downloads" '
            f'allow="clipboard-write" title="{html.escape(escape_controls(self.name))}" loading="lazy" '
            f'style="width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0; border-radius: 8px"></iframe>'
        )


def _write_headline(kind: str, name: str, amount: str) -> tuple[str, str, str]:
    """Return the headline in three parts: the text before the name, the name, and the text after the name.

    The page's script writes the same sentence.
    """
    unit = " of the image" if kind == "mask" else ""
    before = f"The network looked mostly here {VERBS.get(kind, VERBS['score'])} "
    return before, name, f" ({amount}{unit})." if amount else "."


def _to_percent(share: float) -> str:
    """Format a fraction as a percentage such as "58 %", as in the page's script."""
    value = 100 * share
    return "< 0.1 %" if 0 < value < 0.1 else f"{value:.1f} %" if 0 < value < 9.95 else f"{value:.0f} %"


def _round(value: float | None) -> float | None:
    """Round a number to four significant digits; return None for None, NaN and infinities."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def encode_mask(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Run-length encode a mask (h,w) in row order, beginning with the number of pixels outside the mask."""
    pixels = np.concatenate([[False], mask.ravel(), [not mask.ravel()[-1]]])
    runs = np.diff(np.flatnonzero(np.diff(pixels)), prepend=0)
    return {"shape": list(mask.shape), "runs": runs.tolist()}


def quantise_rows(rows: Floats, kind: str = "int8") -> dict[str, Any]:
    """Quantise rows of numbers to integers, with one scale per row.

    Returns a dict with "type", "shape", "data" and "scales". The data and the scales are little-endian, in base64. The
    error of a number is at most half of its row's scale.
    """
    maximum = np.iinfo(kind).max
    scales = np.abs(rows).max(1, initial=0).astype("<f4") / np.float32(maximum)
    divided = rows / np.where(scales > 0, scales, 1)[:, None]
    integers = np.rint(divided).clip(-maximum, maximum).astype(np.dtype(kind).newbyteorder("<"))
    data, scale_data = (base64.b64encode(array.tobytes()).decode() for array in (integers, scales.astype("<f4")))
    return {"type": kind, "shape": list(rows.shape), "data": data, "scales": scale_data}


def encode_colormap(name: str) -> str:
    """Return the 256 RGB colours of a colour map as bytes in base64."""
    from gradcam.images.draw import find_colormap, list_colours

    if name == "grey":
        table = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, 1)
    else:
        table = list_colours(find_colormap(name)).astype(np.uint8)
    return base64.b64encode(np.ascontiguousarray(table).tobytes()).decode()


__getattr__ = find_old_names(__name__)
