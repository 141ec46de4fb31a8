"""Where methods are from: what is cited, and as BibTeX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A publication. `venue` is a journal or a conference; an article of a preprint server is `arXiv:<number>`."""

    key: str
    authors: str  # "Surname, Given and Surname, Given", as BibTeX wants them
    title: str
    venue: str
    year: int
    is_article: bool = False

    def __str__(self) -> str:
        """One line: Selvaraju et al., Grad-CAM: ..., ICCV 2017."""
        surnames = [author.partition(",")[0] for author in self.authors.split(" and ")]
        names = " and ".join(surnames) if len(surnames) < 3 else f"{surnames[0]} et al."
        return f"{names}, {self.title}, {self.venue}{',' if self.is_article else ''} {self.year}"

    def to_bibtex(self) -> str:
        """The entry, its title protected from being set in lower case."""
        kind, venue = ("article", "journal") if self.is_article else ("inproceedings", "booktitle")
        lines = [
            f"  author = {{{self.authors}}},",
            f"  title = {{{{{self.title}}}}},",
            f"  {venue} = {{{self.venue}}},",
            f"  year = {{{self.year}}},",
        ]
        return "\n".join([f"@{kind}{{{self.key},", *lines, "}"])


GRADCAM = Paper(
    "selvaraju2017gradcam",
    "Selvaraju, Ramprasaath R. and Cogswell, Michael and Das, Abhishek and Vedantam, Ramakrishna and Parikh, Devi "
    "and Batra, Dhruv",
    "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization",
    "ICCV",
    2017,
)
GRADCAM_PP = Paper(
    "chattopadhyay2018gradcampp",
    "Chattopadhyay, Aditya and Sarkar, Anirban and Howlader, Prantik and Balasubramanian, Vineeth N.",
    "Grad-CAM++: Improved Visual Explanations for Deep Convolutional Networks",
    "WACV",
    2018,
)
XGRADCAM = Paper(
    "fu2020axiom",
    "Fu, Ruigang and Hu, Qingyong and Dong, Xiaohu and Guo, Yulan and Gao, Yinghui and Li, Biao",
    "Axiom-based Grad-CAM: Towards Accurate Visualization and Explanation of CNNs",
    "BMVC",
    2020,
)
HIRESCAM = Paper(
    "draelos2020hirescam",
    "Draelos, Rachel Lea and Carin, Lawrence",
    "Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks",
    "arXiv:2011.08891",
    2020,
    is_article=True,
)
ELEMENTWISE = Paper(
    "gildenblat2021pytorchcam",
    "Gildenblat, Jacob and contributors",
    "PyTorch library for CAM methods (GradCAMElementWise, EigenGradCAM)",
    "GitHub, jacobgil/pytorch-grad-cam",
    2021,
    is_article=True,
)
LAYERCAM = Paper(
    "jiang2021layercam",
    "Jiang, Peng-Tao and Zhang, Chang-Bin and Hou, Qibin and Cheng, Ming-Ming and Wei, Yunchao",
    "LayerCAM: Exploring Hierarchical Class Activation Maps for Localization",
    "IEEE Transactions on Image Processing",
    2021,
    is_article=True,
)
EIGENCAM = Paper(
    "muhammad2020eigencam",
    "Muhammad, Mohammed Bany and Yeasin, Mohammed",
    "Eigen-CAM: Class Activation Map using Principal Components",
    "IJCNN",
    2020,
)
KPCACAM = Paper(
    "karmani2024kpcacam",
    "Karmani, Sachin and Sivakaran, Thanushon and Prasad, Gaurav and Ali, Mehmet and Yang, Wenbo and Tang, Sheyang",
    "KPCA-CAM: Visual Explainability of Deep Computer Vision Models using Kernel PCA",
    "IEEE MMSP",
    2024,
)
FEM = Paper(
    "fuad2020fem",
    "Fuad, Kazi Ahmed Asif and Martin, Pierre-Etienne and Giot, Romain and Bourqui, Romain and Benois-Pineau, Jenny "
    "and Zemmari, Akka",
    "Features Understanding in 3D CNNs for Actions Recognition in Video",
    "IPTA",
    2020,
)
FINERCAM = Paper(
    "zhang2025finercam",
    "Zhang, Ziheng and Gu, Jianyang and Chowdhury, Arpita and Mai, Zheda and Carlyn, David and Berger-Wolf, Tanya "
    "and Su, Yu and Chao, Wei-Lun",
    "Finer-CAM: Spotting the Difference Reveals Finer Details for Visual Explanation",
    "CVPR",
    2025,
)
SHAPLEYCAM = Paper(
    "cai2025shapleycam",
    "Cai, Huaiguang",
    "CAMs as Shapley Value-based Explainers",
    "arXiv:2501.06261",
    2025,
    is_article=True,
)
SALIENCY = Paper(
    "simonyan2014saliency",
    "Simonyan, Karen and Vedaldi, Andrea and Zisserman, Andrew",
    "Deep Inside Convolutional Networks: Visualising Image Classification Models and Saliency Maps",
    "ICLR workshop",
    2014,
)
GUIDED_BACKPROPAGATION = Paper(
    "springenberg2015striving",
    "Springenberg, Jost Tobias and Dosovitskiy, Alexey and Brox, Thomas and Riedmiller, Martin",
    "Striving for Simplicity: The All Convolutional Net",
    "ICLR workshop",
    2015,
)
SMOOTHGRAD = Paper(
    "smilkov2017smoothgrad",
    "Smilkov, Daniel and Thorat, Nikhil and Kim, Been and Viegas, Fernanda and Wattenberg, Martin",
    "SmoothGrad: removing noise by adding noise",
    "arXiv:1706.03825",
    2017,
    is_article=True,
)
INTEGRATED_GRADIENTS = Paper(
    "sundararajan2017axiomatic",
    "Sundararajan, Mukund and Taly, Ankur and Yan, Qiqi",
    "Axiomatic Attribution for Deep Networks",
    "ICML",
    2017,
)
ABLATIONCAM = Paper(
    "desai2020ablationcam",
    "Desai, Saurabh and Ramaswamy, Harish G.",
    "Ablation-CAM: Visual Explanations for Deep Convolutional Network via Gradient-free Localization",
    "WACV",
    2020,
)
RECIPROCAM = Paper(
    "byun2022reciprocam",
    "Byun, Seok-Yong and Lee, Wonju",
    "Recipro-CAM: Fast gradient-free visual explanations for convolutional neural networks",
    "arXiv:2209.14074",
    2022,
    is_article=True,
)
SCORECAM = Paper(
    "wang2020scorecam",
    "Wang, Haofan and Wang, Zifan and Du, Mengnan and Yang, Fan and Zhang, Zijian and Ding, Sirui "
    "and Mardziel, Piotr and Hu, Xia",
    "Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks",
    "CVPR Workshops",
    2020,
)
SSCAM = Paper(
    "wang2020sscam",
    "Wang, Haofan and Naidu, Rakshit and Michael, Joy and Kundu, Soumya Snigdha",
    "SS-CAM: Smoothed Score-CAM for Sharper Visual Feature Localization",
    "arXiv:2006.14255",
    2020,
    is_article=True,
)
ISCAM = Paper(
    "naidu2020iscam",
    "Naidu, Rakshit and Ghosh, Ankita and Maurya, Yash and Nayak K, Shamanth R and Kundu, Soumya Snigdha",
    "IS-CAM: Integrated Score-CAM for axiomatic-based explanations",
    "arXiv:2010.03023",
    2020,
    is_article=True,
)
FASTERSCORECAM = Paper(
    "kubota2020tfkerasvis",
    "Kubota, Yasuhiro and contributors",
    "tf-keras-vis (Faster-Score-CAM)",
    "GitHub, keisen/tf-keras-vis",
    2020,
    is_article=True,
)
RISE = Paper(
    "petsiuk2018rise",
    "Petsiuk, Vitali and Das, Abir and Saenko, Kate",
    "RISE: Randomized Input Sampling for Explanation of Black-box Models",
    "BMVC",
    2018,
)
SMOOTHGRADCAM_PP = Paper(
    "omeiza2019smoothgradcampp",
    "Omeiza, Daniel and Speakman, Skyler and Cintas, Celia and Weldemariam, Komminist",
    "Smooth Grad-CAM++: An Enhanced Inference Level Visualization Technique for Deep Convolutional Neural Network Models",
    "arXiv:1908.01224",
    2019,
    is_article=True,
)
ROLLOUT = Paper(
    "abnar2020rollout",
    "Abnar, Samira and Zuidema, Willem",
    "Quantifying Attention Flow in Transformers",
    "ACL",
    2020,
)
GRADIENT_ROLLOUT = Paper(
    "chefer2021generic",
    "Chefer, Hila and Gur, Shir and Wolf, Lior",
    "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder Transformers",
    "ICCV",
    2021,
)
LEGRAD = Paper(
    "bousselham2025legrad",
    "Bousselham, Walid and Boggust, Angie and Chaybouti, Sofian and Strobelt, Hendrik and Kuehne, Hilde",
    "LeGrad: An Explainability Method for Vision Transformers via Feature Formation Sensitivity",
    "ICCV",
    2025,
)


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
