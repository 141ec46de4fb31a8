CAUSES = ["the images are not prepared as in training: wrong size, mean and standard deviation"]
CAUSE = CAUSES[0]
COMMAND = (
    "gradcam run photo.jpg --model train.py:build --weights best.ckpt --labels labels.txt "
    "--mean 0.5,0.5,0.5 --std 0.5,0.5,0.5 --size 96x96 --json"
)
