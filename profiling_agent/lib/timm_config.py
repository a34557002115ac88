"""timm checkpoints: config.json for transformers, and the image processor. Importing this imports no torch."""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

MODEL_TYPE, PACKAGES = "timm_wrapper", ("timm", "torchvision")
# Arguments of `timm.create_model` that load weights, or build something else than a classifier.
NON_ARCHITECTURE_ARGUMENTS = frozenset(
    {"model_name", "checkpoint_path", "cache_dir", "scriptable", "exportable", "no_jit"}
    | {"features_only", "feature_cfg", "out_indices", "kwargs_filter"}
    | {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict"}
)

Refuse = Callable[[str], Exception]


def check_timm(config: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return a timm model's config as transformers reads it, once it names an architecture of the installed timm.

    timm's exports repeat the number of classes among the arguments, which transformers can't read.

    Raises:
        Exception: `refuse` with what is wrong or not installed.
    """
    fields, architecture = dict(config), str(config.get("architecture"))
    arguments = dict(config.get("model_args") or {})
    repeated = arguments.pop("num_classes", None)
    count = fields.get("num_classes", repeated)
    if repeated not in (None, count):
        raise refuse(f"its model_args have {repeated} classes, and the model {count}: leave one out")
    names = fields.get("label_names") or fields.get("labels") or None
    # transformers would ignore all names, and number the classes.
    if names and (not isinstance(names, list) or len(names) != (count or len(names))):
        raise refuse(f"it has {count} classes and {len(names)} label_names: list a name for each class, in order")
    # timm treats a name with a scheme as an address on the Hub or of a folder.
    if ":" in architecture:
        raise refuse("it names another model as its architecture, which is never fetched")
    if forbidden := sorted(NON_ARCHITECTURE_ARGUMENTS & set(arguments)):
        raise refuse(f"its model_args set {forbidden[0]!r}, which is no setting of an architecture: leave it out")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise refuse(f"it is one of timm's, and {missing[0]} isn't installed: pip install 'profiling-agent[timm]'")
    try:
        import timm  # pyright: ignore[reportMissingImports] - an extra
    # A torchvision built for another torch raises a RuntimeError.
    except (ImportError, RuntimeError) as error:
        raise refuse(f"timm can't be imported: {type(error).__name__} ({str(error)!r})") from error
    if not timm.is_model(architecture):
        near = ", ".join(get_close_matches(architecture, timm.list_models())) or "none"
        raise refuse(f"timm {timm.__version__} has no architecture {architecture!r} (near: {near})")
    changes = {"model_args": arguments, "num_classes": count, "label_names": names}
    return fields | {name: value for name, value in changes.items() if value is not None}


def make_plain_(model: "nn.Module") -> None:
    """Replace timm's linear layers by torch's, in place: they differ for TorchScript only."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).__module__ == "timm.layers.linear":
            module.__class__ = nn.Linear


def processor_of_timm(pretrained_cfg: Mapping[str, Any], refuse: Refuse) -> Any:
    """Return a transformers image processor that prepares images as timm's evaluation does.

    Both give the same pixels, up to float32 rounding, if an even number is cropped from an edge. For an odd number timm's crop may be one
    pixel lower or further right.

    Raises:
        Exception: `refuse` with a setting that this processor doesn't support.
    """
    from PIL.Image import Resampling
    from timm.data.config import resolve_data_config  # pyright: ignore[reportMissingImports] - an extra
    from transformers import CLIPImageProcessorPil

    config = resolve_data_config(pretrained_cfg=dict(pretrained_cfg))
    channels, height, width = config["input_size"]
    interpolation, crop_mode = config["interpolation"].upper(), config["crop_mode"]
    if channels != len(config["mean"]) or channels != 3:
        raise refuse(f"pretrained_cfg.input_size has {channels} channels, 3 are read")
    if interpolation not in Resampling.__members__:
        raise refuse(f"pretrained_cfg.interpolation is {config['interpolation']!r}")
    # `border` keeps the whole picture and pads it.
    if crop_mode not in ("center", "squash"):
        raise refuse(f"pretrained_cfg.crop_mode is {crop_mode!r}")
    if crop_mode == "center" and height != width:
        raise refuse(f"pretrained_cfg.input_size: {height}x{width} is no square, which crop_mode 'center' needs")
    size = {"height": math.floor(height / config["crop_pct"]), "width": math.floor(width / config["crop_pct"])}
    return CLIPImageProcessorPil(
        size=size if crop_mode == "squash" else {"shortest_edge": size["height"]},
        resample=Resampling[interpolation],
        crop_size={"height": height, "width": width},
        image_mean=list(config["mean"]),
        image_std=list(config["std"]),
    )
