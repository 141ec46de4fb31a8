"""Whether a map tells of the model at all: other classes, noise in the picture, and weights that are drawn anew."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import BlindLayerError, ModelError, TargetError, describe_unexpected, show_fields
from gradcam.evaluation.controls import Explain
from gradcam.evaluation.explainers import run_explain
from gradcam.evaluation.subject import Subject, check_heatmaps, draw, to_tensor
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.preserve import preserve_state
from gradcam.options import check_count, check_number


def rank_correlation(a: Any, b: Any) -> Tensor:
    """Spearman's rank correlation of heatmaps `a` and `b` (N,H,W), of any library: float32 (N,) in [-1,1]. Pixels of
    one value share the mean of their ranks. 1 is the same order, -1 the opposite one. Of a constant map, such as a
    blank one, it is not defined; here it is 1 where both are constant, since they agree everywhere, and 0 where one is.
    Raises `ImageError` where the heatmaps are none, hold NaN, or are not of one size."""
    size = tuple(getattr(getattr(a, "heatmaps", a), "shape", ()))
    first = check_heatmaps(a, (size[0], *size[-2:]) if len(size) in (3, 4) else size)
    second = check_heatmaps(b, first.shape, first.device)
    one, other = (_rank(maps.flatten(1)) for maps in (first, second))
    lengths = one.norm(dim=1), other.norm(dim=1)
    is_flat, is_other_flat = (length == 0 for length in lengths)
    products = (one * other).sum(1) / torch.where(is_flat | is_other_flat, 1.0, lengths[0] * lengths[1])
    return torch.where(is_flat & is_other_flat, 1.0, products).clamp(-1, 1).float()


def _rank(values: Tensor) -> Tensor:
    """Each value's place in its row (N,P), from the least, around zero; equal ones have the mean of theirs."""
    values = values.contiguous()
    ordered = values.sort(dim=1).values
    before, through = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    precision = torch.float32 if values.device.type == "mps" else torch.float64  # which that device does not have
    # The mean of places 0 to P - 1 is known, whatever the ties.
    return (before + through - 1).to(precision) / 2 - (values.shape[1] - 1) / 2


def class_difference(subject: Subject, explain: Explain, heatmaps: Any = None) -> Tensor:
    """Measure how different a map is from that of the class's strongest rival: 1 minus their rank correlation.

    The rival is the most probable other class. 0 says that the map is the same for both, 1 that they have nothing in
    common. Two classes of one kind, such as dogs, may rightly be looked for in one place: a small difference alone
    refutes nothing, none at all does. Two constant maps have a difference of 0; a constant map and another one have 1.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    explain : callable
        A function of the model, images (N,C,H,W) and classes (N,) that gives heatmaps (N,H,W).
    heatmaps : Tensor, array or Explanation (N,H,W), default None
        The maps of the subject's classes. None: `explain` makes them.

    Returns
    -------
    Tensor (N,)
        float32 in [0,2].

    Raises
    ------
    TargetError
        Where the model has one class only.
    ImageError
        For heatmaps of another form or size, those of `explain` too. Whatever else `explain` raises comes through.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, class_difference
    >>> def explain(model, images, classes):
    ...     return gradcam.explain(model, images, "layer4", target=classes).heatmaps[:, 0]
    >>> classifier = gradcam.load_classifier()
    >>> subject = Subject(classifier.model, classifier.batch(["photo.jpg"]))
    >>> round(class_difference(subject, explain).item(), 1)  # the cat and the espresso are in different places
    1.6

    References
    ----------
    Selvaraju et al., "Grad-CAM", ICCV 2017, section 5.1, for the question; Adebayo et al., "Sanity Checks for Saliency
    Maps", NeurIPS 2018, section 3, for the measure.
    """
    before = _explain_unless(heatmaps, subject, explain)
    rivals = run_explain(explain, subject.model, subject.images, find_rivals(subject))
    return 1 - rank_correlation(before, check_heatmaps(rivals, subject.size, subject.images.device))


def _explain_unless(heatmaps: Any, subject: Subject, explain: Explain) -> Tensor:
    made = run_explain(explain, subject.model, subject.images, subject.classes) if heatmaps is None else heatmaps
    return check_heatmaps(made, subject.size, subject.images.device)


def find_rivals(subject: Subject) -> Tensor:
    """The most probable class of each image beside its own: int64 (N,). Raises `TargetError` where there is no other."""
    count = subject.all_probabilities.shape[1]
    if count < 2:
        raise TargetError(f"The model has {count} class: there is no other to compare its map with.")
    return subject.all_probabilities.scatter(1, subject.classes[:, None], float("-inf")).argmax(1)


def max_sensitivity(
    subject: Subject, explain: Explain, heatmaps: Any = None, *, radius: float = 0.02, samples: int = 10, seed: int = 0
) -> Tensor:
    """Measure the largest change of a map under noise, from 0 up; 0 is best.

    It is the maximum over the draws of e of ``|E(x + e) - E(x)| / |E(x)|``, with the Euclidean norm. As usual it is
    divided by the map's own norm, so that maps of any scale compare. A blank map's change is left as it is.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    explain : callable
        E: a function of the model, images (N,C,H,W) and classes (N,) that gives heatmaps (N,H,W). With noise too, the
        classes are the subject's.
    heatmaps : Tensor, array or Explanation (N,H,W), default None
        The maps without noise. None: `explain` makes them.
    radius : float, default 0.02
        Each value of e is uniform in [-radius, radius], in the units of the images, as preprocessed.
    samples : int, default 10
        How many e are drawn.
    seed : int, default 0
        Draws the noise.

    Returns
    -------
    Tensor (N,)
        float32, 0 or more.

    Raises
    ------
    GradcamError
        For a radius that is no number from zero up, and for samples below 1.
    ImageError
        For heatmaps of another form or size, those of `explain` too. Whatever else `explain` raises comes through.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, max_sensitivity
    >>> def explain(model, images, classes):
    ...     return gradcam.explain(model, images, "layer4", target=classes).heatmaps[:, 0]
    >>> classifier = gradcam.load_classifier()
    >>> subject = Subject(classifier.model, classifier.batch(["photo.jpg"]))
    >>> round(max_sensitivity(subject, explain, samples=2).item(), 1)  # a little noise hardly changes the map
    0.0

    References
    ----------
    Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019, equation 2.
    """
    check_number(radius, "radius", "how far a value may change, a number from 0 on.")
    check_count(samples, "samples", "how often to draw noise, 1 or more.")
    images, before = subject.images, _explain_unless(heatmaps, subject, explain)
    generator = draw(seed, "noise")
    most = torch.zeros(len(images), dtype=torch.float32, device=images.device)
    for _ in range(samples):
        drawn = torch.rand(images.shape, generator=generator, dtype=torch.float32, device="cpu")
        noise = (2 * drawn - 1) * radius
        after = run_explain(explain, subject.model, images + noise.to(images.device, images.dtype), subject.classes)
        change = check_heatmaps(after, subject.size, images.device) - before
        most = torch.maximum(most, change.flatten(1).norm(dim=1))
    length = before.flatten(1).norm(dim=1)
    return most / torch.where(length > 0, length, 1.0)


@dataclass(frozen=True)
class Randomisation:
    """Maps of a network whose weights are drawn anew down to each of L layers, and how alike they are to those before.

    Attributes
    ----------
    layers : tuple of str
        The layers' dotted names, from the top down. At each, its weights and those of all that run after it are drawn
        anew.
    correlations : Tensor (N,L)
        Rank correlation with the maps of the network as it is, float32 in [-1,1].
    heatmaps : Tensor (N,L,H,W)
        The maps of the network at each layer, float32.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, randomisation
    >>> def blob(model, images, classes):  # which knows nothing of the model
    ...     return images.abs().mean(1)
    >>> classifier = gradcam.load_classifier()
    >>> found = randomisation(Subject(classifier.model, classifier.batch(["photo.jpg"])), blob, stages=2)
    >>> found.layers, found.correlations, found.heatmaps.shape
    (('head.3', 'stem.0.0'), tensor([[1., 1.]]), torch.Size([1, 2, 224, 224]))
    """

    layers: tuple[str, ...]
    correlations: Tensor
    heatmaps: Tensor = field(repr=False)

    __repr__ = show_fields


def randomisation(
    subject: Subject, explain: Explain, heatmaps: Any = None, *, stages: int = 8, seed: int = 0
) -> Randomisation:
    """Draw the model's weights anew, layer by layer from the top, and measure how much the map stays the same.

    A map that explains the model must change when the weights do: correlations near 0 are good, and 1 says that the map
    does not depend on the weights. The weights are drawn anew on a copy of the model. Each parameter's values are put
    into a random order, which keeps their scale: with weights of another scale a network may have no signal left, and
    all its maps are blank. Statistics of batch norms stay. Layers are the modules that own parameters, in the reverse
    of the order in which they start. A map that cannot be had, because its gradient is zero or its numbers overflow,
    counts as blank. The correlation of two constant maps, such as blank ones, is 1, and that of a constant map with
    another one 0.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    explain : callable
        A function of the model, images (N,C,H,W) and classes (N,) that gives heatmaps (N,H,W), as a tensor or an array.
    heatmaps : Tensor, array or Explanation (N,H,W), default None
        The maps of the model as it is. None: `explain` makes them.
    stages : int, default 8
        How many layers are looked at: the topmost, the last, where all weights are drawn, and about evenly between.
    seed : int, default 0
        Draws the orders of the weights.

    Returns
    -------
    Randomisation
        The layers, and at each the maps and their rank correlation with the maps of the model as it is.

    Raises
    ------
    ModelError
        For a model without parameters, and for one that cannot be copied.
    GradcamError
        For `stages` below 1.
    ImageError
        For heatmaps of another form or size, those of `explain` too. Whatever else `explain` raises comes through.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, randomisation
    >>> def explain(model, images, classes):
    ...     return gradcam.explain(model, images, "layer4", target=classes).heatmaps[:, 0]
    >>> classifier = gradcam.load_classifier()
    >>> subject = Subject(classifier.model, classifier.batch(["photo.jpg"]))
    >>> randomisation(subject, explain, stages=3).layers
    ('head.3', 'layer3.3.expand.1', 'stem.0.0')

    References
    ----------
    Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, section 4.1 (cascading randomisation).
    """
    check_count(stages, "stages", "how many layers to look at, 1 or more.")
    before = _explain_unless(heatmaps, subject, explain)
    found = {
        name: explain_or_blank(explain, model, subject.images, subject.classes)
        for name, model in draw_models(subject, stages, seed)
    }
    correlations = torch.stack([rank_correlation(before, maps) for maps in found.values()], 1)
    return Randomisation(tuple(found), correlations, torch.stack([*found.values()], 1))


def draw_models(subject: Subject, stages: int, seed: int) -> Iterator[tuple[str, nn.Module]]:
    """A copy of the subject's model whose weights are drawn anew from the top down: at each stage the name of the layer
    that it reached, and the model, which the next stage changes. Raises `ModelError` as `randomisation` does."""
    model = _copy(subject.model)
    for name in _draw_anew(model, subject.images[:1], stages, seed):
        yield name, model


def draw_networks(subject: Subject, count: int, seed: int) -> Iterator[nn.Module]:
    """So many times a copy of the subject's model with all weights drawn anew, which the next time changes. Raises
    `ModelError` where it cannot be copied. Weights that are in no order any more need but be moved on for another one."""
    model = _copy(subject.model)
    for number in range(count):
        for name, parameter in model.named_parameters():
            generator = draw(seed, "network", str(number), name)
            if number == 0:
                _shuffle(parameter, generator)
            elif parameter.numel():
                steps = torch.randint(parameter.numel(), (1,), generator=generator, dtype=torch.int64, device="cpu")
                with torch.no_grad():
                    parameter.copy_(parameter.roll(int(steps)))  # as one row of values
        yield model


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied, and its weights are drawn anew on a copy alone: "
            f"{describe_unexpected(error)}"
        ) from error


def explain_or_blank(explain: Explain, model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Heatmaps (N,H,W) of a model with weights drawn anew, zero where no gradient or no number is left."""
    size = (len(images), *images.shape[2:])
    try:
        made = to_tensor(run_explain(explain, model, images, classes)).nan_to_num(0, 0, 0)
    except BlindLayerError:
        made = torch.zeros(size, dtype=torch.float32, device=images.device)
    return check_heatmaps(made, size, images.device)


def _draw_anew(model: nn.Module, images: Tensor, stages: int, seed: int) -> Iterator[str]:
    """Draw the weights of the model, which is changed, from the top down; at each stage the name of the layer it reached."""
    layers = _find_layers(model, images)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no parameters: there is nothing that could be drawn anew.")
    last = len(layers) - 1
    ends = {round(stage * last / (stages - 1)) for stage in range(stages)} if stages > 1 else {last}
    drawn: set[Tensor] = set()
    for number, (name, parameters) in enumerate(layers):
        for parameter_name, parameter in parameters:
            if parameter not in drawn:  # tied ones are drawn once
                _shuffle(parameter, draw(seed, "weights", parameter_name))
                drawn.add(parameter)
        if number in ends:
            yield name


def _shuffle(parameter: Tensor, generator: torch.Generator) -> None:
    """The same values in another order."""
    order = torch.randperm(parameter.numel(), generator=generator, dtype=torch.int64, device="cpu")
    with torch.no_grad():
        parameter.copy_(parameter.flatten()[order.to(parameter.device)].reshape(parameter.shape))


def _find_layers(model: nn.Module, images: Tensor) -> list[tuple[str, list[tuple[str, Tensor]]]]:
    """Modules that own parameters, the last to start first, each with these and their names. Parameters of a module
    that is never called, since another one computes with them, are the one's around it."""
    starts: dict[str, int] = {}
    with torch.no_grad(), Hooks() as hooks, preserve_state(model):
        for name, module in model.named_modules():
            hooks.before_forward(module, lambda *_, name=name: starts.__setitem__(name, len(starts)))
        model(images)
    owners: defaultdict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):  # of tied ones all owners
        owner = name.rpartition(".")[0]
        while owner and owner not in starts:
            owner = owner.rpartition(".")[0]
        owners[owner].append((name, parameter))
    return sorted(owners.items(), key=lambda item: -starts[item[0]])
