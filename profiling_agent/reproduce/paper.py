"""The paper's numbers (arXiv 2509.05584), as printed: accuracies in points, parameters in millions, savings in percent."""

from typing import Literal

from profiling_agent.records import Record

Family = Literal["ViT-B/16", "DeiT-B/16", "Swin-B", "ResNet-101"]
FAMILIES: tuple[Family, ...] = ("ViT-B/16", "DeiT-B/16", "Swin-B", "ResNet-101")
Criterion = Literal["l1", "l2", "random"]
RATIOS = (0.01, 0.10, 0.20)
CRITERIA: tuple[Criterion, ...] = ("l1", "l2", "random")
# Where the paper's models are, and what stands in for them where no network is.
HUB: dict[Family, str] = {
    "ViT-B/16": "google/vit-base-patch16-224",
    "DeiT-B/16": "facebook/deit-base-patch16-224",
    "Swin-B": "microsoft/swin-base-patch4-window7-224",
    "ResNet-101": "microsoft/resnet-101",
}
EMBEDDED: dict[Family, str] = {
    "ViT-B/16": "reference:vit",
    "DeiT-B/16": "reference:deit",
    "Swin-B": "reference:swin",
    "ResNet-101": "reference:resnet",
}
HUB_DATA, EMBEDDED_DATA = "frgfm/imagenette", "reference:digits"

# Table 1, Imagenette: points of accuracy gained, millions of parameters left; of 86.6, 86.6, 87.8 and 44.5.
BASELINE_PARAMS: dict[Family, float] = {"ViT-B/16": 86.6, "DeiT-B/16": 86.6, "Swin-B": 87.8, "ResNet-101": 44.5}
TABLE_1: dict[Family, dict[tuple[str, float], tuple[float, float]]] = {
    "DeiT-B/16": {
        ("l1", 0.01): (-1, 86.0),
        ("l1", 0.1): (-3, 80.9),
        ("l1", 0.2): (-7, 75.2),
        ("l2", 0.01): (0, 86.0),
        ("l2", 0.1): (-1, 80.9),
        ("l2", 0.2): (-9, 75.2),
        ("random", 0.01): (0, 86.0),
        ("random", 0.1): (-3, 80.9),
        ("random", 0.2): (-3, 75.2),
    },
    "ResNet-101": {
        ("l1", 0.01): (-13, 40.6),
        ("l1", 0.1): (-17, 23.4),
        ("l1", 0.2): (-17, 16.6),
        ("l2", 0.01): (-17, 40.6),
        ("l2", 0.1): (-17, 23.4),
        ("l2", 0.2): (-17, 16.6),
        ("random", 0.01): (-11, 40.6),
        ("random", 0.1): (-17, 23.4),
        ("random", 0.2): (-17, 16.6),
    },
    "Swin-B": {
        ("l1", 0.01): (-1, 87.2),
        ("l1", 0.1): (0, 82.2),
        ("l1", 0.2): (-3, 76.6),
        ("l2", 0.01): (-1, 87.2),
        ("l2", 0.1): (-2, 82.2),
        ("l2", 0.2): (-4, 76.6),
        ("random", 0.01): (0, 87.2),
        ("random", 0.1): (1, 82.2),
        ("random", 0.2): (-3, 76.6),
    },
    "ViT-B/16": {
        ("l1", 0.01): (0, 86.0),
        ("l1", 0.1): (0, 80.9),
        ("l1", 0.2): (-3, 75.2),
        ("l2", 0.01): (0, 86.0),
        ("l2", 0.1): (0, 80.9),
        ("l2", 0.2): (-3, 75.2),
        ("random", 0.01): (0, 86.0),
        ("random", 0.1): (0, 80.9),
        ("random", 0.2): (-2, 75.2),
    },
}
TABLE_1_OURS: dict[Family, tuple[float, float]] = {
    "DeiT-B/16": (-1, 80.9),
    "ResNet-101": (1, 43.0),
    "Swin-B": (-1, 81.1),
    "ViT-B/16": (2, 78.1),
}
# Table 2, CIFAR-10: top-1 before and after, percent of the file saved.
TABLE_2: dict[Family, tuple[float, float, float]] = {
    "ResNet-101": (84.1, 84.2, 3.1),
    "ViT-B/16": (98.5, 97.9, 6.5),
    "Swin-B": (98.6, 97.9, 7.6),
    "DeiT-B/16": (97.8, 97.1, 6.5),
}
# Table 3, ImageNet-1K: points gained, percent of the bytes saved, times as fast as ONNX Runtime's dynamic int8.
TABLE_3: dict[Family, tuple[float, float, float]] = {
    "ViT-B/16": (0, 74.2, 1.66),
    "ResNet-101": (0, 3.4, 1.36),
    "Swin-B": (0, 74.7, 1.46),
    "DeiT-B/16": (-1, 74.2, 1.65),
}
# Table 4, ImageNet-1K: top-1 before and after, percent of bytes and of parameters saved, speed-up.
Effect = tuple[float, float, float, float, float]
TABLE_4: dict[Family, dict[str, Effect]] = {
    "ViT-B/16": {"pruned": (80.3, 79.5, 3.3, 3.3, 1.02), "quantized": (80.3, 80.2, 74.3, 0.0, 1.74)},
    "ResNet-101": {"pruned": (82.4, 79.7, 2.9, 2.9, 0.97), "quantized": (82.4, 82.2, 3.4, 0.0, 1.01)},
    "Swin-B": {"pruned": (85.3, 84.7, 1.9, 1.9, 1.02), "quantized": (85.3, 85.1, 74.7, 0.0, 1.59)},
    "DeiT-B/16": {"pruned": (81.0, 80.2, 2.0, 2.0, 0.98), "quantized": (81.0, 79.8, 74.3, 0.0, 1.73)},
}
# Table 5, Imagenette: points gained and millions of parameters left, by GPT-4o and by GPT-4-Turbo.
TABLE_5: dict[Family, dict[str, tuple[float, float]]] = {
    "DeiT-B/16": {"GPT-4o": (-1, 80.9), "GPT-4-Turbo": (-4, 78.06)},
    "ResNet-101": {"GPT-4o": (1, 43.04), "GPT-4-Turbo": (-14, 40.56)},
    "ViT-B/16": {"GPT-4o": (2, 78.06), "GPT-4-Turbo": (-1, 80.9)},
    "Swin-B": {"GPT-4o": (-1, 81.05), "GPT-4-Turbo": (-1, 68.2)},
}
# Figure 5 is a drawing; of its bars the text gives the best one, and that ResNet-101 is a little slower.
FIGURE_5_BEST = 1.10


class Row(Record):
    """One cell of a table: the paper's number, ours, and by how much ours is better (negative: worse)."""

    model: str
    family: str
    what: str
    quantity: str
    paper: float | None
    ours: float | None
    better_by: float | None = None
    note: str = ""


class Study(Record):
    """A table, and what was different from the paper's way of making it."""

    name: str
    title: str
    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    missing: tuple[str, ...]


def family_of(model: str, architecture: str) -> Family | None:
    """Return which of the paper's models one stands for; DeiT's published weights call themselves ViT."""
    known: tuple[tuple[str, Family], ...] = (
        ("deit", "DeiT-B/16"),
        ("swin", "Swin-B"),
        ("resnet", "ResNet-101"),
        ("vit", "ViT-B/16"),
    )
    kind = architecture.removeprefix("reference:").lower()
    family: Family | None = next((family for word, family in known if kind.startswith(word)), None)
    if family == "ViT-B/16" and "deit" in model.rsplit("/", maxsplit=1)[-1].lower():
        return "DeiT-B/16"
    return family
