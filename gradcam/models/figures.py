"""Draw figures for papers: images, their heatmaps, titles and one colour bar, as PDF, SVG or PNG."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gradcam.errors import GradcamError, ImageError, shorten, to_pip_command
from gradcam.images.draw import draw_colour_bar
from gradcam.images.files import write_atomically
from gradcam.images.read import Pixels, Spacing, to_path
from gradcam.images.write import select_maps, translate_write_errors
from gradcam.options import LOOK_OPTIONS, check_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PANELS, DOTS_PER_INCH = 40, 300
COLOUR_COUNT = 256  # number of colours in the colour bar
MAX_SCALE_BAR_SHARE = 0.4  # longest scale bar, as a share of the image's width
MAX_PIXEL_STRETCH = 0.01  # If pixels are not square, the scale bar is left out: it would be wrong for heights.
# Lengths in inches. The default width is a page with two columns. LINE is the height of a line of text.
WIDTH, MARGIN, GAP, ROW_GAP, TEXT_GAP, LINE = 7.0, 0.05, 0.08, 0.12, 0.04, 0.135
MIN_CELL_WIDTH, MIN_WRAPPED_WIDTH, MAX_PANEL_HEIGHT, BAR_WIDTH, BAR_HEIGHT = 0.5, 1.0, 4.0, 2.0, 0.08
TITLE_SIZE, NOTE_SIZE, INK, MUTED = 8.0, 7.0, "#111111", "#555555"  # font sizes in points, and colours of text
MAX_LINES = 3  # largest number of lines in a title, a note or a label
TEXT_SLACK = 1.03  # Programs that open an SVG or PDF may set text a little wider than matplotlib measures it.
WORD = re.compile(r"[^\s_./-]+[\s_./-]*|[\s_./-]+")  # Lines also end within names, such as encoder.layer_11.
# PDF and SVG files store text in TrueType fonts, not as outlines. The same figure always gives the same bytes.
SETTINGS: Any = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "gradcam", "savefig.bbox": None}
SETTINGS |= {"text.parse_math": False, "text.usetex": False}
METADATA: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}
# The label of the colour bar, by the kind of evidence. On a user's axes, the part after the semicolon is left out.
LABELS = {kind: f"{kind} evidence; 1 is the maximum of each heatmap" for kind in ("positive", "negative")}
LABELS["signed"] = "evidence against (below 0) and for (above 0); ±1 is the largest magnitude in each heatmap"


class FigurePanel(NamedTuple):
    """An image with a title and a note above it, and a scale bar if the spacing of its pixels is known."""

    pixels: Pixels
    title: str
    note: str
    spacing: Spacing | None = None


def figure(
    explanations: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    i: int | None = None,
    k: int | None = None,
    names: Sequence[str] | None = None,
    width: float = WIDTH,
    title: bool = True,
    colorbar: bool = True,
    **look: Any,
) -> Figure:
    """Draw explanations for a paper: the images, a heatmap for each class or method, titles and one colour bar.

    With one method, the figure has a row per image and a column per class. Many classes continue on further rows. With
    several methods, the figure has a row per image and class, and a column per method and layer. All panels have the
    same height. If the images have a pixel spacing in mm (DICOM files), a scale bar is drawn. The figure is drawn
    without pyplot. Figures need matplotlib (extra `plots`).

    Parameters
    ----------
    explanations : ImageExplanation, ImageAttribution, mapping or sequence
        The result of `explain`, `attribute` or `compare` of a model that takes images, or a list of such results. In a
        list, an item may also be a list of explanations of the same images by several methods.
    path : str or path, default None
        The file to write: ``.pdf``, ``.svg`` or ``.png``. PDF and SVG files contain each panel at full resolution, and
        text as text. The same figure always gives the same bytes. None writes nothing.
    i : int, default None
        The image, counted from 0. None draws all images.
    k : int, default None
        The class, counted from 0. None draws all classes.
    names : sequence of str, default None
        The title of each image. None means "image".
    width : float, default 7.0
        The width of the figure, in inches. The height follows from the panels. A PNG has 300 pixels per inch.
    title : bool, default True
        Whether to write the class, probability, method and layer above the panels.
    colorbar : bool, default True
        Whether to draw the colour bar. Attributions have no colour bar.
    **look : Any
        The options of `ImageExplanation.overlay`, such as `alpha` and `colormap`.

    Returns
    -------
    matplotlib.figure.Figure
        The figure.

    Raises
    ------
    GradcamError
        If matplotlib is missing, if the figure would have more than 40 panels, if the panels do not fit into the width,
        or if the explanations show different kinds of evidence.
    ImageError
        If the suffix is not supported, the file cannot be written, or there is no such image or class.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> explanations = classifier.compare("photo.jpg", methods=["gradcam", "layercam"], target="espresso")
    >>> figure = gradcam.figure(explanations, "figure.pdf", width=5)
    >>> len(figure.axes)  # the image, two heatmaps and the colour bar
    4
    """
    check_plots()
    import matplotlib as mpl

    suffix = None if path is None else to_path(path).suffix.lower()
    if suffix not in (None, *METADATA):
        raise ImageError(f"{path}: a figure can only be written as {', '.join(METADATA)}")
    check_number(width, "The figure's width", "inches, such as 7.", least=1, most=100)
    groups = _to_groups(explanations)
    rows = _list_rows(groups, i, k, names, look)
    if (count := sum(map(len, rows))) > MAX_PANELS:
        problem = f"The figure would have {count} panels, more than {MAX_PANELS}"
        raise GradcamError(f"{problem}: draw fewer images or classes.")
    rows = rows if title else [[panel._replace(title="", note="") for panel in row] for row in rows]
    if all(len(group) == 1 for group in groups):  # Continue many classes, such as words, on further rows.
        columns = int(width / MIN_WRAPPED_WIDTH)
        rows = [row[start : start + columns] for row in rows for start in range(0, len(row), columns)]
    evidence = _find_evidence([source for group in groups for source in group]) if colorbar else None
    interpolation = "antialiased" if suffix == ".png" else "none"  # With "none", PDF and SVG files have all pixels.
    with mpl.rc_context(SETTINGS):
        result, file = _draw_grid(rows, width, evidence, look, interpolation), io.BytesIO()
        if suffix is not None:
            result.savefig(file, format=suffix[1:], metadata=METADATA[suffix])
    if path is not None:
        with translate_write_errors(to_path(path)):
            write_atomically(to_path(path), file.getvalue())
    return result


class FigureMaker:
    """The method of explanations and attributions that draws a figure."""

    def figure(self, path: str | os.PathLike[str] | None = None, *, ax: Any = None, **options: Any) -> Figure:
        """Draw a figure for a paper: the images, a heatmap for each class, titles and a colour bar.

        Parameters
        ----------
        path : str or path, default None
            The file to write: ``.pdf``, ``.svg`` or ``.png``. None writes nothing.
        ax : matplotlib.axes.Axes, default None
            Your own axes. One heatmap is drawn there: of the first image and class, unless `i` and `k` are given.
        **options : Any
            The options of `gradcam.figure`: `i`, `k`, `names`, `width`, `title`, `colorbar`, and those of `overlay`.
            `names` and `width` cannot be combined with `ax`.

        Returns
        -------
        matplotlib.figure.Figure
            The figure. With `ax`, the figure of these axes.

        Raises
        ------
        GradcamError
            As in `gradcam.figure`. Also if `ax` is not an Axes, or is combined with `path`, `names` or `width`.
        ImageError
            As in `gradcam.figure`.

        Examples
        --------
        >>> import gradcam
        >>> explanation = gradcam.load_classifier().explain("photo.jpg", target="espresso")
        >>> figure = explanation.figure("figure.svg", width=3.5)
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> explanation.figure(ax=axes, colorbar=False) is axes.figure
        True
        """
        if ax is None:
            return figure(self, path, **options)
        check_plots()
        if not hasattr(ax, "imshow"):
            raise GradcamError(f"ax is {shorten(ax)}, expected the axes of a matplotlib figure.")
        if unsuitable := sorted({"path"} if path is not None else options.keys() & {"names", "width"}):
            problem = f"{unsuitable[0]}= cannot be used with ax=, which draws one panel on your own axes"
            raise GradcamError(f"{problem}: leave {unsuitable[0]}= out, and save your figure with savefig().")
        return _draw_on_axes(self, ax, **options)


def check_plots() -> None:
    """Raise `GradcamError` if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise GradcamError(f"Figures need matplotlib: {to_pip_command('plots')}.")


def _to_groups(explanations: Any) -> list[list[Any]]:
    """Return lists of explanations. The explanations of a list are of the same images, by several methods."""
    items = explanations if isinstance(explanations, (list, tuple)) else [explanations]
    groups = [list(item.values()) if isinstance(item, Mapping) else item for item in items]
    groups = [list(group) if isinstance(group, (list, tuple)) else [group] for group in groups]
    if not groups or not all(group and all(isinstance(item, FigureMaker) for item in group) for group in groups):
        expected = "the result of explain(), attribute() or compare() of a model from load_model(), or a list of them"
        raise GradcamError(f"The explanations are {shorten(explanations)}, expected {expected}.")
    return groups


def _find_evidence(sources: Sequence[Any]) -> str | None:
    """Return the kind of evidence of all heatmaps; None for attributions, which have no colour bar."""
    first, *others = [*dict.fromkeys(source.evidence for source in sources if hasattr(source, "heatmaps")), None]
    if others[1:]:
        raise GradcamError(f"One colour bar cannot show {first} and {others[0]} evidence: draw separate figures.")
    return first


def _list_rows(
    groups: list[list[Any]], i: int | None, k: int | None, names: Sequence[str] | None, look: dict[str, Any]
) -> list[list[FigurePanel]]:
    images = [
        [source.select(range(len(source.images))[number]) for source in group]
        for group in groups
        for number in select_maps(i, None, tuple(group[0].scores.shape))[0]
    ]
    if names is not None and len(names) != len(images):
        raise GradcamError(f"There are {len(names)} names for {len(images)} images: give one name for each image.")
    has_methods, rows = any(len(group) > 1 for group in groups), list[list[FigurePanel]]()
    for sources, name in zip(images, names or [""] * len(images)):
        rows += _list_image_rows(sources, k, name, look, has_methods=has_methods)
        if references := [source.reference for source in sources if getattr(source, "reference", None) is not None]:
            rows += _list_image_rows(references, None, "other image", look, has_methods=has_methods)  # for `Like`
    for number in range(len(rows) - 1, 0, -1) if has_methods else ():  # Write headings only where they change.
        pairs = zip(rows[number][1:], rows[number - 1][1:])
        rows[number][1:] = [p._replace(title="", note="") if p[1:] == above[1:] else p for p, above in pairs]
    return rows


def _list_image_rows(
    sources: Sequence[Any], k: int | None, name: str, look: dict[str, Any], *, has_methods: bool
) -> list[list[FigurePanel]]:
    """Return a row for each class, with a heatmap for each method; for a single method, a row with all classes."""
    first, shape = sources[0], tuple(sources[0].scores.shape)
    image = FigurePanel(first.images[0], name or "image", "", first.spacings[0] if first.spacings else None)
    rows = list[list[FigurePanel]]() if has_methods else [[image]]
    for column in select_maps(0, k, shape)[1] if shape[1] else ():
        target, value = _name_target(first, column), first._format_value(0, column)
        if has_methods:
            rows.append([image._replace(title=target, note=_join(value, name))])
        for source in sources:
            place, is_map = f" at {source.layer}" if source.layer else "", hasattr(source, "heatmaps")
            blank = f"no {source.evidence} evidence" if is_map and not source.maps[0, column].any() else ""
            title, notes = (source.method, [place[4:]]) if has_methods else (target, [value, source.method + place])
            pixels = source._draw_one(0, column, **(look if is_map else {}))
            rows[-1].append(FigurePanel(pixels, title, _join(*notes, blank)))
    return rows


def _name_target(source: Any, k: int) -> str:
    instance = source.instance(0, k)
    if instance is None:
        return str(source.label(0, k) or source.name_class(0, k))
    return instance.name if instance.number is None else f"{instance.number} {instance.name}"


def _join(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _draw_grid(
    rows: list[list[FigurePanel]], width: float, evidence: str | None, look: Mapping[str, Any], interpolation: str
) -> Figure:
    """Draw panels of one height in rows, with a colour bar below the second column."""
    from matplotlib.figure import Figure

    columns = max(map(len, rows))
    cell = (width - 2 * MARGIN - (columns - 1) * GAP) / columns
    if cell < MIN_CELL_WIDTH:
        problem = f"{columns} panels side by side do not fit into a width of {width:g} inches"
        raise GradcamError(f"{problem}: give fewer classes or methods, or a larger width.")
    aspects = [[panel.pixels.shape[1] / panel.pixels.shape[0] for panel in row] for row in rows]
    height = min(MAX_PANEL_HEIGHT, cell / max(map(max, aspects)))
    texts = [[(_wrap(p.title, cell, TITLE_SIZE), _wrap(p.note, cell, NOTE_SIZE)) for p in row] for row in rows]
    counts = [[max(map(len, lines)) for lines in zip(*row)] for row in texts]  # lines of titles and notes
    label = [] if evidence is None else _wrap(LABELS[evidence], width - cell - GAP, NOTE_SIZE)
    total = 2 * MARGIN + sum(LINE * sum(pair) + TEXT_GAP + height + ROW_GAP for pair in counts)
    total += BAR_HEIGHT + LINE * (1 + len(label)) if label else -ROW_GAP
    place: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
    # pyplot is not used, because pyplot would keep a reference to the figure, and select a display backend.
    result, y = Figure(figsize=(width, total), dpi=DOTS_PER_INCH, facecolor="white"), MARGIN

    def add_axes(column: int, width_inches: float, height_inches: float) -> Any:
        left = (MARGIN + column * (cell + GAP)) / width
        return result.add_axes((left, 1 - y / total, width_inches / width, height_inches / total))

    for row, row_texts, (titles, notes) in zip(rows, texts, counts):
        y += LINE * (titles + notes) + TEXT_GAP + height  # from the top of the figure to the panels' lower edge
        for column, (panel, (title, note)) in enumerate(zip(row, row_texts)):
            axes = add_axes(column, height * panel.pixels.shape[1] / panel.pixels.shape[0], height)
            _show(axes, panel, interpolation)
            boundary = 72 * (TEXT_GAP + LINE * notes)
            axes.annotate("\n".join(title), (0, 1), (0, boundary + 1), va="bottom", size=TITLE_SIZE, color=INK, **place)
            axes.annotate("\n".join(note), (0, 1), (0, boundary - 1), va="top", size=NOTE_SIZE, color=MUTED, **place)
        y += ROW_GAP
    if evidence is not None:
        y += BAR_HEIGHT
        bar = add_axes(min(1, columns - 1), min(BAR_WIDTH, cell), BAR_HEIGHT)
        _add_colour_bar(result, evidence, look, cax=bar, orientation="horizontal")
        bar.set_xlabel("\n".join(label), loc="left", labelpad=1, fontsize=NOTE_SIZE, color=MUTED)
    return result


def _draw_on_axes(source: Any, ax: Any, *, title: bool = True, colorbar: bool = True, **options: Any) -> Figure:
    """Draw one heatmap on the axes of a user's figure, and return the figure."""
    i, k = (options.pop(name, None) or 0 for name in ("i", "k"))
    ((image, panel),) = _list_rows([[source]], i, k, None, options)
    _show(ax, panel._replace(spacing=image.spacing), "none")
    size, (width, height) = ax.title.get_fontsize(), ax.get_window_extent().size / ax.figure.dpi
    if title:
        ax.set_title("\n".join([*_wrap(panel.title, width, size), *_wrap(panel.note, width, size)]), parse_math=False)
    if colorbar and (evidence := _find_evidence([source])) is not None:
        label = _wrap(LABELS[evidence].partition(";")[0], height, size)
        bar = _add_colour_bar(ax.figure, evidence, options, cax=ax.inset_axes((1.03, 0, 0.04, 1)))
        bar.set_label("\n".join(label), parse_math=False)
    result: Figure = ax.figure
    return result


def _show(axes: Any, panel: FigurePanel, interpolation: str) -> None:
    axes.imshow(panel.pixels, interpolation=interpolation)
    axes.set_axis_off()
    if panel.spacing is None or not math.isclose(*panel.spacing, rel_tol=MAX_PIXEL_STRETCH):
        return
    from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar

    rows, columns = panel.pixels.shape[:2]
    longest = MAX_SCALE_BAR_SHARE * columns * panel.spacing[1]
    decade = 10.0 ** math.floor(math.log10(longest))
    length = max(step * decade for step in (1, 2, 5) if step * decade <= longest)
    style: Any = {"color": "white", "prop": {"size": NOTE_SIZE}, "label_top": True, "pad": 0.3, "borderpad": 0.5}
    style["size_vertical"] = 0.01 * rows
    bar = AnchoredSizeBar(axes.transData, length / panel.spacing[1], f"{length:g} mm", "lower left", **style)
    bar.patch.set(facecolor="black", alpha=0.6, linewidth=0)
    axes.add_artist(bar)


def _add_colour_bar(result: Any, evidence: str, look: Mapping[str, Any], **place: Any) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    signed, options = evidence == "signed", {name: look[name] for name in LOOK_OPTIONS if name in look}
    colours = draw_colour_bar(COLOUR_COUNT, 1, signed=signed, **options)[0] / 255
    ticks = {-1: "\N{MINUS SIGN}1", 0: "0", 1: "1"} if signed else {0: "0", 0.5: "0.5", 1: "1"}
    bar = result.colorbar(ScalarMappable(Normalize(min(ticks), 1), ListedColormap(colours)), **place)
    bar.set_ticks([*ticks], labels=[*ticks.values()])
    bar.ax.tick_params(labelsize=NOTE_SIZE, labelcolor=INK, length=2, width=0.5, pad=1.5)
    bar.outline.set_linewidth(0.5)
    return bar


def _wrap(text: str, width: float, size: float) -> list[str]:
    """Break a text into lines of at most this width in inches. Shorten lines that are still too long."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    def fits(line: str) -> bool:
        length, *_ = text_to_path.get_text_width_height_descent(line.strip(), FontProperties(size=size), False)
        return length * TEXT_SLACK <= 72 * width

    lines: list[str] = []
    for word in WORD.findall(text):
        if lines and fits(lines[-1] + word):
            lines[-1] += word
        else:
            lines.append(word)
    lines[MAX_LINES - 1 :] = filter(None, ["".join(lines[MAX_LINES - 1 :])])
    for number, line in enumerate(lines):  # Replace the middle, because the ends of layer names matter most.
        half = min(len(line), 200) // 2
        while half and not fits(lines[number]):
            half -= 1
            lines[number] = f"{line[:half].strip()}…{line[len(line) - half :].strip()}"
    return [line.strip() for line in lines]
