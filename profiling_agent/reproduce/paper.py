"""The paper's numbers (arXiv 2509.05584), as printed: accuracies in points, parameters in millions, savings in percent."""

from typing import Literal

from profiling_agent.records import Record

Family = Literal["ViT-B/16", "DeiT-B/16", "Swin-B", "ResNet-101"]
FAMILIES: tuple[Family, ...] = ("ViT-B/16", "DeiT-B/16", "Swin-B", "ResNet-101")
Criterion = Literal["l1", "l2", "random"]
RATIOS = (0.01, 0.10, 0.20)
CRITERIA: tuple[Criterion, ...] = ("l1", "l2", "random")
Images = Literal["Imagenette", "CIFAR-10", "CIFAR-100", "ImageNet-1K"]
IMAGES: tuple[Images, ...] = ("Imagenette", "CIFAR-10", "CIFAR-100", "ImageNet-1K")
TableName = Literal["table1", "table2", "table3", "table4", "table5", "figure5"]
TABLE_NAMES: tuple[TableName, ...] = ("table1", "table2", "table3", "table4", "table5", "figure5")
# The data that each table was made on.
MADE_ON: dict[TableName, tuple[Images, ...]] = {
    "table1": ("Imagenette",),
    "table2": ("CIFAR-10", "CIFAR-100"),
    "table3": ("ImageNet-1K",),
    "table4": ("ImageNet-1K",),
    "table5": ("Imagenette",),
    "figure5": ("Imagenette",),
}


def short(name: str) -> str:
    """Return a model or a data set as a table names it: of a path its last part, a Hub id as it is."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".", "~")) else name


class DataSet(Record):
    """A labelled data set by the names that a request has for it, and which of the paper's it stands for."""

    stands_for: Images
    dataset: str
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = None
    image_column: str | None = None
    label_column: str | None = None

    @property
    def asked(self) -> dict[str, str | None]:
        """Return what a request says of it."""
        return self.model_dump(exclude={"stands_for"})

    @property
    def title(self) -> str:
        """Return it as a reader sees it."""
        named = f"{short(self.dataset)} ({self.dataset_config})" if self.dataset_config else short(self.dataset)
        return named if self.dataset == PAPERS_DATA[self.stands_for].dataset else f"{named} as {self.stands_for}"


# Where the paper's data is: of Imagenette the configuration that the paper describes (320 pixels), of ImageNet-1K the split that has labels.
PAPERS_DATA: dict[Images, DataSet] = {
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
# Where the paper's models are. Those that it fine-tuned on CIFAR it did not publish; what stands in where none can be had is embedded.
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
EMBEDDED_DATA = "reference:digits"
# The cut that stands for the paper's where no language model plans: of the MLPs what its Table 1 comes to in params (floor(ratio * 3072) channels of
# 1537 params in 12 layers of a ViT), of the ResNet what its Figure 4 prints.
UNIFORM_CUT: dict[Family, tuple[str, float]] = {
    "ViT-B/16": (r"mlp|intermediate", 0.15),
    "DeiT-B/16": (r"mlp|intermediate", 0.10),
    "Swin-B": (r"mlp|intermediate", 0.12),
    "ResNet-101": ("conv", 0.20),
}

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
# Table 2: top-1 before and after, millions of parameters before and after, percent of the file saved.
Table2 = tuple[float, float, float, float, float]
TABLE_2: dict[Family, dict[Images, Table2]] = {
    "ResNet-101": {"CIFAR-10": (84.1, 84.2, 48.81, 47.30, 3.1), "CIFAR-100": (83.3, 78.4, 42.71, 41.20, 3.5)},
    "ViT-B/16": {"CIFAR-10": (98.5, 97.9, 87.12, 81.45, 6.5), "CIFAR-100": (90.0, 88.1, 85.88, 83.04, 3.3)},
    "Swin-B": {"CIFAR-10": (98.6, 97.9, 88.32, 81.61, 7.6), "CIFAR-100": (87.7, 87.0, 86.85, 80.13, 7.7)},
    "DeiT-B/16": {"CIFAR-10": (97.8, 97.1, 87.12, 81.46, 6.5), "CIFAR-100": (85.5, 84.9, 85.95, 84.26, 2.0)},
}
# Table 3, ImageNet-1K: points gained, percent of the bytes saved, seconds before and after; and times as fast as ONNX Runtime's dynamic int8.
Table3 = tuple[float, float, float, float]
TABLE_3: dict[Family, tuple[Table3, float]] = {
    "ViT-B/16": ((0, 74.2, 0.2320, 0.1316), 1.66),
    "ResNet-101": ((0, 3.4, 0.1211, 0.1199), 1.36),
    "Swin-B": ((0, 74.7, 0.2442, 0.1556), 1.46),
    "DeiT-B/16": ((-1, 74.2, 0.2312, 0.1317), 1.65),
}
TABLE_3_ONNX: dict[Family, Table3] = {
    "ViT-B/16": (0, 74.1, 0.3869, 0.2179),
    "ResNet-101": (0, 3.4, 0.1640, 0.1634),
    "Swin-B": (0, 73.0, 0.3749, 0.2266),
    "DeiT-B/16": (0, 74.1, 0.3863, 0.2174),
}
# Table 4, ImageNet-1K: top-1 before and after, percent of bytes and of parameters saved, speed-up.
Table4 = tuple[float, float, float, float, float]
TABLE_4: dict[Family, dict[Literal["pruning", "quantization"], Table4]] = {
    "ViT-B/16": {"pruning": (80.3, 79.5, 3.3, 3.3, 1.02), "quantization": (80.3, 80.2, 74.3, 0.0, 1.74)},
    "ResNet-101": {"pruning": (82.4, 79.7, 2.9, 2.9, 0.97), "quantization": (82.4, 82.2, 3.4, 0.0, 1.01)},
    "Swin-B": {"pruning": (85.3, 84.7, 1.9, 1.9, 1.02), "quantization": (85.3, 85.1, 74.7, 0.0, 1.59)},
    "DeiT-B/16": {"pruning": (81.0, 80.2, 2.0, 2.0, 0.98), "quantization": (81.0, 79.8, 74.3, 0.0, 1.73)},
}
# Table 5, Imagenette: millions of parameters before; points gained and millions left, by GPT-4o and by GPT-4-Turbo.
TABLE_5_BEFORE: dict[Family, float] = {"DeiT-B/16": 86.56, "ResNet-101": 44.54, "ViT-B/16": 86.56, "Swin-B": 87.76}
TABLE_5: dict[Family, dict[str, tuple[float, float]]] = {
    "DeiT-B/16": {"GPT-4o": (-1, 80.9), "GPT-4-Turbo": (-4, 78.06)},
    "ResNet-101": {"GPT-4o": (1, 43.04), "GPT-4-Turbo": (-14, 40.56)},
    "ViT-B/16": {"GPT-4o": (2, 78.06), "GPT-4-Turbo": (-1, 80.9)},
    "Swin-B": {"GPT-4o": (-1, 81.05), "GPT-4-Turbo": (-1, 68.2)},
}
# Figure 5 is a drawing. Of its speed-ups the text gives the best one, and that ResNet-101 is a little slower; its bars of memory follow from the params
# of Table 1, four bytes each.
FIGURE_5_BEST = 1.10
FIGURE_5_SLOWER: tuple[Family, ...] = ("ResNet-101",)


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
