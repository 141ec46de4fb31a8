"""Following every call of a model's modules through one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradcam.hooks import Hooks


@dataclass
class Entry:
    """One call: the call that it began in, and what was noted of it when it began and ended.

    `ended`: None of one that did not end, but raised.
    """

    module: nn.Module
    holder: Entry | None
    begun: Any = None
    ended: Any = None

    @property
    def depth(self) -> int:
        """In how many calls it lies. Of one that raised, nobody says when: only its parts' calls are taken to lie in it."""
        found, holder = 0, self.holder
        while holder is not None:
            found += holder.ended is not None or any(part is self.module for part in holder.module.modules())
            holder = holder.holder
        return found


class CallLog:
    """The calls of one forward pass, in the order in which they begin; `open` are those that have not ended yet.

    `begin(args, kwargs)` and `end(output)` give what is noted of a call; they run last and first of all that is done here,
    so that a clock which they read measures the call alone.
    """

    def __init__(self, begin: Callable[[tuple[Any, ...], dict[str, Any]], Any], end: Callable[[Any], Any]) -> None:
        self._begin, self._end = begin, end
        self.entries: list[Entry] = []
        self.open: list[Entry] = []

    def watch(self, hooks: Hooks, modules: Iterable[nn.Module]) -> None:
        """Log the calls of these modules from now on."""
        for module in modules:
            hooks.before_forward(module, self._before)
            hooks.after_forward(module, self._after)

    @property
    def order(self) -> list[tuple[nn.Module, int, bool]]:
        """What two passes that do the same have in common: the modules, how deep they lie, and whether each ended."""
        return [(entry.module, entry.depth, entry.ended is None) for entry in self.entries]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entry = Entry(module, self.open[-1] if self.open else None)
        self.entries.append(entry)
        self.open.append(entry)
        entry.begun = self._begin(args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ended = self._end(output)
        while self.open:
            entry = self.open.pop()
            if entry.module is module:  # calls inside it that are still open raised what their caller caught
                entry.ended = ended
                return
