"""Measure soundness: whether heatmaps change with the class and the weights, and stay the same under noise."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import BlindLayerError, ModelError, TargetError, describe_unexpected, format_fields
from gradcam.evaluation.explainers import run_explain
from gradcam.evaluation.heatmap_sources import ExplainFunction
from gradcam.evaluation.subject import Subject, check_heatmaps, correlate, make_generator, to_tensor
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.preserve import preserve_state
from gradcam.options import check_count, check_number


def rank_correlation(a: Any, b: Any) -> Tensor:
    """Return Spearman's rank correlation of heatmaps (N,H,W) from any library: float32 (N,) in [-1,1].

    Pixels of equal value share the mean of their ranks. Spearman's correlation is not defined for constant heatmaps.
    This function returns 1 if both heatmaps are constant, because the heatmaps agree everywhere. If only one heatmap is
    constant, the function returns 0. Raise `ImageError` if the heatmaps are invalid, contain NaN, or differ in size.
    """
    size = tuple(getattr(getattr(a, "heatmaps", a), "shape", ()))
    first = check_heatmaps(a, (size[0], *size[-2:]) if len(size) in (3, 4) else size)
    second = check_heatmaps(b, first.shape, first.device)
    return correlate(*(_rank(maps.flatten(1)) for maps in (first, second))).float()


def _rank(values: Tensor) -> Tensor:
    """Return the rank of each value within its row (N,P), minus the mean rank; equal values share their mean rank."""
    values = values.contiguous()
    ordered = values.sort(dim=1).values
    before, through = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    dtype = torch.float32 if values.device.type == "mps" else torch.float64  # MPS does not support float64.
    # The mean rank is (P - 1) / 2, with or without ties.
    return (before + through - 1).to(dtype) / 2 - (values.shape[1] - 1) / 2


def class_difference(subject: Subject, explain: ExplainFunction, heatmaps: Any = None) -> Tensor:
    """Measure how much the heatmaps of a class and its strongest rival differ: 1 minus their rank correlation.

    The rival is the most probable of the other classes. 0 means that both heatmaps are the same, and 1 means that the
    heatmaps are uncorrelated. A small difference can be right: the evidence for similar classes, such as two dog
    breeds, has the same position. If there is no difference at all, the heatmap ignores the class. The difference of
    two constant heatmaps is 0. The difference of a constant and a varying heatmap is 1.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    explain : callable
        A function of the model, images (N,C,H,W) and classes (N,) that returns heatmaps (N,H,W).
    heatmaps : Tensor, array or Explanation (N,H,W), default None
        The heatmaps of the subject's classes; None computes them with `explain`.

    Returns
    -------
    Tensor (N,)
        float32 in [0,2].

    Raises
    ------
    TargetError
        If the model has only one class.
    ImageError
        If `heatmaps`, or the result of `explain`, is not one heatmap per image at the images' size. Other errors of
        `explain` are passed on.

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
    Selvaraju et al., "Grad-CAM", ICCV 2017, section 5.1, for the comparison of classes; Adebayo et al., "Sanity Checks for
    Saliency Maps", NeurIPS 2018, section 3, for the rank correlation.
    """
    before = _explain_if_missing(heatmaps, subject, explain)
    rivals = run_explain(explain, subject.model, subject.images, find_rivals(subject))
    return 1 - rank_correlation(before, check_heatmaps(rivals, subject.size, subject.images.device))


def _explain_if_missing(heatmaps: Any, subject: Subject, explain: ExplainFunction) -> Tensor:
    maps = run_explain(explain, subject.model, subject.images, subject.classes) if heatmaps is None else heatmaps
    return check_heatmaps(maps, subject.size, subject.images.device)


def find_rivals(subject: Subject) -> Tensor:
    """Return each image's most probable other class, int64 (N,). Raise `TargetError` if there is no other class."""
    count = subject.all_probabilities.shape[1]
    if count < 2:
        raise TargetError(f"The model has {count} class, but two are needed to compare heatmaps.")
    return subject.all_probabilities.scatter(1, subject.classes[:, None], float("-inf")).argmax(1)


def max_sensitivity(
    subject: Subject,
    explain: ExplainFunction,
    heatmaps: Any = None,
    *,
    radius: float = 0.02,
    samples: int = 10,
    seed: int = 0,
) -> Tensor:
    """Measure the largest change of a heatmap under noise; 0 is best.

    The result is the maximum of ``|E(x + e) - E(x)| / |E(x)|`` over random e, with the Euclidean norm. The division by
    the heatmap's norm makes heatmaps of any scale comparable. If the heatmap is blank, the norm is zero, and the change
    is not divided.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    explain : callable
        E: a function of the model, images (N,C,H,W) and classes (N,) that returns heatmaps (N,H,W). The classes stay the
        same for noisy images.
    heatmaps : Tensor, array or Explanation (N,H,W), default None
        The heatmaps without noise; None computes them with `explain`.
    radius : float, default 0.02
        Each value of e is uniform in [-radius, radius], in the units of the preprocessed images.
    samples : int, default 10
        Number of noise samples e.
    seed : int, default 0
        Random seed of the noise.

    Returns
    -------
    Tensor (N,)
        float32, 0 or more.

    Raises
    ------
    GradcamError
        If the radius is negative, or `samples` is below 1.
    ImageError
        If `heatmaps`, or the result of `explain`, is not one heatmap per image at the images' size. Other errors of
        `explain` are passed on.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, max_sensitivity
    >>> def explain(model, images, classes):
    ...     return gradcam.explain(model, images, "layer4", target=classes).heatmaps[:, 0]
    >>> classifier = gradcam.load_classifier()
    >>> subject = Subject(classifier.model, classifier.batch(["photo.jpg"]))
    >>> round(max_sensitivity(subject, explain, samples=2).item(), 1)  # a little noise hardly changes the heatmap
    0.0

    References
    ----------
    Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019, equation 2.
    """
    check_number(radius, "radius", "the largest change of a value, 0 or more.")
    check_count(samples, "samples", "the number of noise samples, 1 or more.")
    images, before = subject.images, _explain_if_missing(heatmaps, subject, explain)
    generator = make_generator(seed, "noise")
    largest = torch.zeros(len(images), dtype=torch.float32, device=images.device)
    for _ in range(samples):
        noise = (2 * torch.rand(images.shape, generator=generator, dtype=torch.float32, device="cpu") - 1) * radius
        after = run_explain(explain, subject.model, images + noise.to(images), subject.classes)
        change = check_heatmaps(after, subject.size, images.device) - before
        largest = torch.maximum(largest, change.flatten(1).norm(dim=1))
    norm = before.flatten(1).norm(dim=1)
    return largest / torch.where(norm > 0, norm, 1.0)


@dataclass(frozen=True)
class Randomisation:
    """Heatmaps of models with randomised weights, and their rank correlation with the original heatmaps.

    Attributes
    ----------
    layers : tuple of str
        The dotted names of the L layers, from the output to the input. For each of these layers, the model's weights
        are randomised from the output down to this layer.
    correlations : Tensor (N,L)
        Rank correlation with the original heatmaps, float32 in [-1,1].
    heatmaps : Tensor (N,L,H,W)
        `heatmaps[:, i]` are the heatmaps after the weights down to `layers[i]` are randomised, float32.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, randomisation
    >>> def blob(model, images, classes):  # ignores the model
    ...     return images.abs().mean(1)
    >>> classifier = gradcam.load_classifier()
    >>> result = randomisation(Subject(classifier.model, classifier.batch(["photo.jpg"])), blob, stages=2)
    >>> result.layers, result.correlations, result.heatmaps.shape
    (('head.3', 'stem.0.0'), tensor([[1., 1.]]), torch.Size([1, 2, 224, 224]))
    """

    layers: tuple[str, ...]
    correlations: Tensor
    heatmaps: Tensor = field(repr=False)

    __repr__ = format_fields


def randomisation(
    subject: Subject, explain: ExplainFunction, heatmaps: Any = None, *, stages: int = 8, seed: int = 0
) -> Randomisation:
    """Run the model parameter randomisation test, a sanity check: randomise the weights and compare the heatmaps.

    A heatmap that explains the model must change with the weights. Correlations near 0 are good; 1 means that the
    heatmap does not depend on the weights. A copy of the model is re-initialised layer by layer, from the output to the
    input (cascading randomisation). The layers are the modules that own parameters, in reverse order of execution. The
    values of each parameter are shuffled, which keeps their scale. With another scale, the activations could vanish,
    and all heatmaps would be blank. Batch norm statistics are unchanged.

    If the gradient is zero, the heatmap counts as blank. Heatmap values that overflow count as zero. The correlation of
    two constant heatmaps is 1. The correlation of a constant and a varying heatmap is 0.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    explain : callable
        A function of the model, images (N,C,H,W) and classes (N,) that returns heatmaps (N,H,W), a tensor or an array.
    heatmaps : Tensor, array or Explanation (N,H,W), default None
        The original heatmaps; None computes them with `explain`.
    stages : int, default 8
        Number of layers at which heatmaps are compared, evenly spaced from the layer nearest the output to the layer
        nearest the input. At the last stage, all weights are randomised. With one stage, only the layer nearest the
        input is used.
    seed : int, default 0
        Random seed.

    Returns
    -------
    Randomisation
        The layers, and for each layer the heatmaps and their rank correlation with the original heatmaps.

    Raises
    ------
    ModelError
        If the model has no parameters, or cannot be copied.
    GradcamError
        If `stages` is below 1.
    ImageError
        If `heatmaps`, or the result of `explain`, is not one heatmap per image at the images' size. Other errors of
        `explain` are passed on.

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
    check_count(stages, "stages", "the number of layers to compare, 1 or more.")
    before = _explain_if_missing(heatmaps, subject, explain)
    maps_by_layer = {
        name: explain_or_blank(explain, model, subject.images, subject.classes)
        for name, model in randomise_in_stages(subject, stages, seed)
    }
    correlations = torch.stack([rank_correlation(before, maps) for maps in maps_by_layer.values()], 1)
    return Randomisation(tuple(maps_by_layer), correlations, torch.stack([*maps_by_layer.values()], 1))


def randomise_in_stages(subject: Subject, stages: int, seed: int) -> Iterator[tuple[str, nn.Module]]:
    """Re-initialise a copy of the subject's model from the output to the input.

    At each stage, yield the name of the last re-initialised layer, and the copy. All stages yield the same copy, and
    each stage changes the copy. Raise `ModelError` as in `randomisation`.
    """
    model = _copy(subject.model)
    layers = _list_layers(model, subject.images[:1])
    if not layers:
        raise ModelError(f"{type(model).__name__} has no parameters, so there is nothing to randomise.")
    last_index = len(layers) - 1
    ends = {round(stage * last_index / (stages - 1)) for stage in range(stages)} if stages > 1 else {last_index}
    shuffled: set[Tensor] = set()
    for number, (name, parameters) in enumerate(layers):
        for parameter_name, parameter in parameters:
            if parameter not in shuffled:  # Tied parameters are shuffled once.
                _shuffle(parameter, make_generator(seed, "weights", parameter_name))
                shuffled.add(parameter)
        if number in ends:
            yield name, model


def make_random_networks(subject: Subject, count: int, seed: int) -> Iterator[nn.Module]:
    """Yield a copy of the subject's model `count` times, each time with all weights re-initialised.

    All networks are the same copy, which is changed in place. For the first network, each parameter is shuffled. For later
    networks, the shuffled values are only rolled by a random number of positions, which is faster. Raise `ModelError` if
    the model cannot be copied.
    """
    model = _copy(subject.model)
    for number in range(count):
        for name, parameter in model.named_parameters():
            generator = make_generator(seed, "network", str(number), name)
            if number == 0:
                _shuffle(parameter, generator)
            elif size := parameter.numel():
                shift = int(torch.randint(size, (1,), generator=generator, dtype=torch.int64, device="cpu"))
                parameter.data.copy_(parameter.data.roll(shift))  # Without `dims`, `roll` rolls the flattened tensor.
        yield model


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        problem = "cannot be copied, which is needed to randomise its weights"
        raise ModelError(f"{type(model).__name__} {problem}: {describe_unexpected(error)}") from error


def explain_or_blank(explain: ExplainFunction, model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Return the heatmaps (N,H,W) of a re-initialised model: blank if the gradient is zero, 0 where values overflow."""
    size = (len(images), *images.shape[2:])
    try:
        heatmaps = to_tensor(run_explain(explain, model, images, classes)).nan_to_num(0, 0, 0)
    except BlindLayerError:
        heatmaps = torch.zeros(size, dtype=torch.float32, device=images.device)
    return check_heatmaps(heatmaps, size, images.device)


def _shuffle(parameter: Tensor, generator: torch.Generator) -> None:
    """Shuffle the values of a parameter in place."""
    order = torch.randperm(parameter.numel(), generator=generator, dtype=torch.int64, device="cpu")
    with torch.no_grad():
        parameter.copy_(parameter.flatten()[order.to(parameter.device)].reshape(parameter.shape))


def _list_layers(model: nn.Module, images: Tensor) -> list[tuple[str, list[tuple[str, Tensor]]]]:
    """Return the modules that own parameters, in reverse order of execution, each with its named parameters.

    If a parent uses the parameters of a module without calling the module, the parameters are listed under the parent.
    """
    execution_order: dict[str, int] = {}
    with torch.no_grad(), Hooks() as hooks, preserve_state(model):
        for name, module in model.named_modules():
            hooks.before_forward(module, lambda *_, name=name: execution_order.__setitem__(name, len(execution_order)))
        model(images)
    owners: defaultdict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):  # Tied parameters have several owners.
        owner = name.rpartition(".")[0]
        while owner and owner not in execution_order:
            owner = owner.rpartition(".")[0]
        owners[owner].append((name, parameter))
    return sorted(owners.items(), key=lambda item: -execution_order[item[0]])
