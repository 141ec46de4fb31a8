"""The page of one picture: its maps, what they are of, and how that is written, for browsers that need nothing else."""

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
from gradcam.errors import GradcamError, OutputError, printable, show_fields
from gradcam.images.read import Pixels, Region
from gradcam.images.write import encode_image, fit_view
from gradcam.web.render import render_whole, to_source, write_page

SCHEMA = 1
LONGEST = 1600  # pixels of the picture in the page
QUALITY = 88
COLORMAPS = ("turbo", "viridis", "cividis", "grey")  # cividis and grey for whoever sees colours otherwise
STYLES, SCRIPTS = ("style.css", "page.css"), {"script": ("theme.js",), "own": ("common.js", "maps.js", "page.js")}
HEIGHT = 760  # pixels of a page in a notebook

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Things:
    """What the maps of a page are of: classes, the most probable first; or boxes, masks, sentences, words.

    Attributes
    ----------
    kind : str
        "class", "score" for a function's, or what an `Instance` calls it.
    names : sequence of str
        What people call each.
    indices : sequence of int or None
        Of classes; None where they have none.
    shares : sequence of float or None
        How sure the model is of each, from 0 to 1; None where it does not say.
    boxes : sequence or None
        Left, top, right and bottom of each, in pixels of the picture.
    words : sequence or None
        What `gradcam run` is told to explain each, None where no option says it. For classes it follows from the index,
        and is left out.
    code : sequence or None
        The same in Python.

    Examples
    --------
    >>> import gradcam
    >>> things: gradcam.web.page.Things = gradcam.page("photo.jpg", layers=["layer4"]).things
    >>> things.kind, things.names[0], things.indices[0]
    ('class', 'Egyptian cat', 285)
    """

    kind: str
    names: Sequence[str]
    indices: Sequence[int | None]
    shares: Sequence[float | None]
    boxes: Sequence[Sequence[float] | None] | None = None
    words: Sequence[Sequence[str] | None] | None = None
    code: Sequence[str | None] | None = None


@dataclass(frozen=True, eq=False)
class MapSet:
    """The maps of a page by one method at one layer, float32, as values or as sums of channels.

    Attributes
    ----------
    layer : str
        The layer's dotted name, or "input", or "attention".
    method : str
        The method's name.
    evidence : str
        "signed", or "positive" by methods without signs.
    maps : array (K,h,w) or None
        The values; None where `weights` and `channels` say the same.
    weights : array (K,C) or None
        What each channel counts.
    channels : array (C,h,w) or None
        What is added up, by these weights.
    things : sequence of int or None
        Which of the page's things have a map, by their positions; None for all of them.

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
    things: Sequence[int] | None = None

    __repr__ = show_fields

    def to_data(self, total: int) -> dict[str, Any]:
        """Write the maps as what JSON has, quantised; products become values where these are fewer bytes.

        Parameters
        ----------
        total : int
            How many things the page has.

        Returns
        -------
        dict
            As `docs/reference/page.md` describes it.
        """
        found: dict[str, Any] = {"layer": self.layer, "method": self.method, "evidence": self.evidence}
        maps, weights, channels = self.maps, self.weights, self.channels
        if weights is not None and channels is not None:
            found["grid"] = list(channels.shape[1:])
            if len(weights) * channels[0].size <= 2 * weights.size + channels.size:
                maps = np.tensordot(weights, channels, 1)
        if maps is not None:
            found |= {"grid": list(maps.shape[1:]), "maps": encode(maps.reshape(len(maps), -1))}
        elif weights is not None and channels is not None:
            found |= {"weights": encode(weights, "int16"), "channels": encode(channels.reshape(len(channels), -1))}
        is_all = self.things is None or list(self.things) == list(range(total))
        return found | {"things": None if is_all else [int(it) for it in self.things or ()]}


@dataclass(frozen=True, eq=False)
class Page:
    """A picture with the maps of all that is explained in it, as one page that needs no server and no network.

    `gradcam.page` makes one with the maps of all classes; `explanation.page()` one of an explanation. A notebook shows
    it by itself.

    Attributes
    ----------
    name : str
        What the picture is called.
    picture : array (H,W,3)
        The picture, RGB, uint8.
    region : (int, int, int, int)
        The pixels of it that the network saw: top, left, height, width.
    model : str
        The name of the model.
    things : Things
        What the maps are of.
    maps : sequence of MapSet
        The maps, by layer and method.
    total : int
        How many classes the model has, of which those in `things` may be a few.
    words : sequence of str
        The options of the shell that choose the model.
    code : str
        The Python that loads it.
    reshape : str, sequence of int or None
        How the layer's output was laid out, where that was told.
    notes : sequence of str
        What a person should know.
    first : int
        Which of the things is shown first.
    verdict : mapping or None
        What a check said: "outcome", "tests" and "summary".
    link : str or None
        Where the gallery is, relative to the page.

    Examples
    --------
    >>> import gradcam
    >>> page = gradcam.page("photo.jpg", layers=["layer4"])
    >>> len(page.things.names), page.maps[0].maps.shape
    (1000, (1000, 7, 7))
    >>> page.save("photo.html")
    >>> page.to_data()["schema"]
    1
    """

    name: str
    picture: Pixels = field(repr=False)
    region: Region
    model: str
    things: Things = field(repr=False)
    maps: Sequence[MapSet] = field(repr=False)
    total: int = 0
    words: Sequence[str] = ()
    code: str = "gradcam.load_classifier()"
    reshape: str | Sequence[int] | None = None
    notes: Sequence[str] = ()
    first: int = 0
    verdict: Mapping[str, Any] | None = field(default=None, repr=False)
    link: str | None = None

    __repr__ = show_fields

    def judged(self, verdict: Mapping[str, Any]) -> Self:
        """Add a verdict.

        Parameters
        ----------
        verdict : mapping
            "outcome", "tests" with "question", "outcome" and "reason", and "summary".

        Returns
        -------
        Page
            The same page with it.
        """
        return replace(self, verdict=verdict)

    def to_data(self) -> dict[str, Any]:
        """Write all of the page as what JSON has; `docs/reference/page.md` describes it.

        Returns
        -------
        dict
            With the picture as a JPEG, and the maps quantised, both in base64.
        """
        shown = fit_view(self.picture, LONGEST)
        height, width = self.picture.shape[:2]
        things = self.things
        listed: dict[str, Any] = {
            "kind": things.kind,
            "names": list(map(printable, things.names)),
            "indices": list(things.indices),
            "shares": [None if it is None or not math.isfinite(it) else float(f"{it:.4g}") for it in things.shares],
        }
        for name in ("boxes", "words", "code"):
            if (values := getattr(things, name)) is not None:
                listed[name] = [list(it) if isinstance(it, (tuple, list)) else it for it in values]
        return {
            "schema": SCHEMA,
            "version": __version__,
            "picture": {
                "name": printable(self.name),
                "width": width,
                "height": height,
                "source": to_source(encode_image(shown, ".jpg", QUALITY)),
            },
            "region": list(map(int, self.region)),
            "model": {
                "name": printable(self.model),
                "classes": self.total,
                "words": list(self.words),
                "code": self.code,
                "reshape": self.reshape,
            },
            "things": listed,
            "maps": [each.to_data(len(things.names)) for each in self.maps],
            "first": self.first,
            "notes": list(map(printable, self.notes)),
            "verdict": None if self.verdict is None else dict(self.verdict),
            "link": self.link,
        }

    def to_html(self) -> str:
        """Write the page.

        Returns
        -------
        str
            All of it: styles, scripts, picture and maps are in it.
        """
        data = self.to_data()
        tables = {name: to_table(name) for name in COLORMAPS}
        return render_whole(
            "page.html.j2",
            styles=STYLES,
            scripts=SCRIPTS,
            title=printable(os.path.basename(self.name)),
            data=data,
            tables=tables,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, whole, or not at all.

        Parameters
        ----------
        path : str or path
            The file, ending in ``.html`` or ``.htm``. Its folder has to exist.

        Raises
        ------
        GradcamError
            For another suffix.
        OutputError
            Where the file cannot be written.
        """
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise GradcamError(f"{os.fspath(path)}: a page is written as .html.")
        if not Path(path).parent.is_dir():
            raise OutputError(f"{os.fspath(path)}: cannot be written (there is no folder {Path(path).parent})")
        write_page(Path(path), self.to_html())

    def _repr_html_(self) -> str:
        return frame(self)


def frame(page: Page) -> str:
    """A page inside another one, such as a notebook, whose scripts it cannot reach."""
    return (
        f'<iframe srcdoc="{html.escape(page.to_html())}" sandbox="allow-scripts allow-downloads" '
        f'allow="clipboard-write" title="{html.escape(printable(page.name))}" loading="lazy" '
        f'style="width: 100%; height: {HEIGHT}px; border: 0; border-radius: 8px"></iframe>'
    )


def encode(rows: Floats, kind: str = "int8") -> dict[str, Any]:
    """Rows of numbers as whole ones, each row with its scale: `{"type", "shape", "data", "scales"}`, the last two in
    base64, little-endian. A number is off by half of its row's scale at most."""
    most = np.iinfo(kind).max
    scales = np.abs(rows).max(1, initial=0).astype("<f4") / np.float32(most)
    divided = rows / np.where(scales > 0, scales, 1)[:, None]
    whole = np.rint(divided).clip(-most, most).astype(np.dtype(kind).newbyteorder("<"))
    data, each = (base64.b64encode(it.tobytes()).decode() for it in (whole, scales.astype("<f4")))
    return {"type": kind, "shape": list(rows.shape), "data": data, "scales": each}


def to_table(name: str) -> str:
    """256 colours as bytes, RGB, in base64."""
    from gradcam.images.draw import colours_of, find_colormap

    if name == "grey":
        table = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, 1)
    else:
        table = colours_of(find_colormap(name)).astype(np.uint8)
    return base64.b64encode(np.ascontiguousarray(table).tobytes()).decode()
