"""Convert a task model to a classifier of one image's instances (boxes, masks, ...), to evaluate heatmaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.explain import Plan, execute_plan
from gradcam.cam.methods.base import Method
from gradcam.errors import TargetError
from gradcam.hooks.containers import Batch, detach_input
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared
from gradcam.models.task_models import TaskModel
from gradcam.targets.base import BoundTarget, Instance, bind_target
from gradcam.targets.classes import compute_scores

PROBABILITY_KINDS = ("box", "missed")  # kinds of instances whose scores are already probabilities
COSINE_KINDS = ("text", "like")


class ScoreModel(nn.Module):
    """A model that returns the scores (N,K) of K fixed instances, such as boxes, in N images.

    All instances were detected in one image, and are scored in every image. Cosines are mapped from [-1,1] to [0,1].
    """

    makes_scores = True  # for `find_output_module`: this class computes the scores

    def __init__(self, bound: BoundTarget, target: Any, *, are_cosines: bool) -> None:
        super().__init__()
        self.module = bound.model
        self._bound, self._target, self._are_cosines = bound, target, are_cosines

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores (N,K). The images run one by one: in a batch, some detectors mix the images' detections."""
        rows = []
        for image in images.split(1):
            batch: Batch = self._bound.batch.copy(detach_input, pictures=image)
            rows.append(compute_scores(self._target, batch.run(self.module), 1).values)
        values = torch.cat(rows)
        return (1 + values) / 2 if self._are_cosines else values


@dataclass(frozen=True, eq=False)
class PictureScores(Classifier):
    """A classifier whose classes are the instances of one image, in the order of `instances`.

    A single instance becomes class 1 of two classes, as for a model with a single logit.
    """

    instances: Sequence[Instance] = field(default=(), repr=False, kw_only=True)
    method: str = field(default="gradcam", repr=False, kw_only=True)

    def find_instance(self, i: int) -> int:
        """Return the class index of the i-th instance."""
        return 1 if len(self.instances) == 1 else i

    def instance(self, index: int) -> Instance:
        """Return the instance that has this class index."""
        return self.instances[0 if len(self.instances) == 1 else index]


def find_instance_classifier(model: TaskModel, picture: Prepared, target: Any = None) -> tuple[PictureScores, int]:
    """Return a classifier for one image, and the index of the class that the target selects.

    If the target is a detection of the model, all detections become classes. Otherwise, only the target's instances
    become classes. Raises the errors of `to_instance_classifier`.
    """
    scores = to_instance_classifier(model, picture, target)
    if target is not None and len(scores.instances) == 1 and (all_targets := model.list_all()) is not None:
        all_scores = to_instance_classifier(model, picture, all_targets)
        key, *keys = [(item.kind, item.number, item.edge) for item in (*scores.instances, *all_scores.instances)]
        if key in keys:
            return all_scores, all_scores.find_instance(keys.index(key))
    return scores, scores.find_instance(0)


def to_instance_classifier(
    model: TaskModel, picture: Prepared, target: Any = None, *, methods: Sequence[Method] = ()
) -> PictureScores:
    """Return a classifier whose classes are the instances of `target` in an image. None stands for all detections.

    The classifier's layer is the model's layer. If the model has no layer, the default layer for `methods` is used. If
    `methods` is empty, the default layer for the target's default method is used.

    Raises
    ------
    TargetError
        If the target is a function or a position, or if nothing is detected in the image.
    """
    target = model.list_all() if target is None else target
    batch, resolved = model.to_batch([picture]), model.resolve(target, [picture])
    if (part := getattr(resolved, "edge", None) or getattr(resolved, "axis", None)) is not None:
        problem = f"The target is a position, {part}, which has no probability to evaluate."
        raise TargetError(f"{problem} Leave out the position, and evaluate the whole box or keypoint.")
    bound = bind_target(resolved, unwrap(model.model), batch)
    with preserve_state(bound.model), torch.no_grad():
        scored = compute_scores(bound.target, bound.batch.copy(detach_input).run(bound.model), 1)
    if scored.instances is None:
        raise TargetError("A function cannot be evaluated as a target: give a box, a mask, a sentence or a word.")
    instances = scored.instances[0]
    kind = instances[0].kind
    layer = model.layer or next(iter(execute_plan(model.model, batch, [], Plan(methods=methods, target=resolved))))[0]
    numbers = ["" if instance.number is None else f"{instance.kind} {instance.number}, " for instance in instances]
    names = [f"{number}{instance.name}" for number, instance in zip(numbers, instances)]
    labels = names if len(names) > 1 else [f"no {names[0]}", names[0]]
    run = ScoreModel(bound, scored.target, are_cosines=kind in COSINE_KINDS).eval()
    layer = layer if layer in ("input", "attention") else find_layer(run, layer).name
    activation = "applied" if kind in (*PROBABILITY_KINDS, *COSINE_KINDS) else "sigmoid"
    required = model.name, run, model.preprocess, len(labels), labels, layer, activation
    return PictureScores(*required, reader=model.reader, notes=model.notes, instances=instances, method=bound.method)
