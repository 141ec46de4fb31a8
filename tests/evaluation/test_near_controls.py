"""Test the near controls of a check: moved maps, maps of other classes, and the test of two correlations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import linregress, zscore

from gradcam.evaluation import Subject
from gradcam.evaluation.checks.control_maps import ControlMap, evaluate_covering
from gradcam.evaluation.checks.near_controls import (
    DIRECTIONS,
    Evidence,
    choose_near_classes,
    choose_rivals,
    compare_near,
    compare_word_maps,
    compute_difference_t,
    compute_williams_t,
    list_displacements,
    measure_evidence,
    mirror_about_centroid,
    move,
    remove_background,
    sample_masks,
)
from gradcam.evaluation.checks.placement import fill_blur

SIZE, GRID = (56, 56), (7, 7)


def make_evidence(truth: torch.Tensor) -> Evidence:
    """Return evidence of a model whose score is the sum of `truth` on the visible pixels, with a little noise.

    The score of class 1 is the sum of the mirrored `truth`.
    """
    masks = sample_masks(SIZE, GRID, 0).float()
    scores = torch.stack([(masks * values).sum((1, 2)).double() for values in (truth, truth.flip(1))], 1)
    noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = scores + 0.05 * scores.std() * noise
    return Evidence(masks, scores[:, 0], scores[:, :1] - scores)


@pytest.fixture
def truth() -> torch.Tensor:
    """Return a map with an off-centre object and a smaller one."""
    y, x = torch.meshgrid(torch.arange(56.0), torch.arange(56.0), indexing="ij")
    return torch.exp(-((y - 20) ** 2 + (x - 30) ** 2) / 60) + 0.5 * torch.exp(-((y - 40) ** 2 + (x - 14) ** 2) / 30)


def test_the_true_map_is_resolved_to_the_smallest_displacement(truth: torch.Tensor) -> None:
    findings = compare_near(truth, make_evidence(truth), GRID, {"another class": (1, truth.flip(1))}, 0)
    assert (findings.resolution.pixels, findings.unresolved, findings.class_verified) == (7, None, True)
    assert "A copy of the heatmap moved by an eighth of the image (7 pixels) is clearly worse." in findings.summary
    assert "The class is verified: the heatmap of 1 other class is worse." in findings.summary


@pytest.mark.parametrize("signs", DIRECTIONS.values(), ids=DIRECTIONS)
def test_a_moved_map_is_not_resolved_to_its_displacement(truth: torch.Tensor, signs: tuple[int, int]) -> None:
    findings = compare_near(move(truth, 1 / 7, signs), make_evidence(truth), GRID, {}, 0)
    assert findings.resolution.pixels > 8
    assert findings.class_verified is None


def test_a_heatmap_that_is_better_without_its_background_has_no_fine_resolution(truth: torch.Tensor) -> None:
    findings = compare_near(truth, make_evidence(truth), GRID, {}, 0)
    noisy = truth + truth.max() * torch.rand(truth.shape, generator=torch.Generator().manual_seed(3))
    noisy_findings = compare_near(noisy, make_evidence(truth), GRID, {}, 0)
    sentence = (
        "Without its lowest values, the heatmap agrees better with the model, which suggests noise in the heatmap. "
        "A displacement by up to a third of the image is therefore possible."
    )
    assert (findings.resolution.name, sentence in findings.summary) == ("an eighth of the image", False)
    assert (noisy_findings.resolution.name, sentence in noisy_findings.summary) == ("a third of the image", True)


def test_the_background_is_a_fifth_of_the_pixels() -> None:
    heatmap = torch.arange(20.0).reshape(4, 5)
    assert torch.equal(remove_background(heatmap), (heatmap - 3).clamp(min=0))
    assert torch.equal(remove_background(heatmap - 5), heatmap - 5)


def test_the_class_is_not_verified_if_another_classs_map_does_better(truth: torch.Tensor) -> None:
    findings = compare_near(truth.flip(1), make_evidence(truth), GRID, {"cat (281)": (1, truth)}, 0)
    assert findings.class_verified is False
    assert "The class is not verified: the heatmap is not better than the heatmap of cat (281)." in findings.summary


def test_the_agreement_is_the_correlation_of_falls_and_hidden_values(truth: torch.Tensor) -> None:
    evidence, heatmap = make_evidence(truth), truth + truth.flip(0)
    result, controls = compare_word_maps(evidence, heatmap, {"mirrored": truth.flip(1), "another word": truth}, 0)
    hidden = [
        [float(values[mask.bool()].sum()) for mask in evidence.masks] for values in (heatmap, truth.flip(1), truth)
    ]
    expected = [np.corrcoef(evidence.falls.numpy(), values)[0, 1] for values in hidden]
    assert [result.value, *(control.effect for control in controls)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("turns", "word_turns", "outcome", "reason"),
    [
        (0, 2, "passed", "Of 19 copies of the heatmap at random positions, 0 do at least as well as the heatmap."),
        (0, 0, "passed", "The best control map, the mirrored heatmap, reaches"),
        (2, 0, "undecided", "The heatmap is worse than the heatmap of another word of the answer."),
    ],
    ids=["true", "words-of-one-place", "wrong-word"],
)
def test_a_words_map_has_to_agree_best(
    truth: torch.Tensor, turns: int, word_turns: int, outcome: str, reason: str
) -> None:
    heatmap, word_map = (torch.rot90(truth, number) for number in (turns, word_turns))
    result, _ = compare_word_maps(
        make_evidence(truth), heatmap, {"mirrored": heatmap.flip(1), "another word": word_map}, 0
    )
    assert result.outcome == outcome
    assert reason in result.reason


def test_the_other_word_is_the_one_that_agrees_best(truth: torch.Tensor) -> None:
    word_maps = torch.stack([truth.flip(1), truth, truth.flip(0)])
    assert torch.equal(make_evidence(truth).find_best(word_maps), truth)


@pytest.mark.parametrize(("better", "outcome"), [(0, "passed"), (1, "undecided")])
def test_no_position_may_be_as_good(better: int, outcome: str) -> None:
    control = ControlMap("mirrored", None, 0.0, 0.0, True, False, torch.zeros(1, 1))
    result = evaluate_covering(0.5, [control], [0.5] * better + [0.0] * (19 - better))
    assert (result.outcome, f"random positions, {better} do at least as well" in result.reason) == (outcome, True)


def test_a_mirrored_map_of_a_word_fails(truth: torch.Tensor) -> None:
    result, controls = compare_word_maps(make_evidence(truth), truth.flip(1), {"mirrored": truth}, 0)
    assert (result.outcome, controls[0].is_better) == ("failed", True)
    assert "The heatmap is worse than the mirrored heatmap." in result.reason


def test_a_moved_map_agrees_with_a_loop_over_pixels() -> None:
    heatmap = torch.arange(12.0).reshape(3, 4)
    expected = [[heatmap[row - 1, column] if row > 0 else 0.0 for column in range(4)] for row in range(3)]
    assert torch.equal(move(heatmap, 1 / 3, (1, 0)), torch.tensor(expected))
    assert torch.equal(move(heatmap, 1 / 4, (0, -1))[:, -1], torch.zeros(3))


def test_mirroring_about_the_centroid_keeps_the_centroid_of_an_asymmetric_map() -> None:
    heatmap = torch.zeros(9, 9)
    heatmap[4, 2], heatmap[4, 5] = 2, 1  # The centroid is at column 3.
    mirrored = mirror_about_centroid(heatmap)
    assert (float(mirrored[4, 4]), float(mirrored[4, 1])) == (2, 1)


def test_a_class_is_verified_although_hidden_parts_harm_both_classes_alike(truth: torch.Tensor) -> None:
    evidence = make_evidence(truth)
    common = 20 * evidence.falls.std() * torch.randn(96, generator=torch.Generator().manual_seed(2)).double()
    findings = compare_near(truth, replace(evidence, falls=evidence.falls + common), GRID, {"b": (1, truth.flip(1))}, 0)
    assert findings.class_verified is True
    assert findings.resolution.name == "a third of the image"  # The falls of the class alone show nothing.


def test_evidence_agrees_with_a_loop_over_masks() -> None:
    weights = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(0)) / 20

    class Linear(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.einsum("nchw,kchw->nk", images, weights)

    images = torch.rand(1, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    evidence = measure_evidence(Subject(Linear(), images, 2), (8, 8), 0)
    blurred = fill_blur(images[0], images[0, 0] > 2, images)
    before = Linear()(images)[0].double().softmax(0).numpy()
    for number in (0, 41, 95):
        hidden = images.clone()[0]
        hidden[:, evidence.masks[number] > 0] = blurred[:, evidence.masks[number] > 0]
        after = Linear()(hidden[None])[0].double().softmax(0).numpy()
        odds_fall = np.log(before[2] / (1 - before[2])) - np.log(after[2] / (1 - after[2]))
        ratio_falls = [np.log(before[2] / before[k]) - np.log(after[2] / after[k]) for k in range(3)]
        assert float(evidence.falls[number]) == pytest.approx(odds_fall, abs=1e-5)
        assert evidence.ratio_falls[number].tolist() == pytest.approx(ratio_falls, abs=1e-5)
        assert abs(odds_fall) > 0.01


def test_the_t_of_a_difference_agrees_with_scipy() -> None:
    rng = np.random.default_rng(3)
    first, second, noise = rng.standard_normal((3, 96))
    second, falls = second + first, first + noise
    matrix = np.corrcoef([falls, first, second])
    expected = linregress(zscore(first) - zscore(second), falls)
    statistic = compute_difference_t(matrix[0, 1], matrix[0, 2], matrix[1, 2], 96)
    assert statistic == pytest.approx(expected.slope / expected.stderr)
    assert compute_difference_t(0.5, 0.5, 1.0, 96) == 0


def test_all_directions_of_a_displacement_must_be_refuted(truth: torch.Tensor) -> None:
    findings = compare_near(move(truth, 1 / 7, (0, 1)), make_evidence(truth), GRID, {}, 0)
    statistics = {control.name: control.statistic for control in findings.controls}
    assert statistics["left by one cell"] < 0 < statistics["right by one cell"]
    assert findings.resolution.name in ("two cells", "a third of the image")


def test_the_choice_of_near_classes_has_both_neighbours_and_no_duplicates() -> None:
    class Head(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean((2, 3)) @ torch.linspace(0, 1, 30).reshape(3, 10)

    subject = Subject(Head(), torch.ones(1, 3, 4, 4), 9)
    rivals = choose_rivals(subject, 0)
    assert rivals[0] == 8  # Its probability is the highest but one.
    assert len({*rivals, 9}) == 5
    assert choose_near_classes(subject, (8, 3, 4, 6)) == [8, 3, 4, 0]


def test_displacements_are_below_a_third() -> None:
    assert [(step.name, step.pixels) for step in list_displacements((224, 224), (7, 7))] == [
        ("an eighth of the image", 28),
        ("one cell", 32),
        ("two cells", 64),
    ]


def test_the_paired_test_rejects_equal_correlations_in_five_percent() -> None:
    rng, rejected, samples = np.random.default_rng(0), 0, 2000
    for _ in range(samples):
        common, first, second, noise = rng.standard_normal((4, 96))
        matrix = np.corrcoef([common + noise, common + first, common + second])
        rejected += compute_williams_t(matrix[0, 1], matrix[0, 2], matrix[1, 2], 96) > 1.661
    assert 0.035 <= rejected / samples <= 0.065
