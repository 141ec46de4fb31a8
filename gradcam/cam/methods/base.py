"""Define a CAM method: a name, its properties, and a function whose arguments depend on the kind of method."""

# This module must not import torch at the top. The command line lists the methods in its help, and importing torch is
# slow.

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gradcam.cam.methods.papers import Paper
from gradcam.errors import GradcamError, join_names, shorten
from gradcam.options import import_function

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Method:
    """A CAM method. Its subclass defines the arguments and the result of its function.

    Parameters
    ----------
    name, summary
        The method's name, and a description in one line.
    source
        The paper; None if there is none.
    function
        The function, or its "module:name" in this package. A function given by name is imported on first use.
    cost
        The number of forward passes, in words.
    is_signed
        True if negative values of the maps are evidence against the class.
    assumes_positive
        True if the method assumes non-negative activations. The target layer should then come after a ReLU.
    score
        "finer" if the method explains the score of Finer-CAM instead of the requested score; None for other methods.
    options
        The options of the function, with their values. `using` changes options.
    channels
        "added" if the map is the sum of the channels, "component" if it is their principal component, "" for other
        methods.
    join
        The "module:name" of a function that replaces the sum of the channels; None for the sum.
    """

    name: str
    summary: str
    source: Paper | None = field(repr=False)
    function: str | Callable[..., Any] = field(repr=False)
    cost: str = field(default="1", repr=False)
    is_signed: bool = field(default=False, repr=False)
    assumes_positive: bool = field(default=False, repr=False)
    score: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    channels: Literal["added", "component", ""] = field(default="", repr=False)
    join: str | None = field(default=None, repr=False)

    # The names of the tensors that the function takes; empty if the function runs the model again.
    needs: ClassVar[tuple[str, ...]] = ()
    # What the values of a map belong to: cells of the target layer, pixels of the input, patches of the attention, or image
    # tokens of a text model.
    place: ClassVar[Literal["layer", "input", "attention", "text"]] = "layer"
    has_layer: ClassVar[bool] = True  # True if the method explains a target layer.
    runs_again: ClassVar[bool] = False  # True if the function runs the model or a part of it again.

    @property
    def paper(self) -> str:
        """Return the paper in one line."""
        return str(self.source or "")

    @property
    def compute(self) -> Callable[..., Any]:
        """Return the function with this method's options. The function is imported on first use."""
        options = dict(self.options)
        if self.join is not None:
            options["join"] = import_function(self.join, __package__)
        function = import_function(self.function, __package__)
        return functools.partial(function, **options) if options else function

    def __call__(self, *inputs: Any) -> Any:
        """Call the function with this method's options."""
        return self.compute(*inputs)

    def using(self, **options: Any) -> Method:
        """Return a copy of the method with other options, such as `METHODS["rise"].using(masks=2000)`.

        The copy can be passed to `gradcam.explain` as `method`. Raises `GradcamError` if the method lacks one of the
        options.
        """
        for name in options:
            if name not in self.options:
                names = join_names(self.options) if self.options else "none"
                raise GradcamError(f"{self.name} has no option {name!r}; its options are: {names}.")
        return replace(self, options={**self.options, **check_plain(self.name, options)})

    def smoothed(self) -> Method:
        """Return a copy of the method with eigen-smoothing.

        Eigen-smoothing replaces the sum of the weighted channels by their first principal component. A method that
        already uses a principal component is returned unchanged. Raises `GradcamError` if the method does not sum
        channels.
        """
        if not self.channels:
            problem = f"{self.name} does not sum channels, so smoothing='eigen' does not apply"
            raise GradcamError(f"{problem}: leave smoothing= out.")
        return self if self.channels == "component" else replace(self, join="components:weighted_component")


def check_plain(method: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options; raise `GradcamError` for a value that is not a number, a string, a bool or None."""
    for name, value in options.items():
        if not isinstance(value, (int, float, str, type(None))):
            raise GradcamError(
                f"{method}: {name} is {shorten(value)}, expected a number, a string, True, False or None."
            )
    return options


class ActivationMethod(Method):
    """A class-agnostic method that computes maps (N,...) from activations (N,C,...), in float32 or float64."""

    needs = ("activations",)


class GradientMethod(Method):
    """A method that computes maps (N,K,...) from activations (N,C,...) and gradients (N,K,C,...) on a grid."""

    needs = ("activations", "gradients")


class CurvatureMethod(Method):
    """A method that computes maps (N,K,...) from activations, gradients and curvatures.

    Curvatures (N,K,C,...) are the Hessian times the activations.
    """

    needs = ("activations", "gradients", "curvatures")


class RerunMethod(Method):
    """A method that reruns the model, or the part after the layer, and returns maps (N,K,...) on the layer's grid.

    The function takes a `RecordedPass`, the layer's `GridActivations` and a `RerunBudget`, and returns `DenoisedMaps`.
    """

    runs_again = True


class InputMethod(Method):
    """A method that runs the model on changed images, and returns maps (N,K,...) at the images' size.

    Its function takes a `RecordedPass` and a `RerunBudget`, and returns `DenoisedMaps`.
    """

    place, has_layer, runs_again = "input", False, True


class AttentionMethod(Method):
    """A method that uses a transformer's attention, and returns maps (N,K,...) on the grid of patches.

    Its function takes a `RecordedPass`, an `AttentionLog` and a `RerunBudget`.
    """

    place, has_layer, runs_again = "attention", False, True


class WordMethod(Method):
    """A method that reads words in a text model's image tokens, and returns maps (N,K,...) on the layer's grid.

    Its function takes a `RecordedPass` and the layer's `GridActivations`. It needs no backward pass.
    """

    place = "text"


def compute_checked(method: ActivationMethod | GradientMethod | CurvatureMethod, *inputs: Tensor) -> Tensor:
    """Return the method's maps. Raise `GradcamError` if a custom function returned an invalid result.

    Maps are (N,K,...), or (N,...) if the method takes only activations.
    """
    import torch

    maps: Any = method.compute(*inputs)
    if isinstance(method.function, str):
        return maps  # The package's own methods are not checked here, because tests check their results.
    expected, grid = inputs[-1].shape[: len(inputs[1:2]) + 1], inputs[0].shape[2:]
    form = f"{str(inputs[0].dtype).removeprefix('torch.')} {(*expected, *grid)} on {inputs[0].device}"
    if not isinstance(maps, torch.Tensor):
        raise GradcamError(f"The method {method.name} returned {shorten(maps)}, expected a tensor {form}.")
    properties = [(tensor.dtype, tensor.device, tensor.layout) for tensor in (maps, inputs[0])]
    if maps.shape != (*expected, *grid) or properties[0] != properties[1]:
        description = f"{str(maps.dtype).removeprefix('torch.')} {tuple(maps.shape)} on {maps.device}"
        description += "" if maps.layout == torch.strided else f", {str(maps.layout).removeprefix('torch.')}"
        raise GradcamError(f"The method {method.name} returned a tensor {description}, expected {form}.")
    if not maps.isfinite().all():
        raise GradcamError(f"The method {method.name} returned maps with NaN or infinite values.")
    return maps
