"""Turn methods and control maps into functions of a model, images and classes. Evaluations vary these arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.compare import compare
from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, ImageError, describe_unexpected
from gradcam.evaluation.heatmap_sources import Control, CustomFunction, Explainable, ExplainFunction, find_explainable
from gradcam.evaluation.subject import check_heatmaps, make_generator, scale_to_unit
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import unwrap
from gradcam.models.instance_scores import ScoreModel
from gradcam.options import Progress
from gradcam.targets.classes import ClassTarget

CENTRE_DEVIATION = 0.25  # The standard deviation of the central blob, divided by the image's height or width.
RANDOM_MAP_CELLS = 7  # The noise has 7 x 7 cells before upsampling, like the last feature map of most CNNs.


def run_explain(explain: ExplainFunction, model: nn.Module, images: Tensor, classes: Tensor) -> Any:
    """Call a function with the model in evaluation mode, because many custom functions do not set the mode."""
    with preserve_state(unwrap(model)):
        return explain(model, images, classes)


@dataclass(frozen=True)
class Explainer:
    """A set of methods and control maps that share the layer, the score and the size of the heatmaps.

    Parameters
    ----------
    names : sequence of str, Method or callable
        Keys of `METHODS` or `CONTROLS`, methods, or custom functions as in `check`.
    layer : str, mapping of str to str, or None
        A dotted layer name, or a mapping from method to layer name; None if no method uses a layer.
    score : str, default "logit"
        As in `targets.ClassTarget`. Methods with a fixed score ignore this parameter.
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
    >>> maps_by_name = explainer.explain(classifier.model, classifier.batch(["photo.jpg"]), torch.tensor([[285, 967]]))
    >>> {name: tuple(heatmaps.shape) for name, heatmaps in maps_by_name.items()}
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
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def explained(self) -> dict[str, Explainable]:
        """Return the methods and control maps by name. Raise `GradcamError` if a name is unknown."""
        return {source.name: source for source in map(find_explainable, self.names)}

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
            The heatmaps by name, in the order of `names`. Values are in [0,1], but heatmaps of custom functions are not
            rescaled.

        Raises
        ------
        GradcamError
            As in `gradcam.compare`. Also if a custom function fails. A `RuntimeError` of the function is passed on.
        ImageError
            If a custom function does not return heatmaps of the images' size.
        """
        methods = [source for source in self.explained.values() if isinstance(source, Method)]
        own_score = [method for method in methods if method.score is not None and self.score != "logit"]
        target = ClassTarget(classes, score=self.score, activation=self.activation)
        maps = self._compare(model, images, replace(target, score="logit"), own_score)
        maps |= self._compare(model, images, target, [method for method in methods if method not in own_score])
        for source in self.explained.values():
            if isinstance(source, Control):
                maps[source.name] = source.make(images, self.seed)[:, None].expand(-1, classes.shape[1], -1, -1)
            elif isinstance(source, CustomFunction):
                class_maps = [_run_custom(source, model, images, indices) for indices in classes.unbind(1)]
                maps[source.name] = torch.stack(class_maps, 1)
        return {name: maps[name] for name in self.explained}

    def only(self, name: str) -> ExplainFunction:
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
        source = self.explained[name]
        if isinstance(source, CustomFunction):
            return lambda model, images, classes: source.function(model, images.detach().clone(), classes)
        explainer = replace(self, names=(source,))
        return lambda model, images, classes: explainer.explain(model, images, classes[:, None])[name][:, 0]

    def _compare(self, model: nn.Module, images: Tensor, target: Any, methods: Sequence[Method]) -> dict[str, Tensor]:
        # Methods without a layer share the forward passes of the methods of the first layer.
        by_layer: dict[str | None, list[Method]] = {}
        for method in sorted(methods, key=lambda method: method.place != "layer"):
            layer = self.layer.get(method.name) if isinstance(self.layer, Mapping) else self.layer
            by_layer.setdefault(layer if method.place == "layer" else next(iter(by_layer), None), []).append(method)
        shared = {"target": target, "reshape": self.reshape, **self.options}
        maps: dict[str, Tensor] = {}
        inputs = model.to_inputs(images) if isinstance(model, ScoreModel) else images
        for layer, layer_methods in by_layer.items():
            layers = [] if layer is None else [layer]
            explanations = compare(model, inputs, layers=layers, methods=layer_methods, **shared)
            maps |= {method: explanation.heatmaps for (_, method), explanation in explanations.items()}
        return maps


def _run_custom(source: CustomFunction, model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    try:
        heatmaps = run_explain(source.function, model, images.detach().clone(), classes)
    except (GradcamError, RuntimeError):
        raise
    except Exception as error:  # A custom function may raise any error, for example if its signature is wrong.
        raise GradcamError(f"{source.name} failed: {describe_unexpected(error)}") from error
    try:
        return check_heatmaps(heatmaps, (len(images), *images.shape[2:]), images.device)
    except ImageError as error:
        raise ImageError(f"{source.name}: {error}") from None


def make_constant(images: Tensor, seed: int = 0) -> Tensor:
    """Return heatmaps that are 1 at every pixel."""
    return torch.ones(len(images), *images.shape[2:], dtype=torch.float32, device=images.device)


def make_centre(images: Tensor, seed: int = 0) -> Tensor:
    """Return a Gaussian blob in the centre, where photographs often show their subject."""
    positions = (torch.arange(length, dtype=torch.float32, device=images.device) for length in images.shape[2:])
    offsets = ((position + 0.5) / len(position) - 0.5 for position in positions)
    rows, columns = (torch.exp(-(offset**2) / (2 * CENTRE_DEVIATION**2)) for offset in offsets)
    return scale_to_unit((rows[:, None] * columns)[None]).expand(len(images), -1, -1)


def make_random(images: Tensor, seed: int = 0) -> Tensor:
    """Return noise on a coarse grid, upsampled by bicubic interpolation. The result is as smooth as a CAM."""
    shape, generator = (len(images), 1, RANDOM_MAP_CELLS, RANDOM_MAP_CELLS), make_generator(seed, "random map")
    noise = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(images.device)
    enlarged = nn.functional.interpolate(noise, size=images.shape[2:], mode="bicubic", align_corners=False)
    return scale_to_unit(enlarged[:, 0])


def make_edges(images: Tensor, seed: int = 0) -> Tensor:
    """Return the image's edges: the norm of the Sobel gradient of the mean over channels."""
    sobel = [[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]
    kernel = torch.tensor(sobel, dtype=torch.float32, device=images.device)
    grey = nn.functional.pad(images.float().mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    return scale_to_unit(nn.functional.conv2d(grey, torch.stack([kernel, kernel.T])[:, None]).norm(dim=1))


@dataclass
class StepCounter:
    """Counts finished steps, and reports the count to the progress callback."""

    progress: Progress | None
    total: int = 0
    done: int = 0

    def step(self, *_: object) -> None:
        self.reach(self.done + 1)

    def reach(self, count: int) -> None:
        if self.progress is not None and count != self.done:
            self.progress(count, self.total)
        self.done = count
