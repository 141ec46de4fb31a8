"""Define the examples and the short help (-h) of every command. This module is imported only to print help.

Every example is run by tests/cli/test_help.py.
"""

from __future__ import annotations

# This table maps each command to its examples. In each line, the text after `#` explains the example.
EXAMPLES = {
    "": (
        "gradcam run photo.jpg  # see where the model looks",
        "gradcam compare photo.jpg  # several methods side by side",
        "gradcam batch photos/ -o explained/ --report  # a whole folder, with a gallery",
    ),
    "run": (
        "gradcam run photo.jpg  # the embedded ImageNet classifier",
        "gradcam run scans/ --model net.py:build --weights best.pth  # your own model, all images in a folder",
        "gradcam run photo.jpg --class espresso --figure photo.pdf  # a figure for a paper",
    ),
    "page": (
        "gradcam page photo.jpg -o photo.html  # one image in one file",
        "gradcam page photos/ -o pages/  # a page per image, and a gallery",
        "gradcam page photo.jpg --class espresso --check  # show this class first, and test its heatmap",
    ),
    "ui": (
        "gradcam ui  # open an empty page in the browser",
        "gradcam ui photos/ --model resnet50  # list the images of a folder, use another model",
        "gradcam ui --host 0.0.0.0 --no-browser  # let other machines connect if they know the printed token",
    ),
    "batch": (
        "gradcam batch photos/ -o explained/ --report  # a folder, with a gallery",
        "gradcam batch photos/ -o explained/ --resume  # continue a run that was interrupted",
        "gradcam batch photos.tar -o maps/ --save map  # an archive, with raw heatmaps as .npy arrays",
    ),
    "report": (
        "gradcam batch photos/ -o explained/ --save overlay,boxes  # explain a folder",
        "gradcam report explained/  # then write explained/index.html",
        "gradcam report explained/ --format coco  # or export the boxes as explained/coco.json",
    ),
    "compare": (
        "gradcam compare photo.jpg  # common methods, side by side",
        "gradcam compare photo.jpg --method gradcam,layercam --layer layer3 --layer layer4  # two methods at two layers",
        "gradcam compare photo.jpg --class tabby --class espresso  # two classes",
    ),
    "check": (
        "gradcam check photo.jpg  # test the heatmap of the top class",
        "gradcam check photo.jpg --method gradcam,eigencam  # test two methods",
        "gradcam check photo.jpg --class espresso --fail-on failed  # exit with status 1 if the check fails",
    ),
    "diff": (
        "gradcam diff net.py:build net.py:build photos/ --weights-old a.pth --weights-new b.pth  # two checkpoints",
        "gradcam diff net.py:build photos/ --weights a.pth --save a.npz  # take a snapshot",
        "gradcam diff net.py:build photos/ --weights b.pth --against a.npz  # compare with the snapshot later",
    ),
    "audit": (
        "gradcam audit photos/  # classes from the folder names or the predictions",
        "gradcam audit photos/ --labels labels.csv  # classes from a table with the columns image and class",
        "gradcam audit photos/ --page audit.html  # also write an HTML page",
    ),
    "evaluate": (
        "gradcam evaluate photos/ --limit 100 -o study/  # default methods and metrics, on 100 images",
        "gradcam evaluate photos/ --method gradcam,layercam --metric road  # two methods, one metric",
        "gradcam evaluate photos/ --annotations boxes.csv --metric pointing-game  # localisation",
    ),
    "recommend": (
        "gradcam recommend photos/  # try all fast methods, all scores and some layers",
        "gradcam recommend photos/ --method gradcam,layercam -l layer3 -l layer4  # try only these methods and layers",
        "gradcam recommend photos/ --annotations boxes.csv  # measure localisation on annotated objects",
    ),
    "layers": (
        "gradcam layers  # layers of the embedded classifier",
        "gradcam layers resnet50  # layers of a torchvision model",
        "gradcam layers resnet50 'layer4.*' --all  # layers whose names match a pattern",
    ),
    "inspect": (
        "gradcam inspect trace --model resnet50  # every call of every layer",
        "gradcam inspect activations photo.jpg  # an image of every channel of a layer",
        "gradcam inspect gradients photo.jpg  # vanishing and exploding gradients",
    ),
    "inspect trace": (
        "gradcam inspect trace --model resnet50  # random weights and noise, without a download",
        "gradcam inspect trace photo.jpg --depth 2  # the embedded classifier on an image",
        "gradcam inspect trace --model resnet50 --layer 'layer4.*' --json  # some layers, as JSON",
    ),
    "inspect features": (
        "gradcam inspect features photos/ -o features.npz  # the default layer of the embedded classifier",
        "gradcam inspect features photos/ -o features.npz --layer layer4 --pool  # the mean of each channel over the image",
    ),
    "inspect activations": (
        "gradcam inspect activations photo.jpg  # the default layer",
        "gradcam inspect activations photo.jpg --layer layer1 --layer layer4 --channels 16  # two layers, 16 channels each",
    ),
    "inspect gradients": (
        "gradcam inspect gradients photo.jpg  # gradients of the top class",
        "gradcam inspect gradients photo.jpg --class espresso --layer 'layer*'  # gradients of one class, at some layers",
    ),
    "methods": (
        "gradcam methods  # all methods, one per line",
        "gradcam methods layercam --verbose  # one method, with its paper",
        "gradcam methods gradcam layercam --bibtex  # BibTeX entries of two methods",
    ),
    "models": (
        "gradcam models  # all models",
        "gradcam models resnet  # models whose names contain a word",
        "gradcam models 'vit_*' --json  # models whose names match a pattern, as JSON",
    ),
}

MODEL = "--model --weights --labels --layer"
PRINTING = "--output --json --quiet"
# The short help of these commands lists only these options. The short help of all other commands lists every option.
OPTIONS = {
    "run": f"{MODEL} --method --class --top-k --box --mask --text --prompt --caption --fit --figure --device {PRINTING}",
    "page": f"{MODEL} --method --class --top --check --device --output --overwrite --resume --quiet",
    "ui": "--model --weights --labels --device --port --host --no-browser",
    "batch": f"--output {MODEL} --method --class --top-k --save --format --batch-size --workers --resume "
    "--overwrite --report --device --json --quiet",
    "compare": f"{MODEL} --method --class --top-k --fit --base --alpha --colormap --device {PRINTING}",
    "check": f"{MODEL} --method --class --score --fail-on --seed --device {PRINTING}",
    "diff": "--weights --weights-old --weights-new --labels --layer --method --save --against --fail-if --junit "
    f"--page --device {PRINTING}",
    "audit": f"--labels --model --weights --class-names --layer --method --score --page --device {PRINTING}",
    "evaluate": f"{MODEL} --method --metric --annotations --class --controls --limit --seed --device --output --resume "
    "--overwrite --json --quiet",
    "recommend": f"{MODEL} --method --score --limit --min-probability --annotations --all --seed --device --json "
    "--quiet",
    "layers": "--model --size --depth --all --json",
    "inspect trace": f"{MODEL} --depth --all --size --device --json",
    "inspect features": f"--output {MODEL} --pool --batch-size --workers --device --json --quiet",
    "inspect activations": f"{MODEL} --channels --columns --order --scale --cell --colormap --device {PRINTING}",
    "inspect gradients": f"{MODEL} --class --all --device {PRINTING}",
}
