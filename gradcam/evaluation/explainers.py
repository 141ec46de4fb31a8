"""Methods as functions of a model, images and classes: what is judged, on any variant of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.cam.explain import compare
from gradcam.cam.methods.table import METHODS, find_method, offer
from gradcam.errors import GradcamError
from gradcam.evaluation.subject import draw
from gradcam.hooks.preserve import undisturbed
from gradcam.layers.find import unwrap
from gradcam.targets import ClassTarget

CENTRE = 0.25  # the blob's standard deviation, as a share of each side
CELLS = 7  # of the random map, along each side: as coarse as the maps of most networks


@dataclass(frozen=True)
class Control:
    """A map that is made without the model: `make` takes images (N,C,H,W) and a seed, and gives heatmaps (N,H,W)."""

    name: str
    summary: str
    make: Callable[[Tensor, int], Tensor] = field(repr=False)


def _scale(maps: Tensor) -> Tensor:
    largest = maps.amax((1, 2), keepdim=True)
    return maps / torch.where(largest > 0, largest, 1.0)


def make_constant(images: Tensor, seed: int = 0) -> Tensor:
    """One everywhere."""
    return torch.ones(len(images), *images.shape[2:], dtype=torch.float32, device=images.device)


def make_centre(images: Tensor, seed: int = 0) -> Tensor:
    """A blob in the middle, where photographers put things: a Gaussian, a quarter of each side wide."""
    rows, columns = (
        torch.exp(-(((_count(length, images.device) + 0.5) / length - 0.5) ** 2) / (2 * CENTRE**2))
        for length in images.shape[2:]
    )
    return _scale((rows[:, None] * columns)[None]).expand(len(images), -1, -1)


def _count(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, dtype=torch.float32, device=device)


def make_random(images: Tensor, seed: int = 0) -> Tensor:
    """Noise on a coarse grid, enlarged as smoothly as class activation maps are."""
    generator = draw(seed, "random map")
    noise = torch.rand(len(images), 1, CELLS, CELLS, generator=generator, dtype=torch.float32, device="cpu")
    size = (int(images.shape[2]), int(images.shape[3]))
    return _scale(
        F.interpolate(noise.to(images.device), size=size, mode="bicubic", align_corners=False)[:, 0].clamp(min=0)
    )


def make_edges(images: Tensor, seed: int = 0) -> Tensor:
    """The picture's edges: the length of the Sobel gradient of the channels' mean."""
    sobel = [[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]
    kernel = torch.tensor(sobel, dtype=torch.float32, device=images.device)
    grey = F.pad(images.float().mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    gradients = F.conv2d(grey, torch.stack([kernel, kernel.T])[:, None])
    return _scale(gradients.norm(dim=1))


CONTROLS: Mapping[str, Control] = {
    control.name: control
    for control in (
        Control("random", "noise on a 7 x 7 grid", make_random),
        Control("centre", "a blob in the middle of every picture", make_centre),
        Control("edges", "the picture's Sobel edges", make_edges),
        Control("constant", "one everywhere", make_constant),
    )
}


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
