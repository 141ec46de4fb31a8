"""Methods and controls as functions of a model, images and classes: what is judged, on any variant of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.explain import compare
from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, ImageError, describe_unexpected
from gradcam.evaluation.controls import Control, Explain, Explained, OwnFunction, find_explained
from gradcam.evaluation.subject import check_heatmaps, draw, to_unit
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import unwrap
from gradcam.options import Progress
from gradcam.targets.classes import ClassTarget

CENTRE = 0.25  # the blob's standard deviation, as a share of each side
CELLS = 7  # of the random map, along each side: as coarse as the maps of most networks


def run_explain(explain: Explain, model: nn.Module, images: Tensor, classes: Tensor) -> Any:
    """What it gives for the model in evaluation mode, also where it is somebody else's and leaves the mode alone."""
    with preserve_state(unwrap(model)):
        return explain(model, images, classes)


@dataclass(frozen=True)
class Explainer:
    """Methods and control maps under the same conditions: one layer, one score, and heatmaps at the images' size.

    Parameters
    ----------
    names : sequence of str, Method or callable
        Each is a key of `METHODS` or `CONTROLS`, a method, or a function with the signature that `check` describes.
    layer : str, mapping of str to str, or None
        A dotted layer name, or a mapping from method to layer name; None if no method uses a layer.
    score : str, default "logit"
        As in `targets.ClassTarget`. Methods with their own score keep it.
    activation : str, default "auto"
        How logits become probabilities, as in `targets.ClassTarget`.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.
    seed : int, default 0
        Random seed of the control maps.
    options : mapping of str to Any, default {}
        Further options of `gradcam.compare`, such as `memory_budget` and `progress`.

    Examples
    --------
    >>> import gradcam, torch
    >>> classifier = gradcam.load_classifier()
    >>> explainer = gradcam.evaluation.Explainer(["gradcam", "centre"], "layer4")
    >>> found = explainer.explain(classifier.model, classifier.batch(["photo.jpg"]), torch.tensor([[285, 967]]))
    >>> {name: tuple(heatmaps.shape) for name, heatmaps in found.items()}
    {'gradcam': (1, 2, 224, 224), 'centre': (1, 2, 224, 224)}
    >>> explainer.only("gradcam")(classifier.model, classifier.batch(["photo.jpg"]), torch.tensor([967])).shape
    torch.Size([1, 224, 224])
    >>> list(explainer.explained)
    ['gradcam', 'centre']
    """

    names: Sequence[Any]
    layer: str | Mapping[str, str] | None
    score: str = "logit"
    activation: str = "auto"
    reshape: Any = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of `compare`: memory_budget, progress

    @cached_property
    def explained(self) -> dict[str, Explained]:
        """The methods and control maps by name. Raises `GradcamError` if a name is unknown."""
        return {it.name: it for it in map(find_explained, self.names)}

    def explain(self, model: nn.Module, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """Compute the heatmaps of all methods, sharing forward passes where possible.

        Parameters
        ----------
        model : nn.Module
            The model.
        images : Tensor (N,C,H,W)
            Preprocessed images.
        classes : Tensor (N,K)
            The classes to explain.

        Returns
        -------
        dict of str to Tensor (N,K,H,W)
            The heatmaps by name, in the order of `names`, in [0,1]. Heatmaps of custom functions keep their scale.

        Raises
        ------
        GradcamError
            As in `gradcam.compare`, and if a custom function fails. A custom function's `RuntimeError` is passed on
            unchanged.
        ImageError
            If a custom function does not return heatmaps of the images' size.
        """
        methods = [it for it in self.explained.values() if isinstance(it, Method)]
        with_score = [it for it in methods if it.score is None or self.score == "logit"]
        found = self._compare(model, images, classes, with_score, self.score)
        found |= self._compare(model, images, classes, [it for it in methods if it not in with_score], "logit")
        for it in self.explained.values():
            if isinstance(it, Control):
                found[it.name] = it.make(images, self.seed)[:, None].expand(-1, classes.shape[1], -1, -1)
            elif isinstance(it, OwnFunction):
                each = [_run_own(it, model, images, one) for one in classes.unbind(1)]
                found[it.name] = torch.stack(each, 1)
        return {name: found[name] for name in self.explained}

    def only(self, name: str) -> Explain:
        """Return one method or control map as a function.

        Parameters
        ----------
        name : str
            A name in `explained`.

        Returns
        -------
        callable
            A function of a model, images (N,C,H,W) and classes (N,) that returns heatmaps (N,H,W).

        Raises
        ------
        KeyError
            If `name` is not in `explained`.
        GradcamError
            If a name in `names` is unknown.
        """
        own = self.explained[name]
        if isinstance(own, OwnFunction):
            return lambda model, images, classes: own.function(model, images.detach().clone(), classes)
        alone = replace(self, names=(own,))
        return lambda model, images, classes: alone.explain(model, images, classes[:, None])[name][:, 0]

    def _compare(
        self, model: nn.Module, images: Tensor, classes: Tensor, methods: Sequence[Method], score: str
    ) -> dict[str, Tensor]:
        assigned: dict[str | None, list[Method]] = {}  # by layer; methods that are of none go with the first
        for method in sorted(methods, key=lambda it: it.place != "layer"):
            layer = self.layer.get(method.name) if isinstance(self.layer, Mapping) else self.layer
            assigned.setdefault(layer if method.place == "layer" else next(iter(assigned), None), []).append(method)
        target = ClassTarget(classes, score=score, activation=self.activation)
        shared = {"target": target, "reshape": self.reshape, **self.options}
        found: dict[str, Tensor] = {}
        for layer, own in assigned.items():
            explained = compare(model, images, layers=[] if layer is None else [layer], methods=own, **shared)
            found.update({method: explanation.heatmaps for (_, method), explanation in explained.items()})
        return found


def _run_own(own: OwnFunction, model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    try:
        made = run_explain(own.function, model, images.detach().clone(), classes)
    except (GradcamError, RuntimeError):
        raise
    except Exception as error:  # whatever somebody's code does, such as not to take three arguments
        raise GradcamError(f"{own.name} failed: {describe_unexpected(error)}") from error
    try:
        return check_heatmaps(made, (len(images), *images.shape[2:]), images.device)
    except ImageError as error:
        raise ImageError(f"{own.name}: {error}") from None


def make_constant(images: Tensor, seed: int = 0) -> Tensor:
    """One everywhere."""
    return torch.ones(len(images), *images.shape[2:], dtype=torch.float32, device=images.device)


def make_centre(images: Tensor, seed: int = 0) -> Tensor:
    """A blob in the middle, where photographers put things: a Gaussian, a quarter of each side wide."""
    counts = [torch.arange(length, dtype=torch.float32, device=images.device) for length in images.shape[2:]]
    rows, columns = (torch.exp(-(((it + 0.5) / len(it) - 0.5) ** 2) / (2 * CENTRE**2)) for it in counts)
    return to_unit((rows[:, None] * columns)[None]).expand(len(images), -1, -1)


def make_random(images: Tensor, seed: int = 0) -> Tensor:
    """Noise on a coarse grid, enlarged as smoothly as class activation maps are."""
    shape, size = (len(images), 1, CELLS, CELLS), (int(images.shape[2]), int(images.shape[3]))
    noise = torch.rand(shape, generator=draw(seed, "random map"), dtype=torch.float32, device="cpu").to(images.device)
    return to_unit(nn.functional.interpolate(noise, size=size, mode="bicubic", align_corners=False)[:, 0])


def make_edges(images: Tensor, seed: int = 0) -> Tensor:
    """The picture's edges: the length of the Sobel gradient of the channels' mean."""
    sobel = [[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]
    kernel = torch.tensor(sobel, dtype=torch.float32, device=images.device)
    grey = nn.functional.pad(images.float().mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    gradients = nn.functional.conv2d(grey, torch.stack([kernel, kernel.T])[:, None])
    return to_unit(gradients.norm(dim=1))


@dataclass
class Counter:
    """How many of so many steps are done, and somebody who wants to know."""

    progress: Progress | None
    total: int = 0
    done: int = 0

    def step(self, *_: object) -> None:
        self.reach(self.done + 1)

    def reach(self, done: int) -> None:
        if self.progress is not None and done != self.done:
            self.progress(done, self.total)
        self.done = done
