import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import TargetError
from gradcam.targets.classes import (
    FINER_RIVAL_WEIGHT,
    ClassTarget,
    compute_contrast,
    find_logits,
    find_nearest_rivals,
)

LOGITS = torch.tensor([[3.0, 1.0, 2.0, 0.0, -1.0, 5.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 7.0]], dtype=torch.float64)


def score(kind: str, logits: torch.Tensor, classes: list[list[int]]) -> torch.Tensor:
    return ClassTarget(classes, score=kind).resolve(logits, len(logits)).compute(logits)


def test_logit_and_probability() -> None:
    assert score("logit", LOGITS, [[1, 5], [6, 0]]).tolist() == [[1, 5], [7, 0]]
    values = score("probability", LOGITS, [[1, 5], [6, 0]])
    total = sum(math.exp(value) for value in LOGITS[0].tolist())
    assert values[0].tolist() == pytest.approx([math.exp(1) / total, math.exp(5) / total])


def test_the_probability_of_a_single_logit_is_logistic() -> None:
    values = score("probability", torch.tensor([[0.5], [-2.0]]), [[0], [0]])
    assert values[:, 0].tolist() == pytest.approx([1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(2))])


def test_contrast_subtracts_the_mean_of_the_five_strongest_rivals() -> None:
    contrasts = score("contrast", LOGITS, [[1, 5], [6, 0]])
    # The rivals of class 1 are 5, 4, 3, 2 and 0, with mean 2.8. Those of class 5 are 4, 3, 2, 1 and 0, with mean 2.
    assert contrasts[0].tolist() == pytest.approx([1 - 2.8, 5 - 2])
    assert contrasts[1].tolist() == pytest.approx([7, 0 - 7 / 5])


def test_contrast_with_few_classes() -> None:
    assert score("contrast", torch.tensor([[3.0, 1.0, 0.0]]), [[0]]).tolist() == [[2.5]]
    assert score("contrast", torch.tensor([[3.0]]), [[0]]).tolist() == [[3.0]]


def test_rivals_are_chosen_once() -> None:
    target = ClassTarget([[1]], score="contrast").resolve(LOGITS[:1], 1)
    other_logits = torch.tensor([[0.0, 1.0, 9.0, 2.0, 3.0, 4.0, 5.0]])
    # The rivals stay those of the first logits, classes 5, 6, 0, 2 and 3, whatever the new logits are.
    assert target.compute(other_logits).item() == pytest.approx(1 - (4 + 5 + 0 + 9 + 2) / 5)
    assert target.repeat(2).compute(torch.cat([LOGITS[:1].float(), other_logits])).flatten().tolist() == pytest.approx(
        [1 - 2.8, 1 - (4 + 5 + 0 + 9 + 2) / 5]
    )


def test_the_nearest_classes_have_the_most_similar_logits() -> None:
    nearest = find_nearest_rivals(LOGITS[:1], torch.tensor([[1, 5]]))
    assert sorted(nearest[0, 0].tolist()) in ([0, 2, 3], [2, 3, 4])  # 3.0 and -1.0 are equally near
    assert sorted(nearest[0, 1].tolist()) == [0, 2, 6]
    contrast = compute_contrast(LOGITS[:1], torch.tensor([[5]]), nearest[:, 1:], FINER_RIVAL_WEIGHT)
    assert contrast.item() == pytest.approx(5 - 0.6 * (3 + 2 + 4) / 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "loss"}, "logit, probability, contrast"), ({"score": ["logit"]}, r"no score \['logit'\]"),
        ({"top": 0}, "top is 0"), ({"top": True}, "top is True"), ({"top": 1.0}, "top is 1.0"),
    ],
)  # fmt: skip
def test_a_bad_class_target(options: dict[str, object], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        ClassTarget(**options)  # type: ignore[arg-type]


def as_attribute(logits: Tensor) -> SimpleNamespace:
    return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"a": x[:, :1], "logits": x}, as_attribute, lambda x: (x, x[:, :2])]
)
def test_logits_are_found_in_what_models_return(wrap: object) -> None:
    assert torch.equal(find_logits(wrap(LOGITS), 2), LOGITS)  # type: ignore[operator]


def test_half_precision_logits_become_float32() -> None:
    assert find_logits(LOGITS.half(), 2).dtype == torch.float32


class TestActivation:
    """Check how logits become probabilities, and how a single logit becomes two classes, worked by hand."""

    single = torch.tensor([[2.0], [-1.0]])
    p = torch.tensor([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))])

    def scores(self, logits: Tensor, **options: Any) -> Tensor:
        target = ClassTarget([[0, 1]] * len(logits), **options)
        resolved_logits = target.find_logits(logits, len(logits))
        return target.resolve(resolved_logits, len(logits)).compute(resolved_logits)

    def test_a_single_logit_is_for_and_against(self) -> None:
        assert self.scores(self.single, activation="sigmoid").tolist() == [[-2, 2], [1, -1]]
        shares = self.scores(self.single, activation="sigmoid", score="probability")
        torch.testing.assert_close(shares, torch.stack([1 - self.p, self.p], 1))
        assert self.scores(self.single, activation="sigmoid", score="contrast").tolist() == [[-4, 4], [2, -2]]

    def test_a_single_probability_is_for_and_against(self) -> None:
        shares = self.p[:, None]
        for score in ("logit", "probability"):
            scores = self.scores(shares, activation="applied", score=score)
            torch.testing.assert_close(scores, torch.stack([1 - self.p, self.p], 1))

    @pytest.mark.parametrize("score", ["logit", "probability"])
    def test_a_value_is_itself(self, score: str) -> None:
        target = ClassTarget(activation="none", score=score)
        logits = target.find_logits(self.single, 2)
        assert torch.equal(target.resolve(logits, 2).compute(logits), self.single)

    @pytest.mark.parametrize("activation", ["auto", "softmax"])
    def test_otherwise_a_single_logit_is_itself(self, activation: str) -> None:
        target = ClassTarget(0, activation=activation)
        assert torch.equal(target.find_logits(self.single, 2), self.single)
        with pytest.raises(TargetError, match="Class 1 does not exist: this model has 1 classes"):
            self.scores(self.single, activation=activation)

    def test_classes_that_do_not_exclude_one_another(self) -> None:
        logits = torch.tensor([[2.0, -1.0, 0.0]])
        scores = self.scores(logits, activation="sigmoid", score="probability")
        torch.testing.assert_close(scores, self.p[None])
        assert self.scores(logits, activation="none", score="probability").tolist() == [[2, -1]]

    def test_evidence_for_one_class_is_evidence_against_the_other(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)).eval()
        images, against = torch.randn(2, 3, 6, 6), ClassTarget(0, activation="sigmoid")

        def maps(target: Any, evidence: str = "signed", **options: Any) -> Tensor:
            return gradcam.explain(model, images, "0", target=target, evidence=evidence, **options).maps

        both = maps(ClassTarget([[0, 1], [0, 1]], activation="sigmoid"))
        assert both.any()
        assert torch.equal(both[:, :1], -both[:, 1:])
        assert torch.equal(both[:, 1:], maps(1))
        assert torch.equal(maps(against, "positive"), maps(1, "negative"))
        for options in ({"augmentation": "flip"}, {"method": "ablationcam"}):
            torch.testing.assert_close(maps(against, **options), -maps(1, **options))
