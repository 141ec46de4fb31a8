"""Test methods as functions of a model, images and classes, under equal conditions."""

from __future__ import annotations

import pytest
import torch

import gradcam
from gradcam.errors import GradcamError, LayerError
from gradcam.evaluation import CONTROLS, Explainer
from gradcam.evaluation.heatmap_sources import find_explainable
from gradcam.targets import ClassTarget
from tests.helpers import TINY, assert_same, tiny_model, traces

CLASSES = torch.tensor([[0, 3], [4, 1], [2, 2]])


def explain(method: str, score: str = "logit", layer: str = "3") -> torch.Tensor:
    target = ClassTarget(CLASSES, score=score)
    return gradcam.explain(tiny_model(), TINY, layer, method=method, target=target).heatmaps


@pytest.mark.parametrize("score", ["logit", "probability", "contrast"])
def test_each_heatmap_is_what_explain_gives(score: str) -> None:
    names = ("layercam", "centre", "gradcam", "eigencam", "edges")
    explanation = Explainer(names, "3", score).explain(tiny_model(), TINY, CLASSES)
    assert tuple(explanation) == names
    for name in ("layercam", "gradcam", "eigencam"):
        expected = explain(name, score)
        assert explanation[name].shape == (3, 2, 12, 16)
        assert expected.max() == 1
        torch.testing.assert_close(explanation[name], expected)
    for name in ("centre", "edges"):
        for k in range(2):
            assert torch.equal(explanation[name][:, k], CONTROLS[name].make(TINY, 0))


def test_scores_make_a_difference() -> None:
    by_score = [
        Explainer(("gradcam",), "3", score).explain(tiny_model(), TINY, CLASSES)["gradcam"]
        for score in ("logit", "contrast")
    ]
    assert (by_score[0] - by_score[1]).abs().max() > 0.01


def test_a_method_with_a_score_of_its_own_keeps_it() -> None:
    finercam = gradcam.METHODS["finercam"]
    assert finercam.score is not None
    for score in ("logit", "probability"):
        explanation = Explainer(("gradcam", "finercam"), "3", score).explain(tiny_model(), TINY, CLASSES)
        torch.testing.assert_close(explanation["finercam"], explain("finercam"))
        torch.testing.assert_close(explanation["gradcam"], explain("gradcam", score))


def test_a_single_one_as_a_function_of_one_class_of_each_image() -> None:
    explainer = Explainer(("gradcam", "random"), "3", "contrast", seed=4)
    heatmaps = explainer.only("gradcam")(tiny_model(), TINY, CLASSES[:, 1])
    torch.testing.assert_close(heatmaps, explain("gradcam", "contrast")[:, 1])
    random_maps = explainer.only("random")(tiny_model(), TINY, CLASSES[:, 0])
    assert torch.equal(random_maps, CONTROLS["random"].make(TINY, 4))
    assert not torch.equal(random_maps, CONTROLS["random"].make(TINY, 0))


def test_a_model_that_is_changed_is_explained_as_it_is_now() -> None:
    alone = Explainer(("gradcam",), "3").only("gradcam")
    model = tiny_model()
    before = alone(model, TINY, CLASSES[:, 0])
    model[0].weight.data.neg_()
    assert not torch.allclose(before, alone(model, TINY, CLASSES[:, 0]))


def test_without_a_layer_only_methods_that_need_none_are_available() -> None:
    with pytest.raises(LayerError, match=r"layers is \[\], expected a list of at least one layer"):
        Explainer(("gradcam",), None).explain(tiny_model(), TINY, CLASSES)
    assert list(Explainer(("edges",), None).explain(tiny_model(), TINY, CLASSES)) == ["edges"]


@pytest.mark.slow
def test_methods_that_need_no_layer_take_none() -> None:
    explanation = Explainer(("rise", "constant"), "3").explain(tiny_model(), TINY[:1], CLASSES[:1])
    assert gradcam.METHODS["rise"].place != "layer"
    rise = gradcam.explain(tiny_model(), TINY[:1], method="rise", target=CLASSES[:1])
    torch.testing.assert_close(explanation["rise"], rise.heatmaps)


def test_controls_alone_do_not_run_the_model() -> None:
    explanation = Explainer(tuple(CONTROLS), "no such layer").explain(None, TINY, CLASSES)  # type: ignore[arg-type]
    assert list(explanation) == list(CONTROLS)


def test_single_pass_methods_share_one_pass() -> None:
    rows: list[int] = []
    model = tiny_model()
    model[0].register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    Explainer(("gradcam", "layercam", "hirescam", "centre"), "3").explain(model, TINY, CLASSES)
    # In the first batch, each image also runs alone, to check that the model treats the images independently.
    assert rows == [3, 1, 1, 1]


def test_options_reach_the_methods() -> None:
    calls: list[tuple[int, int]] = []
    options = {"progress": lambda count, total: calls.append((count, total))}
    Explainer(("ablationcam",), "3", options=options).explain(tiny_model(), TINY, CLASSES)
    assert calls[-1][0] == calls[-1][1]


def test_the_activation_reaches_the_score() -> None:
    explanation = Explainer(("gradcam",), "3", "probability", activation="sigmoid").explain(tiny_model(), TINY, CLASSES)
    target = ClassTarget(CLASSES, score="probability", activation="sigmoid")
    expected = gradcam.explain(tiny_model(), TINY, "3", target=target).heatmaps
    torch.testing.assert_close(explanation["gradcam"], expected)
    softmax = Explainer(("gradcam",), "3", "probability").explain(tiny_model(), TINY, CLASSES)
    assert (softmax["gradcam"] - expected).abs().max() > 0.01


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model().train()
    before = traces(model)
    Explainer(("gradcam", "edges"), "3").explain(model, TINY, CLASSES)
    assert_same(before, traces(model))


def test_an_unknown_layer() -> None:
    with pytest.raises(LayerError, match="There is no layer 'nothing'"):
        Explainer(("gradcam",), "nothing").explain(tiny_model(), TINY, CLASSES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gradcam", "gradcam"), ("GradCAM++", "gradcam-pp"), ("Edges", "edges"), ("chefer", "gradient-rollout")],
)
def test_names_in_the_forms_in_which_people_write_them(name: str, expected: str) -> None:
    assert find_explainable(name).name == expected


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(GradcamError, match=r"There is no method or control 'centr'\. Nearest: 'centre'"):
        find_explainable("centr")
    with pytest.raises(GradcamError, match=r"'gradcan'\. Nearest: 'gradcam'"):
        find_explainable("gradcan")
