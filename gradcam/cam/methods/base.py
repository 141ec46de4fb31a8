"""What a method is: a name, what is known of it, and one function, whose arguments depend on the kind of method."""

# No torch is imported here: the shell reads its choices from the table before there is anything to compute.

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gradcam.cam.methods.papers import Paper
from gradcam.errors import GradcamError, join_names, shorten
from gradcam.options import load_late

if TYPE_CHECKING:
    from torch import Tensor

    from gradcam.cam.forward import Recorded
    from gradcam.cam.grid import GridActivations
    from gradcam.cam.methods.attention_capture import AttentionLog
    from gradcam.cam.rounding import Settled
    from gradcam.hooks.memory import RerunBudget


@dataclass(frozen=True)
class Method:
    """A CAM method. Its kind, one of the subclasses below, defines what its function takes and returns.

    Parameters
    ----------
    name, summary
        Its name, and what it does, in one line.
    source
        The paper; None if there is none.
    function
        The function, or its "module:name" (in this package, or with the full module name), imported on first use.
    cost
        The number of forward passes, in words.
    is_signed
        True if its negative values are evidence against the class.
    assumes_positive
        True if it assumes activations without negative values, so that it needs a layer after a ReLU.
    score
        "finer" if it explains its own score instead of the requested one.
    options
        The options that `using` can change, with their values.
    channels
        "added" if channels are summed, "component" if their principal component is used, or "" for neither.
    join
        The function that joins channels instead of a sum, in the form of `function`.
    is_local
        True if a cell of its map depends on that cell of the layer only, and is zero where the gradient is zero.
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
    is_local: bool = field(default=False, repr=False)

    needs: ClassVar[tuple[str, ...]] = ()  # what the function takes of one pass; nothing where it runs the model again
    place: ClassVar[Literal["layer", "input", "attention"]] = "layer"  # where its maps lie
    has_layer: ClassVar[bool] = True  # which it looks at
    runs_again: ClassVar[bool] = False  # it takes the model, or a part of it, more than once

    @property
    def paper(self) -> str:
        """Where it is from, in one line."""
        return str(self.source or "")

    @property
    def compute(self) -> Callable[..., Any]:
        """The function, imported when it is first asked for, with its options."""
        options = dict(self.options)
        if self.join is not None:
            options["join"] = load_late(self.join, __package__)
        function = load_late(self.function, __package__)
        return functools.partial(function, **options) if options else function

    def __call__(self, *given: Any) -> Any:
        """What the function gives, with the options of this method."""
        return self.compute(*given)

    def using(self, **options: Any) -> Method:
        """Return the method with other options, to pass instead of a name: `METHODS["rise"].using(masks=2000)`.

        Raises `GradcamError` for an option that it does not have.
        """
        for name in options:
            if name not in self.options:
                known = join_names(self.options) if self.options else "none"
                raise GradcamError(f"{self.name} has no option {name!r}; its options are: {known}.")
        return replace(self, options={**self.options, **check_plain(self.name, options)})

    def smoothed(self) -> Method:
        """The method with eigen-smoothing: the first principal component of the weighted channels in place of their
        sum. A method that is a component already stays what it is. Raises `GradcamError` for one that adds no channels
        up."""
        if self.channels == "component":
            return self
        if self.channels != "added":
            raise GradcamError(
                f"{self.name} does not sum channels, so smoothing='eigen' does not apply: leave smoothing= out."
            )
        return replace(self, join="one_pass:weighted_component", is_local=False)


def check_plain(method: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options themselves. Raises `GradcamError` for a value that is neither a number, a text, a bool nor None."""
    for name, value in options.items():
        if not isinstance(value, (int, float, str, type(None))):
            raise GradcamError(
                f"{method}: {name} is {shorten(value)}, expected a number, a string, True, False or None."
            )
    return options


class OfActivations(Method):
    """Of no class: from activations (N,C,...), on a grid of any rank, float32 or float64, to maps (N,...)."""

    needs = ("activations",)
    if TYPE_CHECKING:
        compute: Callable[[Tensor], Tensor]


class OfGradients(Method):
    """From activations (N,C,...) and gradients (N,K,C,...), on a grid, to maps (N,K,...)."""

    needs = ("activations", "gradients")
    if TYPE_CHECKING:
        compute: Callable[[Tensor, Tensor], Tensor]


class OfCurvatures(Method):
    """From activations, gradients, and curvatures H A (N,K,C,...), the second derivatives times the activations."""

    needs = ("activations", "gradients", "curvatures")
    if TYPE_CHECKING:
        compute: Callable[[Tensor, Tensor, Tensor], Tensor]


class OfReruns(Method):
    """It runs the model, or its tail, again: from what was recorded, and a layer's grid, to maps (N,K,...)."""

    runs_again = True
    if TYPE_CHECKING:
        compute: Callable[[Recorded, GridActivations, RerunBudget], Settled]


class OfInput(Method):
    """It runs the model again on other pictures: from what was recorded to maps (N,K,...) at their own size."""

    place, has_layer, runs_again = "input", False, True
    if TYPE_CHECKING:
        compute: Callable[[Recorded, RerunBudget], Settled]


class OfAttention(Method):
    """It follows the attentions of a transformer: from what was recorded to maps (N,K,...) on the grid of its patches."""

    place, has_layer, runs_again = "attention", False, True
    if TYPE_CHECKING:
        compute: Callable[[Recorded, AttentionLog, RerunBudget], Tensor]
