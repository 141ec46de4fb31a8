"""Ask which method to trust, on pictures and boxes of yours.

    python examples/evaluate_methods.py                                                  photographs of the repository
    python examples/evaluate_methods.py PICTURE... --boxes boxes.csv --methods gradcam,layercam,mine.py:mycam

Prints a table: each method, and maps that know nothing of the model as controls, by faithfulness (ROAD), and where there are
boxes by the share of the map that lies in them. `gradcam evaluate` is the same in the shell, with plots and a report.
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
    parser = argparse.ArgumentParser(description="Ask which method to trust, on pictures of yours.")
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
        control = "  (knows nothing of the model)" if method in CONTROLS else ""
        interval = mean_interval(numbers)
        print(f"{metric:22} {method:14} {interval.mean:6.3f}  {interval.low:6.3f} to {interval.high:6.3f}{control}")


if __name__ == "__main__":
    main()
