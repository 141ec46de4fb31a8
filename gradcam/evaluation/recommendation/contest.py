"""What combinations of methods, scores and layers are measured by: mosaics of pictures, and the pictures alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradcam.classifiers import Classifier
from gradcam.classifiers.preparation import find_input_dtype
from gradcam.evaluation.grid import grid_pointing_game
from gradcam.evaluation.mosaics import Mosaic, Tile
from gradcam.evaluation.recommendation.outcome import Combination
from gradcam.evaluation.recommendation.trials import Trials
from gradcam.evaluation.removal import road
from gradcam.evaluation.subject import Subject

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the pixels that ROAD imputes
PICTURES = 4  # in one run of ROAD

Values = dict[Combination, Tensor]  # float64 (P,): one number for each picture


@dataclass(frozen=True, eq=False)
class Contest:
    """Mosaics, and the pictures that are in them. `step` is called after each mosaic, and each of ROAD's batches."""

    trials: Trials
    tiles: Sequence[Tile]
    mosaics: Sequence[Mosaic]
    seed: int
    step: Callable[[], None] = field(default=lambda: None)

    @property
    def batches(self) -> int:
        """How many steps ROAD takes for each combination."""
        return -(-len(self.tiles) // PICTURES)

    def play(self, combinations: Sequence[Combination]) -> tuple[Values, Values]:
        """The grid pointing game: mass and hits, each picture's mean over the mosaics that it is in."""
        places = {tile.name: place for place, tile in enumerate(self.tiles)}
        sums = {it: torch.zeros(2, len(places), dtype=torch.float64, device="cpu") for it in combinations}
        counts = torch.zeros(len(places), dtype=torch.float64, device="cpu")
        for mosaic in self.mosaics:
            at = [places[name] for name in mosaic.names]
            counts[at] += 1
            image = to_batch(self.trials.classifier, [mosaic.image])
            classes = torch.tensor([mosaic.classes], dtype=torch.int64, device=image.device)
            for it, heatmaps in self.trials.explain(image, classes, combinations):
                found = grid_pointing_game(heatmaps)
                sums[it][:, at] += torch.cat([found.mass, found.hits]).double().cpu()
            self.step()
        left = [it for it in combinations if it not in self.trials.left_out]
        return {it: sums[it][0] / counts for it in left}, {it: sums[it][1] / counts for it in left}

    def remove(self, combinations: Sequence[Combination]) -> Values:
        """ROAD of each picture alone, for its class, at the network's own size."""
        classifier = self.trials.classifier
        values: dict[Combination, list[Tensor]] = {it: [] for it in combinations}
        for start in range(0, len(self.tiles), PICTURES):
            part = self.tiles[start : start + PICTURES]
            images = to_batch(classifier, [tile.image for tile in part])
            classes = [tile.index for tile in part]
            subject = Subject(classifier.model, images, classes, activation=classifier.activation)
            for it, heatmaps in self.trials.explain(images, subject.classes[:, None], combinations):
                values[it].append(road(subject, heatmaps[:, 0], shares=SHARES, seed=self.seed).combined.double().cpu())
                self.step()
        return {it: torch.cat(parts) for it, parts in values.items() if parts}


def to_batch(classifier: Classifier, images: Sequence[Tensor]) -> Tensor:
    """Images (C,H,W) as the model takes them, (N,C,H,W)."""
    return torch.stack(list(images)).to(classifier.device, find_input_dtype(classifier.model))
