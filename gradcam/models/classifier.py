"""A model with all that is needed to explain pictures from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from gradcam.attributions.table import AttributionMethod, find_attribution
from gradcam.cam.explain import Explanation, Plan, carry_out, one_map
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_method, find_methods
from gradcam.errors import GradcamError, ImageError, LayerError, shorten, show_fields
from gradcam.hooks.nested import to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.images.read import FORMS, PictureLike, Region, is_one_picture
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.device import find_input_device, find_input_dtype
from gradcam.models.fits import check_sizes, find_step, get_steps, show_whole, take_size
from gradcam.models.labels import find_class
from gradcam.models.preprocess import (
    Prepared,
    Preprocess,
    Reader,
    Reading,
    check_same_sizes,
    find_windows,
    read_picture,
    to_reading,
)
from gradcam.models.results import PictureAttribution, PictureExplanation, to_probabilities
from gradcam.models.tiles import Tiles, explain_tiles, stack
from gradcam.options import PREDICTIONS, ExplainOptions, Fit, Progress, to_fit
from gradcam.targets.classes import ClassTarget, to_class_target

Pass = tuple[Sequence[str | nn.Module], Plan]  # layers, and what is explained there
Found = dict[tuple[str, str], Explanation]  # by layer and method
Picture = PictureLike | Reading | Prepared


@dataclass(frozen=True, eq=False)
class Classifier:
    """A model in evaluation mode, with its preprocessing, its classes, and the layer to explain.

    `load_classifier` makes one.

    Attributes
    ----------
    name : str
        What the model is called.
    model : nn.Module
        The model itself.
    preprocess : callable
        From an RGB array, uint8 (H,W,3), or whatever the reader gives, to a tensor (C,H,W).
    classes : int
        The number of classes. A single logit is two classes, 1 for and 0 against.
    labels : sequence of str or None
        The names of the classes; None where nobody knows them.
    layer : str
        The layer that is explained where no other is named.
    layer_for_positive : str or None
        The layer in its place for methods that assume activations that are not negative, where that is another one.
    activation : str
        How logits become probabilities: "softmax", "sigmoid" or "none".
    reader : callable
        From a file to a `Reading`: the values in it, and the picture to draw on.
    notes : sequence of str
        What was assumed, and what else a person should know of how the model was loaded.
    fit : str
        As in `load_classifier`.
    predictions : str
        As in `load_classifier`.

    Examples
    --------
    >>> import gradcam, torch
    >>> from gradcam.cam.explain import Plan
    >>> classifier = gradcam.load_classifier()
    >>> classifier.classes, classifier.layer, classifier.layer_for("xgradcam")
    (1000, 'layer4', 'head.0')
    >>> classifier.label(967), classifier.find_class("Espresso"), classifier.region(640, 800)
    ('espresso', 967, (40, 120, 560, 560))
    >>> photo = classifier.prepare("photo.jpg")
    >>> photo.image.shape, classifier.batch([photo, "other.png"]).shape
    (torch.Size([3, 224, 224]), torch.Size([2, 3, 224, 224]))
    >>> list(classifier.carry_out(photo, ["layer4"], Plan()))
    [('layer4', 'gradcam')]
    >>> noise = torch.rand(1, 3, 224, 224, device=classifier.device)
    >>> classifier.probabilities(classifier.model(noise), 1).shape
    torch.Size([1, 1000])
    """

    name: str
    model: nn.Module = field(repr=False)
    preprocess: Preprocess
    classes: int
    labels: Sequence[str] | None = field(repr=False)
    layer: str
    layer_for_positive: str | None = field(default=None, repr=False, kw_only=True)
    activation: str = "softmax"
    reader: Reader = field(default=read_picture, repr=False)
    notes: Sequence[str] = field(default=(), repr=False)
    fit: str = field(default="crop", kw_only=True)
    predictions: str = field(default="own", repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.fit != "crop" and self._fit.kind != "crop":
            get_steps(self.preprocess)
        if self.predictions not in PREDICTIONS:
            raise GradcamError(f"predictions is {shorten(self.predictions)}, expected {' or '.join(PREDICTIONS)}.")

    task: ClassVar[str] = "classification"
    default_method: ClassVar[str] = "gradcam"

    __repr__ = show_fields

    @cached_property
    def _fit(self) -> Fit:
        return Fit(self.fit) if self.fit == "crop" else to_fit(self.fit)

    @property
    def device(self) -> torch.device:
        """The device of the model; of a model on several devices, the one that its input goes to."""
        return find_input_device(self.model)

    def region(self, height: int, width: int) -> Region:
        """Find the pixels of a picture that the network's own preprocessing takes.

        Parameters
        ----------
        height : int
            The height of the picture, in pixels.
        width : int
            The width of the picture, in pixels.

        Returns
        -------
        (int, int, int, int)
            Top, left, height and width.

        Raises
        ------
        ImageError
            For a picture without a pixel.
        """
        return self.preprocess.region(height, width)

    def prepare(self, picture: Picture) -> Prepared:
        """Read and preprocess a picture, once for several calls of `explain` and `compare`; several threads may do so.

        Parameters
        ----------
        picture : picture
            In any form that `explain` takes.

        Returns
        -------
        Prepared
            `image`, the tensor (C,H,W) that the model takes, and `reading`, what was read.

        Raises
        ------
        ImageError
            As `gradcam.read_image` does, and for values that the preprocessing does not take.
        """
        if isinstance(picture, Prepared):
            return picture
        reading = to_reading(picture, self.reader, getattr(self.preprocess, "channels", 3))
        return Prepared(reading, self.preprocess(reading.values))

    def batch(self, pictures: Sequence[Picture]) -> Tensor:
        """Make the tensor that the model takes, on its device and in its precision, of several pictures.

        Parameters
        ----------
        pictures : sequence of pictures
            One or more, each in any form that `explain` takes.

        Returns
        -------
        Tensor (N,C,H,W)
            Preprocessed.

        Raises
        ------
        ImageError
            As `prepare` does, and for pictures whose sizes differ once preprocessed.
        """
        return self._stack([self.prepare(picture).image for picture in pictures])

    def _stack(self, images: list[Tensor]) -> Tensor:
        if len(images) > 1:
            check_same_sizes([tuple(image.shape[1:]) for image in images], "once preprocessed")
        return self._place(torch.stack(images))

    def _place(self, images: Tensor) -> Tensor:
        return images.to(self.device, find_input_dtype(self.model))

    def probabilities(self, output: Any, images: int) -> Tensor:
        """Compute all classes' probabilities from what the model gave.

        Parameters
        ----------
        output : Any
            The model's output.
        images : int
            For how many images it is.

        Returns
        -------
        Tensor (N,C)
            The probabilities, float32.

        Raises
        ------
        TargetError
            For an output without a row of classes for each image, or with several heads of classes.
        """
        return to_probabilities(output, images, self.activation)

    def layer_for(self, method: str | Method) -> str:
        """Name the layer that a method explains where none is given.

        Parameters
        ----------
        method : str or Method
            As in `gradcam.explain`.

        Returns
        -------
        str
            `layer`; for methods that assume activations that are not negative, `layer_for_positive`, if any.

        Raises
        ------
        GradcamError
            For an unknown method, where there is a `layer_for_positive`.
        """
        positive = self.layer_for_positive
        return self.layer if positive is None or not find_method(method).assumes_positive else positive

    def explain(
        self,
        pictures: Picture | Sequence[Picture],
        layer: str | nn.Module | None = None,
        *,
        method: str | Method | None = None,
        target: Any = None,
        layers: Sequence[str | nn.Module] | None = None,
        fit: str | None = None,
        **options: Unpack[ExplainOptions],
    ) -> PictureExplanation:
        """Show where the model looked in one picture, or in a sequence of them.

        Parameters
        ----------
        pictures : picture or sequence of pictures
            Anything that `gradcam.read_image` takes (a path, bytes, an open file, a picture of PIL's, an array, a
            tensor), or what `prepare` gave. A sequence may have several sizes and kinds; a tensor (N,C,H,W) is one. An
            array may also hold any integers or floats (H,W) or (H,W,C) that the preprocessing takes. The picture that
            is drawn on is then made from it, stretched where its values use less than half of their range.
        layer : str or nn.Module, default None
            A dotted name, or a module. None takes `layer_for(method)`.
        method : str or Method, default None
            As in `gradcam.explain`.
        target : Any, default None
            As in `gradcam.explain`, with labels in place of indices where wanted.
        layers : sequence of str or nn.Module, default None
            Several layers in place of `layer`, to be joined as in `gradcam.explain`.
        fit : str, default None
            What of the picture is explained, as in `load_classifier`. None takes the classifier's own.
        **options : Any
            The options of `explain`.

        Returns
        -------
        PictureExplanation
            With `overlay`, `save`, `label` and `probability`.

        Raises
        ------
        ImageError
            For pictures that cannot be read, or that do not fit into one batch: explain these one by one.
        GradcamError
            As `gradcam.explain` does, and for a `fit` that is unknown, or that the model cannot be shown pictures with.

        Examples
        --------
        >>> import gradcam
        >>> explanation = gradcam.load_classifier().explain("photo.jpg", target="espresso")
        >>> explanation.save("espresso.png")
        >>> explanation
        PictureExplanation(1 image(s), 1 map(s) each, gradcam at layer4, 7 x 7 to 224 x 224, ...)
        """
        chosen = one_map(layer, layers, options.get("join"))
        plan = Plan.of([] if method is None else [find_method(method)], target, options, "explain")
        return next(iter(self._fitted(fit).carry_out(pictures, chosen, plan).values()))

    def _fitted(self, fit: str | None) -> Self:
        return self if fit is None else replace(self, fit=fit)

    def compare(
        self,
        pictures: Picture | Sequence[Picture],
        *,
        layers: Sequence[str | nn.Module] | None = None,
        methods: Sequence[str | Method],
        target: Any = None,
        fit: str | None = None,
        **options: Unpack[ExplainOptions],
    ) -> dict[tuple[str, str], PictureExplanation]:
        """Explain pictures at several layers with several methods, from one pass.

        Parameters
        ----------
        pictures : picture or sequence of pictures
            As in `explain`.
        layers : sequence of str or nn.Module, default None
            None explains each method at its own layer, `layer_for(method)`, with one pass for each of these layers.
        methods : sequence of str or Method
            As in `gradcam.compare`.
        target : Any, default None
            As in `explain`.
        fit : str, default None
            As in `explain`.
        **options : Any
            The options of `explain`.

        Returns
        -------
        dict of (str, str) to PictureExplanation
            By layer name and method name.

        Raises
        ------
        GradcamError
            As `explain` does.

        Examples
        --------
        >>> import gradcam
        >>> found = gradcam.load_classifier().compare("photo.jpg", methods=["gradcam", "xgradcam"])
        >>> list(found)
        [('layer4', 'gradcam'), ('head.0', 'xgradcam')]
        """
        plan = Plan.of(find_methods(methods), target, options, "compare")
        return self._fitted(fit).carry_out(pictures, layers, plan)

    def carry_out(
        self, pictures: Picture | Sequence[Picture], layers: Sequence[str | nn.Module] | None, plan: Plan
    ) -> dict[tuple[str, str], PictureExplanation]:
        """Explain as `compare` does, with a plan that has been checked.

        Parameters
        ----------
        pictures : picture or sequence of pictures
            As in `explain`.
        layers : sequence of str or nn.Module or None
            As in `compare`.
        plan : Plan
            What is explained, and how.

        Returns
        -------
        dict of (str, str) to PictureExplanation
            By layer name and method name.

        Raises
        ------
        GradcamError
            As `explain` does.
        """
        prepared = self._prepare_all(pictures)
        plan = plan if plan.methods else plan.complete(self.default_method)
        plan = replace(plan, target=self._to_target(plan.target))
        assigned: dict[str, list[Method]] = {}
        for method in plan.methods if layers is None else ():
            assigned.setdefault(self.layer_for(method), []).append(method)
        passes: list[Pass] = [([layer], replace(plan, methods=own)) for layer, own in assigned.items()]
        found = self._explain_shown(prepared, passes if layers is None else [(layers, plan)])
        if len(passes) > 1:
            order = [method.name for method in plan.methods]
            found = dict(sorted(found.items(), key=lambda item: order.index(item[0][1])))
        described = self._describe(prepared)
        return {key: PictureExplanation(**vars(explanation), **described) for key, explanation in found.items()}

    def _explain_shown(self, prepared: Sequence[Prepared], passes: list[Pass]) -> Found:
        """What is found in what the network is shown of the pictures, whose number of pixels is the same."""
        target, options = passes[0][1].target, passes[0][1].options
        if self._fit.kind != "tiles":
            images, target, output = self._show(prepared, target)
            return self._run_passes(images, passes, target, output)
        own, step = get_steps(self.preprocess), find_step(self.model)
        tiles = [Tiles(each.reading.values, own, self._tile_side, step) for each in prepared]
        check_same_sizes([each.canvas for each in tiles], "in windows")
        tiles[0].check()
        is_mean = self.predictions == "seen" and not callable(target)
        output = torch.cat([self._average(one, target) for one in tiles]) if is_mean else self._classify(prepared)
        chosen = target.resolve(output, len(tiles)) if is_mean else self._choose_classes(target, output, len(tiles))
        silent: ExplainOptions = options | {"progress": None}
        passes = [(layers, replace(plan, options=silent)) for layers, plan in passes]

        def explain_some(images: Tensor, i: int) -> Found:
            wanted = chosen if callable(chosen) else chosen.one(i).repeat(len(images))
            return self._run_passes(self._place(images), passes, wanted)

        each = [explain_tiles(one, partial(explain_some, i=i), options["progress"]) for i, one in enumerate(tiles)]
        return {key: replace(stack([found[key] for found in each]), output=output) for key in each[0]}

    def _average(self, tiles: Tiles, target: ClassTarget) -> Tensor:
        some = (images for _, images in tiles.batches())
        return torch.cat([target.find_logits(self._run(self._place(it)), len(it)) for it in some]).mean(0, keepdim=True)

    def _show(self, prepared: Sequence[Prepared], target: Any) -> tuple[Any, Any, Any]:
        if self._fit.kind == "crop":
            images = self._stack([picture.image for picture in prepared])
            windows = hasattr(self.preprocess, "window") and find_windows(self.preprocess, prepared)
            return replace(to_batch(images), windows=windows) if windows else images, target, None
        own, step = get_steps(self.preprocess), find_step(self.model)
        check_sizes(self.model, self._stack([prepared[0].image]), step)
        images = self._stack([show_whole(picture.reading.values, own, step) for picture in prepared])
        output = None if self.predictions == "seen" else self._classify(prepared)
        return images, target if output is None else self._choose_classes(target, output, len(prepared)), output

    def _classify(self, prepared: Sequence[Prepared]) -> Any:
        return self._run(self._stack([picture.image for picture in prepared]))

    def _run(self, images: Tensor) -> Any:
        with preserve_state(unwrap(self.model)), torch.no_grad():
            return self.model(images)

    def _choose_classes(self, target: Any, output: Any, images: int) -> Any:
        return target if callable(target) else target.resolve(target.find_logits(output, images), images)

    def _run_passes(self, images: Any, passes: list[Pass], target: Any, output: Any = None) -> Found:
        found: Found = {}
        for layers, plan in passes:
            model, inputs = self._take(to_batch(images).copy() if len(passes) > 1 else images)
            own = layers if model is self.model else [find_layer(unwrap(self.model), it).name for it in layers]
            found |= carry_out(model, inputs, own, replace(plan, target=target))
        return found if output is None else {key: replace(each, output=output) for key, each in found.items()}

    def _take(self, images: Any) -> tuple[nn.Module, Any]:
        if self._fit.kind != "whole":
            return self.model, images
        return take_size(self.model, images, get_steps(self.preprocess).size)

    def attribute(
        self,
        pictures: Picture | Sequence[Picture],
        method: str | AttributionMethod = "guided-gradcam",
        *,
        layer: str | nn.Module | None = None,
        target: Any = None,
        reshape: Any = None,
        progress: Progress | None = None,
    ) -> PictureAttribution:
        """Show how much each pixel that the network saw matters.

        Parameters
        ----------
        pictures : picture or sequence of pictures
            As in `explain`.
        method : str or AttributionMethod, default "guided-gradcam"
            A key of `gradcam.attributions.ATTRIBUTIONS`, or one of its values.
        layer : str or nn.Module, default None
            For guided-gradcam alone. None takes the classifier's `layer`.
        target : Any, default None
            As in `explain`.
        reshape : tuple, str or callable, default None
            For guided-gradcam alone, as in `gradcam.explain`.
        progress : callable, default None
            For methods of many passes, as in `gradcam.explain`.

        Returns
        -------
        PictureAttribution
            Signed values, drawn by `picture(i, k)`.

        Raises
        ------
        LayerError
            For a layer, or a `reshape`, where the method takes none.
        GradcamError
            As `explain` and the method's function do, for an unknown method, and for the fit "tiles".

        Examples
        --------
        >>> import gradcam
        >>> found = gradcam.load_classifier().attribute("photo.jpg", "input-gradients", target="espresso")
        >>> found.values.shape, found.picture().shape
        (torch.Size([1, 1, 3, 224, 224]), (640, 800, 3))
        """
        chosen = method if isinstance(method, AttributionMethod) else find_attribution(method)
        for name, value in {"layer": layer, "reshape": reshape}.items():
            if value is not None and not chosen.has_layer:
                what = "takes no layer: it attributes to the picture itself"
                raise LayerError(f"{chosen.name} {what}. Leave {name}= away.")
        prepared = self._prepare_all(pictures)
        options = {"layer": self.layer if layer is None else layer, "reshape": reshape} if chosen.has_layer else {}
        if chosen.has_progress:
            options["progress"] = progress
        if self._fit.kind == "tiles":
            what = "is of the picture that the network is shown"
            raise GradcamError(f"{chosen.name} {what}: take the fit 'crop' or 'whole'.")
        images, wanted, output = self._show(prepared, self._to_target(target))
        model, inputs = self._take(images)
        if model is not self.model and chosen.has_layer:
            options["layer"] = find_layer(unwrap(self.model), options["layer"]).name
        found = vars(chosen.function(model, inputs, target=wanted, **options))
        found = found if output is None else found | {"output": output}
        return PictureAttribution(**found, **self._describe(prepared))

    def find_class(self, wanted: str) -> int:
        """Find the index of a class by its label, in any case.

        Parameters
        ----------
        wanted : str
            The label; or the index, in digits. "name:7" is the class that is called "7". Where nobody knows how many
            classes there are, as of some detectors, any index is taken.

        Returns
        -------
        int
            The index.

        Raises
        ------
        TargetError
            For an unknown label, with the nearest; for one that several classes have; and for an index without a class.
        """
        return find_class(self.labels, wanted, self.classes or None)

    def label(self, index: int) -> str | None:
        """Name a class by its index.

        Parameters
        ----------
        index : int
            Which class.

        Returns
        -------
        str or None
            None where nobody knows the labels.

        Raises
        ------
        IndexError
            Where there are fewer labels.
        """
        return None if self.labels is None else self.labels[index]

    def _to_target(self, target: Any) -> Any:
        """The target with indices in place of labels, and with the model's own activation where it has none."""
        target = self._with_indices(target)
        if callable(target):
            return target
        target = to_class_target(target)
        return replace(target, activation=self.activation) if target.activation == "auto" else target

    def _with_indices(self, target: Any) -> Any:
        if isinstance(target, str):
            return self.find_class(target)
        if isinstance(target, (list, tuple)):
            return [self._with_indices(value) for value in target]
        if isinstance(target, ClassTarget):
            classes, against = (self._with_indices(value) for value in (target.classes, target.against))
            return replace(target, classes=classes, against=against)
        return target

    def _prepare_all(self, pictures: Picture | Sequence[Picture]) -> list[Prepared]:
        is_list, is_prepared = isinstance(pictures, list), isinstance(pictures, (Reading, Prepared))
        found: Any = pictures if is_list or not (is_prepared or is_one_picture(pictures)) else [pictures]
        if not isinstance(found, (Sequence, np.ndarray, Tensor)):
            raise ImageError(f"The pictures are {shorten(found)}, expected {FORMS}, or a sequence of them.")
        prepared = [self.prepare(picture) for picture in found]
        if not prepared:
            raise ImageError("There are no pictures: expected one, or a sequence of them.")
        return prepared

    def _describe(self, prepared: Sequence[Prepared]) -> dict[str, Any]:
        pictures = [each.reading.picture for each in prepared]
        is_crop = self._fit.kind == "crop"
        regions = [self.region(*picture.shape[:2]) if is_crop else (0, 0, *picture.shape[:2]) for picture in pictures]
        notes = [each.reading.note for each in prepared]
        shown = replace(self._fit, side=self._tile_side) if self._fit.kind == "tiles" else self._fit
        own = {"labels": self.labels, "activation": self.activation, "fit": None if is_crop else str(shown)}
        return {"pictures": pictures, "regions": regions, "notes": notes, **own}

    @property
    def _tile_side(self) -> int:
        return self._fit.side or max(get_steps(self.preprocess).size)
