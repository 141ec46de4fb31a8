COMMAND = "gradcam check photo.jpg --fail-on undecided --json --output gate.png"
