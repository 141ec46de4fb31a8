"""Features of many pictures: what layers give for each of them, one picture after another."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradcam.arguments import to_batch
from gradcam.axes import Axes
from gradcam.batch.items import Item
from gradcam.batch.pipeline import compute_items
from gradcam.batch.reading import Fetched
from gradcam.classifiers import Classifier, Prepared
from gradcam.classifiers.preparation import find_input_dtype
from gradcam.classifiers.probing import make_noise
from gradcam.errors import GradcamError, LayerError
from gradcam.inspection.extraction import features
from gradcam.inspection.selection import Layers, select_layers
from gradcam.layers import unwrap
from gradcam.patches import find_patches

Row = dict[str, Tensor]  # by layer: what it gave for one picture, on the CPU


@dataclass(frozen=True)
class Extractor:
    """Which layers of a model, by name. `pools`: their mean over the picture; `reshape`: as in `gradcam.explain`."""

    classifier: Classifier
    layers: Sequence[str]
    pools: bool = False
    reshape: str | tuple[int, ...] | None = None

    def extract(self, pictures: Sequence[Prepared], *, classes: Sequence[int] | None = None) -> list[Row]:
        """What the layers give for pictures of one size, from one pass; `classes` make no difference."""
        images = torch.stack([picture.image for picture in pictures])
        found = self._extract(images.to(self.classifier.device, find_input_dtype(self.classifier.model)))
        on_cpu = {name: tensor.cpu() for name, tensor in found.items()}
        return [{name: tensor[i] for name, tensor in on_cpu.items()} for i in range(len(pictures))]

    def _extract(self, images: Tensor) -> Row:
        found = features(self.classifier.model, images, self.layers)
        for name, tensor in found.items():
            if not tensor.ndim or len(tensor) != len(images):
                raise LayerError(
                    f"Layer '{name}' gives {tuple(tensor.shape)} for {len(images)} pictures: its rows are not the pictures, "
                    "so that none has features of its own. Choose a layer outside the part that folds the batch."
                )
        return {name: self._pool(name, tensor, images) for name, tensor in found.items()} if self.pools else found

    def _pool(self, name: str, tensor: Tensor, images: Tensor) -> Tensor:
        """(N,C): the mean over all places; of tokens, over those of the grid."""
        if tensor.ndim <= 2 or tensor[0].numel() == max(tensor.shape[1:]):
            return tensor.flatten(1) if tensor.ndim > 2 else tensor
        model = unwrap(self.classifier.model)
        module = select_layers(model, name)[name]
        patches = find_patches(model.modules()) if tensor.ndim == 3 else ()
        layout = Axes(model, to_batch(images), patches).find_layout(tensor.shape, module, self.reshape)
        if layout is None:
            raise LayerError(
                f"Layer '{name}' gives {tuple(tensor.shape)} for {len(images)} pictures, in which it is not certain where "
                "their grid lies: give --reshape, or leave --pool out."
            )
        return layout.to_grid(tensor).flatten(2).mean(2)


def prepare_extractor(
    classifier: Classifier,
    layers: Layers,
    *,
    pools: bool = False,
    reshape: str | tuple[int, ...] | None = None,
    batch_size: int,
) -> Extractor:
    """An extractor of the layers that these names and patterns mean, tried out on pictures of noise.

    Raises `LayerError` where `inspection.features` does, and for a layer that gives nothing for each picture.
    """
    noise = make_noise(classifier.preprocess, classifier.model)
    images = noise.repeat(min(batch_size, 2), *[1] * (noise.ndim - 1))
    found = features(classifier.model, images, layers)  # of a pattern, those that run
    extractor = Extractor(classifier, list(found), pools, reshape)
    extractor._extract(images)
    return extractor


def extract_items(
    extractor: Extractor, items: Iterable[Item], *, batch_size: int, workers: int
) -> Generator[tuple[str, Row | GradcamError], None, None]:
    """Each picture's name, and what the layers give for it or why that cannot be had, in the order of the items."""
    unasked = (replace(item, wanted=None) for item in items)  # no class is looked at
    return compute_items(
        extractor.classifier, extractor.extract, unasked, finish=_name, batch_size=batch_size, workers=workers
    )


def _name(fetched: Fetched, found: Mapping[str, Tensor] | GradcamError) -> tuple[str, Row | GradcamError]:
    return fetched.item.name, found if isinstance(found, GradcamError) else dict(found)
