"""A model with everything needed to explain images from files: preprocessing, class names and a default layer."""

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
from gradcam.cam.explain import Plan, check_one_map, execute_plan
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_method, find_methods
from gradcam.errors import GradcamError, ImageError, LayerError, format_fields, shorten
from gradcam.fit import Fit, parse_fit
from gradcam.hooks.containers import to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.images.read import IMAGE_FORMS, ImageLike, Region, is_one_image
from gradcam.layers.find import find_layer, unwrap
from gradcam.models import preprocess as preparing
from gradcam.models.device import find_input_device, find_input_dtype
from gradcam.models.fits import check_sizes, find_step, get_steps, show_whole, take_size
from gradcam.models.labels import find_class
from gradcam.models.preprocess import Prepared, Preprocess, Reader, Reading, check_same_sizes, find_windows, to_reading
from gradcam.models.results import ImageAttribution, ImageExplanation
from gradcam.models.tiles import Explanations, Tiles, explain_tiles, stack
from gradcam.options import PREDICTIONS, ExplainOptions, Progress, keep_old_names
from gradcam.targets.classes import ClassTarget, to_class_target, to_probabilities

Pass = tuple[Sequence[str | nn.Module], Plan]  # target layers of one forward pass, and the plan for them

ImageInput = ImageLike | Reading | Prepared
Images = ImageInput | Sequence[ImageInput]
Layers = Sequence[str | nn.Module] | None


@keep_old_names
@dataclass(frozen=True, eq=False)
class Classifier:
    """A loaded model, with its preprocessing, class names and default target layer (see `load_classifier`).

    Attributes
    ----------
    name : str
        The model's name.
    model : nn.Module
        The model itself.
    preprocess : callable
        A function that turns an image into a tensor (C,H,W). The image is an RGB array, uint8 (H,W,3), or the array
        that the reader returns.
    classes : int
        The number of classes. A single logit counts as two classes: 1 (positive) and 0 (negative).
    labels : sequence of str or None
        The class names; None if they are unknown.
    layer : str
        The default target layer.
    layer_for_positive : str or None
        The default target layer for methods that assume non-negative activations. None means `layer`.
    activation : str
        How logits become probabilities: "softmax", "sigmoid" or "none".
    reader : callable
        A function that reads a file into a `Reading`: the values for `preprocess`, and the image to draw on.
    notes : sequence of str
        Assumptions that were made when the model was loaded, and further remarks.
    fit, predictions : str
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
    >>> list(classifier.run_plan(photo, ["layer4"], Plan()))
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
    reader: Reader = field(default=preparing.read_image_file, repr=False)
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

    __repr__ = format_fields

    @cached_property
    def _fit(self) -> Fit:
        return Fit(self.fit) if self.fit == "crop" else parse_fit(self.fit)

    @property
    def device(self) -> torch.device:
        """Return the model's device, or the device of its input if the model is spread over several devices."""
        return find_input_device(self.model)

    def region(self, height: int, width: int) -> Region:
        """Return the region of an image that the model's default preprocessing keeps.

        Parameters
        ----------
        height : int
            The height of the image, in pixels.
        width : int
            The width of the image, in pixels.

        Returns
        -------
        (int, int, int, int)
            Top, left, height and width.

        Raises
        ------
        ImageError
            If the image has no pixels.
        """
        return self.preprocess.region(height, width)

    def prepare(self, image: ImageInput) -> Prepared:
        """Read and preprocess an image for several calls of `explain` and `compare`. This method is thread-safe.

        Parameters
        ----------
        image : image
            The image, in any form that `explain` accepts.

        Returns
        -------
        Prepared
            Its `image` is the tensor (C,H,W) that the model takes. The attribute `reading` contains the values in the
            file, and the image to draw on.

        Raises
        ------
        ImageError
            As in `gradcam.read_image`. Also if the preprocessing does not support the image's dtype or channels.
        """
        if isinstance(image, Prepared):
            return image
        reading = to_reading(image, self.reader, getattr(self.preprocess, "channels", 3))
        return Prepared(reading, self.preprocess(reading.values))

    def batch(self, images: Sequence[ImageInput]) -> Tensor:
        """Preprocess images into one batch, on the model's device and in its precision.

        Parameters
        ----------
        images : sequence of images
            One or more images, each in any form that `explain` accepts.

        Returns
        -------
        Tensor (N,C,H,W)
            The preprocessed images.

        Raises
        ------
        ImageError
            As in `prepare`. Also if the images' sizes differ after preprocessing.
        """
        return self._stack([self.prepare(image).image for image in images])

    def _stack(self, images: list[Tensor]) -> Tensor:
        if len(images) > 1:
            check_same_sizes([tuple(image.shape[1:]) for image in images], "after preprocessing")
        return self._place(torch.stack(images))

    def _place(self, images: Tensor) -> Tensor:
        return images.to(self.device, find_input_dtype(self.model))

    def probabilities(self, output: Any, images: int) -> Tensor:
        """Compute the probabilities of all classes from the model's output.

        Parameters
        ----------
        output : Any
            The model's output.
        images : int
            The number of images in the batch.

        Returns
        -------
        Tensor (N,C)
            The probabilities, float32.

        Raises
        ------
        TargetError
            If the output does not have one row of class scores per image, or has several classification heads.
        """
        return to_probabilities(output, images, self.activation)

    def layer_for(self, method: str | Method) -> str:
        """Return the default target layer of a method.

        Parameters
        ----------
        method : str or Method
            As in `gradcam.explain`.

        Returns
        -------
        str
            `layer_for_positive` if it is set and the method assumes non-negative activations, otherwise `layer`.

        Raises
        ------
        GradcamError
            If the method is unknown. If `layer_for_positive` is None, the method is not checked.
        """
        positive = self.layer_for_positive
        return self.layer if positive is None or not find_method(method).assumes_positive else positive

    def explain(
        self,
        images: ImageInput | Sequence[ImageInput],
        layer: str | nn.Module | None = None,
        *,
        method: str | Method | None = None,
        target: Any = None,
        layers: Sequence[str | nn.Module] | None = None,
        fit: str | None = None,
        **options: Unpack[ExplainOptions],
    ) -> ImageExplanation:
        """Explain the model's prediction for one image, or for a sequence of images.

        Parameters
        ----------
        images : image or sequence of images
            Any form that `gradcam.read_image` takes (a path, bytes, an open file, a PIL image, an array, a tensor), or
            the result of `prepare`. A sequence may mix sizes and forms; a tensor (N,C,H,W) is a sequence. An array
            (H,W) or (H,W,C) may also contain integers or floats of any range, if the preprocessing supports them. The
            image to draw on is then an 8-bit version of the array. The contrast of this version is stretched if some
            values are negative, or if the values cover less than half of the dtype's range.
        layer : str or nn.Module, default None
            The target layer: a dotted name, or a module. None uses `layer_for(method)`.
        method : str or Method, default None
            As in `gradcam.explain`.
        target : Any, default None
            As in `gradcam.explain`. Labels may be used instead of class indices.
        layers : sequence of str or nn.Module, default None
            Several target layers instead of `layer`, combined as in `gradcam.explain`.
        fit : str, default None
            Which part of the image the model sees, as in `load_classifier`. None uses the classifier's `fit`.
        **options : Any
            The options of `explain`.

        Returns
        -------
        ImageExplanation
            The heatmaps, with the methods `overlay`, `save`, `label` and `probability`.

        Raises
        ------
        ImageError
            If an image cannot be read, or if the images differ in size after preprocessing. Explain images of different
            sizes one by one.
        GradcamError
            As in `gradcam.explain`. Also if `fit` is unknown, or the model does not support it.

        Examples
        --------
        >>> import gradcam
        >>> explanation = gradcam.load_classifier().explain("photo.jpg", target="espresso")
        >>> explanation.save("espresso.png")
        >>> explanation
        ImageExplanation(1 image(s), 1 map(s) each, gradcam at layer4, 7 x 7 to 224 x 224, ...)
        """
        target_layers = check_one_map(layer, layers, options.get("join"))
        plan = Plan.of([] if method is None else [find_method(method)], target, options, "explain")
        return next(iter(self._fitted(fit).run_plan(images, target_layers, plan).values()))

    def _fitted(self, fit: str | None) -> Self:
        return self if fit is None else replace(self, fit=fit)

    def compare(
        self,
        images: ImageInput | Sequence[ImageInput],
        *,
        layers: Sequence[str | nn.Module] | None = None,
        methods: Sequence[str | Method],
        target: Any = None,
        fit: str | None = None,
        **options: Unpack[ExplainOptions],
    ) -> dict[tuple[str, str], ImageExplanation]:
        """Explain images at several layers with several methods, in one pass of the model.

        Parameters
        ----------
        images : image or sequence of images
            As in `explain`.
        layers : sequence of str or nn.Module, default None
            The target layers. None uses the default layer of each method, `layer_for(method)`, with one pass per layer.
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
        dict of (str, str) to ImageExplanation
            The keys are (layer name, method name).

        Raises
        ------
        GradcamError
            As in `explain`.

        Examples
        --------
        >>> import gradcam
        >>> explanations = gradcam.load_classifier().compare("photo.jpg", methods=["gradcam", "xgradcam"])
        >>> list(explanations)
        [('layer4', 'gradcam'), ('head.0', 'xgradcam')]
        """
        return self._fitted(fit).run_plan(images, layers, Plan.of(find_methods(methods), target, options, "compare"))

    def run_plan(self, images: Images, layers: Layers, plan: Plan) -> dict[tuple[str, str], ImageExplanation]:
        """Explain images as in `compare`, with a validated plan.

        Parameters
        ----------
        images : image or sequence of images
            As in `explain`.
        layers : sequence of str or nn.Module or None
            As in `compare`.
        plan : Plan
            The methods, the target and the options.

        Returns
        -------
        dict of (str, str) to ImageExplanation
            The keys are (layer name, method name).

        Raises
        ------
        GradcamError
            As in `explain`.
        """
        prepared = self._prepare_all(images)
        plan = plan if plan.methods else plan.complete(self.default_method)
        plan = replace(plan, target=self._to_target(plan.target))
        assigned: dict[str, list[Method]] = {}
        for method in plan.methods if layers is None else ():
            assigned.setdefault(self.layer_for(method), []).append(method)
        passes: list[Pass] = [([layer], replace(plan, methods=methods)) for layer, methods in assigned.items()]
        explanations = self._explain_visible(prepared, passes if layers is None else [(layers, plan)])
        if len(passes) > 1:
            order = [method.name for method in plan.methods]
            explanations = dict(sorted(explanations.items(), key=lambda item: order.index(item[0][1])))
        image_fields = self._describe(prepared)
        return {key: ImageExplanation(**vars(explanation), **image_fields) for key, explanation in explanations.items()}

    def _explain_visible(self, prepared: Sequence[Prepared], passes: list[Pass]) -> Explanations:
        """Explain preprocessed images of one size. The maps cover the parts of the images that the model sees."""
        target, options = passes[0][1].target, passes[0][1].options
        if self._fit.kind != "tiles":
            images, target, output = self._to_input(prepared, target)
            return self._run_passes(images, passes, target, output)
        preprocess, step = get_steps(self.preprocess), find_step(self.model)
        grids = [Tiles(item.reading.values, preprocess, self._tile_side, step) for item in prepared]
        check_same_sizes([grid.canvas for grid in grids], "in tiles")
        grids[0].check()
        is_mean = self.predictions == "seen" and not callable(target)
        output = torch.cat([self._average(grid, target) for grid in grids]) if is_mean else self._classify(prepared)
        classes = target.resolve(output, len(grids)) if is_mean else self._choose_classes(target, output, len(grids))
        silent: ExplainOptions = options | {"progress": None}
        passes = [(layers, replace(plan, options=silent)) for layers, plan in passes]

        def explain_batch(images: Tensor, i: int) -> Explanations:
            tile_target = classes if callable(classes) else classes.select(i).repeat(len(images))
            return self._run_passes(self._place(images), passes, tile_target)

        joined = [explain_tiles(grid, partial(explain_batch, i=i), options["progress"]) for i, grid in enumerate(grids)]
        return {key: replace(stack([results[key] for results in joined]), output=output) for key in joined[0]}

    def _average(self, tiles: Tiles, target: ClassTarget) -> Tensor:
        batches = (images for _, images in tiles.batches())
        return torch.cat([target.find_logits(self._run(self._place(b)), len(b)) for b in batches]).mean(0, keepdim=True)

    def _to_input(self, prepared: Sequence[Prepared], target: Any) -> tuple[Any, Any, Any]:
        if self._fit.kind == "crop":
            images = self._stack([item.image for item in prepared])
            windows = hasattr(self.preprocess, "window") and find_windows(self.preprocess, prepared)
            return replace(to_batch(images), windows=windows) if windows else images, target, None
        preprocess, step = get_steps(self.preprocess), find_step(self.model)
        check_sizes(self.model, self._stack([prepared[0].image]), step)
        images = self._stack([show_whole(item.reading.values, preprocess, step) for item in prepared])
        output = None if self.predictions == "seen" else self._classify(prepared)
        return images, target if output is None else self._choose_classes(target, output, len(prepared)), output

    def _classify(self, prepared: Sequence[Prepared]) -> Any:
        return self._run(self._stack([item.image for item in prepared]))

    def _run(self, images: Tensor) -> Any:
        with preserve_state(unwrap(self.model)), torch.no_grad():
            return self.model(images)

    def _choose_classes(self, target: Any, output: Any, images: int) -> Any:
        return target if callable(target) else target.resolve(target.find_logits(output, images), images)

    def _run_passes(self, images: Any, passes: list[Pass], target: Any, output: Any = None) -> Explanations:
        results: Explanations = {}
        for layers, plan in passes:
            model, inputs = self._adapt_model(to_batch(images).copy() if len(passes) > 1 else images)
            names = layers if model is self.model else [find_layer(unwrap(self.model), layer).name for layer in layers]
            results |= execute_plan(model, inputs, names, replace(plan, target=target))
        return results if output is None else {key: replace(result, output=output) for key, result in results.items()}

    def _adapt_model(self, images: Any) -> tuple[nn.Module, Any]:
        is_whole = self._fit.kind == "whole"
        return take_size(self.model, images, get_steps(self.preprocess).size) if is_whole else (self.model, images)

    def attribute(
        self,
        images: ImageInput | Sequence[ImageInput],
        method: str | AttributionMethod = "guided-gradcam",
        *,
        layer: str | nn.Module | None = None,
        target: Any = None,
        reshape: Any = None,
        progress: Progress | None = None,
    ) -> ImageAttribution:
        """Compute how much each input pixel matters: an attribution, or saliency map.

        Parameters
        ----------
        images : image or sequence of images
            As in `explain`.
        method : str or AttributionMethod, default "guided-gradcam"
            A key or a value of `gradcam.attributions.ATTRIBUTIONS`.
        layer : str or nn.Module, default None
            The target layer, only for guided-gradcam. None uses the classifier's `layer`.
        target : Any, default None
            As in `explain`.
        reshape : tuple, str or callable, default None
            As in `gradcam.explain`. Only for guided-gradcam.
        progress : callable, default None
            As in `gradcam.explain`. Only for methods with many passes.

        Returns
        -------
        ImageAttribution
            The signed attributions. Its method `draw(i, k)` draws the k-th attribution of image i.

        Raises
        ------
        LayerError
            If you pass `layer` or `reshape` to a method that has no target layer.
        GradcamError
            As in `explain` and in the method's function. Also if the method is unknown, or the fit is "tiles".

        Examples
        --------
        >>> import gradcam
        >>> attribution = gradcam.load_classifier().attribute("photo.jpg", "input-gradients", target="espresso")
        >>> attribution.values.shape, attribution.draw().shape
        (torch.Size([1, 1, 3, 224, 224]), (640, 800, 3))
        """
        attribution = method if isinstance(method, AttributionMethod) else find_attribution(method)
        options: dict[str, Any] = {"progress": progress} if attribution.has_progress else {}
        if attribution.has_layer:
            options |= {"layer": self.layer if layer is None else layer, "reshape": reshape}
        elif layer is not None or reshape is not None:
            problem = "takes no layer, because it explains the input image itself"
            raise LayerError(f"{attribution.name} {problem}. Leave out {'reshape' if layer is None else 'layer'}=.")
        prepared = self._prepare_all(images)
        if self._fit.kind == "tiles":
            raise GradcamError(f"{attribution.name} does not support the fit 'tiles': use 'crop' or 'whole'.")
        batch, resolved, output = self._to_input(prepared, self._to_target(target))
        model, inputs = self._adapt_model(batch)
        if model is not self.model and attribution.has_layer:
            options["layer"] = find_layer(unwrap(self.model), options["layer"]).name
        fields = vars(attribution.function(model, inputs, target=resolved, **options))
        fields = fields if output is None else fields | {"output": output}
        return ImageAttribution(**fields, **self._describe(prepared))

    def find_class(self, name: str) -> int:
        """Find the index of a class by its label, ignoring case.

        Parameters
        ----------
        name : str
            The label, or the index in digits. "name:7" means the class with the label "7". If the number of classes is
            unknown, as for some detectors, any index is accepted.

        Returns
        -------
        int
            The index.

        Raises
        ------
        TargetError
            If no class has the label or the index, or if several classes share the label.
        """
        return find_class(self.labels, name, self.classes or None)

    def label(self, index: int) -> str | None:
        """Return the label of a class.

        Parameters
        ----------
        index : int
            The class index.

        Returns
        -------
        str or None
            The label; None if the model has no labels.

        Raises
        ------
        IndexError
            If the model has labels, but no label for this index.
        """
        return None if self.labels is None else self.labels[index]

    def _to_target(self, target: Any) -> Any:
        """Replace labels in the target by indices, and the activation "auto" by the model's activation."""
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

    def _prepare_all(self, pictures: Images) -> list[Prepared]:
        is_list, is_prepared = isinstance(pictures, list), isinstance(pictures, (Reading, Prepared))
        images: Any = pictures if is_list or not (is_prepared or is_one_image(pictures)) else [pictures]
        if not isinstance(images, (Sequence, np.ndarray, Tensor)):
            raise ImageError(f"The images are {shorten(images)}, expected {IMAGE_FORMS}, or a sequence of them.")
        prepared = [image if isinstance(image, Prepared) else self.prepare(image) for image in images]
        if not prepared:
            raise ImageError("There are no images: expected one image, or a sequence of images.")
        return prepared

    def _describe(self, prepared: Sequence[Prepared]) -> dict[str, Any]:
        drawn_on, notes = [item.reading.picture for item in prepared], [item.reading.note for item in prepared]
        spacings = [item.reading.spacing for item in prepared]
        is_crop = self._fit.kind == "crop"
        regions = [self.region(*pixels.shape[:2]) if is_crop else (0, 0, *pixels.shape[:2]) for pixels in drawn_on]
        fit = replace(self._fit, side=self._tile_side) if self._fit.kind == "tiles" else self._fit
        shared_fields = {"labels": self.labels, "activation": self.activation, "fit": None if is_crop else str(fit)}
        image_fields = {"images": drawn_on, "regions": regions, "notes": notes, "spacings": spacings}
        return image_fields | {"model": self.name} | shared_fields

    @property
    def _tile_side(self) -> int:
        return self._fit.side or max(get_steps(self.preprocess).size)
