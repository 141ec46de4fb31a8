"""Explanations and attributions with their images: draw, name and save them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from gradcam.attributions.base import Attribution
from gradcam.attributions.draw import draw_attribution, place_in_image
from gradcam.cam.explain import Explanation
from gradcam.errors import GradcamError
from gradcam.hooks.containers import take_rows
from gradcam.images.draw import join_rows, overlay, to_grey
from gradcam.images.marks import Mark, draw_marks
from gradcam.images.read import Pixels, Region, Spacing
from gradcam.images.write import ARRAY_SUFFIXES, check_suffix, encode_png, select_maps, to_html_figure, write_image
from gradcam.models.explanation_regions import ExplanationRegions
from gradcam.models.figures import FigureMaker
from gradcam.models.labels import name_class
from gradcam.models.page_contents import find_probability, show_explanation
from gradcam.options import keep_old_names
from gradcam.renames import find_old_names
from gradcam.targets.base import Instance
from gradcam.targets.classes import to_probabilities
from gradcam.web.page import Page

MAX_HEIGHTS = (640, 320)  # maximum height in a notebook, in pixels, for a single image and for several images


class _SharedFields:
    """The fields that explanations and attributions have in common."""

    classes: Tensor | None
    scores: Tensor
    output: Any
    method: str
    layer: str | None
    _draw_one: ClassVar[Callable[..., Pixels]]  # `overlay` or `draw`


@dataclass(frozen=True, eq=False)
class ImageResult(_SharedFields, FigureMaker):
    """A result with its images: class names, probabilities, captions and drawing.

    `regions` are the pixels of each image that the model saw. `notes` are remarks on how each image is displayed. `fit`
    names the part of the images that the model saw; None means the default preprocessing. `model` is the model's name.
    `spacings` are the height and width of each image's pixels in mm, or None if they are unknown.
    """

    images: Sequence[Pixels] = field(repr=False)
    regions: Sequence[Region] = field(repr=False)
    labels: Sequence[str] | None = field(repr=False)
    notes: Sequence[str | None] = field(repr=False)
    activation: str = field(repr=False)
    fit: str | None = field(default=None, repr=False)
    model: str | None = field(default=None, repr=False)
    spacings: Sequence[Spacing | None] = field(default=(), repr=False)

    def probabilities(self) -> Tensor:
        """Compute the probabilities of all classes.

        Returns
        -------
        Tensor (N,C)
            The probabilities, float32.

        Raises
        ------
        TargetError
            If the model's output does not have one row of class scores per image, or has several classification heads.
        """
        return to_probabilities(self.output, len(self.images), self.activation)

    def label(self, i: int = 0, k: int = 0) -> str | None:
        """Return the label of the k-th class of image i.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default 0
            The class, counted from 0 in the order of the target.

        Returns
        -------
        str or None
            None if the label is unknown, or the target was a function.

        Raises
        ------
        ImageError
            If there is no such image or class.
        """
        select_maps(i, k, tuple(self.scores.shape), "class")
        return None if self.classes is None or self.labels is None else self.labels[int(self.classes[i, k])]

    def probability(self, i: int = 0, k: int = 0) -> float | None:
        """Return the probability of the k-th class of image i.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default 0
            The class, counted from 0 in the order of the target.

        Returns
        -------
        float or None
            None if the target was a function.

        Raises
        ------
        ImageError
            If there is no such image or class.
        TargetError
            As in `probabilities`.
        """
        select_maps(i, k, tuple(self.scores.shape), "class")
        return None if self.classes is None else float(self.probabilities()[i, int(self.classes[i, k])])

    def name_class(self, i: int = 0, k: int = 0) -> str:
        """Return the label and the index of the k-th class of image i, as text.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default 0
            The class, counted from 0 in the order of the target.

        Returns
        -------
        str
            "espresso (967)", or "class 967" without labels, or "score 0" if the target was a function.

        Raises
        ------
        ImageError
            If there is no such image or class.
        """
        instance = self.instance(i, k)
        if instance is not None and instance.index is None:
            return instance.name
        if self.classes is None:
            return f"score {k}"
        label = self.label(i, k)
        is_value = self.activation == "none" and len(self.labels or ()) == 1
        return name_class(int(self.classes[i, k]), label, with_index=not is_value)

    def instance(self, i: int = 0, k: int = 0) -> Instance | None:
        """Return the instance that the k-th map of image i explains, such as a box.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default 0
            The map, counted from 0.

        Returns
        -------
        Instance or None
            A box, a mask, a sentence and so on. None for a class, for the score of a function, and for an attribution.
        """
        instances = getattr(self, "instances", None)
        return None if instances is None or k >= len(instances[i]) else instances[i][k]

    def caption(self, i: int = 0, k: int = 0) -> str:
        """Return the caption of the k-th result of image i: the class, its probability, the method and the layer.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default 0
            The class, counted from 0 in the order of the target.

        Returns
        -------
        str
            One line. The probability is left out if there is none.

        Raises
        ------
        ImageError
            If there is no such image or class.
        """
        value = self._format_value(i, k)
        evidence = getattr(self, "evidence", "positive")
        kind = "" if evidence == "positive" else f"{evidence} evidence "
        place = f" at {self.layer}" if self.layer else ""
        return f"{self.name_class(i, k)}{f', {value}' if value else ''}, {kind}by {self.method}{place}"

    def _format_value(self, i: int, k: int) -> str:
        """Return the probability, cosine or value of the k-th class of image i as text, or "" if there is none."""
        instance = self.instance(i, k)
        value = None if instance is None else instance.score
        if instance is None:
            # For an output with several heads, there is no probability: the explained head was not recorded.
            with contextlib.suppress(GradcamError):
                value = self.probability(i, k)
        if value is None:
            return ""
        # Show probabilities in percent, but not other values.
        is_cosine = instance is not None and find_probability(instance) is None
        is_value = self.activation == "none" and (len(self.labels or ()) == 1 or not 0 <= value <= 1)
        return f"{value:.4g}" if is_cosine or is_value else f"{100 * value:.0f} %"

    def select(self, i: int) -> Self:
        """Return the result of image i alone.

        Parameters
        ----------
        i : int
            The image, counted from 0.

        Returns
        -------
        ImageExplanation or ImageAttribution
            A copy with N = 1, also of `output`.
        """
        per_image = self._tensors() | {name: getattr(self, name) for name in ("images", "regions", "notes", "spacings")}
        fields: dict[str, Any] = {name: values[i : i + 1] for name, values in per_image.items()}
        if (count := len(self.images)) > 1:
            fields["output"] = take_rows(self.output, slice(i, i + 1), count)
        return replace(self, **(fields | self._take_instances(i)))

    def _take_instances(self, i: int) -> dict[str, Any]:
        return {}  # Results of task models have more fields for each image.

    def cpu(self) -> Self:
        """Return a copy with its tensors on the CPU; the model's output stays on its device.

        Returns
        -------
        ImageExplanation or ImageAttribution
            A copy with its tensors on the CPU.
        """
        return replace(self, **{name: tensor.cpu() for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "output"}

    def _draw_all(self, i: int | None = None, k: int | None = None, **options: Any) -> Pixels:
        cells = self._draw(i, k, **options)
        return cells[0][0] if len(cells) == len(cells[0]) == 1 else join_rows(cells)

    def _draw(self, i: int | None = None, k: int | None = None, **options: Any) -> list[list[Pixels]]:
        rows, columns = select_maps(i, k, tuple(self.scores.shape))
        return [[self._draw_one(row, column, **options) for column in columns] for row in rows]

    def _repr_png_(self) -> bytes:
        return encode_png(self._draw_all())

    def _repr_html_(self) -> str:
        cells = self._draw()
        height = MAX_HEIGHTS[0] if len(cells) == len(cells[0]) == 1 else MAX_HEIGHTS[1]
        page = ""
        for i, row in enumerate(cells):
            figures = "".join(to_html_figure(pixels, height, self.caption(i, k)) for k, pixels in enumerate(row))
            page += f'<div style="display: flex; flex-wrap: wrap; gap: 8px; margin-bottom: 8px">{figures}</div>'
        return page


@keep_old_names
@dataclass(frozen=True, eq=False)
class ImageExplanation(ImageResult, ExplanationRegions, Explanation):
    """An `Explanation` with its images, and with the region of each image that the model saw.

    It has the fields of `Explanation`. A notebook displays it automatically.

    Attributes
    ----------
    images : sequence of arrays
        The images, RGB, uint8 (H,W,3).
    regions : sequence of (int, int, int, int)
        The pixels of each image that the model saw: top, left, height, width.
    labels : sequence of str or None
        The class names; None if they are unknown.
    notes : sequence of str or None
        Remarks on how each image is displayed.
    activation : str
        How logits become probabilities: "softmax", "sigmoid" or "none".
    fit : str or None
        Which part of the images the model saw, as in `load_classifier`; None for the default preprocessing.
    model : str or None
        The model's name.
    spacings : sequence of (float, float) or None
        The height and width of a pixel in mm, for each image; None if they are unknown.
    prompt, answer : str or None
        The prompt of a vision-language model, and the text whose words are explained; None for other models.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> explanation = classifier.explain(["photo.jpg", "other.png"], target=[["espresso"], ["tripod"]])
    >>> explanation.caption(), explanation.name_class(1)
    ('espresso (967), 11 %, by gradcam at layer4', 'tripod (872)')
    >>> explanation.label(1), round(explanation.probability(1), 1), explanation.probabilities().shape
    ('tripod', 0.9, torch.Size([2, 1000]))
    >>> explanation.overlay(0).shape, explanation.regions[0]
    ((640, 800, 3), (40, 120, 560, 560))
    >>> explanation.select(1).cpu().save("tripod.png")
    """

    prompt: str | None = field(default=None, repr=False, kw_only=True)
    answer: str | None = field(default=None, repr=False, kw_only=True)

    __repr__ = Explanation.__repr__

    def overlay(
        self,
        i: int = 0,
        k: int = 0,
        *,
        alpha: float | None = None,
        colormap: str | None = None,
        base: str = "gray",
        blend: str | None = None,
        outline: bool = True,
    ) -> Pixels:
        """Draw the k-th heatmap of image i on the pixels that the model saw; in grey if the word is from the text.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default 0
            The heatmap, counted from 0.
        alpha : float, default None
            The opacity, as in `gradcam.overlay`.
        colormap : str, default None
            As in `gradcam.overlay`. With signed evidence, evidence for the class is red and evidence against it is blue,
            for any colour map.
        base : str, default "gray"
            As in `gradcam.overlay`.
        blend : str, default None
            As in `gradcam.overlay`.
        outline : bool, default True
            Whether to draw a thin line around the region that the model saw.

        Returns
        -------
        array (H,W,3)
            RGB, uint8.

        Raises
        ------
        ImageError
            If there is no such image or heatmap.
        GradcamError
            If the colour map, base or blend is unknown, or the opacity is outside [0,1].
        """
        select_maps(i, k, tuple(self.maps.shape))
        look: Any = {"alpha": alpha, "colormap": colormap, "base": base, "blend": blend, "outline": outline}
        look |= {"region": self.regions[i], "signed": self.evidence == "signed"}
        pixels = overlay(self.images[i], self.heatmaps[i][k], **look)
        instance = self.instance(i, k)
        pixels = to_grey(pixels) if instance is not None and instance.is_from_text else pixels
        return pixels if instance is None or not outline else draw_marks(pixels, [to_mark(instance)])

    def save(
        self,
        path: str | os.PathLike[str],
        i: int | None = None,
        k: int | None = None,
        *,
        alpha: float | None = None,
        colormap: str | None = None,
        base: str = "gray",
        blend: str | None = None,
    ) -> None:
        """Write the overlay to an image file, or the values to ``.npz`` or ``.npy``.

        The values have the format of `Explanation.save`. The file's folder must exist.

        Parameters
        ----------
        path : str or path
            The file. Its suffix determines the format. Image suffixes are those of `gradcam.write_image`.
        i : int, default None
            The image, counted from 0. None writes all images, on a sheet with one row per image.
        k : int, default None
            The map, counted from 0. None writes all maps.
        alpha : float, default None
            For overlays, as in `overlay`.
        colormap : str, default None
            For overlays, as in `overlay`.
        base : str, default "gray"
            For overlays, as in `overlay`.
        blend : str, default None
            For overlays, as in `overlay`.

        Raises
        ------
        ImageError
            If the suffix is not supported, if an ``.npy`` file would get several maps, if there is no such map, or if
            the file cannot be written.
        GradcamError
            If the colour map, base or blend is unknown, or the opacity is outside [0,1].
        """
        if check_suffix(path) in ARRAY_SUFFIXES:
            super().save(path, i, k)
        else:
            write_image(path, self._draw_all(i, k, alpha=alpha, colormap=colormap, base=base, blend=blend))

    def page(self, path: str | os.PathLike[str] | None = None, *, i: int = 0, name: str = "image") -> Page:
        """Make an interactive page of image i and its heatmaps, for any browser, without a server.

        The page contains only the heatmaps of this explanation. `gradcam.page` makes a page with all classes.

        Parameters
        ----------
        path : str or path, default None
            The file to write, ending in ``.html``. None writes nothing.
        i : int, default 0
            The image, counted from 0.
        name : str, default "image"
            The title of the image. Pass the file name, so that the command on the page can find the file.

        Returns
        -------
        Page
            It has the methods `save`, `to_html` and `to_data`. A notebook displays it automatically.

        Raises
        ------
        ImageError
            If there is no such image.
        GradcamError
            If the suffix is not ``.html``, or the file cannot be written.

        Examples
        --------
        >>> import gradcam
        >>> explanation = gradcam.load_classifier().explain("photo.jpg", target=[["espresso", "tripod"]])
        >>> explanation.page("photo.html").targets.names
        ['espresso', 'tripod']
        """
        select_maps(i, None, tuple(self.scores.shape))
        result = show_explanation(self, i, name)
        if path is not None:
            result.save(path)
        return result

    def _repr_html_(self) -> str:
        has_one_image = len(self.images) == 1 and self.maps.ndim == 4 and self.reference is None
        return self.page()._repr_html_() if has_one_image else super()._repr_html_()

    _draw_one = overlay

    def _take_instances(self, i: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"detections": None if self.detections is None else self.detections[i : i + 1]}
        if self.instances is None:
            return fields
        instances = self.instances[i]
        fields |= {"instances": [instances], "heatmaps": self.heatmaps[i][None, : len(instances)]}
        for name in ("maps", "scores", "classes"):  # Images with fewer instances are padded. Remove the padding.
            values = getattr(self, name)
            fields[name] = None if values is None else values[i : i + 1, : len(instances)]
        if self.reference is not None:
            columns = {name: getattr(self.reference, name)[:, i : i + 1] for name in ("maps", "heatmaps", "scores")}
            fields["reference"] = replace(self.reference, **columns)
        return fields

    def laid_on_pictures(self) -> Self:
        """Return a copy whose instances are in pixels of the images instead of the model's input.

        Returns
        -------
        ImageExplanation
            A copy with converted boxes, points and masks.
        """
        fields: dict[str, Any] = {}
        for name in ("instances", "detections"):
            rows = getattr(self, name)
            if rows is not None:
                fields[name] = [[self._to_image_pixels(i, instance) for instance in row] for i, row in enumerate(rows)]
        return replace(self, **fields) if fields else self

    def _to_image_pixels(self, i: int, instance: Instance) -> Instance:
        rows, columns = self.heatmaps[i].shape[-2:]
        return instance.moved((0, 0, rows, columns), self.regions[i], self.images[i].shape[:2])


def to_mark(instance: Instance) -> Mark:
    """Return a mark, to draw an instance on an image."""
    number, score = "" if instance.number is None else f"{instance.number} ", find_probability(instance)
    name = f"{number}{instance.name}" + ("" if score is None else f" {100 * score:.0f} %")
    text = name if instance.kind in ("box", "missed", "keypoint", "mask") else ""
    box = None if instance.kind == "mask" else instance.box
    shape: dict[str, Any] = {"box": box, "edge": instance.edge, "mask": instance.mask, "point": instance.point}
    return Mark(**shape, text=text, number=instance.number, dashed=instance.kind == "missed")


@keep_old_names
@dataclass(frozen=True, eq=False)
class ImageAttribution(ImageResult, Attribution):
    """An `Attribution` with its images, and with the region of each image that the model saw.

    It has the fields of `Attribution`. A notebook displays it automatically.

    Attributes
    ----------
    images : sequence of arrays
        The images, RGB, uint8 (H,W,3).
    regions : sequence of (int, int, int, int)
        The pixels of each image that the model saw: top, left, height, width.
    labels : sequence of str or None
        The class names; None if they are unknown.
    notes : sequence of str or None
        Remarks on how each image is displayed.
    activation : str
        How logits become probabilities: "softmax", "sigmoid" or "none".
    fit : str or None
        Which part of the images the model saw, as in `load_classifier`; None for the default preprocessing.
    model : str or None
        The model's name.
    spacings : sequence of (float, float) or None
        The height and width of each image's pixels, in mm; None if they are unknown.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> attribution = classifier.attribute(["photo.jpg", "other.png"], "input-gradients", target=[["espresso"], ["tripod"]])
    >>> attribution.caption(), attribution.name_class(1)
    ('espresso (967), 11 %, by input-gradients', 'tripod (872)')
    >>> attribution.label(1), round(attribution.probability(1), 1), attribution.probabilities().shape
    ('tripod', 0.9, torch.Size([2, 1000]))
    >>> attribution.draw(0).shape, attribution.regions[0]
    ((640, 800, 3), (40, 120, 560, 560))
    >>> attribution.select(1).cpu().save("tripod.png")
    """

    __repr__ = Attribution.__repr__

    def draw(self, i: int = 0, k: int = 0) -> Pixels:
        """Draw the k-th attribution of image i, in colour on grey.

        The attribution covers the pixels that the model saw. All other pixels are grey, the colour of zero.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default 0
            The attribution, counted from 0.

        Returns
        -------
        array (H,W,3)
            RGB, uint8, as large as the image.

        Raises
        ------
        ImageError
            If there is no such image or attribution.
        """
        select_maps(i, k, tuple(self.values.shape), "attribution")
        return place_in_image(draw_attribution(self.values[i, k]), self.regions[i], *self.images[i].shape[:2])

    def save(self, path: str | os.PathLike[str], i: int | None = None, k: int | None = None) -> None:
        """Write the image that `draw` returns to a file, or the values to ``.npz`` or ``.npy``.

        The values have the format of `Attribution.save`. The file's folder must exist.

        Parameters
        ----------
        path : str or path
            The file. Its suffix determines the format. Image suffixes are those of `gradcam.write_image`.
        i : int, default None
            The image, counted from 0. None writes all images, on a sheet with one row per image.
        k : int, default None
            The attribution, counted from 0. None writes all attributions.

        Raises
        ------
        ImageError
            If the suffix is not supported, if an ``.npy`` file would get several attributions, if there is no such
            attribution, or if the file cannot be written.
        """
        if check_suffix(path) in ARRAY_SUFFIXES:
            super().save(path, i, k)
        else:
            write_image(path, self._draw_all(i, k))

    _draw_one = draw


__getattr__ = find_old_names(__name__)
