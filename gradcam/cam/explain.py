"""Turn a model and images into heatmaps: the entire computation, top to bottom."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from gradcam.cam.forward import RecordedPass, recorded_pass
from gradcam.cam.grid import JOINS, BlindPatchesError, list_unverified
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, apply_smoothing, check_evidence, find_method
from gradcam.cam.plain_maps import Maps, compute_plain_maps
from gradcam.cam.postprocess import Views, to_heatmaps_of_sizes
from gradcam.cam.rounding import Key, warn_of_rounding
from gradcam.errors import ImageError, LayerError, TargetError, join_names, shorten
from gradcam.hooks.containers import Batch, to_batch
from gradcam.hooks.model_facts import ModelFacts, self_changing_models
from gradcam.layers.find import check_layers, find_layers, unwrap
from gradcam.layers.layout import to_reshape
from gradcam.options import AUGMENTATIONS, DEFAULTS, ExplainOptions, fill_options
from gradcam.targets.base import LOCAL_METHOD, BoundTarget, Instance, Target, TargetScores
from gradcam.targets.classes import is_custom_function, is_function
from gradcam.targets.heads import require_class_head


@dataclass(frozen=True, eq=False)
class Explanation:
    """Heatmaps of N images: K class activation maps for each image.

    For volumes, `maps` have (d,h,w) instead of (h,w), and `heatmaps` have (D,H,W) instead of (H,W). Tensors are on the
    images' device.

    Attributes
    ----------
    maps : Tensor (N,K,h,w)
        The raw output of the method, float32, at the layer's resolution. The option `evidence` selects the positive
        values, the magnitudes of the negative values, or all values. If the model pads images, a map covers only the
        image, without the padding.
    heatmaps : Tensor (N,K,H,W)
        The maps at the input's size, float32, each divided by its own maximum: from 0 to 1, or from -1 to 1 for signed
        evidence. A blank map stays zero. If the images have different sizes, this is a list of N tensors (K,H,W).
    classes : Tensor (N,K) or None
        The explained classes, int64; None if the target was a function, a sentence or a reference image.
    scores : Tensor (N,K)
        The explained scores, float32. If images have different numbers of boxes, missing boxes have score NaN, class -1
        and a blank map.
    output : Any
        The model's output, detached.
    layer : str
        The target layer's dotted name; "input" or "attention" if the method needs no layer.
    method : str
        The method's name.
    evidence : str
        "positive", "negative" or "signed".
    instances : sequence of sequences of Instance, or None
        The object that each map of each image explains: a box, mask, sentence or other target of `gradcam.targets`.
        None for classes and functions.
    detections : sequence of sequences of Instance, or None
        All detections of the model in each image, such as its boxes.
    reference : Explanation or None
        The maps on the reference image, if the target is `targets.Like` with an image.
    layout : str or None
        The layout of the layer's output, such as "channels first" or "tokens"; None if no layer is explained.
    interpolation : str
        How the maps were resized to heatmaps: "bicubic", "bilinear" or "nearest".
    output_name : str or None
        The key or index of the explained tensor in the model's output, such as "logits" or "0"; None if the output is one
        tensor, or the target is a function.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None).eval()
    >>> explanation = gradcam.explain(model, torch.rand(2, 3, 64, 64), "layer4", target=[[1, 2, 3]] * 2)
    >>> explanation
    Explanation(2 image(s), 3 map(s) each, gradcam at layer4, 2 x 2 to 64 x 64, cpu)
    >>> explanation.save("maps.npz")
    """

    maps: Tensor
    heatmaps: Tensor
    classes: Tensor | None
    scores: Tensor
    output: Any = field(repr=False)
    layer: str
    method: str
    evidence: str
    instances: Sequence[Sequence[Instance]] | None = field(default=None, repr=False, kw_only=True)
    detections: Sequence[Sequence[Instance]] | None = field(default=None, repr=False, kw_only=True)
    reference: Explanation | None = field(default=None, repr=False, kw_only=True)
    layout: str | None = field(default=None, repr=False, kw_only=True)
    interpolation: str = field(default="bicubic", repr=False, kw_only=True)
    output_name: str | None = field(default=None, repr=False, kw_only=True)

    def __getattr__(self, name: str) -> Any:
        from gradcam.renames import read_old_attribute

        return read_old_attribute(self, name)

    def __repr__(self) -> str:
        images, classes = self.maps.shape[:2]
        grid = " x ".join(map(str, self.maps.shape[2:]))
        size = ", ".join(dict.fromkeys(" x ".join(map(str, heatmap.shape[1:])) for heatmap in self.heatmaps))
        kind = "" if self.evidence == "positive" else f"{self.evidence} evidence by "
        return (
            f"{type(self).__name__}({images} image(s), {classes} map(s) each, {kind}{self.method} at {self.layer}, "
            f"{grid} to {size}, {self.maps.device})"
        )

    def save(self, path: str | os.PathLike[str], i: int | None = None, k: int | None = None) -> None:
        """Write the whole explanation to an ``.npz`` file of NumPy arrays, or a single map (h,w) to an ``.npy`` file.

        `numpy.load("a.npz")` has `maps`, `heatmaps`, `classes` (unless the target was a function), `scores`, `layer`,
        `method` and `evidence`. A single map has the format of `gradcam batch --save map`. The file is written completely or
        not at all.

        Parameters
        ----------
        path : str or path
            The file, ending in ``.npz`` or ``.npy``. The folder of the file must exist.
        i : int, default None
            The image to save; None for all.
        k : int, default None
            The map of that image to save; None for all.

        Raises
        ------
        ImageError
            If the suffix is neither ``.npz`` nor ``.npy``, if there is no such map, or if the file cannot be written.

        Examples
        --------
        >>> import gradcam, numpy, torch, torchvision
        >>> model = torchvision.models.resnet18(weights=None).eval()
        >>> explanation = gradcam.explain(model, torch.rand(1, 3, 64, 64), "layer4")
        >>> explanation.save("map.npy", 0, 0)
        >>> numpy.load("map.npy").shape
        (2, 2)
        """
        from gradcam.images.write import ARRAY_SUFFIXES, check_suffix, write_arrays

        if check_suffix(path) not in ARRAY_SUFFIXES:
            raise ImageError(
                f"{path}: this explanation has no image to draw on. Explain the image file: "
                f"gradcam.load_classifier(model).explain('photo.jpg').save({os.fspath(path)!r}). Or draw one heatmap: "
                "gradcam.overlay(image, explanation.heatmaps[0, 0], region=(top, left, height, width)). Or save the "
                "explanation as .npz."
            )
        tensors = {name: getattr(self, name) for name in ("maps", "heatmaps", "classes", "scores")}
        write_arrays(path, tensors, {name: getattr(self, name) for name in ("layer", "method", "evidence")}, i, k)


def explain(
    model: nn.Module,
    images: Any,
    layer: str | nn.Module | None = None,
    *,
    method: str | Method | None = None,
    target: Any = None,
    layers: Sequence[str | nn.Module] | None = None,
    **options: Unpack[ExplainOptions],
) -> Explanation:
    """Compute class activation maps, in one forward pass and a backward pass through the layers after the target layer.

    The model runs in evaluation mode. The model's hooks, training flags, buffers, `requires_grad` and ``.grad`` are
    left unchanged, as well as the grad mode and the random states. Several threads may explain one model at once. Do
    not train the model in another thread at the same time: all threads share the training flags, so a training step
    would run in evaluation mode.

    Parameters
    ----------
    model : nn.Module
        Any PyTorch model. The model may be frozen, in training mode, in half precision or compiled.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        The model's input, usually a preprocessed floating-point tensor. A tuple is passed as positional arguments, and a
        dict as keyword arguments. The first floating-point 4-D or 5-D tensor among the arguments is taken as the images.
        Detectors may take a list of images (C,H,W), of any sizes.
    layer : str or nn.Module, default None
        The target layer: its dotted name, or the module. "backbone:out" or "backbone.fpn:2" names one of several output
        tensors, by key or index. "encoder.layer4#1" names one of several runs of a layer, counted from 0. If a layer
        returns several tensors and no tensor is named, the first tensor that has a grid and affects the score is used.
        If these tensors form a feature pyramid, the maps of all levels are added. None selects the last layer that
        meets three conditions: the layer has a grid, the score depends on the image only through the layer, and the
        layer's cells respond where the image changes. (Methods that assume non-negative activations get a layer after
        an activation function such as ReLU. For dense outputs, the default is the last layer with the coarsest grid.)
        The search for the layer costs two extra forward passes, one of them with a single image. The layer is cached
        while the model and the shape of the images stay the same. No layer is cached if the target is a function or a
        `gradcam.targets` object other than `ClassTarget`: in a loop with such a target, name the layer.
    method : str or Method, default None
        A key or a value of `gradcam.METHODS`. "rise", "drise" and the methods that follow a transformer's attention,
        such as "rollout", need no layer. For classes, None means "gradcam". For boxes and other targets with a
        position, None means "hirescam" at each level of a feature pyramid. None also means "hirescam" for a function of
        an output that is not (N,C), such as a segmentation.
    target : Any, default None
        What to explain. None means each image's top class. Classes are given as one int for all images, as N ints, or
        as a nested (N,K) sequence or tensor for K maps per image. Other forms are a `gradcam.targets.ClassTarget`, a
        function from the model's output to scores (N,) or (N,K), and the other objects of `gradcam.targets`: a box,
        mask, keypoint, sentence, word or reference image.
    layers : sequence of str or nn.Module, default None
        Several layers instead of `layer`. `join` says how their maps are combined.

    Other Parameters
    ----------------
    join : str, default None
        "sum" resizes the raw maps of `layers` to the finest grid, and adds the maps.
    evidence : str, default "positive"
        "positive" is evidence for the class, and "negative" is evidence against the class. "signed" is both, in [-1,1].
        "negative" and "signed" need a method whose `is_signed` is True. Negative and signed evidence is useful for
        regression and for a single logit.
    augmentation : str, default "none"
        Test-time augmentation. "flip" adds the mirrored images to the batch. "flip-scale" also adds the images and the
        mirrored images with all values multiplied by 0.9 and by 1.1. Maps are means over these views.
    smoothing : str, default "none"
        "eigen" uses the first principal component of the weighted channels instead of their sum.
    interpolation : str, default "bicubic"
        How maps are resized to the size of the images: "bicubic", "bilinear", or "nearest", which shows the cells of the
        layer as blocks. Pixel centres are at half-integers.
    reshape : tuple, str or callable, default None
        The layout of the layer's output, if it is ambiguous. A tuple is the grid (h, w) or (d, h, w) that the tokens
        form. Extra tokens, such as a class token, are skipped. A string is "channels first", "channels
        last", "tokens" (N,T,D) or "tokens first" (T,N,D). A function turns the layer's tensor into (N,C,h,w) or
        (N,C,d,h,w). The function may only select and reorder values.
    memory_budget : int, default None
        Memory in bytes for methods that run the model several times. None means 256 MB, or the memory for one perturbed
        copy of the images if that is more.
    progress : callable, default None
        A function that is called with the number of passes done and the total, by methods that run the model several
        times. If the function raises an exception, the explanation ends.

    Returns
    -------
    Explanation
        The raw `maps`, and `heatmaps` from 0 to 1 at the images' size.

    Raises
    ------
    ModelError
        If the model cannot be explained.
    LayerError
        If the layer does not exist or has no grid. The subclass `BlindLayerError` is raised if the score does not
        depend on the layer.
    TargetError
        If the target does not fit the model's output.
    ImageError
        If the images are not a valid input.
    GradcamError
        If a method or an option is unknown. Errors of the model itself are passed on unchanged.

    Warns
    -----
    GradcamWarning
        If the cells of a layer do not respond where the image changes. The responses are measured once, for default
        layers and for named layers with an ambiguous layout. There are also warnings if images of the batch depend on
        one another, if the output is probabilities instead of logits, and if a map contains only rounding errors.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None).eval()
    >>> explanation = gradcam.explain(model, torch.rand(2, 3, 224, 224), "layer4", target=281)
    >>> explanation.maps.shape, explanation.heatmaps.shape
    (torch.Size([2, 1, 7, 7]), torch.Size([2, 1, 224, 224]))

    References
    ----------
    Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", ICCV 2017,
    equations 1 and 2. `gradcam methods` lists the papers of the other methods.
    """
    plan = Plan.of([] if method is None else [find_method(method)], target, options, "explain")
    target_layers = check_one_map(layer, layers, plan.options["join"]) or []
    return next(iter(execute_plan(model, images, target_layers, plan).values()))


def check_one_map(
    layer: str | nn.Module | None, layers: Sequence[str | nn.Module] | None, join: str | None
) -> Sequence[str | nn.Module] | None:
    """Return the layers for a single map, as a list; None if the user names no layer.

    The list has one layer, or several layers whose maps `join` adds. Raises `LayerError` if `layers` is passed without
    `join` or together with `layer`.
    """
    if layers is None:
        return None if layer is None else [layer]
    if layer is not None or join is None:
        raise LayerError(
            "explain() makes one heatmap per class: pass one layer, or layers=[...] with join='sum'. For one heatmap per "
            "layer, call compare()."
        )
    return check_layers(layers)


@dataclass(frozen=True)
class Plan:
    """A checked request: what to explain and how, as in `explain`.

    If `methods` is empty, the target's default method is used. With `prefers_signed`, the evidence is signed if the
    default method supports signed evidence. If a target function reads positions of the output, as in segmentation,
    `methods_for_places` replace `methods`. Methods that pool gradients would lose the positions.
    """

    methods: Sequence[Method] = (METHODS["gradcam"],)
    target: Any = None
    options: ExplainOptions = field(default_factory=DEFAULTS.copy)
    prefers_signed: bool = False
    methods_for_places: Sequence[Method] = ()

    @classmethod
    def of(cls, methods: Sequence[Method], target: Any, options: ExplainOptions, function: str, **fields: Any) -> Self:
        """Check everything that can be checked without a model, and return a plan.

        Raises `GradcamError` for unknown names and unsupported combinations. Raises `TypeError` for unknown options;
        the message names `function`, the public function that was called.
        """
        filled = fill_options(options, function)
        smoothed = apply_smoothing(methods, filled["smoothing"])
        if filled["join"] is not None and filled["join"] not in JOINS:
            raise LayerError(f"join is {shorten(filled['join'])}, expected {join_names(JOINS)}, or None.")
        check_evidence(filled["evidence"], smoothed)
        filled["reshape"] = to_reshape(filled["reshape"])
        return cls(smoothed, target, filled, **fields)

    def complete(self, method: str) -> Plan:
        """Return the plan, with `method` if the plan has no method yet. Raises `GradcamError` as `of` does."""
        if self.methods:
            return self
        smoothing, options = self.options["smoothing"], self.options
        methods = apply_smoothing([METHODS[method]], smoothing)
        if self.prefers_signed and methods[0].is_signed:
            options = options | {"evidence": "signed"}
        check_evidence(options["evidence"], methods)
        for_places = apply_smoothing([METHODS[LOCAL_METHOD]], smoothing) if is_custom_function(self.target) else ()
        return Plan(methods, self.target, options, self.prefers_signed, for_places)

    @property
    def needs_layers(self) -> bool:
        return any(method.has_layer for method in self.methods)

    @property
    def grad_order(self) -> int:
        """Return the highest order of the derivatives that the methods need: 0, 1 or 2."""
        if any("curvatures" in method.needs for method in self.methods):
            return 2
        return 1 if any(method.needs for method in self.methods) else 0

    @property
    def runs_again(self) -> bool:
        return any(method.runs_again for method in self.methods)


def execute_plan(
    model: nn.Module, images: Any, layers: Sequence[str | nn.Module], plan: Plan
) -> dict[tuple[str, str], Explanation]:
    """Return the explanations of a plan, by layer and method. If `layers` is empty, choose a default layer."""
    model, target = unwrap(model), plan.target
    is_mapping = not isinstance(images, Tensor) and isinstance(images, Mapping)
    batch = _to_model_batch(model, images) if is_mapping else to_batch(images)
    if not is_function(target):
        require_class_head(model)
        bound = BoundTarget(model, batch, target)
    else:
        bound = target.bind(model, batch) if isinstance(target, Target) else BoundTarget(model, batch, target)
    if batch.pieces is not None:
        from gradcam.cam.pieces import bind_pieces

        bound = bind_pieces(model, bound, plan.methods, plan.options, has_layers=bool(layers))
    facts = ModelFacts(model)
    if model in self_changing_models:
        facts.read()
    # If the user names a layer, the default cannot be a method that follows attention, which returns no map of a layer.
    plan = plan.complete("gradcam" if layers and METHODS[bound.method].place == "attention" else bound.method)
    if bound.has_places and plan.options["augmentation"] != "none":
        problem = "Augmentation moves the image, but this target has a fixed position"
        raise TargetError(f"{problem}: leave augmentation= out.")
    if plan.needs_layers and not layers and bound.layer is None:
        positive, reshape = all(method.assumes_positive for method in plan.methods), plan.options["reshape"]
        if callable(reshape):
            raise LayerError("A reshape function fits the tensor of one layer: also pass the name of this layer.")
        from gradcam.cam.default_layer import DefaultLayerSearch

        search = DefaultLayerSearch(model, bound, facts, reshape, positive)
        return search.explain(partial(_explain_at, model, plan, facts))
    has_named_layers = bool(layers)
    layers = layers or bound.layers or ([] if bound.layer is None else [bound.layer])
    if not has_named_layers and len(layers) > 1:
        plan = replace(plan, options=plan.options | {"join": "sum"})
    if plan.options["reshape"] is None and bound.reshape is not None:
        plan = replace(plan, options=plan.options | {"reshape": bound.reshape})
    try:
        return _explain_at(model, plan, facts, bound, layers, verify="guesses" if has_named_layers else "all")
    except BlindPatchesError as error:
        from gradcam.cam.default_layer import BLIND, find_layer_with_gradient
        from gradcam.cam.suggest import find_suggestion

        advice = BLIND
        with contextlib.suppress(Exception):  # The model may raise any error in a second run.
            suggestion = find_suggestion(bound.model, bound.batch, bound.target)
            layer = find_layer_with_gradient(model, bound, suggestion.layers, facts)
            advice = advice if layer is None else f"{error} Choose '{layer}', whose patches affect the score."
        raise type(error)(advice) from None


def _to_model_batch(model: nn.Module, inputs: Mapping[str, Any]) -> Batch:
    """Return named inputs as a batch. A vision-language model's images may be in pieces."""
    if not {"pixel_values", "input_ids"} & inputs.keys():
        return to_batch(inputs)
    from gradcam.adapters import find_family
    from gradcam.adapters.embedding import join_patches
    from gradcam.adapters.vision_language import VisionLanguageModel

    family = find_family(model, VisionLanguageModel)
    if family is None:
        return to_batch(join_patches(inputs) if "spatial_shapes" in inputs else inputs)
    try:
        return family.to_pieces(dict(inputs))
    except ImageError:
        if not family.prefix:
            raise
        return to_batch(inputs)  # A user's module may pass other inputs to the model inside it.


def _explain_at(
    model: nn.Module,
    plan: Plan,
    facts: ModelFacts,
    bound: BoundTarget,
    layers: Sequence[str | nn.Module],
    *,
    verify: Literal["nothing", "guesses", "all", "strictly"] = "nothing",
    on_recorded: Callable[[RecordedPass], None] | None = None,
    from_images: bool = False,
) -> dict[tuple[str, str], Explanation]:
    """Compute the explanations at these layers.

    `verify` says which layouts are measured: none, the ambiguous layouts ("guesses"), or all. "strictly" measures all,
    and raises `MisplacedError` instead of warning. `on_recorded` is called with the recorded pass. `from_images` is
    passed to `recorded_pass`.
    """
    options, reshape = plan.options, plan.options["reshape"]
    outlets = find_layers(model, layers) if layers or plan.needs_layers else []
    views = _make_views(bound, options["augmentation"])
    inputs, reruns = views.batch, None
    settings: dict[str, Any] = {"grad_order": plan.grad_order, "facts": facts, "from_images": from_images}
    if plan.runs_again:
        from gradcam.cam.methods.attention_capture import AttentionLog
        from gradcam.hooks.memory import RerunBudget

        budget, log = reruns = RerunBudget(inputs, options["memory_budget"], options["progress"]), AttentionLog()
        inputs = inputs.copy()
        # During the recorded pass, one context measures memory for later runs, and another context records attention.
        contexts = [budget.measured({outlet.module for outlet in outlets})] if outlets else []
        if any(method.place == "attention" for method in plan.methods):
            contexts.append(log.record(model))
        settings["contexts"] = contexts
    with recorded_pass(bound.model, inputs, outlets, views.target, **settings) as recorded:
        if on_recorded is not None:
            on_recorded(recorded)
        has_pieces = bound.batch.pieces is not None
        is_fixed = has_pieces or recorded.frame is not None or recorded.images_changed
        if verify != "nothing" and outlets and not is_fixed:
            unverified = list_unverified(recorded, reshape, includes_certain=verify != "guesses")
            if unverified:
                from gradcam.cam.verify_layout import verify_places

                # A tuple sets the grid, but not the positions of extra tokens before, between or after the cells.
                is_user_layout = reshape is not None and not isinstance(reshape, tuple)
                verify_places(recorded, unverified, is_user_layout=is_user_layout, strict=verify == "strictly")
        if views.batch.images > 1 and not has_pieces:
            from gradcam.cam.independence import warn_of_mixed_images

            warn_of_mixed_images(recorded)
        if plan.methods_for_places:
            from gradcam.cam.suggest import reads_rows

            if not reads_rows(recorded.scored.values, recorded.output, views.batch.images):
                plan = replace(plan, methods=plan.methods_for_places)
        maps = None if reruns is not None else compute_plain_maps(recorded, plan.methods, reshape)
        if maps is None:
            from gradcam.cam.maps import compute_maps

            maps = compute_maps(recorded, plan.methods, reruns, reshape=reshape, join=options["join"])
        drafts = _draft_explanations(maps, recorded, bound, views, plan)
        reference_inputs = None if bound.mirror is None else bound.mirror(recorded.scored)
    del maps, recorded  # The heatmaps of many words are large. First free the memory of the graph.
    explanations = {}
    for key, fields in drafts.items():
        explanations[key] = Explanation(**fields | {"heatmaps": fields["heatmaps"]()})
    if "_cache" in vars(facts):  # The cache is in use: this pass has read or cached a fact.
        facts.take_over()
    if reference_inputs is not None:  # Explain the reference image at the same layers.
        references = execute_plan(model, reference_inputs[0], layers, replace(plan, target=reference_inputs[1]))
        explanations = {key: replace(item, reference=references.get(key)) for key, item in explanations.items()}
    return explanations


def _make_views(bound: BoundTarget, augmentation: str) -> Views:
    if augmentation == "none":
        return Views(bound.batch, AUGMENTATIONS["none"], bound.target)
    from gradcam.cam.views import make_views

    return make_views(bound.batch, augmentation, bound.target)


def _draft_explanations(
    maps: Mapping[Key, Maps], recorded: RecordedPass, bound: BoundTarget, views: Views, plan: Plan
) -> dict[Key, dict[str, Any]]:
    """Return the fields of explanations: crop maps to the images, average the views, and select the evidence.

    The field `heatmaps` is a function that resizes the maps to the images.
    """
    batch, scored, evidence = bound.batch, recorded.scored, plan.options["evidence"]
    output_name = None
    if not isinstance(recorded.output, Tensor) and scored.logits is not None:
        from gradcam.targets.output_heads import find_output_name

        output_name = find_output_name(recorded.output, scored.logits)
    output = recorded.output if bound.own_output is None else bound.own_output(recorded.output)
    detections = None if bound.list_found is None else bound.list_found(recorded.output)
    detections, instances = _move_instances(detections, batch), _move_instances(scored.instances, batch)
    drafts: dict[Key, dict[str, Any]] = {}
    gradient_methods = {method.name for method in plan.methods if "gradients" in method.needs}
    for (layer, method), method_maps in maps.items():
        levels: Sequence[Tensor] = method_maps.levels
        # For settled scores, the computed gradient is only rounding error. Make the maps of these scores blank.
        if scored.settled is not None and method in gradient_methods:
            levels = [level.masked_fill(scored.settled[..., None, None].to(level.device), 0) for level in levels]
        values = views.combine(_crop_to_images(levels, recorded, layer), evidence)
        values = values if bound.refine is None else bound.refine(values)
        if method_maps.rounding_mask is not None:
            warn_of_rounding(values, method_maps.rounding_mask, evidence, f"{method} at layer '{layer}'")
        scores = _mask_missing_scores(views.first(method_maps.scores), scored)
        drafts[layer, method] = {"maps": values, "scores": scores, "layer": layer, "method": method}
        drafts[layer, method]["layout"] = _name_layout(recorded, layer)
    classes = None if scored.classes is None else views.first(scored.classes)
    shared = {"output": views.first_of(output), "output_name": output_name, "detections": detections}
    shared |= {"instances": instances, "evidence": evidence, "interpolation": plan.options["interpolation"]}
    device, sizes = batch.device, batch.sizes
    shared["classes"] = None if classes is None else classes.to(device)
    options: dict[str, Any] = {"signed": evidence == "signed", "mode": shared["interpolation"]}
    for fields in drafts.values():
        heatmaps = partial(to_heatmaps_of_sizes, fields["maps"], sizes, device, **options)
        fields.update(shared, maps=fields["maps"].to(device), scores=fields["scores"].to(device), heatmaps=heatmaps)
    return drafts


def _name_layout(recorded: RecordedPass, layer: str) -> str | None:
    """Return the layout of a layer's output on the image; None for methods that explain no layer."""
    tensor_names = [tensor_name for name in layer.split(" + ") for tensor_name in recorded.names_by_layer.get(name, ())]
    names = [recorded.layouts[tensor_name].name for tensor_name in tensor_names if tensor_name in recorded.layouts]
    return ", ".join(dict.fromkeys(names)) or None


def _crop_to_images(levels: Sequence[Tensor], recorded: RecordedPass, layer: str) -> Sequence[Tensor]:
    """If the model pads images, crop the maps to the images, because the layers' maps include the padding."""
    frame, batch = recorded.frame, recorded.batch
    if batch.pieces is not None:
        from gradcam.cam.pieces import crop_views

        return crop_views(levels, recorded, layer)
    if layer == "input":  # Maps at the input cover the caller's images, before the model resizes any image.
        from gradcam.layers.frames import find_frame

        frame = find_frame(replace(batch, size=tuple(batch.pictures.shape[2:])), [])
    if frame is None or frame.is_whole:
        return levels
    from gradcam.cam.views import crop_to_windows

    return [crop_to_windows(level, frame) for level in levels]


def _move_instances(rows: Sequence[Sequence[Instance]] | None, batch: Batch) -> Sequence[Sequence[Instance]] | None:
    """Convert the coordinates of instances to pixels of the original images."""
    rows = None if rows is None else rows[: batch.images]
    if rows is None or batch.windows is None:
        return rows
    triples = zip(rows, batch.windows, batch.sizes)
    return [[item.moved(window, (0, 0, size[0], size[1]), size) for item in row] for row, window, size in triples]


def _mask_missing_scores(scores: Tensor, scored: TargetScores) -> Tensor:
    """Set the scores of missing instances to NaN, for images that have fewer instances than other images."""
    if scored.instances is not None:
        for row, instances in zip(scores, scored.instances):
            row[len(instances) :] = torch.nan
    return scores
