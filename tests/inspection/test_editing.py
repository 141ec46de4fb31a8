"""Check edits of gradients at layers, parameters and tensors: values, order, and that nothing is left."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradcam.errors import GradientError, LayerError, ModelError
from gradcam.hooks.hooks import Hooks
from gradcam.inspection.edit import Edit, edit_gradients
from gradcam.inspection.selection import follow_layers
from tests.helpers import TINY, assert_same, set_submodule, tiny_model, traces


def network() -> nn.Sequential:
    return tiny_model().double().eval()


IMAGES = TINY.double()


@pytest.fixture
def model() -> nn.Sequential:
    return network()


def gradients(model: nn.Module, images: Tensor = IMAGES) -> dict[str, Tensor]:
    """Return the gradients of the parameters for the sum of squares of the output."""
    model.zero_grad()
    model(images).pow(2).sum().backward()
    return {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


class Scale(torch.autograd.Function):
    """An identity that doubles the gradient: the reference for an edit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Doubling(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(self.module(x))


def double(gradient: Tensor) -> Tensor:
    return 2 * gradient


def fail(_: Any) -> None:
    raise ZeroDivisionError


class Steps:
    """Edits gradient -> 2 gradient + 1, recorded by name. Their order shows in the result."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, name: str) -> Callable[[Tensor], Tensor]:
        def edit(gradient: Tensor) -> Tensor:
            self.seen.append(name)
            return gradient * 2 + 1

        return edit

    def look(self, name: str) -> Callable[[str, Tensor], Any]:
        return lambda layer, tensor: lambda gradient: self.seen.append(f"{name} {gradient.flatten()[0].item():g}")


class TestTensors:
    def test_leaf_and_intermediate(self) -> None:
        x = torch.randn(4, dtype=torch.float64, requires_grad=True)
        y = x.exp()
        edit_gradients(x, lambda gradient: gradient - 1)
        edit_gradients(y, lambda gradient: gradient * 3)
        (y * y).sum().backward()
        torch.testing.assert_close(x.grad, 3 * 2 * x.detach().exp() ** 2 - 1)

    def test_a_function_that_returns_none_changes_nothing(self) -> None:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        edit = edit_gradients(x, lambda gradient: None)
        (3 * x).sum().backward()
        assert x.grad.tolist() == [3, 3]
        assert edit.is_active

    def test_order_of_registration(self) -> None:
        x = torch.tensor(1.0, requires_grad=True)
        y = 1 * x
        edits = [lambda g: g + 1, lambda g: g * 10, lambda g: g - 3]
        handles = [edit_gradients(y, edit) for edit in edits]
        y.backward(retain_graph=True)
        assert x.grad.item() == (1 + 1) * 10 - 3
        handles[1].remove()
        x.grad = None
        y.backward()
        assert x.grad.item() == 1 + 1 - 3

    def test_what_autograd_grad_and_retained_gradients_show(self) -> None:
        x = torch.tensor(1.0, requires_grad=True)
        y = 1 * x
        y.retain_grad()
        edit_gradients(y, double)
        z = 5 * y
        assert torch.autograd.grad(z, y, retain_graph=True)[0].item() == 10
        y.grad = None
        z.backward()
        assert y.grad.item() == x.grad.item() == 10

    def test_complex_values(self) -> None:
        x = torch.tensor([1 + 2j], requires_grad=True)
        edit_gradients(x, lambda gradient: gradient * 1j)
        (x * x.conj()).real.sum().backward()
        assert x.grad.tolist() == [2j * (1 + 2j)]

    def test_second_derivatives(self) -> None:
        """Check that d(3 y^2)/dx with the edit g^2 at y = 2 x is 2 (6 y)^2 = 288 x^2, and its derivative 576 x."""
        x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        y = 2 * x
        edit = edit_gradients(y, lambda gradient: gradient**2)
        (gradient,) = torch.autograd.grad(3 * y**2, x, create_graph=True)
        assert gradient.item() == pytest.approx(288 * 0.25)
        edit.remove()  # otherwise the second pass, which goes through y again, would be edited too
        (second,) = torch.autograd.grad(gradient, x)
        assert second.item() == pytest.approx(576 * 0.5)

    def test_changed_in_place_after_the_edit_was_made(self) -> None:
        x = torch.tensor([-1.0, 2.0], requires_grad=True)
        y = 3 * x
        edit_gradients(y, lambda gradient: gradient + 1)  # the edit belongs to the value before the in-place change
        y.relu_()
        (5 * y).sum().backward()
        assert x.grad.tolist() == [3, 18]

    def test_a_gradient_that_was_made_in_inference_mode(self) -> None:
        x = torch.ones(2, requires_grad=True)
        edit_gradients(x, double)
        with torch.inference_mode():
            gradient = torch.ones(2)
        x.backward(gradient)
        assert x.grad.tolist() == [2, 2]

    def test_without_a_gradient(self) -> None:
        with pytest.raises(GradientError, match=r"No gradient reaches the tensor \(2, 3\): call requires_grad_\(\)"):
            edit_gradients(torch.zeros(2, 3), double)

    def test_saving_an_edited_tensor_warns_of_nothing(self) -> None:
        tensor = torch.ones(2, requires_grad=True) * 2
        edit_gradients(tensor, double)
        torch.save(tensor, io.BytesIO())


class TestParameters:
    def test_by_pattern_before_they_are_added(self, model: nn.Sequential) -> None:
        plain = gradients(model)
        with edit_gradients(model, lambda gradient: gradient**2, parameters=["8.*", "0.bias"]):
            once = gradients(model)
            model(IMAGES).pow(2).sum().backward()  # the incoming gradient is edited, not the accumulated one
        for name, gradient in plain.items():
            edited = gradient**2 if name.startswith("8.") or name == "0.bias" else gradient
            torch.testing.assert_close(once[name], edited)
            torch.testing.assert_close(model.get_parameter(name).grad, 2 * edited)
        assert_same(gradients(model), plain)

    def test_a_shared_parameter_is_edited_once(self) -> None:
        layer = nn.Linear(1, 1, bias=False)
        model = nn.Sequential(layer, layer)
        layer.weight.data.fill_(3)
        with edit_gradients(model, lambda gradient: gradient + 1, parameters="*"):
            model(torch.ones(1, 1)).sum().backward()
        assert layer.weight.grad.item() == 2 * 3 + 1

    def test_a_sparse_gradient(self) -> None:
        table = nn.Embedding(5, 2, sparse=True)
        with edit_gradients(table, double, parameters="weight"):
            table(torch.tensor([1, 1, 2])).sum().backward()
        assert table.weight.grad.is_sparse
        assert table.weight.grad.to_dense().tolist() == [[0, 0], [4, 4], [2, 2], [0, 0], [0, 0]]
        message = r"returned float32 \(5, 2\) on cpu, expected sparse_coo float32 \(5, 2\)"
        with edit_gradients(table, Tensor.to_dense, parameters="weight"), pytest.raises(GradientError, match=message):
            table(torch.tensor([1])).sum().backward()
        with (
            edit_gradients(table, lambda gradient: (gradient._values().mul_(2), None)[1], parameters="weight"),
            pytest.raises(GradientError, match="in place"),
        ):
            table(torch.tensor([1])).pow(2).sum().backward()

    def test_frozen_parameters(self, model: nn.Sequential) -> None:
        model[0].requires_grad_(False)
        with pytest.raises(GradientError, match=r"No gradient reaches '0\.weight'"):
            edit_gradients(model, double, parameters="0.*")
        with edit_gradients(model, double, parameters="*") as edit:
            assert "'0.weight'" not in repr(edit)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    def test_of_a_compiled_model(self, model: nn.Sequential) -> None:
        plain = gradients(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        compiled(IMAGES)
        with edit_gradients(compiled, double, parameters="8.weight"):
            model.zero_grad()
            output = compiled(IMAGES)
            edit_gradients(output, lambda gradient: 3 * gradient)
            output.pow(2).sum().backward()
        for name, gradient in plain.items():
            factor = 6 if name == "8.weight" else 3
            torch.testing.assert_close(model.get_parameter(name).grad, factor * gradient)
        with pytest.raises(ModelError, match="compiled code ignores hooks"):
            edit_gradients(compiled, double, layers="3")


class TestLayers:
    @pytest.mark.parametrize("name", ["0", "1", "2", "3", "4", "7", "8"])
    def test_each_layer_in_place_or_not(self, name: str) -> None:
        """Compare with a model that has an operation with derivative 2 after the layer."""
        model, theirs = network(), network()
        for module in theirs.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False
        set_submodule(theirs, name, Doubling(theirs.get_submodule(name)))
        expected = {key.replace(".module", ""): value for key, value in gradients(theirs).items()}
        with edit_gradients(model, double, layers=name):
            edited = gradients(model)
        assert edited.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(edited[key], gradient)
        assert_same(gradients(model), gradients(network()))

    def test_by_pattern_and_in_every_pass(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)).double()
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        (plain,) = torch.autograd.grad(model(x).sum(), x)
        with edit_gradients(model, double, layers="[01]"):
            for _ in range(2):
                torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x)[0], 4 * plain)
            (twice,) = torch.autograd.grad(model(model(x).expand(2, 3)).sum(), x)
        (once,) = torch.autograd.grad(model(model(x).expand(2, 3)).sum(), x)
        torch.testing.assert_close(twice, 16 * once)

    def test_order_of_registration_on_one_layer(self) -> None:
        model, steps = network(), Steps()
        with Hooks() as first, Hooks() as last:
            follow_layers(first, {"8": model[8]}, steps.look("first"))
            first_edit = edit_gradients(model, steps("one"), layers="8")
            second_edit = edit_gradients(model, steps("two"), layers="8")
            follow_layers(last, {"8": model[8]}, steps.look("last"))
            third_edit = edit_gradients(model, steps("three"), layers="8")
            output = model(IMAGES)
            fourth_edit = edit_gradients(output, steps("four"))
            output.retain_grad()
            output.sum().backward()
            # Observers see the gradient after all edits: 1, 3, 7, 15, 31.
            assert steps.seen == ["one", "two", "three", "four", "first 31", "last 31"]
            assert output.grad.unique().tolist() == [31]
            torch.testing.assert_close(model[8].bias.grad, torch.full((5,), 3 * 31.0, dtype=torch.float64))
            for edit in (first_edit, second_edit, third_edit, fourth_edit):
                edit.remove()

    def test_order_of_registration_where_a_block_gives_what_its_last_part_gave(self) -> None:
        model, steps = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), Steps()
        names = ["1", "1.0", "1", "1.0"]
        edits = [edit_gradients(model, steps(f"{i} {name}"), layers=name) for i, name in enumerate(names)]
        model(torch.ones(1, 2)).sum().backward()
        assert steps.seen == ["0 1", "1 1.0", "2 1", "3 1.0"]
        for edit in edits:
            edit.remove()

    def test_looks_and_edits_that_ended_before_backward_see_nothing(self) -> None:
        model, steps = nn.Sequential(nn.Linear(2, 2)), Steps()
        with Hooks() as stays:
            follow_layers(stays, {"0": model[0]}, steps.look("stays"))
            with Hooks() as ends:
                follow_layers(ends, {"0": model[0]}, steps.look("ends"))
                edit = edit_gradients(model, steps("edit"), layers="0")
                score = model(torch.ones(1, 2)).sum()
            score.backward(retain_graph=True)
            edit.remove()
            score.backward()
        assert steps.seen == ["edit", "stays 3", "stays 1"]

    def test_a_change_between_two_edits(self) -> None:
        """Edit on both sides of a foreign hook that doubles the layer's output in place."""
        layer = nn.Linear(2, 2, bias=False)
        model, observed = nn.Sequential(layer), []
        with edit_gradients(model, lambda gradient: observed.append(gradient.unique().item()), layers="0"):
            handle = layer.register_forward_hook(lambda module, inputs, output: output.mul_(2))
            with edit_gradients(model, lambda gradient: gradient + 4, layers="0"):
                model(torch.ones(1, 2)).sum().backward()
            handle.remove()
        assert observed == [(1 + 4) * 2]

    def test_removed_before_and_after_backward(self, model: nn.Sequential) -> None:
        plain = gradients(model)
        model.zero_grad()
        edit = edit_gradients(model, double, layers="3")
        score = model(IMAGES).pow(2).sum()
        edit.remove()
        score.backward(retain_graph=True)
        assert_same({name: item.grad for name, item in model.named_parameters()}, plain)
        edit = edit_gradients(model, double, layers="3")
        score = model(IMAGES).pow(2).sum()
        model.zero_grad()
        score.backward(retain_graph=True)
        edited = model[0].weight.grad.clone()
        edit.remove()
        torch.testing.assert_close(edited, 2 * plain["0.weight"])
        assert torch.equal(model[0].weight.grad, edited)
        model.zero_grad()
        score.backward()  # a second backward pass through the same graph, without the edit
        assert torch.equal(model[0].weight.grad, plain["0.weight"])

    def test_second_derivatives(self) -> None:
        """Compare the second derivative of a squared gradient with the same computation written out without hooks."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
        x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        hidden = model[0](x)
        (at_hidden,) = torch.autograd.grad(model[2](hidden.tanh()).sum(), hidden, create_graph=True)
        (expected,) = torch.autograd.grad(((at_hidden**2) @ model[0].weight).pow(2).sum(), model[2].weight)
        with edit_gradients(model, lambda gradient: gradient**2, layers="0"):
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second_derivative,) = torch.autograd.grad(gradient.pow(2).sum(), model[2].weight)
        torch.testing.assert_close(second_derivative, expected)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoints(self, use_reentrant: bool) -> None:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                run = self.part if plain else lambda y: checkpoint(self.part, y, use_reentrant=use_reentrant)
                return run(self.first(x))

        plain, x, gradients_by_mode = True, torch.randn(2, 3), {}
        for plain in (True, False):
            torch.manual_seed(0)
            model = Net()
            model.first, model.part = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
            with edit_gradients(model, double, layers=["part.0", "part"]):
                gradients_by_mode[plain] = gradients(model, x)
        assert_same(gradients_by_mode[True], gradients_by_mode[False])
        with_none = gradients(model, x)
        torch.testing.assert_close(gradients_by_mode[False]["first.weight"], 4 * with_none["first.weight"])

    def test_autocast(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        dtypes = []

        def note(gradient: Tensor) -> Tensor:
            dtypes.append(gradient.dtype)
            return gradient * 2.0

        x = torch.randn(2, 3, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            plain = model(x)
        plain.sum().backward()
        expected, x.grad = x.grad, None
        with edit_gradients(model, note, layers="0"), torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            output.sum().backward()
        assert dtypes == [torch.bfloat16]
        assert torch.equal(x.grad, 2 * expected)
        with edit_gradients(model, Tensor.float, layers="0"), torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            with pytest.raises(GradientError, match=r"layer '0' returned float32 \(2, 3\).*bfloat16 \(2, 3\)"):
                output.sum().backward()

    def test_the_first_floating_tensor_of_several(self) -> None:
        class Part(nn.Module):
            def forward(self, x: Tensor) -> dict[str, Any]:
                return {"index": torch.tensor(1), "values": (3 * x, 5 * x)}

        x = torch.tensor(1.0, requires_grad=True)
        model = nn.Module()
        model.part = Part()
        model.forward = lambda x: sum(model.part(x)["values"])
        with edit_gradients(model, double, layers="part"):
            model(x).backward()
        assert x.grad.item() == 2 * 3 + 5

    def test_functions_that_leave_it_train_bit_for_bit_alike(self) -> None:
        def trained(*, edited: bool) -> dict[str, Tensor]:
            model = tiny_model().train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            torch.manual_seed(0)
            edits = []
            if edited:
                edits = [edit_gradients(model, lambda gradient: None, layers="*")]
                edits.append(edit_gradients(model, lambda gradient: None, parameters="*"))
            for _ in range(3):
                optimizer.zero_grad()
                model(TINY).pow(2).sum().backward()
                optimizer.step()
            for edit in edits:
                edit.remove()
            return {name: item.clone() for name, item in model.state_dict().items()}

        assert_same(trained(edited=True), trained(edited=False))


class TestErrors:
    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (lambda g: g.sum(), r"returned float64 \(\) on cpu, expected float64 \(3, 5\) on cpu"),
            (lambda g: g.float(), r"returned float32 \(3, 5\) on cpu, expected float64"),
            (lambda g: g.to("meta"), r"returned float64 \(3, 5\) on meta, expected .* on cpu"),
            (lambda g: g.to_sparse(), r"returned sparse_coo float64 \(3, 5\) on cpu, expected float64"),
            (lambda g: 3, r"returned 3, expected a tensor float64 \(3, 5\) on cpu, or None"),
            (lambda g: g.numpy(), r"returned array\(.*expected a tensor"),
            (lambda g: g.mul_(2), r"changed the gradient in place.*Return a new tensor"),
            (lambda g: (g.zero_(), None)[1], r"changed the gradient in place"),
            (lambda g: g.detach().add_(1), r"changed the gradient in place"),
            (lambda g: (g.t()[1:].add_(1), None)[1], r"changed the gradient in place"),
        ],
    )
    @pytest.mark.parametrize("expanded", [False, True])
    def test_wrong_replacements_of_a_gradient_are_errors(self, function: Any, message: str, expanded: bool) -> None:
        """Check that the message names the layer or tensor, in backward() and in grad().

        It does so too where PyTorch rejects an in-place change.
        """

        def score() -> Tensor:
            output = model(IMAGES)
            if kind == "the tensor (3, 5)":
                edit_gradients(output, function)
            return output.sum() if expanded else output.pow(2).sum()

        for kind, where in (("layer '8'", {"layers": "8"}), ("the tensor (3, 5)", {})):
            model = network()
            if where:
                edit_gradients(model, function, **where)
            for run in (Tensor.backward, lambda score: torch.autograd.grad(score, list(model.parameters()))):  # noqa: B023
                with pytest.raises(GradientError, match=message) as caught:
                    run(score())
                assert str(caught.value).startswith(f"The edit at {kind} ")

    def test_at_a_parameter(self, model: nn.Sequential) -> None:
        edit_gradients(model, torch.sum, parameters="8.bias")
        with pytest.raises(GradientError, match=r"The edit at parameter '8\.bias' returned float64 \(\)"):
            gradients(model)

    def test_a_gradient_in_place_that_is_the_users_own(self) -> None:
        x = torch.ones(2, requires_grad=True)
        edit_gradients(x, lambda gradient: gradient.mul_(2))
        incoming = torch.ones(2, requires_grad=True)
        with pytest.raises(GradientError, match="in place") as caught:
            x.backward(incoming, create_graph=True)
        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_errors_of_the_function_come_out_as_they_are(self, model: nn.Sequential) -> None:

        def fail(gradient: Tensor) -> Tensor:
            raise error

        edit_gradients(model, fail, layers="3")
        for error in (ValueError("mine"), RuntimeError("mine"), KeyboardInterrupt()):
            with pytest.raises(type(error)) as caught:
                gradients(model)
            assert caught.value is error

    def test_wrong_calls(self) -> None:
        model, tensor = network(), torch.ones(2, requires_grad=True)
        before = traces(model)
        for call, kind, message in (
            (lambda: edit_gradients(model, double), GradientError, "Choose the gradients"),
            (lambda: edit_gradients(model, double, layers="0", parameters="*"), GradientError, "Choose the gradients"),
            (lambda: edit_gradients(tensor, double, layers="0"), GradientError, "need a model, not a tensor"),
            (lambda: edit_gradients(tensor, 2), GradientError, "The edit is 2, expected a function"),
            (lambda: edit_gradients(3, double, layers="0"), ModelError, "The model is int"),
            (lambda: edit_gradients(model, double, layers="O"), LayerError, "There is no layer 'O'"),
            (lambda: edit_gradients(model, double, layers="x*"), LayerError, "No layer matches 'x.'"),
            (lambda: edit_gradients(model, double, layers=[]), LayerError, "The layers are"),
            (lambda: edit_gradients(model, double, parameters=[]), GradientError, "The parameters are"),
            (lambda: edit_gradients(model, double, parameters="8.bais"), GradientError, r"Nearest: '8\.bias'"),
            (lambda: torch.func.vmap(lambda x: edit_gradients(x, double))(tensor), ModelError, r"torch\.func"),
        ):
            with pytest.raises(kind, match=message):
                call()
        assert_same(traces(model), before)

    def test_a_layer_that_never_runs(self, model: nn.Sequential) -> None:
        model.add_module("spare", nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        model.forward = lambda x: model[8](x)
        rows = torch.randn(2, 6, dtype=torch.float64)
        message = r"Layer 'spare' never ran"
        with pytest.raises(LayerError, match=message), edit_gradients(model, double, layers=["spare", "8"]):
            model(rows)
        with edit_gradients(model, double, layers="spare") as edit:
            model(rows)
            edit.remove()
        with pytest.raises(ZeroDivisionError), edit_gradients(model, double, layers="spare"):
            fail(model(rows))
        edit = edit_gradients(model, double, layers="spare")
        model(rows)
        edit.remove()  # never raises

    def test_where_no_gradient_can_come(self) -> None:
        model = network().requires_grad_(False)
        message = r"Layer '0' returned nothing that requires a gradient.*requires_grad_\(\)"
        with pytest.raises(GradientError, match=message), edit_gradients(model, double, layers="0"):
            model(IMAGES)
        message = r"None of the \d+ layers of '\*' returned anything that requires a gradient"
        with pytest.raises(GradientError, match=message), edit_gradients(model, double, layers="*"):
            model(IMAGES)
        with edit_gradients(model, double, layers="0"):  # a trainable input is enough
            model(IMAGES.clone().requires_grad_())
        with edit_gradients(model, double, layers="0"), torch.no_grad():  # a validation pass is no mistake
            model(IMAGES)
        model[8].requires_grad_()
        with edit_gradients(model, double, layers="*"):
            model(IMAGES)


class TestNoTrace:
    @pytest.mark.parametrize("where", [{"layers": "*"}, {"parameters": "*"}])
    def test_everything_is_as_it_was(self, where: dict[str, Any]) -> None:
        model = tiny_model().eval()
        hooks = [parameter._backward_hooks for parameter in model.parameters()]
        before = traces(model)
        with edit_gradients(model, double, **where):
            torch.autograd.grad(model(TINY).sum(), list(model.parameters()))
        assert_same(traces(model), before)
        with pytest.raises(ZeroDivisionError), edit_gradients(model, double, **where):
            fail(model(TINY))
        assert_same(traces(model), before)
        edit_gradients(model, double, **where).remove()
        assert_same(traces(model), before)
        assert hooks == [None] * len(hooks)
        assert not any(parameter._backward_hooks for parameter in model.parameters())

    def test_a_registration_that_fails_half_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model().eval()
        before = traces(model)

        def fail(*_: Any, **__: Any) -> None:
            raise MemoryError

        monkeypatch.setitem(vars(model[3]), "register_forward_hook", fail)
        monkeypatch.setitem(vars(model[3].weight), "register_hook", fail)
        for where in ({"layers": "*"}, {"parameters": "*"}):
            with pytest.raises(MemoryError):
                edit_gradients(model, double, **where)
        monkeypatch.undo()
        assert_same(traces(model), before)
        assert not any(parameter._backward_hooks for parameter in model.parameters())

    def test_a_tensors_hooks(self) -> None:
        x = torch.ones(2, requires_grad=True)
        foreign_hook = x.register_hook(lambda gradient: None)
        before = dict(x._backward_hooks)
        with edit_gradients(x, double):
            assert len(x._backward_hooks) == 2
        assert dict(x._backward_hooks) == before
        with pytest.raises(ZeroDivisionError), edit_gradients(x, double):
            fail(x)
        assert dict(x._backward_hooks) == before
        foreign_hook.remove()

    def test_layers_are_edited_in_passes_of_this_thread_alone(self, model: nn.Sequential) -> None:
        plain = gradients(model)["0.weight"]
        results: list[Tensor] = []

        def work() -> None:
            with edit_gradients(model, lambda gradient: 10 * gradient, layers="8"):
                for _ in range(20):
                    results.extend(torch.autograd.grad(model(IMAGES).pow(2).sum(), model[0].weight))

        threads = [threading.Thread(target=work) for _ in range(2)]
        before = traces(model)
        with edit_gradients(model, double, layers="3"):
            for thread in threads:
                thread.start()
            for _ in range(20):
                (weight_gradient,) = torch.autograd.grad(model(IMAGES).pow(2).sum(), model[0].weight)
                torch.testing.assert_close(weight_gradient, 2 * plain)
            for thread in threads:
                thread.join()
        assert len(results) == 40
        for theirs in results:
            torch.testing.assert_close(theirs, 10 * plain)
        assert_same(traces(model), before)

    def test_a_long_edit_keeps_nothing_of_the_passes(self, model: nn.Sequential) -> None:
        with edit_gradients(model, double, layers="*") as edit:
            for _ in range(100):
                gradients(model)
            assert len(edit._hooks._handles) < 200

    def test_the_handle(self, model: nn.Sequential) -> None:
        edit = edit_gradients(model, double, layers="*")
        assert isinstance(edit, Edit)
        assert repr(edit) == "Edit(layer '0', layer '1', layer '2' and 6 more; active)"
        assert edit.is_active
        edit.remove()
        edit.remove()
        assert not edit.is_active
        assert repr(edit) == "Edit(layer '0', layer '1', layer '2' and 6 more; removed)"
        assert repr(edit_gradients(torch.ones(2, requires_grad=True), double)) == "Edit(the tensor (2,); active)"
        with edit:
            pass
