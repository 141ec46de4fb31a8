"""Check that the default layer is cached for later images, and searched for again when the model changes."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamWarning
from gradcam.targets import ClassTarget
from tests.helpers import FunctionModule

PASSES: list[int] = []  # the batch size of each forward pass
HIDDEN = {"deep": True}  # global state that no setting of the model reveals


class Net(nn.Module):
    """A network whose last layer with a grid is `b` if `is_deep` returns True, and `a` otherwise."""

    def __init__(self, is_deep: Callable[[Any, Tensor], bool] = lambda self, images: self.deep) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3)
        self.head = nn.Linear(6, 5)
        self.deep, self.config, self._is_deep = True, SimpleNamespace(deep=True), is_deep

    def forward(self, images: Tensor) -> Tensor:
        PASSES.append(len(images))
        grid = self.a(self.stem(images).relu()).relu()
        if self._is_deep(self, images):
            grid = self.b(grid).relu()
        return self.head(grid.mean((2, 3)))


def images(side: int = 16, value: float = 0.0) -> Tensor:
    return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1)) + value


def make(is_deep: Callable[[Any, Tensor], bool] = lambda self, images: self.deep) -> Net:
    torch.manual_seed(0)
    return Net(is_deep).eval()


def test_the_search_runs_once_for_each_image_shape() -> None:
    model, passes = make(), []
    for batch, target in ((images(), None), (images(), 3), (images(20), 3), (images(20), [1, 2]), (images(), 3)):
        PASSES.clear()
        explanation = gradcam.explain(model, batch, target=target)
        passes.append(list(PASSES))
        named_explanation = gradcam.explain(model, batch, "b", target=target)
        assert explanation.layer == "b"
        assert torch.equal(explanation.maps, named_explanation.maps)
        assert torch.equal(explanation.scores, named_explanation.scores)
    # The search runs one image; then come the explanation's own pass, a pass with changed images, and each image alone.
    assert passes == [[1, 2, 2, 1, 1], [2], [1, 2, 2, 1, 1], [2], [2]]


def test_only_the_latest_image_sizes_stay_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    answers_per_size = 3  # three cached values: the layer, its layout, and whether images depend on one another
    monkeypatch.setattr("gradcam.hooks.model_facts.MAX_CACHED_VALUES", 8 * answers_per_size)
    model, passes = make(), []
    for side in (*range(16, 25), 24, 16):
        PASSES.clear()
        gradcam.explain(model, images(side), target=3)
        passes.append(len(PASSES))
    assert passes == [5] * 9 + [1, 5]


def run_without_b(model: Net, images: Tensor) -> Tensor:
    return model.head(model.a(model.stem(images).relu()).mean((2, 3)))


def skip_by_another_module(model: Net) -> None:
    model.b = nn.Flatten(2).eval()  # type: ignore[assignment]
    model._is_deep = lambda self, images: False


CHANGES: list[tuple[Callable[[Any, Tensor], bool], Callable[[Any], object]]] = [
    (lambda self, images: self.deep, lambda model: setattr(model, "deep", False)),
    (lambda self, images: self.config.deep, lambda model: setattr(model.config, "deep", False)),
    (lambda self, images: self.deep, lambda model: setattr(model, "forward", partial(run_without_b, model))),
    (lambda self, images: self.deep, skip_by_another_module),
    (lambda self, images: HIDDEN["deep"], lambda model: HIDDEN.update(deep=False)),
    (lambda self, images: self.deep, lambda model: model.b.register_forward_hook(lambda module, args, output: args[0])),
]


@pytest.mark.parametrize(("is_deep", "change"), CHANGES)
def test_a_changed_model_is_searched_again(
    is_deep: Callable[[Any, Tensor], bool], change: Callable[[Net], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HIDDEN, "deep", True)
    model = make(is_deep)
    before = gradcam.explain(model, images(), target=3)
    assert before.layer == "b"
    change(model)
    fresh = make(is_deep)
    change(fresh)
    expected = gradcam.explain(fresh, images(), target=3)
    for _ in range(2):
        explanation = gradcam.explain(model, images(), target=3)
        assert explanation.layer == expected.layer
        assert torch.equal(explanation.maps, expected.maps)


def test_a_class_that_is_patched_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    assert gradcam.explain(model, images(), target=3).layer == "b"
    monkeypatch.setattr(Net, "forward", run_without_b)
    assert gradcam.explain(model, images(), target=3).layer == "a"


def test_an_image_on_another_path_is_noticed() -> None:
    model = make(lambda self, images: bool(images.mean() < 1))
    layers, passes = [], []
    for value in (0, 2, 2, 0, 0):
        PASSES.clear()
        layers.append(gradcam.explain(model, images(value=value), target=3).layer)
        passes.append(len(PASSES))
    assert layers == ["b", "a", "a", "b", "b"]
    assert passes[2] == passes[4] == 1, "what was found last is kept in place of what does not fit"


@pytest.mark.parametrize("target", [ClassTarget(3, output=1), lambda output: output[1][:, 3]])
def test_the_layer_is_searched_for_each_output_separately(target: Any) -> None:
    class Two(Net):
        def forward(self, images: Tensor) -> Any:
            grid = self.a(self.stem(images).relu()).relu()
            return self.head(self.b(grid).relu().mean((2, 3))), self.head(grid.mean((2, 3)))

    torch.manual_seed(0)
    model = Two().eval()
    first = ClassTarget(3, output=0)
    layers = [gradcam.explain(model, images(), target=item).layer for item in (first, target, first, target)]
    assert layers == ["b", "a", "b", "a"]


def test_a_model_is_not_kept_alive() -> None:
    model = make()
    gradcam.explain(model, images())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_warnings_about_the_layer_are_repeated_each_time() -> None:
    def forward(module: Any, images: Tensor) -> Tensor:
        return module.head((module.left(images) + module.right(images)).relu().mean((2, 3)))

    torch.manual_seed(0)
    left, right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    model = FunctionModule(forward, left=left, right=right, head=nn.Linear(4, 5)).eval()
    for _ in range(3):
        with pytest.warns(GradcamWarning, match="The default layer 'right' is on a branch"):
            gradcam.explain(model, images(), target=1)


def test_a_copy_of_a_model_has_its_own_cache() -> None:
    model = make()
    assert gradcam.explain(model, images()).layer == "b"
    clone = copy.deepcopy(model)
    clone.deep = False
    assert gradcam.explain(clone, images()).layer == "a"
    assert gradcam.explain(model, images()).layer == "b"


class Pooled(Net):
    """A network whose pool leaves a grid of several cells or of one, depending on its kernel size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.last = nn.MaxPool2d(10), nn.Conv2d(6, 5, 1)

    def forward(self, images: Tensor, size: int | None = None) -> Tensor:
        grid = self.b(self.a(self.stem(images).relu()).relu()).relu()
        return self.last(self.pool(grid) if size is None else nn.functional.max_pool2d(grid, size)).mean((2, 3))


def test_settings_of_modules_decide_where_the_last_grid_is() -> None:
    torch.manual_seed(0)
    model, layers = Pooled().eval(), []
    for size in (10, 2, 10):
        model.pool.kernel_size = model.pool.stride = size
        layers.append(gradcam.explain(model, images(), target=3).layer)
    assert layers == ["b", "last", "b"]


def test_the_other_inputs_of_the_model_decide_too() -> None:
    torch.manual_seed(0)
    model = Pooled().eval()
    inputs = [{"images": images(), "size": size} for size in (10, 2, 10)]
    assert [gradcam.explain(model, item, target=3).layer for item in inputs] == ["b", "last", "b"]


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.detach().numpy().fill(1.0),
        lambda weight: setattr(weight, "data", weight.data.clone()),
        lambda weight: setattr(weight, "data", weight.data.mT),
    ],
    ids=["data", "NumPy", "other memory", "other strides"],
)
def test_a_write_without_a_new_version_is_noticed(write: Callable[[Tensor], object]) -> None:
    """Check by the number of passes, which is higher when the default layer is searched for again."""
    passes: list[int] = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    model.register_forward_pre_hook(lambda module, args: passes.append(1))
    counts = []
    for _ in range(3):
        passes.clear()
        gradcam.explain(model, torch.ones(1, 3, 16, 16), target=1)
        counts.append(len(passes))
        if len(counts) == 2:
            version = model[0].weight._version
            write(model[0].weight)
            assert model[0].weight._version == version
    assert counts[0] > 1
    assert counts[1:] == [1, counts[0]]


class TwoViews(nn.Module):
    """A model that adds up two runs of its layers, so that its default layer is found by recording from the images on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.Sigmoid(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head((self.body(images) + self.body(images.flip(-1))).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:The default layer")
def test_the_weights_and_the_graph_of_a_deleted_model_are_freed() -> None:
    model = TwoViews().eval()
    weights = [weakref.ref(weight) for weight in model.parameters()]
    gradcam.explain(model, torch.randn(1, 3, 64, 64), target=1)
    del model
    gc.collect()
    assert not any(reference() is not None for reference in weights)
