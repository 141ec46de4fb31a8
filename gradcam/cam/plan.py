"""A checked request for an explanation: methods, target and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import Self

from gradcam.cam.grid import JOINS
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, apply_smoothing, check_evidence
from gradcam.errors import (
    LayerError,
    join_names,
    shorten,
)
from gradcam.layers.layout import to_reshape
from gradcam.options import DEFAULTS, ExplainOptions, fill_options
from gradcam.targets.base import LOCAL_METHOD
from gradcam.targets.classes import is_custom_function


@dataclass(frozen=True)
class Plan:
    """A checked request: what to explain and how, as in `explain`.

    Without `methods`, the target's default method is used. `prefers_signed`: use signed evidence if that method
    supports it. `methods_for_places` replace `methods` if the score of a target function reads positions in the output,
    which pooling would lose.
    """

    methods: Sequence[Method] = (METHODS["gradcam"],)
    target: Any = None
    options: ExplainOptions = field(default_factory=DEFAULTS.copy)
    prefers_signed: bool = False
    methods_for_places: Sequence[Method] = ()

    @classmethod
    def of(cls, methods: Sequence[Method], target: Any, options: ExplainOptions, function: str, **fields: Any) -> Self:
        """Return a plan after all checks that need no model.

        Raises `GradcamError` for unknown names and unsupported combinations, and `TypeError` as a call of `function`
        would.
        """
        filled = fill_options(options, function)
        smoothed = apply_smoothing(methods, filled["smoothing"])
        if filled["join"] is not None and filled["join"] not in JOINS:
            raise LayerError(f"join is {shorten(filled['join'])}, expected {join_names(JOINS)}, or None.")
        check_evidence(filled["evidence"], smoothed)
        return cls(smoothed, target, filled | {"reshape": to_reshape(filled["reshape"])}, **fields)

    def complete(self, method: str) -> Plan:
        """Return the plan with this method if it has none. Raises `GradcamError` as `of` does."""
        if self.methods:
            return self
        methods, options = apply_smoothing([METHODS[method]], self.options["smoothing"]), self.options
        if self.prefers_signed and methods[0].is_signed:
            options = options | {"evidence": "signed"}
        check_evidence(options["evidence"], methods)
        for_places = (
            apply_smoothing([METHODS[LOCAL_METHOD]], options["smoothing"]) if is_custom_function(self.target) else ()
        )
        return replace(self, methods=methods, options=options, methods_for_places=for_places)

    @property
    def needs_layers(self) -> bool:
        return any(method.has_layer for method in self.methods)

    @property
    def grad_order(self) -> int:
        """Return how often the layers after the target layers are differentiated."""
        if any("curvatures" in method.needs for method in self.methods):
            return 2
        return 1 if any(method.needs for method in self.methods) else 0

    @property
    def runs_again(self) -> bool:
        return any(method.runs_again for method in self.methods)
