"""Methods as functions of a model, images and classes: what is judged, on any variant of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gradcam.errors import GradcamError
from gradcam.evaluation.controls import CONTROLS
from gradcam.explanation import compare
from gradcam.isolation import undisturbed
from gradcam.layers import unwrap
from gradcam.methods import METHODS, find_method
from gradcam.methods.finding import offer
from gradcam.targets import ClassTarget

# From a model, images (N,C,H,W) and a class of each (N,) to heatmaps (N,H,W): a method, of ours or of anybody.
Explain = Callable[[nn.Module, Tensor, Tensor], Tensor]


def run_explain(explain: Explain, model: nn.Module, images: Tensor, classes: Tensor) -> Any:
    """What it gives for the model in evaluation mode, also where it is somebody else's and leaves the mode alone."""
    with undisturbed(unwrap(model)):
        return explain(model, images, classes)


def find_explained(name: str) -> str:
    """The name of a method or a control, as the tables have it. Raises `GradcamError` for an unknown one."""
    if name.lower() in CONTROLS:
        return name.lower()
    try:
        return find_method(name).name
    except GradcamError:
        raise GradcamError(f"There is no method or control {name!r}. {offer(name, [*METHODS, *CONTROLS])}") from None


@dataclass(frozen=True)
class Explainer:
    """Methods and controls, all under the same conditions: one layer, one score, and heatmaps at the images' size.

    `names`: keys of `METHODS` and `CONTROLS`. `layer`: dotted name, or one by method; None where no method is of one.
    `score`: a key of `SCORES`; a method that explains a score of its own does so. `seed`: of the controls that are drawn.
    """

    names: Sequence[str]
    layer: str | Mapping[str, str] | None
    score: str = "logit"
    activation: str = "auto"
    reshape: Any = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of `compare`: memory_budget, progress

    def explain(self, model: nn.Module, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """Heatmaps (N,K,H,W) in [0,1] for classes (N,K), by name, in the names' order; as many as can be from one pass.

        Raises as `gradcam.compare` does.
        """
        names = [name for name in self.names if name not in CONTROLS]
        with_score = [name for name in names if METHODS[name].score is None or self.score == "logit"]
        found = self._compare(model, images, classes, with_score, self.score)
        found.update(self._compare(model, images, classes, [it for it in names if it not in with_score], "logit"))
        for name in self.names:
            if name in CONTROLS:
                control = CONTROLS[name].make(images, self.seed)
                found[name] = control[:, None].expand(-1, classes.shape[1], -1, -1)
        return {name: found[name] for name in self.names}

    def only(self, name: str) -> Explain:
        """One of them as a function of a model, images and a class of each, which gives heatmaps (N,H,W)."""
        alone = Explainer((name,), self.layer, self.score, self.activation, self.reshape, self.seed, self.options)

        def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
            return alone.explain(model, images, classes[:, None])[name][:, 0]

        return explain

    def _compare(
        self, model: nn.Module, images: Tensor, classes: Tensor, names: Sequence[str], score: str
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer, own in self._assign(names).items():
            explained = compare(
                model,
                images,
                layers=[] if layer is None else [layer],
                methods=own,
                target=ClassTarget(classes, score=score, activation=self.activation),
                reshape=self.reshape,
                **self.options,
            )
            found.update({method: explanation.heatmaps for (_, method), explanation in explained.items()})
        return found

    def _assign(self, names: Sequence[str]) -> dict[str | None, list[str]]:
        """The layers, each with its methods; those that are of none go with the first."""
        assigned: dict[str | None, list[str]] = {}
        for name in sorted(names, key=lambda name: METHODS[name].place != "layer"):
            layer = self.layer.get(name) if isinstance(self.layer, Mapping) else self.layer
            if METHODS[name].place != "layer":
                layer = next(iter(assigned), None)
            assigned.setdefault(layer, []).append(name)
        return assigned
