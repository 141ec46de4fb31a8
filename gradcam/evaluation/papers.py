"""Where metrics are from."""

from __future__ import annotations

from gradcam.methods.papers import GRADCAM, GRADCAM_PP, RISE, SCORECAM, Paper

__all__ = [
    "ADCC",
    "ADEBAYO",
    "ERASER",
    "GAIN",
    "GRADCAM",
    "GRADCAM_PP",
    "GRID",
    "POINTING",
    "RISE",
    "ROAD",
    "SCORECAM",
    "SENSITIVITY",
]

GAIN = Paper(
    "zhang2024opticam",
    "Zhang, Hanwei and Torres, Felipe and Sicre, Ronan and Avrithis, Yannis and Ayache, Stephane",
    "Opti-CAM: Optimizing saliency maps for interpretability",
    "Computer Vision and Image Understanding",
    2024,
    is_article=True,
)
ROAD = Paper(
    "rong2022road",
    "Rong, Yao and Leemann, Tobias and Borisov, Vadim and Kasneci, Gjergji and Kasneci, Enkelejda",
    "A Consistent and Efficient Evaluation Strategy for Attribution Methods",
    "ICML",
    2022,
)
ERASER = Paper(
    "deyoung2020eraser",
    "DeYoung, Jay and Jain, Sarthak and Rajani, Nazneen Fatema and Lehman, Eric and Xiong, Caiming and Socher, Richard "
    "and Wallace, Byron C.",
    "ERASER: A Benchmark to Evaluate Rationalized NLP Models",
    "ACL",
    2020,
)
GRID = Paper(
    "boehle2021coda",
    "Böhle, Moritz and Fritz, Mario and Schiele, Bernt",
    "Convolutional Dynamic Alignment Networks for Interpretable Classifications",
    "CVPR",
    2021,
)
POINTING = Paper(
    "zhang2018excitation",
    "Zhang, Jianming and Bargal, Sarah Adel and Lin, Zhe and Brandt, Jonathan and Shen, Xiaohui and Sclaroff, Stan",
    "Top-Down Neural Attention by Excitation Backprop",
    "International Journal of Computer Vision",
    2018,
    is_article=True,
)
ADEBAYO = Paper(
    "adebayo2018sanity",
    "Adebayo, Julius and Gilmer, Justin and Muelly, Michael and Goodfellow, Ian and Hardt, Moritz and Kim, Been",
    "Sanity Checks for Saliency Maps",
    "NeurIPS",
    2018,
)
SENSITIVITY = Paper(
    "yeh2019infidelity",
    "Yeh, Chih-Kuan and Hsieh, Cheng-Yu and Suggala, Arun Sai and Inouye, David I. and Ravikumar, Pradeep",
    "On the (In)fidelity and Sensitivity of Explanations",
    "NeurIPS",
    2019,
)
ADCC = Paper(
    "poppi2021adcc",
    "Poppi, Samuele and Cornia, Marcella and Baraldi, Lorenzo and Cucchiara, Rita",
    "Revisiting The Evaluation of Class Activation Mapping for Explainability: A Novel Metric and Experimental Analysis",
    "CVPR Workshops",
    2021,
)
