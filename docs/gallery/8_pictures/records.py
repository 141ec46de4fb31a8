"""
Explain many files
==================

`explain_files` explains many files, and yields one result per file. Threads read and draw images while the model runs.
"""

from pathlib import Path

import gradcam

Path("broken.jpg").write_bytes(Path("assets/koala.webp").read_bytes()[:2000])
classifier = gradcam.load_classifier()
files = ["assets/koala.webp", "assets/rocket.jpg", "broken.jpg"]
for result in gradcam.explain_files(files, classifier, layers=["layer4"]):
    if result.error is None:
        explanation = result.explanations["layer4", "gradcam"]
        print(result.name, explanation.caption())
        explanation.save(Path(result.name).stem + ".jpg")
    else:
        print(result.name, "failed:", result.error)
Path("broken.jpg").unlink()
