"""Test studies: an image's values do not depend on the other images, or on how often the study was interrupted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, ModelError, OutputError, TargetError
from gradcam.evaluation import CONTROLS, METRICS, Metric, Subject, Truth, evaluate
from gradcam.evaluation.explainers import Explainer
from gradcam.evaluation.metrics import DEFAULT_GROUPS
from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.plan import (
    SINGLE_PASS,
    StudyOptions,
    count_explanations,
    count_passes,
    describe_cost,
    make_plan,
)
from gradcam.evaluation.study.prepare import prepare_study
from gradcam.evaluation.study.results import Results, StudyEntry, compare_methods, describe_resizing
from gradcam.evaluation.study.run import MetricInputs, Study
from gradcam.evaluation.study.write import to_csv, to_json
from gradcam.evaluation.subject import derive_seed
from gradcam.sources.collect import list_inputs
from tests.colour_model import LABELS, load, paint, paint_all

Classifier = gradcam.Classifier
MonkeyPatch = pytest.MonkeyPatch
QUICK = ("average-drop", "complexity", "grid-mass", "insertion")


@pytest.fixture(scope="module")
def colours() -> Classifier:
    return load()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint_all(tmp_path_factory.mktemp("study") / "pictures")


def judge(classifier: Classifier, inputs: Any, **options: Any) -> Results:
    return evaluate(classifier, inputs, **{"methods": ["gradcam", "eigencam"], "metrics": QUICK, **options})


def numbers(results: Results, *, kind: str = "image") -> dict[tuple[str, str, str], float]:
    names = {entry.image for entry in results.entries if entry.kind == kind}
    return {
        (measurement.image, measurement.method, measurement.metric): measurement.value
        for measurement in results.measurements
        if measurement.image in names
    }


def prepare(classifier: Classifier, inputs: Any, plan: Any, **options: Any) -> Study:
    return prepare_study(classifier, list_inputs(inputs).items, plan, StudyOptions(**options))


# Values


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_to_the_last_digit(colours: Classifier, pictures: Path) -> None:
    metrics = [name for name in DEFAULT_GROUPS if name != "coherency"]
    first, second = (judge(colours, pictures, metrics=metrics, seed=3) for _ in range(2))
    assert to_csv(first) == to_csv(second)
    assert to_json(first) == to_json(second)
    assert len(first.measurements) == 6 * (7 * (len(metrics) - 2) + 7 * 2)


def test_another_seed_draws_other_controls_and_another_order_of_ties(colours: Classifier, pictures: Path) -> None:
    values, reseeded = (numbers(judge(colours, pictures, metrics=["insertion"], seed=seed)) for seed in (0, 1))
    changed = {
        method for (image, method, metric), measured in values.items() if measured != reseeded[image, method, metric]
    }
    assert {"random", "constant"} <= changed
    assert "centre" not in changed or values["0-red.png", "centre", "insertion"] == pytest.approx(
        reseeded["0-red.png", "centre", "insertion"], abs=0.02
    )


def test_each_picture_has_a_random_map_of_its_own(colours: Classifier, pictures: Path) -> None:
    study = prepare(colours, pictures, make_plan(["gradcam"], ["complexity"]))
    list(study.run())
    red, green = study.example_heatmaps["0-red.png"], study.example_heatmaps["1-green.png"]
    assert not torch.equal(red["random"], green["random"])
    assert torch.equal(red["centre"], green["centre"])


@pytest.mark.slow
def test_order_and_number_of_pictures_do_not_change_a_pictures_numbers(colours: Classifier, pictures: Path) -> None:
    metrics = ["insertion", "average-drop", "road"]
    everything = numbers(judge(colours, pictures, metrics=metrics))
    paths = sorted(pictures.iterdir(), reverse=True)
    backwards = judge(colours, paths, metrics=metrics)
    assert [entry.image for entry in backwards.entries] == [path.name for path in paths]
    assert numbers(backwards) == everything
    alone = numbers(judge(colours, paths[2], metrics=metrics))
    assert alone == {key: value for key, value in everything.items() if key[0] == paths[2].name}
    assert len(alone) == 6 * len(metrics)


def test_mosaics_do_not_depend_on_the_order_either(colours: Classifier, pictures: Path) -> None:
    forwards = judge(colours, pictures, metrics=["grid"])
    backwards = judge(colours, sorted(pictures.iterdir(), reverse=True), metrics=["grid"])
    assert numbers(forwards, kind="mosaic") == numbers(backwards, kind="mosaic") != {}


def test_a_pictures_name_does_not_change_its_numbers(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    shutil.copy(pictures / "0-red.png", tmp_path / "other name.png")
    original = judge(colours, pictures / "0-red.png", metrics=["insertion"])
    renamed = judge(colours, tmp_path / "other name.png", metrics=["insertion"])
    assert [measurement.value for measurement in original.measurements] == [
        measurement.value for measurement in renamed.measurements
    ]
    assert original.data == renamed.data


@pytest.mark.slow
def test_numbers_are_those_of_the_metrics_own_functions(colours: Classifier, pictures: Path) -> None:
    """Read, explain and evaluate an image by hand, without the code of the study."""
    from gradcam.evaluation import adcc, coherency, complexity, confidence_change, deletion, insertion, sufficiency

    results = judge(colours, pictures, metrics=["perturbation", "summary"], methods=["hirescam"], seed=5)
    values = numbers(results)
    path = pictures / "2-blue.png"
    (entry,) = [entry for entry in results.entries if entry.image == path.name]
    seed = derive_seed(5, entry.sha256)
    images = colours.prepare(path).image[None]
    subject = Subject(colours.model, images)
    assert (entry.index, entry.label, entry.probability) == (2, "blue", float(subject.probabilities))
    heatmaps = gradcam.explain(colours.model, images, "relu", method="hirescam", target=2).heatmaps[:, 0]

    def explain(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return gradcam.explain(model, images, "relu", method="hirescam", target=classes).heatmaps[:, 0]

    change, coherencies = confidence_change(subject, heatmaps), coherency(subject, heatmaps, explain)
    complexities = complexity(heatmaps)
    expected = {
        "average-drop": change.drop, "increase": change.increase, "average-gain": change.gain,
        "insertion": insertion(subject, heatmaps, seed=seed).areas,
        "deletion": deletion(subject, heatmaps, seed=seed).areas,
        "sufficiency": sufficiency(subject, heatmaps, seed=seed), "coherency": coherencies,
        "complexity": complexities, "adcc": adcc(change.drop, coherencies, complexities),
    }  # fmt: skip
    for metric, value in expected.items():
        assert values[path.name, "hirescam", metric] == float(value), metric
    curve = insertion(subject, heatmaps, seed=seed).probabilities[0].tolist()
    assert entry.curves["hirescam"]["insertion"] == curve
    assert "average-drop" not in entry.curves["hirescam"]


def test_grid_numbers_are_means_over_a_mosaics_four_classes(colours: Classifier, pictures: Path) -> None:
    study = prepare(colours, pictures, make_plan(["gradcam"], ["grid"]))
    entries = [entry for entry in study.run() if entry.kind == "mosaic"]
    (_, mosaic, _), entry = study.compositions[0], entries[0]
    assert entry.image == " + ".join(mosaic.names)
    assert entry.label == " + ".join(LABELS[index] for index in mosaic.classes)
    assert mosaic.image.shape == (3, 64, 64)
    heatmaps = gradcam.explain(colours.model, mosaic.image[None], "relu", target=[list(mosaic.classes)]).heatmaps[0]
    cells = [(slice(0, 32), slice(0, 32)), (slice(0, 32), slice(32, 64)), (slice(32, 64), slice(0, 32))]
    cells.append((slice(32, 64), slice(32, 64)))
    mass = [float(heatmaps[k][cell].sum() / heatmaps[k].sum()) for k, cell in enumerate(cells)]
    assert entry.values["gradcam"]["grid-mass"] == pytest.approx(sum(mass) / 4, abs=1e-6)
    assert entry.values["gradcam"]["grid-mass"] > 0.95
    inside = [heatmaps[k][cell].flatten() for k, cell in enumerate(cells)]
    outside = [
        torch.cat([heatmaps[k][other_cell].flatten() for other_cell in cells if other_cell != cell])
        for k, cell in enumerate(cells)
    ]
    order = [float(((a[:, None] > b) + (a[:, None] == b) / 2).mean()) for a, b in zip(inside, outside)]
    assert entry.values["gradcam"]["grid-order"] == pytest.approx(sum(order) / 4, abs=1e-6)
    assert entry.values["constant"] == {"grid-order": 0.5, "grid-mass": 0.25, "grid-maximum": 0.25}


def test_metrics_of_one_function_are_told_apart(colours: Classifier, pictures: Path) -> None:
    from gradcam.evaluation import adcc, coherency, complexity, confidence_change, localisation

    subject = Subject(colours.model, colours.prepare(pictures / "0-red.png").image[None])
    truth = Truth(torch.ones(1, 32, 32, dtype=torch.bool), [torch.tensor([[0.0, 0.0, 20.0, 32.0]])])
    heatmaps = torch.linspace(0, 1, 32 * 32).reshape(1, 32, 32)
    explain = Explainer(["gradcam"], "relu").only("gradcam")
    change, localised = confidence_change(subject, heatmaps), localisation(heatmaps, truth.boxes)
    parts = [change.drop, coherency(subject, heatmaps, explain), complexity(heatmaps)]
    expected = {"average-drop": change.drop, "increase": change.increase, "average-gain": change.gain}
    expected |= {"iou": localised.iou, "localisation-error": localised.errors, "adcc": adcc(*parts)}
    case = MetricInputs(subject=subject, heatmaps=heatmaps, explain=explain, masks=truth.masks, boxes=truth.boxes)
    measured = case.measure([METRICS[name] for name in expected])
    assert measured == {name: float(value) for name, value in expected.items()}


def test_every_metric_of_the_table_has_its_function() -> None:
    for metric in METRICS.values():
        assert callable(metric.compute)
        assert metric.is_of_mosaics == (metric.group == "grid")
        assert metric.needs_annotations == (metric.group == "annotations")


def test_what_metrics_share_is_counted_once() -> None:
    plan = make_plan(["gradcam"], ["average-drop", "increase", "average-gain", "adcc", "insertion"])
    assert (count_passes(plan), count_explanations(plan)) == (1 + 49, 1 + 1)
    everything = make_plan(["gradcam"], ["all"], has_annotations=True)
    assert (count_passes(everything), count_explanations(everything)) == (49 + 49 + 18 + 1 + 1, 1 + 1 + 1 + 8 + 10)


def test_the_cost_is_described_with_its_numbers_and_the_expensive_methods() -> None:
    plan = make_plan(["gradcam", "rise"], ["insertion"], controls=["edges"])
    passes = count_passes(plan)
    first, second = describe_cost(plan, 1, 0)
    assert f"{len(plan.names)} heatmaps x {passes} forward passes x 1 image =" in first
    assert f"= {len(plan.names) * passes:,} forward passes" in first
    assert "rise" in second
    assert "gradcam" not in second
    (line,) = describe_cost(make_plan(["gradcam"], ["insertion"], controls=[]), 5, 3)
    assert line.startswith(f"Cost: 1 heatmap x {passes} forward passes x 5 images")
    assert "1 for each of the 3 mosaics" in line


def test_a_metric_that_returns_no_number_is_an_error() -> None:
    nothing = Metric("nothing", "nan", "lower", "own", None, lambda heatmaps: heatmaps.sum((1, 2)) / 0, ("heatmaps",))
    with pytest.raises(GradcamError, match="nothing is nan"):
        MetricInputs(heatmaps=torch.zeros(1, 4, 4)).measure([nothing])


def test_predictions_are_computed_once_for_all(colours: Classifier, pictures: Path, monkeypatch: MonkeyPatch) -> None:
    shapes = []
    original = Subject.__init__

    def count(self: Subject, *arguments: Any, **options: Any) -> None:
        shapes.append(arguments[1].shape)
        original(self, *arguments, **options)

    monkeypatch.setattr(Subject, "__init__", count)
    study = prepare(colours, pictures, make_plan(["single-pass"], ["complexity"]))
    shapes.clear()
    assert len(list(study.run())) == 7
    assert shapes == [(1, 3, 32, 32)] * 7


def test_all_single_pass_methods_share_one_pass(colours: Classifier, pictures: Path) -> None:
    """Each image takes one pass for its probabilities, and one for all maps."""
    study = prepare(colours, pictures, make_plan([*SINGLE_PASS], ["complexity"]))
    passes = []
    handle = colours.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        list(study.run())
    finally:
        handle.remove()
    assert len(passes) == 2 * 7


# Explained classes


def test_the_class_is_the_most_probable_or_the_asked_one(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    top = judge(colours, pictures, metrics=["complexity"])
    assert [entry.label for entry in top.entries] == [LABELS[k] for k in (0, 1, 2, 3, 4, 0, 1)]
    assert top.conditions.target == "the most probable class"
    blue = judge(colours, pictures, metrics=["complexity"], target="blue")
    assert {entry.index for entry in blue.entries} == {2}
    assert blue.conditions.target == "blue (2)"
    assert judge(colours, pictures, metrics=["complexity"], target=2).measurements == blue.measurements
    listed = tmp_path / "list.csv"
    listed.write_text(f"image,class\n{pictures}/0-red.png,cyan\n{pictures}/1-green.png,\n")
    results = judge(colours, listed, metrics=["complexity"])
    assert [entry.label for entry in results.entries] == ["cyan", "green"]
    assert results.conditions.target == "the class in the list, or the most probable one"
    with pytest.raises(GradcamError, match="The list already contains the classes to explain"):
        judge(colours, listed, target="red")


def test_with_annotations_it_is_the_most_probable_of_those(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    boxes = tmp_path / "boxes.csv"
    boxes.write_text(
        "image,left,top,right,bottom,class\n"
        "0-red.png,2,2,38,34,red\n0-red.png,2,2,38,34,blue\n"
        "1-green.png,4,4,20,20,cyan\n2-blue.png,4,4,20,20,\n"
    )
    results = judge(colours, pictures, annotations=boxes, metrics=["energy-pointing", "complexity"])
    entries = {entry.image: entry for entry in results.entries}
    assert [entries[name].label for name in ("0-red.png", "1-green.png", "2-blue.png")] == ["red", "cyan", "blue"]
    # The network sees columns 2 to 38 of the 36 rows, as 32 x 32. In its pixels the box has 28 rows and all columns.
    assert entries["0-red.png"].values["constant"]["energy-pointing"] == 28 / 32
    assert "energy-pointing" not in entries["3-yellow.png"].values["gradcam"]
    assert entries["3-yellow.png"].label == "yellow"
    assert len(results.values("gradcam", "energy-pointing")) == 3
    assert len(results.values("gradcam", "complexity")) == 7
    assert results.conditions.target == "the most probable annotated class"
    assert results.conditions.annotations is not None


def test_a_limit_takes_pictures_by_the_seed_and_a_larger_one_those_too(colours: Classifier, pictures: Path) -> None:
    def list_limited(limit: int | None, seed: int = 0) -> list[str]:
        study = prepare(colours, pictures, make_plan(["gradcam"], ["complexity"]), limit=limit, seed=seed)
        return [item.name for item in study.items]

    everything = list_limited(None)
    assert list_limited(7) == list_limited(100) == everything
    assert len(list_limited(3)) == 3
    assert set(list_limited(3)) < set(list_limited(5)) < set(everything)
    assert list_limited(5) == [name for name in everything if name in list_limited(5)]
    assert len({tuple(list_limited(3, seed)) for seed in range(5)}) > 1


def test_methods_with_their_own_score_stand_beside_the_asked_score(colours: Classifier, pictures: Path) -> None:
    options: Any = {"methods": ["gradcam", "finercam"], "metrics": ["complexity"], "score": "contrast"}
    results = judge(colours, pictures / "0-red.png", **options)
    assert results.conditions.score == "contrast"
    assert {measurement.method for measurement in results.measurements} == {"gradcam", "finercam", *CONTROLS}


# Failures


def test_unreadable_pictures_are_named_the_rest_is_done(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    shutil.copytree(pictures, folder)
    (folder / "3-broken.png").write_bytes((folder / "0-red.png").read_bytes()[:60])
    expected, partial = judge(colours, pictures), judge(colours, folder)
    (failed,) = partial.failures
    assert failed.image == "3-broken.png"
    assert failed.error is not None
    assert failed.error.startswith("3-broken.png: ")
    assert partial.measurements == expected.measurements
    assert partial.data == expected.data


def test_a_picture_whose_maps_fail_is_named_too(colours: Classifier, pictures: Path, monkeypatch: MonkeyPatch) -> None:
    original = Explainer.explain

    def fail(self: Explainer, model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> Any:
        if int(classes[0, 0]) == 2 and len(self.names) > 1:
            raise RuntimeError("no luck")
        return original(self, model, images, classes)

    monkeypatch.setattr(Explainer, "explain", fail)
    results = judge(colours, pictures, metrics=["complexity"])
    assert [entry.image for entry in results.failures] == ["2-blue.png"]
    assert "2-blue.png: RuntimeError: no luck" in str(results.failures[0].error)
    assert len(results.judged()) == 6


def test_grid_metrics_without_four_classes_are_left_out_unless_named(colours: Classifier, pictures: Path) -> None:
    few = [pictures / name for name in ("0-red.png", "1-green.png", "2-blue.png", "5-red.png")]
    study = prepare(colours, few, make_plan(["gradcam"]))
    assert study.plan.metrics == tuple(name for name in DEFAULT_GROUPS if METRICS[name].group != "grid")
    (note,) = study.notes
    assert note.startswith("grid-order, grid-mass and grid-maximum are left out: ")
    assert study.compositions == []
    assert "grid-mass" not in prepare(colours, few, make_plan(["gradcam"], ["all"])).plan.metrics
    for metrics in (["grid-mass"], ["grid"], ["all", "grid-maximum"]):
        with pytest.raises(GradcamError, match="of four"):
            prepare(colours, few, make_plan(["gradcam"], metrics))


def test_metrics_that_need_annotations_say_so_when_they_are_named() -> None:
    for metrics in (["iou"], ["annotations"], ["all", "pointing-game"]):
        with pytest.raises(GradcamError, match=r"annotations of the objects: give --annotations PATH"):
            make_plan(["gradcam"], metrics)
    everything = make_plan(["gradcam"], ["all"]).metrics
    assert everything == tuple(name for name, entry in METRICS.items() if entry.group != "annotations")
    with_them = make_plan(["gradcam"], has_annotations=True).metrics
    assert with_them == tuple(
        name for name in METRICS if name in DEFAULT_GROUPS or METRICS[name].group == "annotations"
    )


def test_methods_and_metrics_by_name_and_by_group() -> None:
    plan = make_plan(["grad-cam++", "LayerCAM", "edges"], ["summary", "Deletion"], controls=["constant"])
    assert plan.methods == ("gradcam-pp", "layercam")
    assert plan.controls == ("edges", "constant")
    assert plan.metrics == ("deletion", "adcc", "coherency", "complexity")
    assert make_plan(["all"]).methods == tuple(METHODS)
    assert make_plan(["single-pass"]).methods == SINGLE_PASS
    assert {"gradcam", "shapleycam", "eigencam"} < set(SINGLE_PASS)
    assert not {"scorecam", "rise", "rollout", "ablationcam"} & set(SINGLE_PASS)
    assert make_plan(["gradcam"], controls=[]).controls == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["gradcan"]}, "no method or control 'gradcan'.*'gradcam'"), ({"limit": True}, "limit is True"),
        ({"methods": []}, "methods is .*expected a list of at least one name"), ({"seed": 1.5}, "seed is 1.5"),
        ({"methods": "gradcam"}, "methods is 'gradcam', expected a list"), ({"layer": "nowhere"}, "nowhere"),
        ({"metrics": ["insertoin"]}, "no metric 'insertoin'.*'insertion'"),
        ({"metrics": []}, "metrics is .*expected a list"), ({"target": 1.5}, "target is 1.5, expected one class"),
        ({"controls": ["noise"]}, "controls is .*expected a list of some of 'random'"),
        ({"score": "loss"}, "score is 'loss', expected one of logit"),
        ({"limit": 0}, "limit is 0, expected an integer, 1 or more"),
        ({"seed": -1}, "seed is -1, expected an integer, 0 or more"),
    ],
)  # fmt: skip
def test_invalid_options(colours: Classifier, pictures: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradcamError, match=f"(?s){message}"):
        judge(colours, pictures, **options)


def test_an_unknown_class(colours: Classifier, pictures: Path) -> None:
    for target in ("violet", 5, -1):
        with pytest.raises(TargetError):
            judge(colours, pictures, target=target)


def test_methods_that_a_model_cannot_have_are_left_out_unless_named(colours: Classifier, pictures: Path) -> None:
    attention = {name for name, method in METHODS.items() if method.place in ("attention", "text")}
    study = prepare(colours, pictures, make_plan(["all"], ["complexity"]))
    assert set(study.plan.methods) == set(METHODS) - attention
    assert sorted(note.split()[0] for note in study.notes) == sorted(attention)
    with pytest.raises(ModelError, match="rollout cannot be used with this model"):
        prepare(colours, pictures, make_plan(["gradcam", "rollout"], ["complexity"]))


def test_the_conditions_are_recorded(colours: Classifier, pictures: Path) -> None:
    conditions = judge(colours, pictures, metrics=["complexity"], seed=4).conditions
    assert (conditions.layer, conditions.score, conditions.seed, conditions.device) == ("relu", "logit", 4, "cpu")
    assert conditions.resizing == "shorter side to 32, centre crop 32 x 32, bilinear"
    assert conditions.versions["gradcam"] == gradcam.__version__
    assert conditions.versions["torch"] == torch.__version__
    whole_image = replace(colours.preprocess, resize=(32, 32))  # type: ignore[type-var]
    assert describe_resizing(whole_image) == "whole image to 32 x 32, bilinear"
    resized = describe_resizing(replace(whole_image, resize=(40, 48)))
    assert resized == "whole image to 40 x 48, centre crop 32 x 32, bilinear"
    assert describe_resizing(len) == "preprocessed by builtin_function_or_method"


def test_the_hash_of_the_data_ignores_names(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    original = judge(colours, pictures, metrics=["complexity"])
    for path in pictures.iterdir():
        (tmp_path / "same").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "same" / f"x{path.name}")
    copied = judge(colours, tmp_path / "same", metrics=["complexity"])
    assert copied.data == original.data
    paint(tmp_path / "same" / "x0-red.png", 0, seed=99)
    assert judge(colours, tmp_path / "same", metrics=["complexity"]).data != original.data
    assert judge(colours, pictures, metrics=["complexity"], limit=6).data != original.data


# Resuming


def stop_after(study: Study, journal: Journal, count: int) -> None:
    entries = study.run(journal)
    for _ in range(count):
        next(entries)
    entries.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_a_resumed_study_equals_an_uninterrupted_one_to_the_last_digit(
    colours: Classifier, pictures: Path, tmp_path: Path, count: int, monkeypatch: MonkeyPatch
) -> None:
    plan = make_plan(["gradcam", "eigencam"], QUICK)
    uninterrupted = judge(colours, pictures)
    study = prepare(colours, pictures, plan)
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, study.conditions.to_run(7), mode="new") as journal:
        stop_after(study, journal, count)
    with open(path, "ab") as file:
        file.write(b'{"image": "half a li')
    explained = []
    original = Explainer.explain
    monkeypatch.setattr(
        Explainer, "explain", lambda self, *inputs: explained.append(len(self.names)) or original(self, *inputs)
    )
    resumed = judge(colours, pictures, journal=path)
    assert (to_csv(resumed), to_json(resumed)) == (to_csv(uninterrupted), to_json(uninterrupted))
    assert [entry.curves for entry in resumed.entries] == [entry.curves for entry in uninterrupted.entries]
    assert explained.count(6) == 14 - count  # the images and mosaics that were not in the journal
    explained.clear()
    assert to_csv(judge(colours, pictures, journal=path)) == to_csv(uninterrupted)
    assert explained.count(6) == 0
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_failed_or_changed_picture_is_judged_again(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    folder, path = tmp_path / "pictures", tmp_path / "journal.jsonl"
    shutil.copytree(pictures, folder)
    good = (folder / "4-cyan.png").read_bytes()
    (folder / "4-cyan.png").write_bytes(good[:50])
    paint(folder / "0-red.png", 0, seed=77)
    first = judge(colours, folder, metrics=["insertion"], journal=path)
    assert [entry.image for entry in first.failures] == ["4-cyan.png"]
    shutil.copy(pictures / "4-cyan.png", folder)
    shutil.copy(pictures / "0-red.png", folder)
    assert to_csv(judge(colours, folder, metrics=["insertion"], journal=path)) == to_csv(
        judge(colours, pictures, metrics=["insertion"])
    )


def test_a_picture_that_failed_is_tried_again_although_it_is_the_same(
    colours: Classifier, pictures: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no luck")

    path, picture = tmp_path / "journal.jsonl", pictures / "0-red.png"
    with monkeypatch.context() as patch:
        patch.setitem(METRICS, "insertion", replace(METRICS["insertion"], function=fail))
        first = judge(colours, picture, metrics=["insertion"], journal=path)
    assert [entry.error is None for entry in first.entries] == [False]
    again = judge(colours, picture, metrics=["insertion"], journal=path)
    assert to_csv(again) == to_csv(judge(colours, picture, metrics=["insertion"]))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"seed": 1}, "seed: 0 → 1"), ({"methods": ["gradcam"]}, "methods: "),
        ({"metrics": ["complexity"]}, "metrics: "), ({"score": "probability"}, "score: logit → probability"),
        ({"target": "red"}, "target: the most probable class → red"), ({"layer": "cells"}, "layer: relu → cells"),
    ],
)  # fmt: skip
def test_a_journal_of_other_settings_is_refused(
    colours: Classifier, pictures: Path, tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    path = tmp_path / "journal.jsonl"
    judge(colours, pictures / "0-red.png", metrics=["insertion"], journal=path)
    before = path.read_bytes()
    with pytest.raises(OutputError, match=name):
        judge(colours, pictures / "0-red.png", **{"metrics": ["insertion"], "journal": path, **options})
    assert path.read_bytes() == before


def test_a_journal_of_other_weights_is_refused(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    judge(colours, pictures / "0-red.png", metrics=["complexity"], journal=path)
    changed = load()
    with torch.no_grad():
        changed.model.cells.bias[0] += 1e-3  # type: ignore[operator,union-attr,index]
    with pytest.raises(OutputError, match="weights"):
        judge(changed, pictures / "0-red.png", metrics=["complexity"], journal=path)


def test_a_journal_of_another_layout_is_refused_and_an_earlier_one_has_none(
    colours: Classifier, pictures: Path, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    judge(colours, pictures / "0-red.png", metrics=["complexity"], journal=path)
    first, *entries = path.read_text().splitlines(keepends=True)
    run = json.loads(first)
    assert run["resolved"] == {"layouts": {"relu": "channels first"}, "output": None}
    for resolved in ({"layouts": {"relu": "channels last"}}, {"output": "logits"}):
        path.write_text("".join([json.dumps(run | {"resolved": resolved}) + "\n", *entries]))
        with pytest.raises(
            OutputError, match=r"(channels last → channels first|logits → null)\. Give the same settings"
        ):
            judge(colours, pictures / "0-red.png", metrics=["complexity"], journal=path)
    del run["resolved"]
    path.write_text("".join([json.dumps(run) + "\n", *entries]))
    judge(colours, pictures / "0-red.png", metrics=["complexity"], journal=path)


def test_a_journal_of_a_list_has_the_words_of_earlier_versions(
    colours: Classifier, pictures: Path, tmp_path: Path
) -> None:
    """Resuming a study compares these words."""
    listed, path = tmp_path / "list.csv", tmp_path / "journal.jsonl"
    listed.write_text(f"path,class\n{pictures / '0-red.png'},0\n")
    judge(colours, listed, metrics=["complexity"], journal=path)
    run = json.loads(path.read_text().splitlines()[0])
    assert run["settings"]["target"] == "the class that the list asks for, or the most probable one"
    judge(colours, listed, metrics=["complexity"], journal=path)


def test_a_journal_that_is_none_or_in_use_or_in_the_way(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    run = judge(colours, pictures / "0-red.png", metrics=["complexity"]).conditions.to_run(1)
    path.write_text("not a journal\n")
    with pytest.raises(OutputError, match="is not a results file of this gradcam version"):
        Journal.open(path, run)
    with pytest.raises(OutputError, match=r"--resume.*--overwrite"):
        Journal.open(path, run, mode="new")
    with (
        Journal.open(path, run, mode="overwrite") as journal,
        pytest.raises(OutputError, match="is in use by another process"),
    ):
        Journal.open(path, run)
    assert path.read_bytes().count(b"\n") == 1
    with Journal.open(path, run) as journal:
        journal.append(StudyEntry("a.png", sha256="ab", values={"gradcam": {"iou": 0.1}}))
    path.write_bytes(path.read_bytes() + b'{"image": 3}\n')
    with pytest.raises(OutputError, match="line 3: it is not a complete entry"):
        Journal.open(path, run)


def test_entries_are_read_back_to_the_last_digit() -> None:
    entry = StudyEntry(
        "ä\udce9.png", "mosaic", "ab" * 32, None, 3, "a, b", 1 / 3,
        {"gradcam": {"iou": 0.1 + 0.2}}, {"gradcam": {"insertion": [1e-45, 2 / 3]}},
    )  # fmt: skip
    assert StudyEntry.from_json(entry.to_json()) == entry
    assert "\n" not in entry.to_json()
    with pytest.raises(GradcamError, match="not a complete entry"):
        StudyEntry.from_json('{"image": "a"}')


def test_progress_is_reported_map_by_map(colours: Classifier, pictures: Path, tmp_path: Path) -> None:
    messages: list[tuple[int, int]] = []
    (tmp_path / "broken.png").write_text("no picture")
    inputs = [tmp_path / "broken.png", pictures / "0-red.png"]
    judge(colours, inputs, metrics=["complexity"], progress=lambda count, total: messages.append((count, total)))
    assert messages == [(step, 12) for step in range(6, 13)]


def test_corloc_chooses_thresholds_on_the_other_half_also_when_resumed(
    colours: Classifier, pictures: Path, tmp_path: Path
) -> None:
    boxes = tmp_path / "boxes.csv"
    names = sorted(path.name for path in pictures.iterdir())
    rows = [f"{name},{8 + number},4,{30 - number},{34 - 3 * number}" for number, name in enumerate(names)]
    boxes.write_text("\n".join(["image,left,top,right,bottom", *rows]))
    options: Any = {"annotations": boxes, "metrics": ["corloc", "iou"], "journal": tmp_path / "journal.jsonl"}
    results = judge(colours, pictures, **options)
    entries = sorted(results.entries, key=lambda entry: str(entry.sha256))
    for method in ("gradcam", "eigencam", "centre"):
        iou = np.array([entry.curves[method]["corloc"] for entry in entries])
        assert iou.shape == (len(names), 19)
        for half in (0, 1):
            other = iou[1 - half :: 2]
            scores = [((column >= 0.5).sum(), round(column.mean(), 9)) for column in other.T]
            best = {t for t, score in enumerate(scores) if score == max(scores)}
            hits = [entry.values[method]["corloc"] for entry in entries[half::2]]
            assert any(hits == (iou[half::2, t] >= 0.5).tolist() for t in best)
    again = judge(colours, pictures, **options)
    assert [entry.values for entry in again.entries] == [entry.values for entry in results.entries]
    hits = results.values("gradcam", "corloc")
    assert {*hits} <= {0, 1}
    interval = compare_methods(results)["gradcam", "corloc"].interval
    assert (interval.n, interval.mean) == (len(names), pytest.approx(sum(hits) / len(names)))
