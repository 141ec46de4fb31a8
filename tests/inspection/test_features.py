"""Compare `inspection.features` with plain hooks and torchvision's feature extraction; check that nothing is left."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

from gradcam.errors import ImageError, LayerError, ModelError
from gradcam.inspection import extraction
from gradcam.inspection.extraction import features
from tests.helpers import TINY, assert_same, tiny_model, traces


def record_outputs(model: nn.Module, names: list[str], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Return the outputs of layers, cloned by plain hooks in a whole forward pass."""
    results: dict[str, Tensor] = {}
    modules = dict(model.named_modules())

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            results.setdefault(name, output.clone())

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in names]
    with torch.no_grad():
        model.eval()(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return {name: results[name] for name in names}


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].dtype == tensor.dtype


class Recurrent(nn.Module):
    """A model that applies one layer three times to a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.step(x)
        return self.head(x)


class FunctionModel(nn.Module):
    """A model whose forward pass is any function of two layers and the input."""

    def __init__(self, function: Callable[[nn.Module, nn.Module, Any], Any]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Any) -> Any:
        return self.function(self.first, self.second, x)


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))


# Values


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("resnet50", ["layer4", "avgpool"]),
        ("alexnet", ["features.0", "features.10", "features"]),  # an in-place operation follows each of these layers
        ("densenet121", ["features.denseblock1", "features.norm5", "features"]),
        ("mobilenet_v3_small", ["features.3", "avgpool", "classifier"]),
        ("vit_b_32", ["encoder.layers.encoder_layer_3", "encoder.ln"]),
    ],
)
def test_features_equal_plain_hooks_and_torchvisions_extractor_bit_for_bit(name: str, layers: list[str]) -> None:
    model = torchvision.models.get_model(name, weights=None).eval()
    images = torch.randn(1, 3, 224, 224)
    tensors = features(model, images, layers)
    assert_equal(tensors, record_outputs(model, layers, images))
    if name == "resnet50":
        assert [tensors[layer].shape for layer in layers] == [(1, 2048, 7, 7), (1, 2048, 1, 1)]
    # Torchvision returns a tensor that a later in-place operation changes, and has no node for a container.
    nodes = [layer for layer in layers if not layer.startswith("features") or layer == "features.3"]
    if nodes:
        with torch.no_grad():
            theirs = create_feature_extractor(model, {node: node for node in nodes})(images)
        assert all(torch.equal(tensors[node], theirs[node]) for node in nodes)


def test_the_order_is_the_one_asked_for_and_a_patterns_the_models() -> None:
    model = torchvision.models.resnet18()
    layers = ["fc", "layer[21].?.conv2", model.conv1, "fc", "layer1.0.conv2"]
    tensors = features(model, torch.randn(1, 3, 32, 32), layers)
    assert list(tensors) == ["fc", *(f"layer{i}.{j}.conv2" for i in (1, 2) for j in (0, 1)), "conv1"]


@pytest.mark.parametrize("layers", ["3", ("3",), iter(["3"])])
def test_one_layer_may_come_alone_or_in_any_sequence(layers: Any) -> None:
    model = tiny_model()
    assert_equal(features(model, TINY, layers), record_outputs(model, ["3"], TINY))
    assert list(features(model, TINY, model[3])) == ["3"]


def test_of_a_layer_that_runs_several_times_it_is_the_first() -> None:
    model = Recurrent()
    first = model.step(X).detach()
    assert torch.equal(features(model, X, "step")["step"], first)
    assert torch.equal(features(model, X, ["step", "head"])["step"], first)


def test_a_module_with_two_names_gives_what_its_first_run_does_under_each() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2] = model[0]
    tensors = features(model, X, ["0", "2"])
    assert torch.equal(tensors["2"], model[0](X))
    assert torch.equal(tensors["0"], tensors["2"])
    assert tensors["0"].data_ptr() != tensors["2"].data_ptr()


def test_the_first_floating_tensor_of_several_in_any_container() -> None:
    lstm = nn.Sequential(nn.LSTM(4, 3, batch_first=True))
    expected, (hidden, _) = lstm[0](X[:, None])
    output = features(lstm, X[:, None], "0")["0"]
    torch.testing.assert_close(output, expected)  # memory alignment decides which kernel runs
    assert output.shape != hidden.shape

    class Dict(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"ids": torch.arange(2), "nothing": None, "values": [x + 1, x + 2]}

    assert torch.equal(features(nn.Sequential(Dict()), X, "0")["0"], X + 1)


# Inputs


def test_tuples_are_positional_and_mappings_are_keywords_of_anything() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.sum = nn.Embedding(7, 4), nn.Identity()

        def forward(self, ids: Tensor, scale: float, *, more: Tensor | None = None) -> Tensor:
            return self.sum(self.embedding(ids) * scale + (0 if more is None else more))

    model, ids = Two(), torch.tensor([[1, 2], [3, 4]])
    plain = model.embedding.weight.detach()[ids]
    assert torch.equal(features(model, (ids, 2.0), "sum")["sum"], plain * 2)
    kwargs = transformers.BatchEncoding({"ids": ids, "scale": 3.0, "more": torch.ones(4)})
    assert torch.equal(features(model, kwargs, "sum")["sum"], plain * 3 + 1)
    linear = nn.Sequential(nn.Linear(4, 4))
    # An input without a batch dimension, and no image.
    assert torch.equal(features(linear, X[0], "0")["0"], linear(X[0]))
    with pytest.raises(ImageError, match="expected the names of the model's arguments"):
        features(model, {1: ids}, "sum")


def test_models_of_hugging_face_and_timm() -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=30
    )
    bert = transformers.BertModel(config).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    with torch.no_grad():
        states = bert(**inputs, output_hidden_states=True).hidden_states
    tensors = features(bert, inputs, ["embeddings", "encoder.layer.?"])
    for tensor, expected in zip(tensors.values(), states, strict=True):
        assert torch.equal(tensor, expected)
    model = timm.create_model("resnet10t", pretrained=False, features_only=False).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(features(model, images, "layer4")["layer4"], model.forward_features(images))


def test_wrapped_and_compiled_models_run_as_what_is_inside() -> None:
    model = tiny_model()
    expected = record_outputs(model, ["3"], TINY)["3"]
    compiled = torch.compile(tiny_model().eval(), backend="eager")
    compiled(TINY)
    for wrapped in (nn.DataParallel(model), compiled, nn.Sequential(OrderedDict(a=torch.compile(tiny_model())))):
        (output,) = features(wrapped, TINY, "a.3" if isinstance(wrapped, nn.Sequential) else "3").values()
        assert torch.equal(output, expected)
    tiny = tiny_model().eval()
    tiny.compile(backend="eager")
    tiny(TINY)
    assert torch.equal(features(tiny, TINY, "3")["3"], expected)


# The end of the pass


def record_runs(model: nn.Module) -> list[str]:
    """Return a list to which each module adds its name when it starts to run."""
    names: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: names.append(name))
    return names


def test_nothing_behind_the_last_layer_runs_and_all_before_it_once() -> None:
    model = torchvision.models.resnet18().eval()
    names = record_runs(model)
    features(model, torch.randn(1, 3, 32, 32), ["layer2.1.conv1", "layer1"])
    assert names[-2:] == ["layer2.1", "layer2.1.conv1"]
    before = [name for name, _ in model.named_modules()]
    before = before[: before.index("layer2.1.conv1") + 1]
    assert set(names) == set(before)
    # Each block calls its ReLU twice.
    assert all(names.count(name) == (2 if name.endswith(".relu") else 1) for name in before)


def test_a_pattern_takes_no_containers_which_never_run_and_leaves_out_what_does_not_run() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.unused, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return self.tail(x)

    model = Parts()
    names = record_runs(model)
    assert list(features(model, X, "parts*")) == ["parts.0", "parts.1"]
    assert "tail" not in names
    assert list(features(model, X, "*")) == ["parts.0", "parts.1", "tail"]
    with pytest.raises(LayerError, match=r"Layer 'unused' did not run"):
        features(model, X, "unuse?")
    with pytest.raises(LayerError, match=r"Layer 'parts' did not run"):
        features(model, X, ["tail", "parts"])


def test_a_container_whose_instance_has_a_forward_can_run() -> None:
    model = FunctionModel(lambda first, second, x: second(first(x)))
    model.first = nn.ModuleList([nn.Linear(4, 4)])
    model.first.forward = lambda x: x * 2  # type: ignore[method-assign]
    assert torch.equal(features(model, X, "firs*")["first"], X * 2)


def test_an_error_before_the_last_layer_is_raised_and_one_after_it_never_occurs() -> None:
    def fail(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        first(x)
        raise ValueError("on purpose")

    model = FunctionModel(fail)
    assert torch.equal(features(model, X, "first")["first"], model.first(X))
    with pytest.raises(ValueError, match="on purpose"):
        features(FunctionModel(fail), X, ["first", "second"])


def caught(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        return second(first(x))
    raise AssertionError("it was taken for an error")


def swallowed(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    y = x
    with contextlib.suppress(BaseException):
        y = first(x)
    return second(y)


def tried_again(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    for attempt in range(5):
        with contextlib.suppress(BaseException):
            return second(first(x + attempt))
    raise AssertionError("it never went well")


def translated(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    try:
        return second(first(x))
    except BaseException as error:
        raise RuntimeError("the forward pass failed") from error


def spoiled(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    values = x.clone()
    with contextlib.suppress(BaseException):
        values = first(values)
    values.zero_()
    return values


@pytest.mark.parametrize("function", [caught, swallowed, tried_again, translated, spoiled])
def test_a_model_that_catches_everything_gives_right_features(function: Any) -> None:
    model = FunctionModel(function)
    if function is spoiled:
        model.first = nn.Identity()
    assert torch.equal(features(model, X, "first")["first"], model.first(X))


def test_nothing_is_recorded_for_gradients() -> None:
    records: list[bool] = []

    def look(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        records.append(torch.is_grad_enabled() or first(x).requires_grad)
        return second(x)

    features(FunctionModel(look), X.clone().requires_grad_(), "second")
    assert records == [False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exceptions_that_end_the_program_are_raised(error: type[BaseException]) -> None:
    def interrupted(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        with contextlib.suppress(BaseException):
            first(x)
        raise error

    model = FunctionModel(interrupted)
    before = traces(model)
    with pytest.raises(error):
        features(model, X, "first")
    assert_same(before, traces(model))
    assert extraction._innermost.get() is None


def test_always_call_hooks_run() -> None:
    model = nn.Sequential(tiny_model())
    calls: list[Any] = []
    handle = model[0].register_forward_hook(lambda *args: calls.append(args[-1]), always_call=True)
    expected = record_outputs(model, ["0.3"], TINY)
    calls.clear()
    assert_equal(features(model, TINY, "0.3"), expected)
    assert [tuple(output.shape) for output in calls] == [(3, 5)]
    handle.remove()
    names: list[str] = []
    with nn.modules.module.register_module_forward_hook(
        lambda module, args, output: names.append(type(module).__name__), always_call=True
    ):
        features(model, TINY, "0.3")
    assert names[-2:] == ["Sequential", "Sequential"]


def test_other_hooks_of_the_users_see_what_they_would_and_may_change_it() -> None:
    model = tiny_model()
    model[3].register_forward_hook(lambda module, args, output: output + 1)
    model[3].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert_equal(features(model, TINY, ["3", "4"]), record_outputs(model, ["3", "4"], TINY))


def test_offloaded_weights_are_offloaded_again() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = nn.Sequential(tiny_model().eval())
    expected = record_outputs(model, ["0.3"], TINY)
    weights = {name: tensor.clone() for name, tensor in model[0].state_dict().items()}
    hook = AlignDevicesHook(
        execution_device="cpu", offload=True, offload_buffers=True, place_submodules=True, weights_map=weights
    )
    add_hook_to_module(model[0], hook)  # the hook offloads the weights of the whole block when the block ends
    assert_equal(features(model, TINY, "0.3"), expected)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


# Ownership of the tensors


def test_features_share_no_memory() -> None:
    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.ones(4))
            self.cache = torch.ones(4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.position, self.cache

    images = X.clone()
    model = nn.Sequential(nn.Identity(), nn.Flatten(0), Position())
    # Each is the last layer once, where a pass that is cut short could return the tensor without a copy.
    for name in ("0", "1", "2"):
        for layers in (name, ["0", name, "2"]):
            (tensor,) = (features(model, images, layers)[name],)
            assert not tensor.requires_grad
            assert tensor.grad_fn is None
            tensor.fill_(7)
    assert torch.equal(images, X)
    assert torch.equal(model[2].position, torch.ones(4))
    tensors = features(model, images, ["0", "2"])
    images.zero_()
    with torch.no_grad():
        model[2].position.zero_()
    assert torch.equal(tensors["0"], X)
    assert torch.equal(tensors["2"], torch.ones(4))


def test_a_part_of_a_large_tensor_does_not_keep_all_of_it() -> None:
    class Token(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 0]

    output = features(nn.Sequential(nn.Linear(4, 4), Token()), torch.randn(2, 500, 4), "1")["1"]
    assert output.untyped_storage().nbytes() == output.numel() * 4


def test_no_graph_and_no_inference_tensors_whatever_is_on() -> None:
    def inside(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = first(x)
        with torch.enable_grad():
            return second(y.clone())

    model = FunctionModel(inside)
    with torch.inference_mode():
        images = X.clone()
        outer = features(model, images, ["first", "second"])
        assert torch.is_inference_mode_enabled()
    for results in (outer, features(model, X, ["first", "second"])):
        for tensor in results.values():
            assert not tensor.is_inference()
            assert not tensor.requires_grad
            assert tensor.is_leaf
            tensor.requires_grad_().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_may_change_in_place_what_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        images = X.clone()
    output = features(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), images, "0")["0"]
    assert torch.equal(output, X.relu())
    assert torch.equal(images, X)


def test_nothing_of_the_pass_is_kept_once_it_is_over() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def watch(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        alive.append(weakref.ref(y))
        return second(first(y))

    model = FunctionModel(watch)
    gc.disable()
    try:
        features(model, X, "first")
        assert alive[0]() is None
    finally:
        gc.enable()


# Nothing is left on the model


def loud_model(error: type[BaseException] | None) -> nn.Sequential:
    """Return a model in training mode with a counter, a random draw, and an optional error in its last layer."""

    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counter", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.counter += 1
            torch.rand(3)
            torch.set_grad_enabled(True)
            if error is not None:
                raise error("on purpose")
            return x

    model = tiny_model().train()
    model[0].requires_grad_(False)
    model.insert(3, Loud())
    return model


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("grad", [True, False])
def test_no_trace(error: type[BaseException] | None, grad: bool) -> None:
    model, images = loud_model(error), TINY.clone()
    with torch.set_grad_enabled(grad):
        before = traces(model)
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            features(model, images, ["0", "4"])
        assert_same(before, traces(model))
    assert model[3].counter == 0
    assert torch.equal(images, TINY)
    assert images.grad_fn is None
    assert extraction._innermost.get() is None


def test_threads_do_not_disturb_one_another() -> None:
    model = tiny_model().train()
    before = traces(model)
    batches = [torch.randn(2, 3, 12, 16) for _ in range(4)]
    layers = [["3"], ["0", "3"], ["5", "0"], ["8"]]
    expected = [record_outputs(tiny_model(), sorted(names), images) for names, images in zip(layers, batches)]
    wrong: list[Any] = []

    def work(i: int) -> None:
        for _ in range(25):
            tensors = features(model, batches[i], layers[i])
            wrong.extend(name for name in layers[i] if not torch.equal(tensors[name], expected[i][name]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert_same(before, traces(model))


def test_nested_calls_do_not_disturb_one_another() -> None:
    model = tiny_model().eval()
    flipped = TINY.flip(-1)
    inner: list[dict[str, Tensor]] = []
    depth = iter([True])

    def look(module: nn.Module, args: Any) -> None:
        if next(depth, False):
            inner.append(features(model, flipped, ["5", "3"]))
            inner.append(features(model, flipped, "0"))

    expected = record_outputs(model, ["0", "3"], TINY)
    theirs = record_outputs(model, ["0", "3", "5"], flipped)
    handle = model[2].register_forward_pre_hook(look)
    assert_equal(features(model, TINY, ["0", "3"]), expected)
    handle.remove()
    assert_equal(inner[0], {name: theirs[name] for name in ("5", "3")})
    assert_equal(inner[1], {"0": theirs["0"]})


def test_a_foreign_stop_is_passed_on() -> None:
    stop = extraction._Stop(object())

    def foreign(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        raise stop

    with pytest.raises(extraction._Stop):
        features(FunctionModel(foreign), X, "first")


# Errors


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("layer5", r"There is no layer 'layer5' in ResNet\. Nearest: 'layer\d'"),
        ("laier*.conv1", r"No layer matches 'laier\*\.conv1'\. Nearest: "),
        ([], r"The layers are \[\], expected a dotted name"),
        (7, "The layers are 7, expected a dotted name"),
        ([7], "The layer is 7, expected a dotted name"),
        (nn.ReLU(), "is not part of the model"),
    ],
)
def test_wrong_layers_are_errors(layers: Any, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        features(torchvision.models.resnet18(), torch.randn(1, 3, 32, 32), layers)


def test_layers_without_a_floating_tensor() -> None:
    class Ids(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1, keepdim=True).expand(-1, 4)

    model = nn.Sequential(nn.Linear(4, 4), Ids())
    with pytest.raises(LayerError, match="Layer '1' returned no floating-point tensor: choose a layer"):
        features(model, X, ["0", "1"])
    assert list(features(model, X, "*")) == ["0"]


@pytest.mark.parametrize("images", [None, "photo.jpg", (), {"x": 3}, np.zeros((1, 4), np.float32)])
def test_images_without_a_tensor(images: Any) -> None:
    with pytest.raises(ImageError, match="expected a tensor, or a tuple or dict with tensors"):
        features(nn.Sequential(nn.Linear(4, 4)), images, "0")


def test_wrong_models_are_errors() -> None:
    with pytest.raises(ModelError, match=r"expected a torch\.nn\.Module"):
        features(lambda x: x, X, "0")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="TorchScript"):
        features(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), X, "0")
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ModelError, match=r"torch\.func"):
        torch.vmap(lambda x: features(model, x, "0")["0"])(X)


@pytest.mark.cuda
def test_features_stay_on_the_models_device() -> None:
    model = tiny_model().cuda()
    output = features(model, TINY.cuda(), "3")["3"]
    assert output.is_cuda
    torch.testing.assert_close(output.cpu(), record_outputs(tiny_model(), ["3"], TINY)["3"])


@pytest.fixture(autouse=True)
def _grad_mode() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()
