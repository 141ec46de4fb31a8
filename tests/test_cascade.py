"""Test that the cascading randomisation of Adebayo et al. (NeurIPS 2018) repeats on two photographs."""

import runpy
from pathlib import Path
from typing import Any

import pytest

import gradcam
from gradcam.evaluation import Subject

ROOT = Path(__file__).parent.parent
TOP, ALL = 0, 1  # stages: only the top layer is shuffled, and all layers are shuffled


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "cascade"))


@pytest.fixture(scope="module")
def cascade(script: dict[str, Any]) -> Any:
    """Return the result for two photographs, after the top layer and after all layers."""
    classifier = gradcam.load_classifier(device="cpu")
    images = classifier.batch([ROOT / "assets" / name for name in ("chelsea.jpg", "koala.webp")])
    experiment = script["Experiment"](
        "two photographs", Subject(classifier.model, images), script["list_methods"]("layer4")
    )
    return script["run_cascade"](experiment, stages=2, seeds=1)


@pytest.mark.parametrize("kind", ["absolute", "signed"])
def test_gradcam_changes_with_the_top_layer_and_guided_backpropagation_does_not(cascade: Any, kind: str) -> None:
    assert cascade.layers == ["head.3", "stem.0.0"]
    assert cascade.intervals["guided backpropagation", kind][TOP].mean > 0.9
    assert abs(cascade.intervals["Grad-CAM", kind][TOP].mean) < 0.6
    assert all(abs(cascade.intervals[name, kind][ALL].mean) < 0.5 for name in ("guided backpropagation", "gradient"))


def test_absolute_values_of_the_gradient_change_less_than_signed_values(cascade: Any) -> None:
    absolute, signed = (cascade.intervals["gradient", kind][TOP].mean for kind in ("absolute", "signed"))
    assert absolute > 0.3 > signed


def test_the_table_and_the_figure_have_all_methods_and_layers(
    script: dict[str, Any], cascade: Any, tmp_path: Path
) -> None:
    header, _, *rows = script["format_table"](cascade, "signed").splitlines()
    assert header == "| randomised down to | Grad-CAM | gradient | guided backpropagation | guided Grad-CAM |"
    assert [row.split(" | ")[0] for row in rows] == ["| head.3", "| stem.0.0"]
    files = [tmp_path / name for name in ("first.svg", "second.svg")]
    for file in files:
        script["draw"]([cascade], file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert b"</svg>" in files[0].read_bytes()
