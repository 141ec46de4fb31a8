"""Test custom methods: objects, files, installed packages, and the messages for wrong ones."""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradcam
from gradcam import plugins
from gradcam.errors import GradcamError
from tests.helpers import tiny_model

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MINE = """
import gradcam

@gradcam.method("mycam", summary="activations times positive gradients", signed=False)
def mycam(activations, gradients, *, power=1):
    return (activations[:, None] * gradients.clamp(min=0)).sum(2) ** power

def plain(activations, gradients):
    return gradients.sum(2)
"""


@gradcam.method("mycam", summary="activations times positive gradients")
def mycam(activations: Tensor, gradients: Tensor) -> Tensor:
    return (activations[:, None] * gradients.clamp(min=0)).sum(2)


def explain(method: Any, **options: Any) -> gradcam.Explanation:
    return gradcam.explain(tiny_model(), IMAGES, "4", method=method, **options)


@pytest.fixture
def method_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def test_a_custom_method_equals_its_formula() -> None:
    custom, layercam = explain(mycam, target=[[1, 2], [0, 3]]), explain("layercam", target=[[1, 2], [0, 3]])
    assert custom.method == "mycam"
    torch.testing.assert_close(custom.maps, layercam.maps)
    assert custom.maps.any()


def test_a_custom_method_shares_the_pass_of_other_methods() -> None:
    model, runs = tiny_model(), []
    model.register_forward_hook(lambda *_: runs.append(1))
    explanations = gradcam.compare(model, IMAGES, layers=["4"], methods=["gradcam", mycam])
    assert list(explanations) == [("4", "gradcam"), ("4", "mycam")]
    assert len(runs) == 1 + len(IMAGES)  # the first call also runs each image alone


def test_activations_alone_and_second_derivatives() -> None:
    @gradcam.method("mean", summary="the mean of the channels")
    def mean(activations: Tensor) -> Tensor:
        return activations.mean(1)

    @gradcam.method("half", summary="Shapley-CAM, written by a user", signed=True)
    def half(activations: Tensor, gradients: Tensor, curvatures: Tensor) -> Tensor:
        weights = (gradients - curvatures / 2).flatten(3).mean(3)
        return (activations[:, None] * weights[..., None, None]).sum(2)

    torch.testing.assert_close(explain(half, evidence="signed").maps, explain("shapleycam", evidence="signed").maps)
    assert explain(mean).maps.shape == explain("gradcam").maps.shape


def test_options_keep_two_of_one_name_apart(method_file: str) -> None:
    data = plugins.load_plugin("methods", f"{method_file}:mycam")
    explained = gradcam.compare(tiny_model(), IMAGES, layers=["4"], methods=[data, data.using(power=2)])
    plain, squared = explained["4", "mycam"], explained["4", "mycam-power=2"]
    torch.testing.assert_close(squared.maps, plain.maps.square())


def test_options_in_a_name_are_a_part_of_files_names() -> None:
    text = gradcam.method("text", summary="")(lambda activations, gradients, k="a": gradients.sum(2))
    explanations = gradcam.compare(tiny_model(), IMAGES, layers=["4"], methods=[text, text.using(k="../../b c")])
    assert [name for _, name in explanations] == ["text", "text-k=.._.._b_c"]
    with pytest.raises(GradcamError, match="text: k is .*expected a number, a string, True, False or None"):
        text.using(k=torch.zeros(2))


def test_rise_by_name_and_with_few_masks() -> None:
    few = gradcam.METHODS["rise"].using(masks=5)
    more = gradcam.METHODS["rise"].using(masks=9)
    explanations = gradcam.compare(tiny_model(), IMAGES, layers=["4"], methods=[few, more, "gradcam"])
    assert list(explanations) == [("4", "gradcam"), ("input", "rise"), ("input", "rise-masks=9")]
    torch.testing.assert_close(explanations["input", "rise-masks=9"].maps, explain(more).maps)
    assert not torch.equal(explanations["input", "rise"].maps, explanations["input", "rise-masks=9"].maps)


def test_a_method_of_a_file_and_of_a_package(method_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.testing.assert_close(explain(f"{method_file}:mycam").maps, explain(mycam).maps)
    install(tmp_path, monkeypatch, "mycam = mine:mycam\nbroken = nowhere:mycam\ngradcam = mine:mycam\n")
    torch.testing.assert_close(explain("mycam").maps, explain(mycam).maps)
    assert explain("gradcam").method == "gradcam", "what comes with gradcam keeps its name"
    with pytest.raises(GradcamError, match=r"broken \(nowhere:mycam of the package mine\) cannot be imported"):
        explain("broken")
    with pytest.raises(GradcamError, match="There is no method 'mycan'. Nearest: 'mycam'"):
        explain("mycan")
    install(tmp_path, monkeypatch, "mycam = other:mycam\n", "other")
    with pytest.raises(GradcamError, match="mycam is registered in .* by several packages, 'mine', 'other'"):
        explain("mycam")


def test_a_changed_file_is_another_method(method_file: str) -> None:
    first = plugins.load_plugin("methods", f"{method_file}:mycam")
    assert plugins.load_plugin("methods", f"{method_file}:mycam") is first
    before = plugins.fingerprint(first)
    Path(method_file).write_text(MINE.replace("sum(2)", "mean(2)"))
    second = plugins.load_plugin("methods", f"{method_file}:mycam")
    assert second is not first
    assert before["file"] == "mine.py"
    assert plugins.fingerprint(second) != before
    assert plugins.fingerprint(functools.partial(second.function, power=2)) == plugins.fingerprint(second)
    assert plugins.fingerprint(gradcam.METHODS["gradcam"]) is None


def test_two_files_of_one_name_are_two(method_file: str, tmp_path: Path) -> None:
    changed_file = tmp_path / "other" / "mine.py"
    changed_file.parent.mkdir()
    changed_file.write_text(MINE.replace("sum(2)", "mean(2)"))
    first, second = (plugins.load_plugin("methods", f"{file}:mycam") for file in (method_file, changed_file))
    assert plugins.fingerprint(first) != plugins.fingerprint(second)
    assert not torch.equal(explain(first).maps, explain(second).maps)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: str, package: str = "mine") -> None:
    """Create an installed package `mine` that registers these methods, as pip would leave it."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gradcam.methods]\n{entries}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(plugins, "_read_entry_points", entry_points)
    monkeypatch.setattr(plugins, "list_entry_points", inspect.unwrap(plugins.list_entry_points))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda activations, gradients: gradients,
            r"odd returned a tensor float32 \(2, 1, 6, .*expected float32 \(2, 1, ",
        ),
        (lambda activations, gradients: gradients.sum(2).double(), r"odd returned a tensor float64 .*expected float32"),
        (lambda activations, gradients: gradients.sum(2).to("meta"), r"odd returned .* on meta, expected .* on cpu"),
        (lambda activations, gradients: gradients.sum(2) / 0, "odd returned maps with NaN or infinite"),
        (lambda activations, gradients: gradients.sum(2).to_sparse(), "odd returned .* on cpu, sparse_coo, expected"),
        (lambda activations, gradients: None, "odd returned None, expected a tensor float32"),
        (lambda activations: activations, r"odd returned a tensor float32 \(2, 6, .*expected float32 \(2, 8"),
    ],
)
def test_a_wrong_map_of_a_method_is_an_error(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        explain(gradcam.method("odd", summary="odd")(function))


NO_METHODS: list[Any] = [
    lambda: 0, lambda gradients: 0, lambda activations, weights: 0, lambda *tensors: 0, 3,
    lambda activations, *, gradients: 0, lambda activations, gradients, p=2, /: 0,
]  # fmt: skip


@pytest.mark.parametrize("function", NO_METHODS)
def test_a_wrong_method_function_is_an_error(function: Any) -> None:
    with pytest.raises(GradcamError, match=r"odd (has the parameters|is 3, expected a function)"):
        gradcam.method("odd", summary="odd")(function)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gradcam", "A method named 'gradcam' already exists"), ("Grad-CAM++", "expected letters, digits"),
     ("a/b", "expected letters, digits"), ("gradcampp", "already"), ("", "expected letters"),
     (3, "name is 3, expected letters")],
)  # fmt: skip
def test_wrong_names_are_errors(name: Any, message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        gradcam.method(name, summary="odd")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", r"mine.py:plain is <function plain.*expected a function decorated with @gradcam.method"),
        ("nothing", "There is no 'nothing' in"),
    ],
)
def test_a_name_that_is_no_method_of_the_file_is_an_error(method_file: str, name: str, message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        explain(f"{method_file}:{name}")
    with pytest.raises(GradcamError, match="nowhere.py: does not exist"):
        explain(f"nowhere.py:{name}")


def test_two_methods_of_one_name_are_an_error() -> None:
    @gradcam.method("mycam", summary="another")
    def another_method(activations: Tensor, gradients: Tensor) -> Tensor:
        return gradients.sum(2)

    with pytest.raises(GradcamError, match="Two methods are named 'mycam'"):
        gradcam.compare(tiny_model(), IMAGES, layers=["4"], methods=[mycam, another_method])
