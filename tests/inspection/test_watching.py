"""Watch a training loop: check the layer, step, kind and cause that are reported, and that training is unchanged."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradcam.errors import GradientError, LayerError, ModelError
from gradcam.inspection import Discovery, GradientWarning, gradients, watch_gradients
from tests.helpers import TINY, assert_same, tiny_model, traces


class FaultyModel(nn.Module):
    """A model of linear layers in which `fault` selects what goes wrong between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.middle, self.last = (
            nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 1),
        )  # fmt: skip
        self.fault = "none"

    def forward(self, values: Tensor) -> Tensor:
        values = self.middle(self.relu(self.first(values)))
        if self.fault == "sqrt":
            values = (values * 0).sqrt()
        if self.fault == "infinite":
            values = values - values.detach()
            values = values.sqrt()
        if self.fault == "forward":
            values = values * torch.tensor([1.0, float("inf"), 1, 1])
        return self.last(values)


@pytest.fixture
def model() -> FaultyModel:
    return FaultyModel()


INPUT = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, *faults: str) -> None:
    for fault in faults:
        model.fault = fault
        model.zero_grad()
        model(INPUT.to(next(model.parameters()).device)).sum().backward()


def test_the_first_layer_of_the_backward_pass_is_reported_once(model: FaultyModel) -> None:
    with watch_gradients(model) as watch, pytest.warns(GradientWarning) as messages:
        step(model, "none", "sqrt", "sqrt", "none", "sqrt")
    assert watch.discoveries == (
        Discovery(2, "middle", "output", "NaN", 20, None),
        Discovery(5, "middle", "output", "NaN", 20, None),
    )
    assert str(messages[0].message) == (
        "Step 2: the gradient at the output of layer 'middle' is NaN in 20 values, the first such gradient in the backward "
        "pass. The forward pass was finite: check the operations between layer 'middle' and the loss."
    )
    assert len(messages) == 2
    assert messages[0].filename == __file__  # the line that calls backward()


def test_infinity_and_nan_are_told_apart(model: FaultyModel) -> None:
    with watch_gradients(model) as watch, pytest.warns(GradientWarning, match="infinite in 20 values"):
        step(model, "infinite")
    assert watch.discoveries == (Discovery(1, "middle", "output", "infinite", 20, None),)


def test_what_began_in_the_forward_pass_is_said_to_have_begun_there(model: FaultyModel) -> None:
    with (
        watch_gradients(model) as watch,
        pytest.warns(GradientWarning, match="the first non-finite output is the output of"),
    ):
        step(model, "forward")
    (discovery,) = watch.discoveries
    assert (discovery.layer, discovery.tensor, discovery.cause) == ("last", "weight", "last")
    with torch.no_grad():
        model.first.bias[2] = float("nan")
    with watch_gradients(model) as watch, pytest.warns(GradientWarning, match="the output of layer 'first'"):
        step(model, "none")
    (discovery,) = watch.discoveries
    assert (discovery.layer, discovery.cause) == ("last", "first")


def test_an_earlier_steps_forward_pass_is_no_cause(model: FaultyModel) -> None:
    with watch_gradients(model) as watch, pytest.warns(GradientWarning):
        step(model, "forward", "none", "sqrt")
    assert [(discovery.step, discovery.cause) for discovery in watch.discoveries] == [(1, "last"), (3, None)]


def test_a_parameters_own_gradient() -> None:
    model = nn.Linear(2, 1)
    with watch_gradients(model) as watch, pytest.warns(GradientWarning, match="at the parameter 'weight' of the model"):
        (model(torch.tensor([[1.0, float("inf")]])).clamp(0, 1)).sum().backward()
    assert (watch.discoveries[0].tensor, watch.discoveries[0].count) == ("weight", 1)


def test_finite_values_with_an_infinite_sum_are_not_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch_gradients(model) as watch:
            model(torch.zeros(1, 4).half()).backward(torch.full((1, 4), 2e4).half())  # the largest float16 is 65504
    assert watch.discoveries == ()


def test_raising_stops_before_the_optimiser(model: FaultyModel) -> None:
    before = traces(model)
    message = "Step 2: the gradient at the output of layer 'middle' is NaN"
    with pytest.raises(GradientError, match=message), watch_gradients(model, on_nonfinite="raise"):
        step(model, "none", "sqrt", "none")
    assert torch.isnan(model.first.weight.grad).any()  # step 2 has set this gradient; step 3 was never reached
    assert_same(before["hooks"], traces(model)["hooks"])
    model.fault = "sqrt"
    model(INPUT).sum().backward()  # watching has ended, so this does not raise


def train(model: nn.Module, steps: int = 4) -> list[Tensor]:
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(steps):
        optimiser.zero_grad()
        model(TINY).square().sum().backward()
        optimiser.step()
    return [item.detach().clone() for item in (*model.parameters(), *model.buffers())]


def test_training_is_the_same_bit_by_bit_and_nothing_is_left() -> None:
    plain = train(tiny_model().train())
    model = tiny_model().train()
    with watch_gradients(model):
        watched = train(model)
    assert_same(plain, watched)
    assert not any(traces(model)["hooks"][at][2] for at in range(len(traces(model)["hooks"])))
    assert all(not parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception_in_a_backward_pass(model: FaultyModel, kind: type[BaseException]) -> None:
    before = traces(model)["hooks"]

    def fail(gradient: Tensor) -> None:
        raise kind("on purpose")

    def break_off() -> None:
        output = model(INPUT)
        output.register_hook(fail)
        output.sum().backward()

    with pytest.raises(kind, match="on purpose"), watch_gradients(model):
        break_off()
    assert_same(before, traces(model)["hooks"])
    with watch_gradients(model) as watch, pytest.warns(GradientWarning):
        step(model, "sqrt")
    assert watch.discoveries[0].step == 1


def test_only_the_layers_that_were_asked_for_are_watched(model: FaultyModel) -> None:
    with watch_gradients(model, "first") as watch, pytest.warns(GradientWarning):
        step(model, "sqrt")
    assert watch.discoveries[0].layer == "first"
    with watch_gradients(model, ["la*"]) as watch:
        step(model, "sqrt")
    assert watch.discoveries == ()


class Reentrant(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = FaultyModel(), reentrant
        self.head = nn.Linear(1, 1)

    def forward(self, values: Tensor) -> Tensor:
        self.body.fault = self.fault
        return self.head(checkpoint(self.body, values.clone().requires_grad_(), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    model = Reentrant(reentrant=reentrant)
    with watch_gradients(model) as watch, pytest.warns(GradientWarning) as messages:
        step(model, "none", "sqrt", "sqrt", "none")
    assert [(discovery.step, discovery.layer) for discovery in watch.discoveries] == [(2, "body.middle")]
    assert [issubclass(warning.category, GradientWarning) for warning in messages].count(True) == 1


def test_several_backward_passes_are_one_step(model: FaultyModel) -> None:

    def take_step() -> None:
        model.fault = "sqrt"
        broken = model(INPUT).sum()
        model.fault = "none"
        healthy = model(INPUT).sum()
        broken.backward()
        healthy.backward()
        step(model, "sqrt")  # not reported again, because one pass of the step before was not finite

    with watch_gradients(model) as watch, pytest.warns(GradientWarning) as messages:
        take_step()
    assert [discovery.step for discovery in watch.discoveries] == [1]
    assert len(messages) == 1


def test_another_threads_training_is_not_watched(model: FaultyModel) -> None:
    with warnings.catch_warnings(record=True) as messages, watch_gradients(model) as watch:
        thread = threading.Thread(target=step, args=(model, "sqrt"))
        thread.start()
        thread.join()
    assert watch.discoveries == ()
    assert messages == []


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    with watch_gradients(model, "0") as watch, pytest.warns(GradientWarning):
        model[0](torch.tensor([1, 2])).backward(torch.tensor([[float("nan"), 1, 1], [float("nan"), 1, 1]]))
    (discovery,) = watch.discoveries
    assert (discovery.layer, discovery.tensor, discovery.count) == ("0", "output", 2)


def enter_and_leave(kind: Callable[[], Any]) -> None:
    with kind():
        pass


def test_bad_input() -> None:
    with pytest.raises(GradientError, match="on_nonfinite is 'print', expected one of warn, raise"):
        enter_and_leave(lambda: watch_gradients(tiny_model(), on_nonfinite="print"))
    with pytest.raises(LayerError, match="There is no layer 'nine'"):
        enter_and_leave(lambda: watch_gradients(tiny_model(), "nine"))
    with pytest.raises(ModelError, match="compiled"):
        enter_and_leave(lambda: watch_gradients(torch.compile(tiny_model(), backend="eager")))
    inner = copy.deepcopy(tiny_model())
    inner[3].compile(backend="eager")
    with pytest.raises(ModelError, match="'3'"):
        enter_and_leave(lambda: watch_gradients(inner))


@pytest.mark.cuda
def test_on_a_gpu_the_kind_is_told_without_the_count() -> None:
    model = FaultyModel().cuda()
    with watch_gradients(model) as watch, pytest.warns(GradientWarning, match="is NaN, the first"):
        step(model, "sqrt")
    assert watch.discoveries == (Discovery(1, "middle", "output", "NaN", None, None),)


def test_passes_of_gradcam_are_not_watched() -> None:
    model = nn.Sequential(nn.Flatten(), FaultyModel())
    model[1].fault = "sqrt"
    images = INPUT[:, :, None, None]
    with warnings.catch_warnings(record=True) as messages, watch_gradients(model) as watch:
        activations = {layer.name: layer.activations for layer in gradients(model, images).layers}
        assert activations["1.first"].nans
    assert watch.discoveries == ()
    assert messages == []

    def look_between() -> None:
        output = model(images).sum()
        gradients(model, images)
        output.backward()

    with pytest.warns(GradientWarning), watch_gradients(model) as watch:
        look_between()
    (discovery,) = watch.discoveries
    assert (discovery.step, discovery.layer, discovery.cause) == (1, "1.middle", None)


def test_a_layer_that_ran_for_gradcam_alone_never_ran() -> None:
    model = nn.Sequential(nn.Flatten(), FaultyModel())

    def run_without() -> None:
        gradients(model, INPUT[:, :, None, None])
        del model[1]
        model(INPUT)

    with pytest.raises(LayerError, match="'1' never ran"), watch_gradients(model, "1"):
        run_without()


def test_a_model_that_ran_for_gradcam_alone_has_not_run() -> None:
    model = nn.ModuleDict({"used": nn.Flatten(), "unused": nn.Linear(1, 1)})
    model.forward = lambda images: model["used"](images) * model["unused"].weight
    with watch_gradients(model, "unused") as watch:
        gradients(model, INPUT[:, :, None, None])
    assert watch.discoveries == ()


def test_a_backward_pass_that_was_broken_off_is_forgotten(model: FaultyModel) -> None:

    def fail(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    def break_off() -> None:
        hidden = model.first(INPUT)
        hidden.register_hook(fail)
        (model.last(hidden) * float("nan")).sum().backward()

    with warnings.catch_warnings(record=True) as messages, watch_gradients(model) as watch:
        with pytest.raises(ValueError, match="on purpose"):
            break_off()
        step(model, "none")
    assert watch.discoveries == ()
    assert messages == []
