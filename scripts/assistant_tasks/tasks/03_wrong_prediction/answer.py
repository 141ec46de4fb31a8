"""Find out why the prediction is wrong, and correct the command."""

CAUSES = [
    "the weights of the head were not loaded, because the names in the checkpoint have a prefix",
    "the labels are in the wrong order",
    "the model is in training mode, so dropout changes the prediction",
    "the images are not prepared as in training: wrong size, mean and standard deviation",
    "the channels are in the order blue, green, red",
]
CAUSE = None
COMMAND = "gradcam run photo.jpg --model train.py:build --weights best.ckpt --labels labels.txt"
