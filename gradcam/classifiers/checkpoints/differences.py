"""How the tensors of a checkpoint differ from those that a model expects, in words."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradcam.classifiers.checkpoints.heads import find_head
from gradcam.errors import join_names

MOST_NAMES = 3
COUNTER = "num_batches_tracked"  # of batch norms, for training alone
# Buffers that modules work out by themselves, and that their versions keep, drop or size differently; thop's counts.
COMPUTED = (
    COUNTER, "relative_position_index", "relative_coords_table", "attn_mask", "position_ids", "total_ops", "total_params",
)  # fmt: skip
TRAINING_ONLY = re.compile(r"(AuxLogits|aux1|aux2)\.")  # heads of Inception and GoogLeNet


@dataclass(frozen=True)
class Difference:
    """What is wrong, by name, `shapes` with what the file has and what the model expects; and what is of no account."""

    missing: Sequence[str]
    unexpected: Sequence[str]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    of_no_account: Sequence[str]
    matching: int
    total: int

    @property
    def matters(self) -> bool:
        """Whether the model cannot be loaded from the tensors."""
        return bool(self.missing or self.unexpected or self.shapes)

    def notes(self) -> Sequence[str]:
        """A sentence on what was passed over; counters are not worth one."""
        names = [name for name in self.of_no_account if name.rpartition(".")[2] != COUNTER]
        if not names:
            return ()
        return [f"{len(names)} tensor(s) that need not fit were passed over, the first '{names[0]}'."]

    def describe(self, model: nn.Module) -> tuple[str, str]:
        """A line that says so, and one of three counted lists and the likely cause."""
        shapes = [f"'{name}' has {has}, expected {wants}" for name, (has, wants) in self.shapes.items()]
        return (
            f"does not fit {type(model).__name__}; {self.matching} of the model's {self.total} tensors do.",
            f"missing: {len(self.missing)}{_after_colon(_list(self.missing))}, "
            f"unexpected: {len(self.unexpected)}{_after_colon(_list(self.unexpected))}, "
            f"wrong shape: {len(self.shapes)}{_after_colon('; '.join(shapes[:MOST_NAMES]))}. {self._cause(model)}",
        )

    def _cause(self, model: nn.Module) -> str:
        head = find_head(model)
        wrong = [*self.missing, *self.unexpected, *self.shapes]
        in_head = head is not None and all(name.startswith(f"{head}.") for name in [*self.missing, *self.shapes])
        if self.matching < len(wrong):
            return "These are the weights of another architecture."
        if in_head and self.shapes and not self.missing and not self.unexpected:
            classes = next(iter(self.shapes.values()))
            return f"The file has another number of classes: {classes[0][0]}, where the model has {classes[1][0]}."
        if in_head and self.missing and not self.shapes:
            return f"The last layer, '{head}', is missing or has another form in the file."
        if not self.missing and not self.shapes:
            return "The file has all of this model and more: another head beside it, or a larger model around it."
        return "The file is of another size or version of this architecture."


def compare(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], outside: Collection[str] = ()) -> Difference:
    """The difference between a checkpoint's tensors, under the model's names, and the model's state dict.

    `outside`: names that need not be the model's, if it has everything: parts of something else, as a loss or a teacher.
    """
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    shapes = {
        name: (tuple(tensors[name].shape), tuple(wanted.shape))
        for name, wanted in expected.items()
        if name in tensors and tensors[name].shape != wanted.shape
    }
    idle = [name for name in [*missing, *shapes] if _is_kept(name, expected[name])]
    idle += [name for name in unexpected if _is_passed_over(name, expected)]
    if set(missing) <= set(idle) and set(shapes) <= set(idle):
        idle += [name for name in unexpected if name in outside and name not in idle]
    return Difference(
        missing=[name for name in missing if name not in idle],
        unexpected=[name for name in unexpected if name not in idle],
        shapes={name: pair for name, pair in shapes.items() if name not in idle},
        of_no_account=idle,
        matching=len(expected) - len(missing) - len(shapes),
        total=len(expected),
    )


def _is_kept(name: str, wanted: Tensor) -> bool:
    """Whether the model's own value will do: one on the meta device has none, yet counters start at zero."""
    last = name.rpartition(".")[2]
    return last == COUNTER or (last in COMPUTED and not wanted.is_meta)


def _is_passed_over(name: str, expected: Mapping[str, Tensor]) -> bool:
    match = TRAINING_ONLY.match(name)
    has_none = match is not None and not any(other.startswith(match[0]) for other in expected)
    return has_none or name.rpartition(".")[2] in COMPUTED


def _list(names: Sequence[str]) -> str:
    return join_names(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")


def _after_colon(text: str) -> str:
    return f" ({text})" if text else ""
