"""What the results of a batch depend on, for `run.json`: a run is resumed with the same alone."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradcam.batch.engine import Work
    from gradcam.batch.output.saving import Saving
    from gradcam.classifiers import Classifier
    from gradcam.cli.settings import Settings


def describe_settings(settings: Settings, work: Work, saving: Saving) -> dict[str, Any]:
    """The choices, by the names of the options, with what was found where nothing was said; all of it is JSON."""
    classifier, question, target = work.classifier, work.question, work.question.target
    chosen = settings.model
    return {
        "model": classifier.name,
        "device": work.device or classifier.device.type,
        "precision": chosen.precision,
        "preprocessing": _describe_preprocess(classifier.preprocess),
        "activation": classifier.activation,
        "reader": chosen.reader,
        "layers": question.list_layers(classifier),
        "reshape": list(question.reshape) if isinstance(question.reshape, tuple) else question.reshape,
        "methods": [*question.methods, *question.attributions],
        "classes": None if target.classes is None else [int(index) for index in target.classes[0]],
        "top_k": target.top,
        "score": target.score,
        "against": [int(index) for index in target.against or ()],
        "evidence": question.evidence,
        "augmentation": question.augmentation,
        "smoothing": question.smoothing,
        **_describe_fit(classifier),
        "batch_size": work.batch_size,
        "audit": work.audit,
        **{("save" if name == "kinds" else name): value for name, value in asdict(saving).items() if name != "views"},
    }


def _describe_fit(classifier: Classifier) -> dict[str, str]:
    """Nothing where it is as it always was: an earlier version's run is gone on with."""
    return {} if classifier.fit == "crop" else {"fit": classifier.fit, "predictions": classifier.predictions}


def _describe_preprocess(preprocess: Any) -> Any:
    """Its values, or, of code that is not ours, its name: a repr may have an address in it."""
    is_ours = is_dataclass(preprocess) and not isinstance(preprocess, type)
    return asdict(preprocess) if is_ours else type(preprocess).__qualname__
