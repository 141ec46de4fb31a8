"""Compare CAM methods on your own images and boxes.

    python examples/evaluate_methods.py                                                photographs in assets/
    python examples/evaluate_methods.py IMAGE... --boxes boxes.csv --methods gradcam,layercam,mine.py:mycam

Prints a table of all methods, and of control maps that ignore the model. The metrics are faithfulness (ROAD) and, if you
pass boxes, the share of the heatmap inside them. The command `gradcam evaluate` does the same, with plots and a report.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import gradcam
from gradcam.evaluation import CONTROLS, mean_interval

ASSETS = Path(__file__).parent.parent / "assets"
PICTURES = [
    ASSETS / name for name in ("coffee.jpg", "koala.webp", "panda.webp", "macaw.webp", "rocket.jpg", "lemur.webp")
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare CAM methods on your own images.")
    parser.add_argument("pictures", nargs="*", type=Path, default=PICTURES)
    parser.add_argument("--boxes", type=Path, help="a CSV: image,left,top,right,bottom[,class]")
    parser.add_argument("--methods", default="gradcam,layercam,hirescam")
    parser.add_argument("--metrics", default="road,complexity")
    parser.add_argument("--model", default="efficientnet_lite0")
    typed = parser.parse_args()

    classifier = gradcam.load_classifier(typed.model)
    metrics = typed.metrics.split(",") + (["energy-pointing-game"] if typed.boxes else [])
    results = gradcam.evaluation.evaluate(
        classifier,
        typed.pictures,
        methods=typed.methods.split(","),
        metrics=metrics,
        annotations=typed.boxes,
    )
    values = defaultdict(list)
    for each in results.measurements:
        values[each.metric, each.method].append(each.value)
    for (metric, method), numbers in sorted(values.items()):
        control = "  (control: ignores the model)" if method in CONTROLS else ""
        interval = mean_interval(numbers)
        print(f"{metric:22} {method:14} {interval.mean:6.3f}  {interval.low:6.3f} to {interval.high:6.3f}{control}")


if __name__ == "__main__":
    main()
