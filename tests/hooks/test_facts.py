"""Check that cached facts about a model are dropped when one of its settings changes, at any depth."""

from types import SimpleNamespace

from torch import nn

from gradcam.hooks.model_facts import ModelFacts


def remember(model: nn.Module) -> None:
    ModelFacts(model).set("question", "answer")
    assert ModelFacts(model).get("question") == "answer"


def test_a_change_in_a_shared_configuration_is_noticed() -> None:
    config = SimpleNamespace(layout=SimpleNamespace(flips=False))
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[0].config = model[1].config = config
    remember(model)
    config.layout.flips = True
    assert ModelFacts(model).get("question") is None


def test_another_shared_object_is_noticed() -> None:
    first, second = SimpleNamespace(size=1), SimpleNamespace(size=2)
    model = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())
    model[0].config, model[1].config, model[2].config = first, second, first
    remember(model)
    model[2].config = second
    assert ModelFacts(model).get("question") is None


def test_objects_that_share_others_are_compared_once_each() -> None:
    model = nn.ReLU()
    value = SimpleNamespace(left=0, right=0)
    for number in range(60):  # a description without sharing would double in size at each step
        setattr(model, f"part{number}", value)
        value = SimpleNamespace(left=value, right=value)
    remember(model)
    model.part0.left = 1
    assert ModelFacts(model).get("question") is None
