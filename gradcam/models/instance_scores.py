"""Convert a task model to a classifier of one image's instances (boxes, masks, ...), to evaluate heatmaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.cam.explain import Plan, execute_plan
from gradcam.cam.methods.base import Method
from gradcam.cam.pieces import bind_pieces
from gradcam.errors import TargetError
from gradcam.hooks.containers import Batch, detach_input
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier, ImageInput
from gradcam.models.preprocess import Prepared
from gradcam.models.task_models import Captioner, TaskModel
from gradcam.targets.base import BoundTarget, Instance, bind_target
from gradcam.targets.classes import compute_scores
from gradcam.targets.words import Token, WordScoreExtractor

PROBABILITY_KINDS = ("box", "missed", "word")  # kinds of instances with probabilities
COSINE_KINDS = ("text", "like")


class ScoreModel(nn.Module):
    """A model that returns the scores (N,K) of K fixed instances, such as boxes, in N images.

    All instances were detected in one image, and are scored in every image. Cosines are mapped from [-1,1] to [0,1]. The
    score of a word is its probability, with the gradient of the target's score, such as the logit.

    If images reach the model in pieces, `make_batch` returns the model's input for an image (1,3,H,W) of RGB pixels.
    """

    makes_scores = True  # for `find_output_module`: this class computes the scores

    def __init__(self, bound: BoundTarget, target: Any, *, are_cosines: bool, make_batch: Any = None) -> None:
        super().__init__()
        self.module, self.target = bound.model, target
        self._bound, self._are_cosines, self._make_batch = bound, are_cosines, make_batch

    def forward(self, images: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the scores (N,K) of images, or of inputs from `to_inputs`.

        The images run one by one: in a batch, some detectors mix the images' detections.
        """
        if images is None:
            return self._score(self.module(**inputs))
        make_batch = self._make_batch or (lambda image: self._bound.batch.copy(detach_input, pictures=image))
        return torch.cat([self._score(make_batch(image).run(self.module)) for image in images.split(1)])

    def to_inputs(self, images: Tensor) -> Tensor | Batch:
        """Return the input of `gradcam.explain` for images (N,C,H,W), or for an image that has to be cut into pieces."""
        return images if self._make_batch is None else self._make_batch(images)

    def _score(self, output: Any) -> Tensor:
        scored = compute_scores(self.target, output, 1)
        if not isinstance(self.target, WordScoreExtractor):
            return (1 + scored.values) / 2 if self._are_cosines else scored.values
        probabilities = [[instance.score or 0.0 for instance in row] for row in scored.instances or ()]
        return scored.values - scored.values.detach() + scored.values.new_tensor(probabilities)


@dataclass(frozen=True, eq=False)
class ImageScores(Classifier):
    """A classifier whose classes are the instances of one image, in the order of `instances`.

    A single instance becomes class 1 of two classes, as for a model with a single logit. If images reach the model in
    pieces, `pixel_size` is the height and width of the RGB pixels that `batch` returns.
    """

    instances: Sequence[Instance] = field(default=(), repr=False, kw_only=True)
    method: str = field(default="gradcam", repr=False, kw_only=True)
    pixel_size: tuple[int, int] | None = field(default=None, repr=False, kw_only=True)

    def batch(self, images: Sequence[ImageInput]) -> Tensor:
        if self.pixel_size is None:
            return super().batch(images)
        parts = []
        for values in (self.prepare(image).reading.picture for image in images):
            top, left, rows, columns = self.region(*values.shape[:2])
            visible = values[top : top + rows, left : left + columns]
            parts.append(torch.from_numpy(visible.copy()).permute(2, 0, 1)[None])
        pixels = [F.interpolate(item.float(), self.pixel_size, mode="bilinear", antialias=True) for item in parts]
        return torch.cat(pixels).to(self.device)

    def find_instance(self, i: int) -> int:
        """Return the class index of the i-th instance."""
        return 1 if len(self.instances) == 1 else i

    def instance(self, index: int) -> Instance:
        """Return the instance that has this class index."""
        return self.instances[0 if len(self.instances) == 1 else index]


def find_instance_classifier(model: TaskModel, prepared: Prepared, target: Any = None) -> tuple[ImageScores, int]:
    """Return a classifier for one image, and the index of the class that the target selects.

    If the target is a detection of the model, all detections become classes. If the target is words, all words of the
    answer become classes. Otherwise, only the target's instances become classes. Raises the errors of
    `to_instance_classifier`.
    """
    model, target = model.for_target(target)
    is_captioner = isinstance(model, Captioner)
    target = model.resolve(target, [prepared]) if is_captioner else target  # Generate the answer only once.
    scores = to_instance_classifier(model, prepared, target)
    all_targets = _list_words(target, scores.model) if is_captioner else model.list_all()
    if all_targets is not None and target is not None and (is_captioner or len(scores.instances) == 1):
        all_scores = to_instance_classifier(model, prepared, all_targets)
        key, *keys = [(item.kind, item.number, item.edge) for item in (scores.instances[0], *all_scores.instances)]
        if key in keys:
            return all_scores, all_scores.find_instance(keys.index(key))
    return scores, scores.find_instance(0)


def to_instance_classifier(
    model: TaskModel, prepared: Prepared, target: Any = None, *, methods: Sequence[Method] = ()
) -> ImageScores:
    """Return a classifier whose classes are the instances of `target` in an image. None stands for all detections.

    The classifier's layer is the model's layer. If the model has no layer, the default layer for `methods` is used. If
    `methods` is empty, the default layer for the target's default method is used.

    Raises
    ------
    TargetError
        If the target is a function or a position, or if nothing is detected in the image.
    """
    model, target = model.for_target(model.list_all() if target is None else target)
    batch, resolved = model.to_batch([prepared]), model.resolve(target, [prepared])
    if (part := getattr(resolved, "edge", None) or getattr(resolved, "axis", None)) is not None:
        problem = f"The target is a position, {part}, which has no probability to evaluate."
        raise TargetError(f"{problem} Leave out the position, and evaluate the whole box or keypoint.")
    if prepared.further_images:
        raise TargetError("Only one image is evaluated at a time: leave the other images of the prompt out.")
    bound = bind_target(resolved, unwrap(model.model), batch)
    with preserve_state(bound.model), torch.no_grad():
        scored = compute_scores(bound.target, bound.batch.copy(detach_input).run(bound.model), 1)
    if scored.instances is None:
        raise TargetError("A function cannot be evaluated as a target: give a box, a mask, a sentence or a word.")
    instances = scored.instances[0]
    kind = instances[0].kind
    pieces, plan = bound.batch.pieces, Plan(methods=methods, target=resolved)
    # Images in pieces have other defaults.
    defaults = bound if pieces is None else bind_pieces(unwrap(model.model), bound, methods, plan.options)
    default_layer = None if pieces is None or model.is_chosen else defaults.layer
    layer = default_layer or model.layer or next(iter(execute_plan(model.model, batch, [], plan)))[0]
    numbers = ["" if instance.number is None else f"{instance.kind} {instance.number}, " for instance in instances]
    names = [f"{number}{instance.name}" for number, instance in zip(numbers, instances)]
    labels = names if len(names) > 1 else [f"no {names[0]}", names[0]]
    make_batch = None if pieces is None else _make_batch_function(model, bound)
    run = ScoreModel(bound, scored.target, are_cosines=kind in COSINE_KINDS, make_batch=make_batch).eval()
    layer = layer if layer in ("input", "attention") else find_layer(run, layer).name
    activation = "applied" if kind in (*PROBABILITY_KINDS, *COSINE_KINDS) else "sigmoid"
    required = model.name, run, model.preprocess, len(labels), labels, layer, activation
    fields: Any = {"instances": instances, "method": defaults.method, "pixel_size": pieces and pieces.sizes[0]}
    return ImageScores(*required, reader=model.reader, notes=model.notes, **fields)


def _list_words(target: Any, scores: Any) -> Token:
    """Return the target of all words of the same answer, with their probabilities if the image is blank."""
    if target.context == "subtract":
        raise TargetError("Only one word's map is tested, but context='subtract' needs several: leave context= out.")
    target, words = replace(target, control="blank"), scores.target
    if target.against is not None:  # The alternative to one word is no alternative to the other words.
        return target
    target, first = replace(target, ids=list(words.tokens), say=None), words.phrases[0]
    if target.word is not None:
        return replace(target, word=all)
    return replace(target, position=[first, *(i for i in range(len(words.tokens)) if i not in first)])


def _make_batch_function(model: TaskModel, bound: BoundTarget) -> Callable[[Tensor], Batch]:
    """Return a function that cuts an image (1,3,H,W) of RGB pixels into the pieces that the model takes."""

    def make_batch(image: Tensor) -> Batch:
        pixels = image[0].detach().clamp(0, 255).round().to("cpu", torch.uint8).permute(1, 2, 0).numpy()
        _, batch = bound.target.family.bind(bound.model, model.to_batch([model.prepare(pixels)]), bound.target.tokens)
        names = [f"module.module.{name}" for name in batch.pieces.text_modules]  # as in `ScoreModel`
        return replace(batch, pieces=replace(batch.pieces, text_modules=names))

    return make_batch
