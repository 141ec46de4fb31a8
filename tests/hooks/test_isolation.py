import contextlib
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.hooks import preserve as isolation
from gradcam.hooks.preserve import eager_mode, evaluation_mode, preserve_state
from tests.helpers import Compiled


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    layers[1][0].eval()
    return layers


def test_flags_overlap_in_any_order() -> None:
    shared = model()
    before = flags(shared)
    first, second = evaluation_mode(list(shared.modules())), evaluation_mode(list(shared[1].modules()))
    first.__enter__()
    second.__enter__()
    assert not any(flags(shared))
    first.__exit__(None, None, None)  # the contexts do not end in reverse order
    assert flags(shared)[0] is True
    assert not any(flags(shared[1]))
    second.__exit__(None, None, None)
    assert flags(shared) == before


def test_flags_are_restored_after_an_error() -> None:
    shared = model()
    before = flags(shared)
    with pytest.raises(ValueError, match="on purpose"), preserve_state(shared):
        raise ValueError("on purpose")
    assert flags(shared) == before


def test_the_compilers_mode_overlaps_in_any_order() -> None:
    compiled = Compiled(model().eval(), torch.ones(1, 2))
    modules = list(compiled.module.modules())
    first, second = eager_mode(modules), eager_mode(modules)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not compiled.is_compiled()
    second.__exit__(None, None, None)
    assert compiled.is_compiled()
    with eager_mode(list(model().modules())):
        assert compiled.is_compiled()  # the compiled module belongs to another model


@pytest.mark.parametrize("draws", [False, True])
def test_the_random_state_is_put_back(draws: bool) -> None:
    shared = model()
    before = torch.get_rng_state()
    with preserve_state(shared):
        if draws:
            torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_many_threads_in_and_out() -> None:
    shared = model()
    before = flags(shared)

    def work(_: int) -> None:
        for _ in range(200):
            with evaluation_mode(list(shared.modules())):
                assert not any(flags(shared))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert flags(shared) == before


class InterruptsOnce:
    """A lock whose owner is interrupted just after its release."""

    def __init__(self, lock: threading.Lock, turns: int) -> None:
        self.lock, self.turns = lock, turns

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        self.turns -= 1
        if self.turns == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("turns", [1, 2])
def test_an_interruption_leaves_no_model_in_evaluation_mode(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = model()
    before = flags(shared)
    with monkeypatch.context() as patch:
        patch.setattr(isolation, "_lock", InterruptsOnce(isolation._lock, turns))
        with pytest.raises(KeyboardInterrupt), preserve_state(shared):
            pass
    with preserve_state(shared):
        assert not any(flags(shared))
    assert flags(shared) == before
    assert not isolation._flags


class Counts(nn.Module):
    """A model that changes a buffer in evaluation mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x)


def test_buffers_that_a_model_changes_itself_are_put_back() -> None:
    counts = Counts()
    calls = counts.calls
    first, second = preserve_state(counts), preserve_state(counts)
    first.__enter__()
    counts(torch.ones(3, 2))
    second.__enter__()
    counts(torch.ones(3, 2))
    first.__exit__(None, None, None)
    assert counts.calls == 2  # the second context is still open
    second.__exit__(None, None, None)
    assert counts.calls is calls
    assert calls == 0
    assert not isolation._buffers


def test_buffers_that_nobody_changed_are_not_written_to() -> None:
    counts = Counts()
    counts.register_buffer("sparse", torch.eye(2).to_sparse())
    counts.register_buffer("elsewhere", torch.empty(2, device="meta"))
    before = counts.calls._version
    with preserve_state(counts):
        pass
    assert counts.calls._version == before


def test_running_statistics_stay_what_a_training_thread_makes_of_them() -> None:
    counts = Counts()
    with preserve_state(counts):
        counts.norm.running_mean += 1
    assert torch.equal(counts.norm.running_mean, torch.ones(2))


@pytest.mark.filterwarnings("ignore")  # PyTorch's deprecation warnings
def test_observers_of_quantisation_aware_training_are_put_back() -> None:
    quantisation = pytest.importorskip("torch.ao.quantization")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).train()
    net.qconfig = quantisation.get_default_qat_qconfig()
    prepared = quantisation.prepare_qat(net)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 3, 8, 8, generator=generator) for _ in range(2))
    prepared(first)
    before = copy.deepcopy(prepared.state_dict())
    gradcam.explain(prepared, second, "0")
    after = prepared.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    prepared.eval()(second)  # without `explain`, the model does change its observers
    assert not all(torch.equal(before[name], value) for name, value in prepared.state_dict().items())


class Keeps(nn.Module):
    """A module that runs `change` on itself in the forward pass."""

    def __init__(self, change: Callable[[nn.Module], object], **buffers: torch.Tensor | None) -> None:
        super().__init__()
        self.change = change
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return x


def make_counted_model(
    change: Callable[[nn.Module], object], **buffers: torch.Tensor | None
) -> tuple[nn.Module, torch.Tensor]:
    """Return a model that holds these buffers and then counts its calls, and the counter."""
    counter = Keeps(lambda module: module.calls.add_(1), calls=torch.zeros(()))
    return nn.Sequential(Keeps(change, **buffers), counter), counter.calls


@pytest.mark.parametrize(
    ("change", "buffer"),
    [
        (lambda module: None, torch.zeros(2, dtype=torch.bits8)),
        (lambda module: None, torch.tensor([float("nan"), 1.0])),
        (lambda module: setattr(module.own, "data", module.own.data.double()), torch.ones(2)),
        (lambda module: setattr(module.own, "data", torch.ones(3)), torch.ones(2, requires_grad=True)),
    ],
    ids=["packed", "nan", "other dtype", "other size"],
)
def test_odd_buffers_keep_nothing_else_from_being_put_back(change: Callable[..., object], buffer: Tensor) -> None:
    shared, calls = make_counted_model(change, own=buffer)
    version = buffer._version
    with preserve_state(shared):
        shared(torch.ones(1))
    assert calls == 0
    assert buffer._version == version  # the buffer is not rewritten, with or without NaN
    assert not isolation._buffers


def test_a_cache_that_took_another_buffers_place_stays() -> None:
    cache = torch.ones(4)
    shared, calls = make_counted_model(
        lambda module: setattr(module, "cache", cache), cache=torch.ones(1), nothing=None
    )
    with preserve_state(shared):
        shared(torch.ones(1))
    assert calls == 0
    assert shared[0].cache is cache  # the module may have recorded the size of its cache elsewhere


def test_buffers_are_left_to_a_thread_that_loads_weights_meanwhile() -> None:
    shared, calls = make_counted_model(lambda module: None)
    shared.append(nn.Linear(1, 1))
    state = {name: torch.full_like(value, 5.0) for name, value in shared.state_dict().items()}
    with preserve_state(shared):
        shared.load_state_dict(state)
    assert calls == 5
    assert not isolation._buffers


@pytest.mark.parametrize("turns", range(1, 7))
def test_an_interruption_leaves_the_compiler_as_it_was(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(model().eval(), torch.ones(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(isolation, "_lock", InterruptsOnce(isolation._lock, turns))
        with contextlib.suppress(KeyboardInterrupt), preserve_state(compiled.module):
            pass
    with preserve_state(compiled.module):
        assert not compiled.is_compiled()
    assert compiled.is_compiled()


def test_an_abandoned_context_that_is_collected_under_the_lock_does_not_wait_for_itself() -> None:
    shared = model()
    before = flags(shared)
    context = preserve_state(shared)
    context.__enter__()
    with isolation._lock:
        del context  # the context is a generator, so deleting it ends it
    assert flags(shared) == before


def test_the_random_state_is_not_written_where_nothing_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Generator:
        def get_state(self) -> torch.Tensor:
            return torch.zeros(3)

        def set_state(self, state: torch.Tensor) -> None:
            raise AssertionError("another thread's numbers would repeat")

    monkeypatch.setattr(torch, "default_generator", Generator())
    with preserve_state(model()):
        pass


def test_evaluation_mode_caches_do_not_outlive_a_training_step() -> None:
    class Biased(nn.Module):
        """A module as in LeViT, which caches its biases in evaluation mode; `train(False)` does not clear the cache."""

        def __init__(self) -> None:
            super().__init__()
            self.bias, self.cache = nn.Parameter(torch.zeros(4)), dict[str, Tensor]()

        def forward(self, values: Tensor) -> Tensor:
            if self.training:
                return values + self.bias[:, None, None]
            return values + self.cache.setdefault("bias", self.bias[:, None, None].clone())

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Biased(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).train()
    images = torch.rand(1, 3, 8, 8)
    gradcam.explain(model, images, "0", target=1)
    with torch.no_grad():
        model[1].bias += 1
    expected = model(images)
    assert torch.equal(model.eval()(images), expected)


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_compiled_forward_method_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a module whose `forward` is compiled in place, as Lightning does."""
    images, graphs = torch.rand(2, 3, 16, 16), []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    expected = gradcam.explain(model, images, "1", target=1).maps
    model.forward = torch.compile(model.forward, backend=count)
    model(images)
    compiled_graphs = len(graphs)
    if not hasattr(torch.compiler, "set_stance"):  # Before PyTorch 2.6, no switch turns this compiled code off.
        with pytest.raises(gradcam.GradcamError, match="inspect the uncompiled model"):
            gradcam.explain(model, images, "1", target=1)
        return
    actual = gradcam.explain(model, images, "1", target=1).maps
    torch.testing.assert_close(actual, expected)
    assert len(graphs) == compiled_graphs


class Buffered(nn.Module):
    """A layer that returns its own buffer, in a module inside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("grid", torch.rand(1, 3, 8, 8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.inner.grid


def test_a_buffer_that_a_layer_returns_gets_no_graph() -> None:
    layer = Buffered()
    model = nn.Sequential(layer, nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    buffer, values = layer.inner.grid, layer.inner.grid.clone()
    with gradcam.TargetLayer(layer) as target:
        target.backward(model(torch.rand(1, 3, 8, 8))[0, 1])
        assert layer.inner.grid is buffer
        assert not buffer.requires_grad
        assert buffer.grad_fn is None
    assert torch.equal(buffer, values)
    assert target.gradients.any()
