"""What a model found in one picture as classes of it, so that whatever judges maps of classes can judge its maps as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.explain import Plan, carry_out
from gradcam.cam.methods.base import Method
from gradcam.errors import TargetError
from gradcam.hooks.nested import Batch, caller_keeps
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier
from gradcam.models.kinds import TaskModel
from gradcam.models.preprocess import Prepared
from gradcam.targets.base import Bound, Instance, bind
from gradcam.targets.classes import compute_scores

IN_UNIT = ("box", "missed")  # kinds whose scores are probabilities as they are
COSINES = ("text", "like")


class ScoreModel(nn.Module):
    """A model whose output are the scores (N,K) of what was found in one picture, in whatever is shown in its place:
    cosines as numbers from 0 to 1."""

    makes_scores = True  # whatever the model gives, an embedding too

    def __init__(self, bound: Bound, target: Any, *, are_cosines: bool) -> None:
        super().__init__()
        self.module = bound.model
        self._bound, self._target, self._are_cosines = bound, target, are_cosines

    def forward(self, images: Tensor) -> Tensor:
        """One picture at a time, since a detector's may all be of one batch otherwise."""
        rows = []
        for image in images.split(1):
            batch: Batch = self._bound.batch.copy(caller_keeps, pictures=image)
            rows.append(compute_scores(self._target, batch.run(self.module), 1).values)
        values = torch.cat(rows)
        return (1 + values) / 2 if self._are_cosines else values


@dataclass(frozen=True, eq=False)
class PictureScores(Classifier):
    """A classifier of one picture, whose classes are what was found there, in the order of `instances`. With one of them
    there are two classes, as of any single number: 1 for it."""

    instances: Sequence[Instance] = field(default=(), repr=False, kw_only=True)
    method: str = field(default="gradcam", repr=False, kw_only=True)

    def find_instance(self, i: int) -> int:
        """The class of the i-th of them."""
        return 1 if len(self.instances) == 1 else i

    def instance(self, index: int) -> Instance:
        """What a class is of."""
        return self.instances[0 if len(self.instances) == 1 else index]


def find_among(model: TaskModel, picture: Prepared, target: Any = None) -> tuple[PictureScores, int]:
    """A picture's own classifier, and which of its classes a target names. A single thing stands among all that is found
    in the picture, where it is found there. Raises as `to_classifier` does."""
    own = to_classifier(model, picture, target)
    if target is not None and len(own.instances) == 1 and (everything := model.list_all()) is not None:
        rivals = to_classifier(model, picture, everything)
        of = [(it.kind, it.number, it.edge) for it in rivals.instances]
        only = own.instances[0]
        if (only.kind, only.number, only.edge) in of:
            return rivals, rivals.find_instance(of.index((only.kind, only.number, only.edge)))
    return own, own.find_instance(0)


def to_classifier(
    model: TaskModel, picture: Prepared, target: Any = None, *, methods: Sequence[Method] = ()
) -> PictureScores:
    """Return a classifier of what a target names in an image, or else of all that is detected in it.

    Its layer is the default of these methods, or else of the target's own method.

    Raises
    ------
    TargetError
        For a target that is a function, or a place, and for a picture in which there is nothing.
    """
    batch, wanted = model.to_batch([picture]), model.resolve(model.list_all() if target is None else target, [picture])
    if (part := getattr(wanted, "edge", None) or getattr(wanted, "axis", None)) is not None:
        what = f"The target is a position, {part}, which has no probability to evaluate."
        raise TargetError(f"{what} Leave out the position, and evaluate the whole box or keypoint.")
    bound = bind(wanted, unwrap(model.model), batch)
    with preserve_state(bound.model), torch.no_grad():
        scored = compute_scores(bound.target, bound.batch.copy(caller_keeps).run(bound.model), 1)
    if scored.instances is None:
        raise TargetError("A function cannot be evaluated as a target: give a box, a mask, a sentence or a word.")
    instances = scored.instances[0]
    kind = instances[0].kind
    layer = model.layer or next(iter(carry_out(model.model, batch, [], Plan(methods=methods, target=wanted))))[0]
    names = [it.name if it.number is None else f"{it.kind} {it.number}, {it.name}" for it in instances]
    run = ScoreModel(bound, scored.target, are_cosines=kind in COSINES).eval()
    return PictureScores(
        model.name,
        run,
        model.preprocess,
        max(2, len(instances)),
        names if len(names) > 1 else [f"no {names[0]}", names[0]],
        layer if layer in ("input", "attention") else find_layer(run, layer).name,
        activation="applied" if kind in (*IN_UNIT, *COSINES) else "sigmoid",
        reader=model.reader,
        notes=model.notes,
        instances=instances,
        method=bound.method,
    )
