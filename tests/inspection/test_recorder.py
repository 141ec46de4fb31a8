"""Compare recording during training with plain autograd on the same graph, and with training without a recorder."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import threading
import warnings
import weakref
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradcam
from gradcam.errors import GradcamError, LayerError, ModelError
from gradcam.hooks.pytorch import VERSION
from gradcam.inspection.edit import edit_gradients
from gradcam.inspection.flow import Statistics, measure, to_statistics
from gradcam.inspection.recorder import Recorder, record
from tests.helpers import TINY, assert_same, tiny_model, traces

LABELS = torch.tensor([0, 1, 4])


def worked_model() -> nn.Sequential:
    """Return Linear, in-place ReLU, Linear, with weights that can be worked out by hand."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2, 3], [-4, -5, -6], [7, 8, 9], [-10, -11, -12]]))
        model[0].bias.copy_(torch.tensor([1.0, 2, 3, 4]))
        model[2].weight.copy_(torch.tensor([[1.0, 2, 3, 4]]))
        model[2].bias.fill_(1)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor = TINY, labels: Tensor = LABELS) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_exact(tensor: Tensor, right: Any) -> None:
    torch.testing.assert_close(tensor, torch.as_tensor(right, dtype=tensor.dtype), rtol=0, atol=0)


class Shared(nn.Module):
    """A model with one layer that runs twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()).tanh())


# -- records ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> nn.Sequential:
    return worked_model()


@pytest.mark.parametrize("keep", ["device", "cpu"])
def test_the_worked_numbers_before_an_in_place_relu(model: nn.Sequential, keep: Any) -> None:
    with record(model, ["0", "1", "2"], keep=keep) as recorder:
        model(torch.ones(1, 3)).backward()
    assert_exact(recorder.activations["0"], [[7, -13, 27, -29]])
    assert_exact(recorder.activations["1"], [[7, 0, 27, 0]])
    assert_exact(recorder.activations["2"], [[89]])
    assert_exact(recorder.gradients["2"], [[1]])
    assert_exact(recorder.gradients["1"], [[1, 2, 3, 4]])
    assert_exact(recorder.gradients["0"], [[1, 0, 3, 0]])


def test_statistics_are_the_default(model: nn.Sequential) -> None:
    with record(model, "*") as recorder:
        model(torch.ones(1, 3)).backward()
    right = Statistics(4, 10**0.5, 1.0, 2**0.5, 0.5, 3.0, 0, 0)
    assert asdict(recorder.gradients["0"]) == pytest.approx(asdict(right))
    assert recorder.activations["1"].zeros == 0.5
    assert list(recorder.activations) == ["0", "1", "2"]
    assert list(recorder.gradients) == ["2", "1", "0"]


def test_gradients_equal_those_of_retained_outputs() -> None:
    """Compare with a copy of the model whose outputs retain their gradients."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5).double().eval()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    outputs: dict[str, Tensor] = {}
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    layers = [name for name, item in model.named_modules() if isinstance(item, nn.Conv2d)]
    for name in layers:

        def keep(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            output.retain_grad()
            outputs[name] = output

        plain.get_submodule(name).register_forward_hook(keep)
    nn.functional.cross_entropy(plain(images), LABELS[:2]).backward()
    with record(model, layers, keep="device") as recorder:
        nn.functional.cross_entropy(model(images), LABELS[:2]).backward()
    assert len(layers) == len(recorder.activations) == len(recorder.gradients) == 20
    for name in layers:
        assert_exact(recorder.activations[name], outputs[name].detach())
        assert_exact(recorder.gradients[name], outputs[name].grad)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["statistics", "device", "cpu"])
@pytest.mark.parametrize("every", [1, 2])
def test_losses_and_parameters_are_the_same_to_the_bit(keep: Any, every: int) -> None:
    torch.manual_seed(0)
    first = torchvision.models.resnet18(num_classes=5)
    first.fc = nn.Sequential(nn.Dropout(), first.fc)
    second = copy.deepcopy(first)
    images, losses = torch.randn(3, 3, 48, 48), []
    for model in (first, second):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        recorded = record(model, "*", keep=keep, every=every, last=1) if model is second else contextlib.nullcontext()
        with recorded:
            losses.append([train(model, optimizer, images) for _ in range(3)])
    assert_same(losses[0], losses[1])
    assert_same(first.state_dict(), second.state_dict())
    assert losses[0][0] != losses[0][2]


@pytest.mark.parametrize("keep", ["device", "cpu"])
def test_snapshots_outlive_what_is_done_in_place_afterwards(keep: Any) -> None:
    model, passed = worked_model(), []
    model[0].register_forward_hook(lambda module, args, output: output.register_hook(passed.append) and None)
    with record(model, ["0", "2"], keep=keep) as recorder:
        output = model(torch.ones(1, 3))
        output.backward()
        output.detach().fill_(5)
        passed[0].fill_(7)
    assert_exact(recorder.activations["2"], [[89]])
    assert_exact(recorder.gradients["0"], [[1, 0, 3, 0]])


# -- steps and runs ---------------------------------------------------------------------------------------------------


def test_every_nth_step_is_recorded_and_the_last_are_kept(model: nn.Sequential) -> None:
    with record(model, "2", keep="device", every=3, last=2) as recorder:
        for step in range(11):
            model(torch.full((1, 3), float(step))).backward()
    assert recorder.steps == [6, 9]
    for step in (6, 9):
        assert_exact(recorder.at(step).activations["2"], model(torch.full((1, 3), float(step))).detach())
    assert recorder.activations["2"] == recorder.at(9).activations["2"]
    for step in (0, 7, 10):
        with pytest.raises(LayerError, match=rf"Step {step} is not recorded: the recorded steps are \[6, 9\]"):
            recorder.at(step)


@pytest.mark.parametrize("keep", ["statistics", "device"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_gradients_are_stored_with_their_own_pass(keep: Any, order: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    with record(model, "0", keep=keep) as recorder:
        outputs = [model(torch.tensor([[float(x)]])) for x in (1, 2)]
        for index in order:
            (outputs[index] * (3 + index)).backward()
    for step, output in enumerate(outputs):
        gradient = recorder.at(step).gradients["0"]
        right = (3 + step) * (1 - output.detach() ** 2).item()
        assert (gradient.item() if isinstance(gradient, Tensor) else gradient.mean) == pytest.approx(right, rel=1e-6)


def test_each_run_of_a_shared_layer_has_its_own() -> None:
    model = Shared()
    x = torch.randn(2, 3)
    with record(model, ["layer", "head"], keep="device") as recorder:
        model(x).sum().backward()
    first = model.layer(x).detach().requires_grad_()
    second = model.layer(first.tanh()).detach().requires_grad_()
    model.head(second.tanh()).sum().backward()
    model.layer(first.tanh()).backward(second.grad)
    assert_exact(recorder.activations["layer"], first.detach())
    assert_exact(recorder.activations["layer", 1], second.detach())
    torch.testing.assert_close(recorder.gradients["layer"], first.grad)
    torch.testing.assert_close(recorder.gradients["layer", 1], second.grad)
    assert list(recorder.gradients) == ["head", ("layer", 1), "layer"]
    assert ("layer", 1) in recorder.gradients
    assert ("layer", 2) not in recorder.gradients
    with pytest.raises(LayerError, match="ran 2 times in step 0: there is no run 2"):
        recorder.gradients["layer", 2]


def test_of_several_backward_passes_the_last_ones_gradient_is_kept(model: nn.Sequential) -> None:
    with record(model, "0", keep="device") as recorder:
        output = model(torch.ones(1, 3))
        output.backward(retain_graph=True)
        (10 * output).backward()
    assert_exact(recorder.gradients["0"], [[10, 0, 30, 0]])


def test_a_gradient_that_comes_after_its_step_is_packed_is_still_its_own(model: nn.Sequential) -> None:
    with record(model, "*") as recorder:
        output = model(torch.ones(1, 3))
        with torch.no_grad():
            model(torch.zeros(1, 3))
        assert recorder.at(0).activations["2"].mean == 89
        output.backward()
    assert recorder.at(0).gradients["0"].largest == 3
    assert recorder.at(0).activations["0"].largest == 29
    assert len(recorder.at(1).gradients) == 0


def test_a_gradient_after_the_end_is_not_recorded_even_when_it_is_entered_again(model: nn.Sequential) -> None:
    recorder = record(model, "0")
    with recorder:
        output = model(torch.ones(1, 3))
    with recorder:
        output.backward()
        model(torch.ones(1, 3))
    assert recorder.steps == [0, 1]
    assert len(recorder.at(0).gradients) == 0
    assert_exact(model[2].weight.grad, [[7, 0, 27, 0]])


@pytest.mark.parametrize("keep", ["statistics", "device"])
def test_evaluation_passes_are_steps_of_activations_alone(model: nn.Sequential, keep: Any) -> None:
    with record(model, "0", keep=keep) as recorder:
        model(torch.ones(1, 3)).backward()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                model(torch.ones(1, 3))
    assert recorder.steps == [0, 1, 2]
    assert len(recorder.at(0).gradients) == 1
    for step in (1, 2):
        assert len(recorder.at(step).activations) == 1
        with pytest.raises(LayerError, match=f"Step {step} was a pass without gradients"):
            recorder.at(step).gradients["0"]
    if keep == "device":
        assert not recorder.activations["0"].is_inference()


# -- kinds of models ---------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A model with a layer shared by two checkpoints, and another layer between them."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.layer, self.between, self.checkpointing = nn.Linear(3, 3), nn.Linear(3, 3), checkpointing

    def part(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh()).tanh()

    def nested(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing == "plain":
            return self.part(self.between(self.part(x)))
        part, reentrant = self.part, self.checkpointing == "reentrant"
        if self.checkpointing == "nested":
            part, reentrant = self.nested, True
        x = checkpoint(part, x, use_reentrant=reentrant)
        return checkpoint(part, self.between(x), use_reentrant=reentrant)


@pytest.mark.parametrize("checkpointing", ["reentrant", "without reentry", "nested"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpoints_change_no_number(checkpointing: str, order: tuple[int, int], every: int) -> None:
    results = {}
    inputs = torch.randn(2, 4, 3)
    for kind in ("plain", checkpointing):
        torch.manual_seed(0)
        model = Checkpointed(kind)
        with record(model, "*", keep="device", every=every) as recorder:
            outputs = [model(x.clone().requires_grad_()) for x in inputs]
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # reentrant checkpoints warn that they give no gradients
                model(inputs[0])
            for index in order:
                outputs[index].square().sum().backward()
        results[kind] = {
            (step, readings._kind, name): value
            for step in recorder.steps
            for readings in (recorder.at(step).activations, recorder.at(step).gradients)
            for name, value in readings.items()
        }
    assert results["plain"].keys() == results[checkpointing].keys()
    assert len(results[checkpointing]) == (2 * 10 + 5 if every == 1 else 10 + 5)
    for key, value in results["plain"].items():
        torch.testing.assert_close(results[checkpointing][key], value, msg=str(key))


@pytest.mark.parametrize("checkpointing", ["reentrant", "without reentry"])
def test_checkpoints_repeated_in_another_thread_belong_to_their_pass(checkpointing: str) -> None:
    """Run autograd in another thread, as it does on CUDA."""
    results = []
    for threaded in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(checkpointing)
        with record(model, "*", keep="device") as recorder:
            loss = model(torch.ones(2, 3, requires_grad=True)).square().sum()
            run_in_thread(loss.backward) if threaded else loss.backward()
        results.append(dict(recorder.gradients))
    assert len(results[0]) == 5
    assert_same(results[0], results[1])


def run_in_thread(work: Any) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_a_model_that_is_checkpointed_as_a_whole_runs_one_step(model: nn.Sequential) -> None:
    with record(model, "0", keep="device") as recorder:
        checkpoint(model, torch.ones(1, 3, requires_grad=True), use_reentrant=True).backward()
    assert recorder.steps == [0]
    assert_exact(recorder.gradients["0"], [[1, 0, 3, 0]])


def test_frozen_layers_give_activations_and_say_why_there_is_no_gradient(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)
    with record(model, "*", keep="device") as recorder:
        model(torch.ones(1, 3)).backward()
    assert_exact(recorder.activations["0"], [[7, -13, 27, -29]])
    assert_exact(recorder.gradients["2"], [[1]])
    with pytest.raises(LayerError, match="No gradient reached layer '0' in step 0.*nothing.*|.*are frozen"):
        recorder.gradients["0"]


class Packed(nn.Module):
    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.linear, self.pack = nn.Linear(2, 2), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.linear(x))


@pytest.mark.parametrize(
    ("pack", "key"), [(lambda value: (torch.arange(2), value), 1), (lambda value: {"a": value}, "a")]
)
def test_outputs_inside_containers(pack: Any, key: Any) -> None:
    model, x = nn.Sequential(Packed(pack)), torch.randn(3, 2)
    with record(model, "0", keep="device") as recorder:
        (model(x)[key] ** 2).sum().backward()
    assert_exact(recorder.activations["0"], model[0].linear(x).detach())
    assert_exact(recorder.gradients["0"], 2 * recorder.activations["0"])


def test_a_layer_that_returns_its_input_and_one_in_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(0.0).eval())
    x = torch.randn(5, 2)
    with record(model, "*", keep="device") as recorder:
        (3 * model(x)).sum().backward()
    plain = model[0](x).detach()
    assert_exact(recorder.activations["0"], plain)
    assert_exact(recorder.activations["1"], plain)
    assert_exact(recorder.activations["2"], plain.relu())
    assert_exact(recorder.gradients["3"], torch.full((5, 2), 3.0))
    assert_exact(recorder.gradients["2"], torch.full((5, 2), 3.0))
    for name in "01":
        assert_exact(recorder.gradients[name], 3.0 * (plain > 0))


class InPlaceDouble(nn.Module):
    """A module that changes its input in place, which is the output of the layer before."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class SharedTensors(nn.Module):
    """A model with two shared tensors.

    The block's part returns a tensor that the block reads again. The idle layer returns its input, which is also used
    elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Module()
        self.block.part, self.block.side = nn.Linear(64, 64), nn.Linear(64, 64)
        self.block.forward = self._run_block
        self.idle = nn.Dropout(0.0).eval()

    def _run_block(self, x: Tensor) -> tuple[Tensor, Tensor]:
        part = self.block.part(x)
        return part, self.block.side(part)

    def forward(self, x: Tensor) -> Tensor:
        part, side = self.block(x)
        idle = self.idle(part)
        return part.sin() * 3.3 + idle.cos() * 1.7 + part.tanh() * 0.77 + side


@pytest.mark.parametrize("names", [["idle"], ["block"], ["block.part"], ["idle", "block"], ["block.part", "block"]])
def test_a_tensor_of_several_layers_has_one_gradient_whichever_of_them_are_recorded(names: list[str]) -> None:
    model, x = SharedTensors(), torch.randn(16, 64)
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    handle = model.block.part.register_forward_hook(keep)
    (1.3 * model(x)).sum().backward()
    handle.remove()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with record(model, names, keep="device") as recorder:
        (1.3 * model(x)).sum().backward()
    for name in names:
        assert_exact(recorder.gradients[name], outputs[0].grad)
    assert_same(expected, [parameter.grad for parameter in model.parameters()])


def test_an_edit_does_the_same_with_and_without_a_recorder_of_another_layer() -> None:
    model, x, gradients_by_run = SharedTensors(), torch.randn(16, 64), []
    for names in ([], ["block.part"], ["idle"]):
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            stack.enter_context(edit_gradients(model, lambda gradient: 10 * gradient, layers="idle"))
            if names:
                stack.enter_context(record(model, names))
            model(x).sum().backward()
        gradients_by_run.append([parameter.grad.clone() for parameter in model.parameters()])
    assert_same(gradients_by_run[0], gradients_by_run[1])
    assert_same(gradients_by_run[0], gradients_by_run[2])


@pytest.mark.parametrize("name", ["deviation", "mean"])
def test_edited_or_not_each_output_of_one_node_has_its_own_gradient(name: str) -> None:
    """Work the derivatives out by hand: 1/2 for the mean, and -1/sqrt(2) and 1/sqrt(2) for the deviation."""

    class Spread(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            spread = dict(zip(("deviation", "mean"), torch.std_mean(x, dim=1)))
            return {name: spread.pop(name), **spread}

    model, x = nn.Sequential(Spread()), torch.tensor([[1.0, 3.0]], requires_grad=True)
    with (
        edit_gradients(model, lambda gradient: 2 * gradient, layers="0"),
        record(model, "0", keep="device") as recorder,
    ):
        output = model(x)
        (3 * output["mean"] + 8 * output["deviation"]).sum().backward(retain_graph=True)
        assert_exact(recorder.gradients["0"], [6.0 if name == "mean" else 16.0])
        mean, deviation = (6.0, 8.0) if name == "mean" else (3.0, 16.0)
        right = torch.tensor([[-1.0, 1.0]]) * deviation / 2**0.5 + mean / 2
        torch.testing.assert_close(x.grad, right)
        unedited = output["deviation" if name == "mean" else "mean"]
        unedited.sum().backward()  # no gradient reaches the edited output
    other_right = torch.tensor([[-1.0, 1.0]]) / 2**0.5 if name == "mean" else torch.full((1, 2), 0.5)
    torch.testing.assert_close(x.grad, right + other_right)


def test_a_part_and_its_block_may_give_different_outputs_of_one_node() -> None:
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.std_mean(x, dim=1)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Spread()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.part(x)[::-1]

    model = nn.Sequential(Turned())
    with record(model, ["0", "0.part"], keep="device") as recorder:
        mean, deviation = model(torch.randn(2, 5, requires_grad=True))
        (3 * mean + 7 * deviation).sum().backward()
    assert_exact(recorder.gradients["0"], [3.0, 3.0])
    assert_exact(recorder.gradients["0.part"], [7.0, 7.0])


@pytest.mark.parametrize("name", ["flat", "idle"])
def test_a_view_that_is_changed_in_place_and_an_input_that_is_given_back(name: str) -> None:
    """Let the first layer return a view of its input, or its input itself, which is a leaf."""
    parts = {"flat": nn.Flatten(), "idle": nn.Identity()}
    model = nn.Sequential(collections.OrderedDict({name: parts[name], "scale": InPlaceDouble()}))
    x = torch.ones(2, 3, requires_grad=True)
    start = x * 1 if name == "flat" else x
    with record(model, name, keep="device") as recorder:
        inputs = start[:, :, None] if name == "flat" else start
        model(inputs).sum().backward()
    assert_exact(recorder.gradients[name], torch.full((2, 3), 2.0))
    assert_exact(x.grad, torch.full((2, 3), 2.0))


def test_autocast_and_a_scaled_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with record(model, "0", keep="device") as recorder:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(1, 4)).float().sum()
        (1024 * loss).backward()
    assert recorder.activations["0"].dtype == recorder.gradients["0"].dtype == torch.bfloat16
    right = 1024 * model[1].weight.detach().bfloat16().float().sum(0)[None]
    torch.testing.assert_close(recorder.gradients["0"].float(), right, rtol=1e-2, atol=1)


def test_second_derivatives_pass_through() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    grads = []
    for context in (contextlib.nullcontext(), record(model, "*", keep="device")):
        model.zero_grad()
        x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
        with context:
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in list(model.parameters())[:3]])
    assert_same(grads[0], grads[1])


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["statistics", "device"])
def test_rows_are_flat(model: nn.Sequential, keep: Any) -> None:
    with record(model, ["0", "2"], keep=keep, every=2) as recorder:
        for _ in range(3):
            model(torch.ones(1, 3)).backward()
    rows = recorder.rows()
    order = [(row["step"], row["kind"], row["layer"], row["run"]) for row in rows]
    in_one = [("activation", "0", 0), ("activation", "2", 0), ("gradient", "2", 0), ("gradient", "0", 0)]
    assert order == [(step, *item) for step in (0, 2) for item in in_one]
    numbers = measure(torch.tensor([1.0, 0, 3, 0]))
    right = {"step": 2, "layer": "0", "run": 0, "kind": "gradient", **asdict(to_statistics(4, numbers))}
    assert rows[-1] == right


def test_an_epoch_of_statistics_takes_little_memory() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    with record(model, "*") as recorder:
        for _ in range(30):
            model(torch.ones(1, 1)).backward()
    stores = [recorder.at(step).store for step in recorder.steps[:-1]]
    assert all(not store._unpacked and store._block.shape == (40, 7) for store in stores)
    # Each step takes 2240 bytes, and all share one list of names.
    assert len({id(store._layout) for store in stores}) == 1


# -- side effects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_no_trace_is_left_also_after_an_error_inside_the_model(error: type[BaseException] | None) -> None:
    model = tiny_model()
    failing = error and model[5].register_forward_hook(lambda *_: (_ for _ in ()).throw(error("on purpose")))
    before = traces(model.eval())
    with pytest.raises(error, match="on purpose") if error else torch.no_grad(), record(model, ["8", "0"]) as recorder:
        model(TINY)
    assert_same(before, traces(model))
    if failing:
        failing.remove()
    assert recorder.steps == [0]
    assert recorder.activations["0"].count == 3 * 4 * 12 * 16


def test_graphs_and_tensors_go_with_their_steps() -> None:
    model, alive = tiny_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[3].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        with record(model, "*") as recorder:
            for _ in range(100):
                train(model, optimizer)
            assert sum(ref() is not None for ref in alive) <= 1
            assert len(recorder._hooks._handles) < 200
    finally:
        gc.enable()


def test_another_threads_training_and_explanations_are_not_recorded() -> None:
    model = tiny_model().eval()
    with record(model, ["0", "3"]) as recorder:
        model(TINY).sum().backward()
        run_in_thread(lambda: model(2 * TINY).sum().backward())
        run_in_thread(lambda: gradcam.explain(model, TINY, "3"))
    rows = recorder.rows()
    assert recorder.steps == [0]
    assert len(rows) == 4


def test_an_explanation_inside_is_no_step_and_the_same_as_outside() -> None:
    model = tiny_model().eval()
    outside = gradcam.explain(model, TINY, "3", target=1)
    with record(model, "*", keep="device") as recorder:
        loss = model(TINY).sum()
        inside = gradcam.explain(model, TINY, "3", target=1)
        loss.backward()
        before = [(name, value.clone()) for name, value in recorder.gradients.items()]
        gradcam.explain(model, TINY, "0", target=1)
    assert_exact(inside.maps, outside.maps)
    assert recorder.steps == [0]
    assert len(before) == 9
    assert_same(before, list(recorder.gradients.items()))


def test_two_recorders_see_the_same(model: nn.Sequential) -> None:
    with record(model, "*", keep="device") as outer:
        model(torch.zeros(1, 3)).backward()
        with record(model, "*", keep="device") as inner:
            model(torch.ones(1, 3)).backward()
        assert_same(dict(outer.gradients), dict(inner.gradients))
        model(torch.ones(1, 3))
    assert (outer.steps, inner.steps) == ([0, 1, 2], [0])
    assert_exact(inner.gradients["0"], [[1, 0, 3, 0]])


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_layer_that_never_ran_is_named_at_the_end(model: nn.Sequential) -> None:
    model.spare = nn.ModuleDict({"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)})
    model.forward = lambda x: model[2](model[1](model[0](x)))
    with (
        pytest.raises(LayerError, match="Layer 'spare.one' never ran, although the model ran"),
        record(model, ["0", "spare.one"]),
    ):
        model(torch.ones(1, 3))
    with pytest.raises(LayerError, match=r"None of the 2 layers of 'spare\.\*' ever ran"), record(model, "spare.*"):
        model(torch.ones(1, 3))
    with record(model, "*"):  # some of these layers ran
        model(torch.ones(1, 3))
    with record(model, "spare.one"):  # the model did not run either
        pass
    with pytest.raises(ZeroDivisionError), record(model, "spare.one"):
        model(torch.ones(1, 3)) / (1 // 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "gpu"}, "keep is 'gpu', expected one of 'statistics', 'device', 'cpu'"),
        ({"every": 0}, "every is 0, expected a whole number of steps, 1 or more"),
        ({"every": 2.0}, "every is 2.0"),
        ({"every": True}, "every is True"),
        ({"last": 0}, "last is 0"),
        ({"layers": "conv1"}, "There is no layer 'conv1'"),
        ({"layers": "conv*"}, r"No layer matches 'conv\*'"),
        ({"layers": []}, "expected a dotted name"),
    ],
)
def test_layers_that_cannot_be_recorded_are_errors_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        record(worked_model(), **{"layers": "0", **options})


def test_errors_for_missing_records(model: nn.Sequential) -> None:
    recorder = record(model, ["0", "2"])
    with pytest.raises(LayerError, match="No step is recorded yet: run the recorded model"):
        recorder.activations["0"]
    with pytest.raises(LayerError, match="Step 0 is not recorded: no step is recorded"):
        recorder.at(0)
    with recorder:
        model(torch.ones(1, 3))
        with pytest.raises(LayerError, match=r"No gradient reached layer '0' in step 0: call backward\(\)"):
            recorder.gradients["0"]
        with pytest.raises(LayerError, match="Layer '1' is not recorded. Nearest: '0', '2'"):
            recorder.gradients["1"]
        with pytest.raises(GradcamError, match="This recorder is already open"):
            recorder.__enter__()
    assert isinstance(recorder, Recorder)
    assert repr(recorder) == "Recorder(2 layers, 1 of 1 steps, keep='statistics')"


def test_a_layer_without_a_floating_tensor() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x > 0).long()

    model = nn.Sequential(nn.Linear(2, 2), Counts())
    with pytest.raises(LayerError, match="Layer '1' returned no floating-point tensor"), record(model, "1"):
        model(torch.ones(1, 2))


def test_compiled_models_are_refused(model: nn.Sequential) -> None:
    with pytest.raises(ModelError, match="compiled"), record(torch.compile(model, backend="eager"), "0"):
        pass
    model[0].compile(backend="eager")
    with pytest.raises(ModelError, match="The model's '0' is compiled"), record(model, "0"):
        pass


def compiled_step(model: nn.Module, **options: Any) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    return torch.compile(step, backend="eager", **options)


@pytest.mark.skipif(VERSION < (2, 7), reason="PyTorch compiles calls of hooks too: they raise an error")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_function_that_is_compiled_inside_gives_the_right_numbers(model: nn.Sequential) -> None:
    step = compiled_step(model)
    with record(model, ["0", "2"], keep="device", every=2) as recorder:
        for _ in range(3):
            step(torch.ones(1, 3))
    assert recorder.steps == [0, 2]
    for number in recorder.steps:
        assert_exact(recorder.at(number).activations["0"], [[7, -13, 27, -29]])
        assert_exact(recorder.at(number).gradients["0"], [[1, 0, 3, 0]])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_function_that_was_compiled_before_is_an_error_rather_than_silence() -> None:
    torch._dynamo.reset()  # drop code that other tests have compiled, and their failures to compile
    model = worked_model()
    step = compiled_step(model)
    step(torch.ones(1, 3))
    with record(model, "0") as recorder:
        step(torch.ones(1, 3))
    with pytest.raises(LayerError, match="Do not call the model from a compiled function"):
        _ = recorder.activations


def test_readings_name_their_layers() -> None:
    model = worked_model()
    with record(model, ["0", "2"]) as recorder:
        model(torch.ones(1, 3))
    assert repr(recorder.activations) == "activations of step 0: 0, 2"
    assert repr(recorder.gradients) == "gradients of step 0: none"
