from . import lightning as lightning
from . import transformers as transformers
from .logger import HeatmapLogger as HeatmapLogger
