"""Models for tasks other than classification: detectors, segmenters, matchers, captioners and pose models."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from gradcam import targets
from gradcam.adapters import list_families
from gradcam.adapters.base import Family
from gradcam.cam.explain import Explanation, Plan, execute_plan
from gradcam.errors import ImageError, ModelError, TargetError
from gradcam.hooks.containers import Batch, Window, to_batch
from gradcam.images.read import Pixels, Region, to_8_bits
from gradcam.layers.find import unwrap
from gradcam.models.classifier import Classifier, Images, Layers
from gradcam.models.preprocess import Prepared, find_windows
from gradcam.models.results import ImageExplanation
from gradcam.targets.base import Target, crop_mask
from gradcam.targets.boxes import NoBoxError, check_inside
from gradcam.targets.classes import ClassTarget, is_function
from gradcam.targets.masks import check_point, find_image_areas, read_mask
from gradcam.targets.words import to_tokens


@dataclass(frozen=True)
class Placement:
    """The position of an image in the model's input.

    `size` is the size of the image. `region` is the visible part of the image. `window` is the position of this part in
    the input. `input_size` is the size of the whole input.
    """

    size: tuple[int, int]
    region: Region
    window: Window
    input_size: tuple[int, ...]

    def move_box(self, box: Sequence[float]) -> tuple[float, float, float, float]:
        """Move a box (left, top, right, bottom) from the image to the model's input."""
        (left, top), (right, bottom) = self.move_point(box[:2]), self.move_point(box[2:])
        return left, top, right, bottom

    def restore_box(self, box: Sequence[float]) -> tuple[float, float, float, float]:
        """Move a box from the model's input to the image: the inverse of `move_box`."""
        return Placement(self.input_size[-2:], self.window, self.region, self.size).move_box(box)  # type: ignore[arg-type]

    def move_point(self, point: Sequence[float]) -> tuple[float, float]:
        """Move a point (x, y) from the image to the model's input."""
        scales = [inner / outer for inner, outer in zip(self.window[2:], self.region[2:])]
        across = self.window[1] + (point[0] - self.region[1]) * scales[1]
        return across, self.window[0] + (point[1] - self.region[0]) * scales[0]

    def move_mask(self, mask: Any) -> Any:
        """Move a point, a box or a mask from the image to the model's input.

        `mask` is a point, a box, a file's path, or an array of the image's size. Raises `TargetError` if an array or a
        file has another size.
        """
        if isinstance(mask, (str, os.PathLike)):
            mask = read_mask(mask)
        if isinstance(mask, (tuple, list)) and all(isinstance(coordinate, (int, float)) for coordinate in mask):
            if len(mask) == 2:
                check_point(mask, (0, 0, self.size[1], self.size[0]))  # before moving: errors show user coordinates
                return self.move_point(mask)
            return self.move_box(mask) if len(mask) == 4 else tuple(mask)
        array = mask if isinstance(mask, Tensor) else torch.from_numpy(np.ascontiguousarray(mask))
        if tuple(array.shape[-2:]) != self.size or array.ndim != 2:
            mask_size, image_size = (" x ".join(map(str, shape[::-1])) for shape in (array.shape, self.size))
            problem = f"The mask is {mask_size}, but the image is {image_size}"
            raise TargetError(f"{problem}: expected a mask of the image's size.")
        scales = [outer / inner for outer, inner in zip(self.region[2:], self.window[2:])]
        top, left = (-start * scale for start, scale in zip(self.window, scales))
        height, width = (length * scale for length, scale in zip(self.input_size, scales))
        row, column, rows, columns = self.region
        part = array[row : row + rows, column : column + columns] != 0
        return crop_mask(part, (top, left, height, width), self.input_size)


@dataclass(frozen=True, eq=False)
class TaskModel(Classifier):
    """A model for a task other than classification, with its preprocessing. `gradcam.load_model` returns a subclass.

    It has the fields of `Classifier`; `classes` is 0 if the model has no classes.

    Attributes
    ----------
    family : Family or None
        The adapter that reads the model's output; None if the output needs no adapter.
    inputs : mapping of str to Tensor
        Additional inputs, such as text prompts. Each input has batch size 1, and is used for all images.
    is_chosen : bool
        Whether the user chose `layer`.

    Examples
    --------
    >>> import gradcam, torchvision
    >>> from gradcam.models.task_models import TaskModel
    >>> model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    >>> segmenter: TaskModel = gradcam.load_segmenter(model)
    >>> segmenter.layer, segmenter.is_chosen
    ('backbone:high', False)
    """

    family: Family | None = field(default=None, repr=False, kw_only=True)
    inputs: Mapping[str, Tensor] = field(default_factory=dict, repr=False, kw_only=True)
    is_chosen: bool = field(default=False, repr=False, kw_only=True)

    def run_plan(self, images: Images, layers: Layers, plan: Plan) -> dict[tuple[str, str], ImageExplanation]:
        prepared = self._prepare_all(images)
        plan = replace(plan, target=self.resolve(plan.target, prepared))
        return self._explain_batch(self.to_batch(prepared), prepared, layers, plan)

    def _explain_batch(self, batch: Batch, prepared: Sequence[Prepared], layers: Layers, plan: Plan) -> Any:
        has_layer = plan.needs_layers or not plan.methods
        default_layers: Sequence[str | nn.Module] = [self.layer] if self.is_chosen and has_layer else []
        explanations = execute_plan(self.model, batch, layers or default_layers, plan)
        return {key: self._to_image_explanation(explanation, prepared) for key, explanation in explanations.items()}

    def for_target(self, target: Any) -> tuple[Self, Any]:
        """Return the model for a target with its own prompt, and the target without the prompt.

        Parameters
        ----------
        target : Any
            As in `explain`.

        Returns
        -------
        (TaskModel, Any)
            The same model and target if the target has no prompt.

        Raises
        ------
        TargetError
            If the model takes no prompt.
        """
        return self, target

    def resolve(self, target: Any, prepared: Sequence[Prepared]) -> Any:
        """Convert a target to the form that `gradcam.explain` takes: read its files, and replace labels by indices.

        Parameters
        ----------
        target : Any
            As in `explain`.
        prepared : sequence of Prepared
            The images.

        Returns
        -------
        Target or callable
            The target.

        Raises
        ------
        TargetError
            If this kind of model does not support the target.
        """
        return self._to_target(target)

    def place(self, prepared: Sequence[Prepared]) -> Placement:
        """Return the position of the images in the model's input.

        Parameters
        ----------
        prepared : sequence of Prepared
            The images.

        Returns
        -------
        Placement
            One placement for all images.

        Raises
        ------
        ImageError
            If the images have different sizes, and therefore different placements.
        """
        windows, placements = find_windows(self.preprocess, prepared), set()
        for i, item in enumerate(prepared):
            height, width = item.reading.picture.shape[:2]
            rows, columns = item.image.shape[1:]
            window = (0, 0, rows, columns) if windows is None else windows[i]
            placements.add(Placement((height, width), self.region(height, width), window, (rows, columns)))
        if len(placements) > 1:
            advice = "explain images of different sizes one by one."
            raise ImageError(f"A location in pixels fits images of one size only: {advice}")
        return placements.pop()

    def _to_target(self, target: Any) -> Any:
        return target if isinstance(target, Target) or callable(target) else self._make_target(target)

    def _make_target(self, target: Any) -> Any:
        """Convert a plain value, such as a sentence or a number, to a target."""
        raise NotImplementedError

    def list_all(self) -> Any:
        """Return the target that selects all instances in the image, such as all boxes.

        Returns
        -------
        Any
            A target, as in `explain`; None for models without such a target.
        """
        return None

    def to_batch(self, prepared: Sequence[Prepared]) -> Batch:
        """Make the model's input from images.

        Parameters
        ----------
        prepared : sequence of Prepared
            The images.

        Returns
        -------
        Batch
            The input, and the position of each image in the input.

        Raises
        ------
        ImageError
            If the model takes one tensor, but the images differ in size after preprocessing.
        """
        images = [self._place(item.image) for item in prepared]
        as_list = isinstance(self._to_inputs(images[0][None]), list)
        batch = to_batch(images if as_list else self._to_inputs(self._stack([item.image for item in prepared])))
        windows = find_windows(self.preprocess, prepared)
        if windows is None:
            return batch
        batch = replace(batch, windows=windows)
        parameters = inspect.signature(unwrap(self.model).forward).parameters
        names = getattr(getattr(self.preprocess, "processor", None), "model_input_names", ())
        if "pixel_mask" not in names or "pixel_mask" not in parameters:
            return batch
        mask = torch.stack(find_image_areas(batch)).long()
        return replace(batch, args=(), kwargs={**dict(zip(parameters, batch.args)), **batch.kwargs, "pixel_mask": mask})

    def _to_inputs(self, images: Tensor) -> Any:
        inputs = images if self.family is None else self.family.to_inputs(images)
        if not self.inputs:
            return inputs
        extra_inputs = {name: value.repeat(len(images), *[1] * (value.ndim - 1)) for name, value in self.inputs.items()}
        return {**(inputs if isinstance(inputs, dict) else {"pixel_values": inputs}), **extra_inputs}

    def _to_image_explanation(self, explanation: Explanation, prepared: Sequence[Prepared]) -> ImageExplanation:
        return ImageExplanation(**vars(explanation), **self._describe(prepared)).laid_on_pictures()


@dataclass(frozen=True, eq=False)
class Detector(TaskModel):
    """An object detector, with its preprocessing and its class names.

    `gradcam.load_detector` returns one. A target is a `targets.Box`, a `targets.MissedBox`, or a class, by index or
    label. A class selects the highest-scoring box of this class. None selects the highest-scoring box of the image.

    Examples
    --------
    >>> import gradcam, torchvision
    >>> model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
    ...     weights=None, weights_backbone=None, num_classes=3, score_thresh=0.0
    ... )
    >>> detector = gradcam.load_detector(model, labels=["background", "cup", "cat"])
    >>> type(detector).__name__
    'Detector'
    >>> explanation = detector.explain("photo.jpg", target=gradcam.targets.Box(0))
    >>> explanation.overlay().shape
    (640, 800, 3)
    """

    task: ClassVar[str] = "detection"
    default_method: ClassVar[str] = "hirescam"

    def run_plan(self, images: Images, layers: Layers, plan: Plan) -> dict[tuple[str, str], ImageExplanation]:
        prepared = self._prepare_all(images)
        try:
            return super().run_plan(prepared, layers, plan)
        except NoBoxError as error:
            restore_box = self.place([prepared[error.image]]).restore_box
            moved = [replace(candidate, box=restore_box(candidate.box or ())) for candidate in error.candidates]
            raise NoBoxError.of(error.subject, error.image, moved) from None

    def resolve(self, target: Any, prepared: Sequence[Prepared]) -> Any:
        resolved = self._to_target(target)
        if not isinstance(resolved, targets.MissedBox):
            return resolved
        placement = self.place(prepared)
        check_inside(resolved.boxes, placement.size)  # before moving: errors show user coordinates
        return replace(resolved, box=[placement.move_box(box) for box in resolved.boxes])

    def list_all(self) -> Any:
        return targets.Box(all)

    def _to_target(self, target: Any) -> Any:
        if isinstance(target, (targets.Box, targets.MissedBox)):
            return replace(target, class_=self._with_indices(target.class_))
        if is_function(target):
            return target
        classes = _only_classes(target)
        if classes is None:
            return targets.Box()
        if isinstance(classes, (list, tuple)):
            advice = "For several boxes, pass their numbers: targets.Box([0, 1])."
            raise TargetError(f"For boxes, pass a single class per call. {advice}")
        return targets.Box(class_=self._with_indices(classes))


@dataclass(frozen=True, eq=False)
class Segmenter(TaskModel):
    """A semantic segmentation model, with its preprocessing and its class names.

    `gradcam.load_segmenter` returns one. A target is a `targets.Mask`, or classes, by index or label. A class selects
    the predicted mask of this class. None selects the class with the largest area, except the
    background.

    Examples
    --------
    >>> import gradcam, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 8, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1))
    >>> segmenter = gradcam.load_segmenter(model, labels=["ground", "cup"])
    >>> type(segmenter).__name__
    'Segmenter'
    >>> explanation = segmenter.explain("photo.jpg", "1")
    >>> explanation.instances[0][0].kind
    'mask'
    """

    task: ClassVar[str] = "segmentation"
    default_method: ClassVar[str] = "hirescam"

    def resolve(self, target: Any, prepared: Sequence[Prepared]) -> Any:
        resolved = self._to_target(target)
        if not isinstance(resolved, targets.Mask) or resolved.mask is None:
            return resolved
        return replace(resolved, mask=self.place(prepared).move_mask(resolved.mask))

    def _to_target(self, target: Any) -> Any:
        if isinstance(target, targets.Mask):
            return replace(target, class_=self._with_indices(target.class_))
        return target if is_function(target) else targets.Mask(self._with_indices(_only_classes(target)))


@dataclass(frozen=True, eq=False)
class Matcher(TaskModel):
    """A model that compares images with sentences or with reference images, with its preprocessing.

    Sentences need a text encoder, as in CLIP. `gradcam.load_matcher` returns a `Matcher`. A target is a `targets.Text`,
    one or more sentences, or a `targets.Like` with a reference image in any form that `gradcam.read_image` takes.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None)
    >>> model.fc = torch.nn.Identity()
    >>> matcher = gradcam.load_matcher(model)
    >>> explanation = matcher.explain("photo.jpg", target=gradcam.targets.Like("other.png"))
    >>> explanation.reference.overlay().shape == gradcam.read_image("other.png").shape
    True
    """

    task: ClassVar[str] = "matching"

    def run_plan(self, images: Images, layers: Layers, plan: Plan) -> dict[tuple[str, str], ImageExplanation]:
        explanations = super().run_plan(images, layers, plan)
        references = self._prepare_all(plan.target.reference) if _has_reference_images(plan.target) else []
        for key, explanation in explanations.items():
            if references and explanation.reference is not None:
                reference = self._to_image_explanation(explanation.reference, references)
                explanations[key] = replace(explanation, reference=reference)
        return explanations

    def resolve(self, target: Any, prepared: Sequence[Prepared]) -> Any:
        if not _has_reference_images(target):
            return self._to_target(target)
        references = target.reference
        images = self._stack([item.image for item in self._prepare_all(references)])
        return targets.Like(images, target.name if target.name != "reference" else _name_references(references))

    def _make_target(self, target: Any) -> Any:
        sentences = [target] if isinstance(target, str) else target
        if isinstance(sentences, (list, tuple)) and all(isinstance(sentence, str) for sentence in sentences):
            return targets.Text(target)
        problem = "The model compares images with sentences or reference images"
        raise TargetError(f"{problem}. Give targets.Text(sentence) (--text) or targets.Like(image) (--like).")


@dataclass(frozen=True, eq=False)
class Captioner(TaskModel):
    """An image captioning model or a vision-language model, with its preprocessing.

    `gradcam.load_model` returns one. A target is a `targets.Token`, or indices of tokens in the generated caption. None
    explains all tokens of the generated caption. Vision-language models get each image as it is, through their own
    processor. A tuple of images stands for several images in one prompt: the explanation has the maps of each image.

    Attributes
    ----------
    prompt : str or None
        The default prompt; None for models without a prompt. `targets.Token(prompt=...)` replaces it.

    Examples
    --------
    >>> import gradcam
    >>> from transformers import GitConfig, GitForCausalLM
    >>> small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> ends = dict(vocab_size=20, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    >>> config = GitConfig(**small, **ends, vision_config=small | dict(image_size=32, patch_size=8))
    >>> captioner = gradcam.load_model(GitForCausalLM(config), size=32)
    >>> type(captioner).__name__
    'Captioner'
    >>> captioner.explain("photo.jpg", target=gradcam.targets.Token([5, 9])).heatmaps.shape
    torch.Size([1, 2, 32, 32])
    """

    task: ClassVar[str] = "captioning"
    family: Any = field(default=None, repr=False, kw_only=True)  # a CaptionerAdapter
    prompt: str | None = field(default=None, repr=False, kw_only=True)

    def run_plan(self, images: Images, layers: Layers, plan: Plan) -> dict[tuple[str, str], ImageExplanation]:
        captioner, target = self.for_target(plan.target)
        prepared = captioner._prepare_all(images)
        batch = captioner.to_batch(prepared)
        target = captioner._add_caption(target, batch)
        explanations = captioner._explain_batch(batch, prepared, layers, replace(plan, target=target))
        fields = {"prompt": captioner.prompt, "answer": captioner._read_answer(target)}
        return {key: replace(explanation, **fields) for key, explanation in explanations.items()}

    def prepare(self, image: Any) -> Prepared:
        if not isinstance(image, tuple) or not image or not self.family.takes_pieces:
            return super().prepare(image)
        first, *further_images = map(super().prepare, image)
        return replace(first, further_images=further_images)

    def for_target(self, target: Any) -> tuple[Self, Any]:
        family = self.family
        if getattr(target, "prompt", None) is None or not isinstance(target, targets.Token):
            return self, target
        if family.plain_prompt is None or family.processor is None:
            advice = "leave the prompt out." if family.plain_prompt is None else "load the model with processor=."
            problem = "takes no prompt" if family.plain_prompt is None else "has no processor that writes a prompt"
            raise TargetError(f"{type(family.model).__name__} {problem}: {advice}")
        return replace(self, prompt=target.prompt), replace(target, prompt=None)

    def resolve(self, target: Any, prepared: Sequence[Prepared]) -> Any:
        return self._add_caption(target, self.to_batch(prepared))

    def to_batch(self, prepared: Sequence[Prepared]) -> Batch:
        if self.prompt is None:
            return super().to_batch(prepared)
        if len(prepared) > 1:
            advice = "explain the images one by one. For several images in one prompt, pass a tuple of images"
            raise ImageError(f"Each image has its own prompt: {advice}.")
        images = [_to_pixels(item) for item in (prepared[0], *prepared[0].further_images)]
        tensors = self.family.process(images, self.prompt)
        inputs = {name: self._place(x) if x.is_floating_point() else x.to(self.device) for name, x in tensors.items()}
        if not self.family.takes_pieces:
            return to_batch(inputs)
        batch: Batch = self.family.to_pieces(inputs)
        if batch.images != len(images):
            problem = f"The processor cuts {len(images)} image(s) into {batch.images} images"
            raise ImageError(f"{problem}: switch this off in the processor's settings.")
        shares = [self.preprocess.find_share(*image.shape[:2]) for image in images]  # type: ignore[attr-defined]
        return replace(batch, pieces=batch.pieces.crop(shares))

    def _to_target(self, target: Any) -> Any:
        resolved = super()._to_target(target)
        is_token = isinstance(resolved, targets.Token) and resolved.processor is None
        return replace(resolved, processor=self.family.processor) if is_token else resolved

    def _prepare_all(self, pictures: Any) -> list[Prepared]:
        is_one_prompt = isinstance(pictures, tuple) and self.family.takes_pieces
        return super()._prepare_all([pictures] if is_one_prompt else pictures)

    def _describe(self, prepared: Sequence[Prepared]) -> dict[str, Any]:
        return super()._describe([image for item in prepared for image in (item, *item.further_images)])

    def _add_caption(self, target: Any, batch: Batch) -> Any:
        """Return the target with the caption's tokens, generated by the model if the target has no caption."""
        resolved = self._to_target(target)
        if not isinstance(resolved, targets.Token) or resolved.ids is not None or resolved.say is not None:
            return resolved
        if batch.samples > 1:
            advice = "explain the images one by one, or give targets.Token(ids)."
            raise ImageError(f"Each image has its own caption: {advice}")
        return replace(resolved, ids=self.family.write(batch, resolved.max_tokens))

    def _read_answer(self, target: Any) -> str | None:
        """Return the text whose words are explained; None without a tokenizer."""
        if isinstance(target, targets.Token):
            with contextlib.suppress(TargetError):
                return target.say or "".join(self.family.split_caption(to_tokens(target.ids))).strip()
        return None

    def _make_target(self, target: Any) -> Any:
        return targets.Token(None, _only_classes(target))


@dataclass(frozen=True, eq=False)
class PoseFinder(TaskModel):
    """A pose estimation (keypoint) model, with its preprocessing.

    `gradcam.load_model` returns one. A target is a `targets.Keypoint`, or indices of keypoints. None means the first
    keypoint.

    Examples
    --------
    >>> import gradcam, torch
    >>> heatmaps = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 8, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 3, 1, 1))
    >>> finder = gradcam.load_model(heatmaps, task="pose", size=64)
    >>> type(finder).__name__
    'PoseFinder'
    >>> finder.explain("photo.jpg", "0", target=gradcam.targets.Keypoint(1)).instances[0][0].kind
    'keypoint'
    """

    task: ClassVar[str] = "pose"

    def _make_target(self, target: Any) -> Any:
        return targets.Keypoint(_only_classes(target) or 0)


TASK_MODELS = {kind.task: kind for kind in (Detector, Segmenter, Matcher, Captioner, PoseFinder)}


def require_family(model: nn.Module, task: str) -> Family | None:
    """Return the model's adapter for a task, or None. For detection and captioning, raise `ModelError` instead."""
    family = next((family for family in list_families(unwrap(model)) if family.task == task), None)
    if family is None and task in ("detection", "captioning"):
        problem = f"{type(model).__name__} is not a known model for {task}"
        advice = "Give another task, such as --task classification (task= in Python)."
        use = "Or use gradcam.explain(model, images, target=...) with a function of the model's output."
        raise ModelError(f"{problem}. {advice} {use}")
    return family


def _to_pixels(prepared: Prepared) -> Pixels:
    """Return an image as RGB, uint8 (H,W,3), for a processor. The contrast is not stretched, as it is for display."""
    values = prepared.reading.values
    return to_8_bits(values) if values.ndim == 2 or values.shape[2] == 3 else prepared.reading.picture


def _has_reference_images(target: Any) -> bool:
    return isinstance(target, targets.Like) and not isinstance(target.reference, Tensor)


def _only_classes(target: Any) -> Any:
    """Return the classes of a `ClassTarget`; return any other target unchanged."""
    if not isinstance(target, ClassTarget):
        return target
    classes = target.classes
    return classes[0] if isinstance(classes, (list, tuple)) and len(classes) == 1 else classes


def _name_references(references: Any) -> Sequence[str]:
    images = enumerate(references if isinstance(references, (list, tuple)) else [references])
    return [os.fspath(image) if isinstance(image, (str, os.PathLike)) else f"reference {i}" for i, image in images]
