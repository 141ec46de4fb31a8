"""Log heatmaps while a model is trained: in Lightning, in Hugging Face's Trainer, and in any other training loop.

heatmaps = gradcam.integrations.HeatmapLogger(images, every_n_steps=100)
callback = gradcam.integrations.lightning.HeatmapCallback(images, every_n_steps=100)
callback = gradcam.integrations.transformers.HeatmapCallback(images, every_n_steps=100)
"""

from gradcam.lazy import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
