"""How the values of a recorded step are kept: as snapshots, or as statistics that stay on their device until read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gradcam.inspection.statistics import Statistics, measure, to_statistics

ACTIVATION, GRADIENT = "activation", "gradient"


class Key(NamedTuple):
    """Whose value it is. `run`: of the layer in this step, from 0. `kind`: activation or gradient."""

    layer: str
    run: int
    kind: str


Layout = tuple[tuple[Key, int], ...]  # of the rows of a block: each with the count of values


class Tensors:
    """Snapshots by key, which later changes in place do not reach. `device`: where they go, None to leave them there."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._values: dict[Key, Tensor] = {}

    def add(self, key: Key, tensor: Tensor) -> None:
        self._values[key] = tensor.clone() if self._device is None else tensor.to(self._device, copy=True)

    def pack(self) -> None:
        """There is nothing to be saved."""

    def read(self) -> dict[Key, Tensor]:
        return dict(self._values)


class Numbers:
    """Statistics, which stay on the tensors' device until they are read: a row for each tensor, one block when packed.

    `layouts`: keys and counts as other steps have them too, so that a whole epoch holds them once.
    """

    def __init__(self, layouts: dict[Layout, Layout]) -> None:
        self._layouts = layouts
        self._fresh: dict[Key, tuple[int, Tensor]] = {}
        self._layout: Layout = ()
        self._block: Tensor | None = None

    def add(self, key: Key, tensor: Tensor) -> None:
        self._fresh[key] = (tensor.numel(), measure(tensor))

    def pack(self) -> None:
        """One tensor of all rows, on a GPU if one of them is there, so that nothing waits for it."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, {}
        rows = self._rows() | fresh
        tensors = [numbers for _, numbers in rows.values()]
        device = next((it.device for it in tensors if it.device.type != "cpu"), tensors[0].device)
        self._block = torch.stack([it.to(device, non_blocking=True) for it in tensors])
        layout = tuple((key, count) for key, (count, _) in rows.items())
        self._layout = self._layouts.setdefault(layout, layout)

    def read(self) -> dict[Key, Statistics]:
        fetch([self])
        return {key: to_statistics(count, numbers) for key, (count, numbers) in self._rows().items()}

    def _rows(self) -> dict[Key, tuple[int, Tensor]]:
        blocks = [] if self._block is None else self._block.unbind()
        return {key: (count, numbers) for (key, count), numbers in zip(self._layout, blocks)}


def fetch(stores: Iterable[Numbers]) -> None:
    """Bring what is still on a device to the processor: one copy from each device, however many steps there are."""
    by_device: dict[torch.device, list[Numbers]] = {}
    for store in stores:
        store.pack()
        if store._block is not None and store._block.device.type != "cpu":
            by_device.setdefault(store._block.device, []).append(store)
    for remote in by_device.values():
        blocks = [store._block for store in remote if store._block is not None]
        fetched = torch.cat(blocks).cpu()
        for store, block in zip(remote, fetched.split([len(block) for block in blocks])):
            store._block = block


Store = Tensors | Numbers  # a later value of the same key takes the place of an earlier one
