import gradcam

COMMAND = "gradcam batch photos/ --output explained/ --save overlay,map --top-k 2 --report --resume"


def summarise(folder):
    labels, failed = {}, []
    for record in gradcam.read_manifest(folder):
        if record.error is None:
            labels[record.image] = record.predictions[0].label
        else:
            failed.append(record.image)
    return labels, failed
