"""Numbers that the paper prints (arXiv 2509.05584), and rows that put measurements next to them.

Accuracies are in points, parameters in millions, savings in percent.
"""

from collections.abc import Mapping
from typing import Literal

from profiling_agent.schemas import Record

Family = Literal["ViT-B/16", "DeiT-B/16", "Swin-B", "ResNet-101"]
FAMILIES: tuple[Family, ...] = ("ViT-B/16", "DeiT-B/16", "Swin-B", "ResNet-101")
Criterion = Literal["l1", "l2", "random"]
CRITERIA: tuple[Criterion, ...] = ("l1", "l2", "random")
RATIOS = (0.01, 0.10, 0.20)
Images = Literal["Imagenette", "CIFAR-10", "CIFAR-100", "ImageNet-1K"]
TableName = Literal["table1", "table2", "table3", "table4", "table5", "figure5"]
# Title, data and columns of each table.
TABLES: Mapping[TableName, tuple[str, tuple[Images, ...], tuple[str, ...]]] = {
    "table1": ("pruning on Imagenette", ("Imagenette",), ("points gained", "params, M", "% of params saved")),
    "table2": (
        "pruning on CIFAR-10 and CIFAR-100",
        ("CIFAR-10", "CIFAR-100"),
        ("top-1, %", "points gained", "params, M", "MACs, M", "% of bytes saved"),
    ),
    "table3": (
        "quantization on ImageNet-1K",
        ("ImageNet-1K",),
        ("points gained", "MB on disk", "% of bytes saved", "seconds an image", "times ONNX Runtime"),
    ),
    "table4": (
        "pruning and quantization on ImageNet-1K",
        ("ImageNet-1K",),
        ("top-1, %", "points gained", "MB on disk", "% of bytes saved", "% of params saved", "times as fast"),
    ),
    "table5": ("language models plan", ("Imagenette",), ("points gained", "params, M", "% of params saved")),
    "figure5": (
        "inference speed-up and memory",
        ("Imagenette",),
        ("times as fast", "% of memory saved", "points gained"),
    ),
}
# How each quantity is written; significant digits if models of all sizes have it.
FORMATS: Mapping[str, str] = {
    "top-1, %": ".2f",
    "points gained": "+.2f",
    "params, M": ".4g",
    "% of params saved": ".1f",
    "MACs, M": ".4g",
    "MB on disk": ".4g",
    "% of bytes saved": ".1f",
    "seconds an image": ".3g",
    "times as fast": ".2f",
    "times ONNX Runtime": ".2f",
    "% of memory saved": ".1f",
}
# The kinds of rows: the paper's method in our jobs, its int8 recipe as torch has it, ONNX Runtime's, and the product.
METHOD, OURS, ONNX = "the paper's method", "ours", "ONNX Runtime dynamic"
RECIPE = f"{METHOD}, torch's quantize_dynamic"


class Value(Record):
    """A number; `before` is the unpruned float32 model's, `low` and `high` are a 95% interval, each None if not known."""

    value: float
    before: float | None = None
    low: float | None = None
    high: float | None = None


Numbers = dict[str, Value]


class Cell(Record):
    """One quantity as the paper prints it and as measured here, None if there is none."""

    quantity: str
    paper: Value | None = None
    here: Value | None = None


class Row(Record):
    """One line of a table: a model, a data set, and what was done to the model."""

    model: str
    family: Family
    data: str
    what: str
    cells: tuple[Cell, ...]
    note: str = ""

    def here(self, quantity: str) -> Value | None:
        """Return what was measured of a quantity, or None."""
        return next((cell.here for cell in self.cells if cell.quantity == quantity), None)

    def paper(self, quantity: str) -> Value | None:
        """Return what the paper prints of a quantity, or None."""
        return next((cell.paper for cell in self.cells if cell.quantity == quantity), None)


class Study(Record):
    """A table, how the measurement differs from the paper's, and what is missing."""

    name: TableName
    title: str
    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    missing: tuple[str, ...]


class DataSet(Record):
    """A labelled data set in the fields of a request, and the paper's data set that it stands for."""

    stands_for: Images
    dataset: str
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = None
    image_column: str | None = None
    label_column: str | None = None

    @property
    def title(self) -> str:
        """Return the name in a table."""
        named = f"{short(self.dataset)} ({self.dataset_config})" if self.dataset_config else short(self.dataset)
        return named if self.dataset == DATA[self.stands_for].dataset else f"{named} as {self.stands_for}"


def short(name: str) -> str:
    """Return the last part of a path, or a Hub id unchanged."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".", "~")) else name


# The paper describes Imagenette's 320 px configuration; ImageNet-1K's test split has no labels.
DATA: dict[Images, DataSet] = {
    "Imagenette": DataSet(stands_for="Imagenette", dataset="frgfm/imagenette", dataset_config="320px"),
    "CIFAR-10": DataSet(stands_for="CIFAR-10", dataset="uoft-cs/cifar10", dataset_config="plain_text", split="test"),
    "CIFAR-100": DataSet(
        stands_for="CIFAR-100",
        dataset="uoft-cs/cifar100",
        dataset_config="cifar100",
        split="test",
        label_column="fine_label",
    ),
    "ImageNet-1K": DataSet(stands_for="ImageNet-1K", dataset="ILSVRC/imagenet-1k", split="validation"),
}
# The paper did not publish the models that it fine-tuned on CIFAR.
HUB: dict[Family, str] = {
    "ViT-B/16": "google/vit-base-patch16-224",
    "DeiT-B/16": "facebook/deit-base-patch16-224",
    "Swin-B": "microsoft/swin-base-patch4-window7-224",
    "ResNet-101": "microsoft/resnet-101",
}
# First plan without a language model: the MLP cut that gives Table 1's params, and the ResNet cut that Figure 4 prints.
UNIFORM_CUT: dict[Family, tuple[str, float]] = {
    "ViT-B/16": (r"mlp|intermediate", 0.15),
    "DeiT-B/16": (r"mlp|intermediate", 0.10),
    "Swin-B": (r"mlp|intermediate", 0.12),
    "ResNet-101": ("conv", 0.20),
}

# Table 1: params before; params left by uniform cuts, by ratio; points gained by criterion and ratio; the paper's method.
PARAMS: dict[Family, float] = {"ViT-B/16": 86.6, "DeiT-B/16": 86.6, "Swin-B": 87.8, "ResNet-101": 44.5}
UNIFORM_PARAMS: dict[Family, tuple[float, float, float]] = {
    "ViT-B/16": (86.0, 80.9, 75.2),
    "DeiT-B/16": (86.0, 80.9, 75.2),
    "Swin-B": (87.2, 82.2, 76.6),
    "ResNet-101": (40.6, 23.4, 16.6),
}
UNIFORM_GAINED: dict[Family, dict[Criterion, tuple[float, float, float]]] = {
    "ViT-B/16": {"l1": (0, 0, -3), "l2": (0, 0, -3), "random": (0, 0, -2)},
    "DeiT-B/16": {"l1": (-1, -3, -7), "l2": (0, -1, -9), "random": (0, -3, -3)},
    "Swin-B": {"l1": (-1, 0, -3), "l2": (-1, -2, -4), "random": (0, 1, -3)},
    "ResNet-101": {"l1": (-13, -17, -17), "l2": (-17, -17, -17), "random": (-11, -17, -17)},
}
TABLE_1: dict[Family, tuple[float, float]] = {
    "ViT-B/16": (2, 78.1),
    "DeiT-B/16": (-1, 80.9),
    "Swin-B": (-1, 81.1),
    "ResNet-101": (1, 43.0),
}
# Table 2: top-1 before and after, params before and after, percent of the file saved.
TABLE_2: dict[Family, dict[Images, tuple[float, float, float, float, float]]] = {
    "ResNet-101": {"CIFAR-10": (84.1, 84.2, 48.81, 47.30, 3.1), "CIFAR-100": (83.3, 78.4, 42.71, 41.20, 3.5)},
    "ViT-B/16": {"CIFAR-10": (98.5, 97.9, 87.12, 81.45, 6.5), "CIFAR-100": (90.0, 88.1, 85.88, 83.04, 3.3)},
    "Swin-B": {"CIFAR-10": (98.6, 97.9, 88.32, 81.61, 7.6), "CIFAR-100": (87.7, 87.0, 86.85, 80.13, 7.7)},
    "DeiT-B/16": {"CIFAR-10": (97.8, 97.1, 87.12, 81.46, 6.5), "CIFAR-100": (85.5, 84.9, 85.95, 84.26, 2.0)},
}
# Table 3: points gained, percent of the bytes saved, seconds before and after; the speed ratio to ONNX Runtime's int8.
TABLE_3: dict[Family, tuple[float, float, float, float, float | None]] = {
    "ViT-B/16": (0, 74.2, 0.2320, 0.1316, 1.66),
    "ResNet-101": (0, 3.4, 0.1211, 0.1199, 1.36),
    "Swin-B": (0, 74.7, 0.2442, 0.1556, 1.46),
    "DeiT-B/16": (-1, 74.2, 0.2312, 0.1317, 1.65),
}
TABLE_3_ONNX: dict[Family, tuple[float, float, float, float, float | None]] = {
    "ViT-B/16": (0, 74.1, 0.3869, 0.2179, None),
    "ResNet-101": (0, 3.4, 0.1640, 0.1634, None),
    "Swin-B": (0, 73.0, 0.3749, 0.2266, None),
    "DeiT-B/16": (0, 74.1, 0.3863, 0.2174, None),
}
# Table 4: top-1 before and after, percent of bytes and of params saved, speed-up.
Step = Literal["pruning", "quantization"]
TABLE_4: dict[Family, dict[Step, tuple[float, float, float, float, float]]] = {
    "ViT-B/16": {"pruning": (80.3, 79.5, 3.3, 3.3, 1.02), "quantization": (80.3, 80.2, 74.3, 0.0, 1.74)},
    "ResNet-101": {"pruning": (82.4, 79.7, 2.9, 2.9, 0.97), "quantization": (82.4, 82.2, 3.4, 0.0, 1.01)},
    "Swin-B": {"pruning": (85.3, 84.7, 1.9, 1.9, 1.02), "quantization": (85.3, 85.1, 74.7, 0.0, 1.59)},
    "DeiT-B/16": {"pruning": (81.0, 80.2, 2.0, 2.0, 0.98), "quantization": (81.0, 79.8, 74.3, 0.0, 1.73)},
}
# Table 5: params before; points gained and params left, by language model.
TABLE_5_PARAMS: dict[Family, float] = {"DeiT-B/16": 86.56, "ResNet-101": 44.54, "ViT-B/16": 86.56, "Swin-B": 87.76}
TABLE_5: dict[Family, dict[str, tuple[float, float]]] = {
    "DeiT-B/16": {"GPT-4o": (-1, 80.9), "GPT-4-Turbo": (-4, 78.06)},
    "ResNet-101": {"GPT-4o": (1, 43.04), "GPT-4-Turbo": (-14, 40.56)},
    "ViT-B/16": {"GPT-4o": (2, 78.06), "GPT-4-Turbo": (-1, 80.9)},
    "Swin-B": {"GPT-4o": (-1, 81.05), "GPT-4-Turbo": (-1, 68.2)},
}
# Figure 5 is a drawing: the text gives its best speed-up, and that ResNet-101 becomes slightly slower.
FIGURE_5_BEST, FIGURE_5_SLOWER = 1.10, "ResNet-101"


def saved(now: float, before: float) -> float:
    """Return the percent that is gone."""
    return 100 * (1 - now / before)


def printed_pruned(gained: float, params: float, before: float) -> Numbers:
    """Return what follows from points gained and float32 params left."""
    gone = Value(value=saved(params, before))
    return {
        "points gained": Value(value=gained),
        "params, M": Value(value=params, before=before),
        "% of params saved": gone,
        "% of memory saved": gone,
    }


def printed_table2(family: Family, images: Images) -> Numbers:
    """Return a row of Table 2, empty for other data than CIFAR."""
    if images not in TABLE_2[family]:
        return {}
    before, after, params_before, params, smaller = TABLE_2[family][images]
    return {
        "top-1, %": Value(value=after, before=before),
        "points gained": Value(value=after - before),
        "params, M": Value(value=params, before=params_before),
        "% of bytes saved": Value(value=smaller),
    }


def printed_table3(row: tuple[float, float, float, float, float | None]) -> Numbers:
    """Return a row of Table 3."""
    gained, smaller, before, after, ratio = row
    numbers: Numbers = {
        "points gained": Value(value=gained),
        "% of bytes saved": Value(value=smaller),
        "seconds an image": Value(value=after, before=before),
    }
    return numbers if ratio is None else {**numbers, "times ONNX Runtime": Value(value=ratio)}


def printed_table4(family: Family, step: Step) -> Numbers:
    """Return a row of Table 4."""
    before, after, smaller, fewer, speedup = TABLE_4[family][step]
    return {
        "top-1, %": Value(value=after, before=before),
        "points gained": Value(value=after - before),
        "% of bytes saved": Value(value=smaller),
        "% of params saved": Value(value=fewer),
        "times as fast": Value(value=speedup),
    }


def family_of(model: str, architecture: str) -> Family | None:
    """Return the paper's model that a model stands for; DeiT's published weights have a ViT's architecture."""
    words: dict[str, Family] = {"deit": "DeiT-B/16", "swin": "Swin-B", "resnet": "ResNet-101", "vit": "ViT-B/16"}
    kind = architecture.removeprefix("reference:").lower()
    if kind.startswith("vit") and "deit" in model.rsplit("/", maxsplit=1)[-1].lower():
        return "DeiT-B/16"
    return next((family for word, family in words.items() if kind.startswith(word)), None)


def formatted(quantity: str, value: Value | None) -> str:
    """Return a number as text with the one before and its interval; nothing for None."""
    if value is None:
        return ""
    form = FORMATS[quantity]
    before = f"{value.before:{form}} → " if value.before is not None else ""
    interval = f" [{value.low:{form}}, {value.high:{form}}]" if value.low is not None and value.high is not None else ""
    return f"{before}{value.value:{form}}{interval}"
