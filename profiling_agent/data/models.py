"""Image classifiers from the Hub, a folder or the references: their weights, image processors, input shapes and devices."""

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - of the transport library
from PIL import Image
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    CLIPImageProcessorPil,
    TimmWrapperConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from profiling_agent.data import TIMM, is_local
from profiling_agent.data.images import process, to_processor_channels
from profiling_agent.data.reference import PREFIX, reference_model
from profiling_agent.errors import AcquisitionError, ArtifactError, RequestError, ShapeUnresolvedError
from profiling_agent.lib.logs import Progress, Refuse, checked_logits, quiet, silent, third_party_errors
from profiling_agent.lib.machine import TIMM_PACKAGES
from profiling_agent.lib.modules import device_of, preserving_state
from profiling_agent.schemas import InputSpec, ShapeFacts

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files of this package's saved and exported models, whose int8 weights transformers may read as floats.
OUTPUT_FILES = ("recipe.json", "layers.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MODEL_FILES = ["config.json", *PROCESSOR_FILES, WEIGHTS, INDEX, "model-*-of-*.safetensors"]
# Arguments of `timm.create_model` that load weights, some of them as pickles.
LOADING_ARGUMENTS = {"checkpoint_path", "cache_dir", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}
# Two aspect ratios: a processor that keeps the aspect ratio gives two shapes, and so does not fix one.
BLANK_SIZES = ((320, 320), (480, 320))
# Parts of the names of image settings.
KEYWORDS = ("size", "shape", "channel", "patch", "stride", "depth", "hidden", "embed", "kernel", "resolution", "crop")

Kind = Literal["model", "dataset"]


def local_folder(name: str, kind: Kind) -> Path:
    """Return the absolute path of an existing folder; AcquisitionError if there is none."""
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise AcquisitionError(f"{kind} path {name!r} {problem}: give an existing folder or a Hub id")
    return path


@contextmanager
def hub_errors(kind: Kind, name: str, revision: str | None) -> Generator[None]:
    """Raise a one-line AcquisitionError for any error of the Hub."""
    try:
        yield
    except (HTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        at = f" at revision {revision!r}" if revision else ""
        problem = f"is no local folder, and {constants.ENDPOINT} has none for you{at} ({type(error).__name__})"
        advice = "check the name and the network; if it is private or gated, set HF_TOKEN or run `hf auth login`"
        raise AcquisitionError(f"{kind} {name!r} {problem}: {advice}") from error


def fetch_model(name: str, revision: str | None) -> Path:
    """Download a model's snapshot (configuration, processor, safetensors only) and return its folder, named by its commit."""
    with hub_errors("model", name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=MODEL_FILES))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A classifier in eval mode and float32 on its device.

    `source` is the requested name, or the absolute path of a folder; `revision` is the Hub commit, or None for a folder.
    `note`, for readers of the results, is set if the weights are stored in half precision.
    """

    model: nn.Module
    processor: Any
    source: str
    revision: str | None
    architecture: str
    note: str | None = None


def load_model(
    name: str, *, revision: str | None = None, device: str = "cpu", progress: Progress = silent
) -> LoadedModel:
    """Load the image classifier `name`: a Hub id, a local folder, or reference:vit|deit|swin|resnet.

    Weights come from safetensors only, Pillow processes the images, and no code from the model repository is run.

    Raises:
        AcquisitionError: the model can't be fetched, is no image classifier, or its weights are incomplete or not finite.
    """
    with quiet():
        if name.startswith(PREFIX):
            folder, commit = reference_model(name, progress), None
        elif is_local(name):
            folder, commit = local_folder(name, "model"), None
        else:
            progress(f"fetching {name}", 0, 0)
            folder = fetch_model(name, revision)
            commit = folder.name
        progress(f"loading {name}", 0, 0)
        config = _read_config(folder, name)
        dtype, note = str(config.dtype or torch.float32).removeprefix("torch."), None
        if dtype != "float32":
            note = f"the weights are stored in {dtype}: the baseline that sizes and speeds are compared with is float32"
        model: Any = _read_weights(folder, name, config)
        processor = _read_processor(folder, name, config)
        model.config.name_or_path = model.name_or_path = str(folder)
    return LoadedModel(
        model=model.to(device).eval(),
        processor=processor,
        source=str(folder) if is_local(name) else name,
        revision=commit,
        architecture=type(model).__name__,
        note=note,
    )


def _refused(start: str, problem: str) -> AcquisitionError:
    return AcquisitionError(f"{start}{problem}")


def _read_config(folder: Path, name: str) -> Any:
    """Return the config of a classifier that transformers itself implements, with a name for every class."""
    origin = "give the model that it was made from"
    if any((folder / file).exists() for file in OUTPUT_FILES):
        raise AcquisitionError(f"model {name!r} was written by profiling-agent: {origin}")
    refuse = partial(_refused, f"model {name!r} can't be read from its config.json: ")
    with third_party_errors(refuse):
        fields: dict[str, Any] = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        model_type = fields.get("model_type", TIMM if "pretrained_cfg" in fields else None)
        is_supported = model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        if fields.get("auto_map") and not is_supported:
            raise AcquisitionError(f"model {name!r} needs Python code of its own, which is never run: choose another")
        if model_type == TIMM:
            config: Any = TimmWrapperConfig.from_dict(check_timm(fields, refuse))
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        labels: dict[int, Any] = dict(config.id2label)
    built_for = ", ".join(config.architectures or [config.model_type])
    is_numbered = set(labels) == set(range(len(labels))) and all(isinstance(label, str) for label in labels.values())
    problems = {
        f"is quantized already: {origin}": fields.get("quantization_config") is not None,
        f"is no image classifier ({built_for}): choose one that is": not is_supported,
        f"has problem_type 'regression', whose {len(labels)} outputs are no classes: give a classifier": len(labels) > 1
        and config.problem_type == "regression",
        # The softmax of 0 and a logit is its sigmoid.
        "has one output, a score (regression) or a yes-or-no logit: give a classifier of two or more classes; a yes-or-no logit becomes "
        "two by a row of zeros before the classifier's weight and bias, two names in id2label, and no problem_type": len(
            labels
        )
        < 2,
        # Labels of a data set become these numbers, and are compared with the indices of logits.
        f"has names of classes (id2label) that aren't numbered from 0 to {len(labels) - 1}": not is_numbered,
    }
    if problem := next((text for text, is_so in problems.items() if is_so), None):
        raise AcquisitionError(f"model {name!r} {problem}")
    return config


def _read_weights(folder: Path, name: str, config: Any) -> nn.Module:
    """Return the model with all of its weights, which are in safetensors files of its folder."""
    if not any((folder / file).exists() for file in (WEIGHTS, INDEX)):
        raise AcquisitionError(f"model {name!r} has no {WEIGHTS}: save it as safetensors, as pickles are never loaded")
    refuse = partial(_refused, f"model {name!r} can't be loaded from {WEIGHTS}: ")
    with third_party_errors(refuse):
        if not (folder / WEIGHTS).exists():
            for file in set(json.loads((folder / INDEX).read_text())["weight_map"].values()):
                if (folder / file).parent != folder or not file.endswith(".safetensors"):
                    raise refuse(f"{INDEX} names {file!r}, which is no safetensors file in its folder")
        model, info = AutoModelForImageClassification.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            # Reported below in one line, not as a table on the terminal.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    if mismatched := sorted((key, tuple(stored), tuple(built)) for key, stored, built in info["mismatched_keys"]):
        key, stored, built = mismatched[0]
        classes = f"it names {len(config.id2label)} classes by id2label (2 if it has none) or label_names"
        raise AcquisitionError(f"model {name!r} has {key!r} of {stored}, and by its config.json of {built}: {classes}")
    if missing := sorted(info["missing_keys"]):
        built_for = ", ".join(config.architectures or ["an unknown task"])
        lacking = f"its weights ({built_for}) lack {missing[0]!r} and {len(missing) - 1} more"
        raise AcquisitionError(f"model {name!r} is no complete image classifier: {lacking}")
    make_plain_(model)
    return model


def _read_processor(folder: Path, name: str, config: Any) -> Any:
    start = f"model {name!r} has no image processor that can be used; save the one that it was trained with: "
    with third_party_errors(partial(_refused, start)):
        if not any((folder / file).exists() for file in PROCESSOR_FILES) and config.model_type == TIMM:
            return processor_of_timm(config.pretrained_cfg)
        return AutoImageProcessor.from_pretrained(
            folder,
            # By default it first looks into a timm config.
            image_processor_filename=PROCESSOR_FILES[0],
            backend="pil",
            trust_remote_code=False,
            local_files_only=True,
        )


def check_timm(config: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return a timm model's config as transformers reads it: timm's exports repeat the number of classes among the arguments.

    Raises:
        ProfilingAgentError: `refuse` with what is wrong or not installed.
    """
    fields, arguments = dict(config), dict(config.get("model_args") or {})
    repeated = arguments.pop("num_classes", None)
    count = fields.get("num_classes", repeated)
    names = fields.get("label_names") or fields.get("labels") or None
    # timm treats a name with a scheme as an address on the Hub or of a folder.
    if ":" in str(fields.get("architecture")):
        raise refuse("it names another model as its architecture, which is never fetched")
    if forbidden := sorted(LOADING_ARGUMENTS & set(arguments)):
        raise refuse(f"its model_args set {forbidden[0]!r}, which is no setting of an architecture: leave it out")
    if missing := [package for package in TIMM_PACKAGES if find_spec(package) is None]:
        raise refuse(f"it is one of timm's, and {missing[0]} isn't installed: pip install 'profiling-agent[timm]'")
    changes = {"model_args": arguments, "num_classes": count, "label_names": names}
    return fields | {name: value for name, value in changes.items() if value is not None}


def make_plain_(model: nn.Module) -> None:
    """Replace timm's linear layers by torch's, in place: they differ for TorchScript only."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).__module__ == "timm.layers.linear":
            module.__class__ = nn.Linear


def processor_of_timm(pretrained_cfg: Mapping[str, Any]) -> Any:
    """Return a transformers image processor that prepares images as timm's evaluation does.

    Both give the same pixels, up to float32 rounding, if an even number is cropped from an edge. For an odd number timm's crop may be one
    pixel lower or further right.

    Raises:
        AcquisitionError: it crops in a way that this processor doesn't support.
    """
    from timm.data.config import resolve_data_config  # pyright: ignore[reportMissingImports] - an extra

    config = resolve_data_config(pretrained_cfg=dict(pretrained_cfg))
    _, height, width = config["input_size"]
    mode = config["crop_mode"]
    # `border` keeps the whole picture and pads it.
    if mode != "squash" and (mode != "center" or height != width):
        raise AcquisitionError(
            f"an input_size of {height}x{width} with crop_mode {mode!r} in pretrained_cfg is not supported"
        )
    size = {"height": math.floor(height / config["crop_pct"]), "width": math.floor(width / config["crop_pct"])}
    return CLIPImageProcessorPil(
        size=size if mode == "squash" else {"shortest_edge": size["height"]},
        resample=Image.Resampling[config["interpolation"].upper()],
        crop_size={"height": height, "width": width},
        image_mean=list(config["mean"]),
        image_std=list(config["std"]),
    )


def _processor_shape(processor: Any) -> tuple[int, ...] | None:
    """Return the shape of images from the processor, (channels, height, width); None if it gives several, or fails."""
    blanks = [to_processor_channels(Image.new("RGB", size), processor) for size in BLANK_SIZES]
    try:
        shapes = {process([blank], processor).shape[1:] for blank in blanks}
    # Its settings may fit no image.
    except ArtifactError:
        return None
    return shapes.pop() if len(shapes) == 1 else None


def _proposals(model: nn.Module, processor: Any) -> dict[InputSpec, str]:
    """Return the shapes that the processor and the model's config give, each with why the model refuses it, or ""."""
    config: Any = model.config
    size: Any = getattr(config, "image_size", None)
    sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
    shapes: dict[str, tuple[int, ...] | None] = {
        "image processor": _processor_shape(processor),
        "model config": None if size is None else (getattr(config, "num_channels", 3), *sizes),
    }
    problems = dict[InputSpec, str]()
    for source, shape in shapes.items():
        if shape is not None:
            spec = InputSpec(channels=shape[0], height=shape[1], width=shape[2], source=source)
            try:
                verify(model, spec)
                problems[spec] = ""
            except ShapeUnresolvedError as error:
                problems[spec] = str(error)
    return problems


def verify(model: nn.Module, spec: InputSpec) -> None:
    """Run one blank image of the shape `spec` through `model` in eval mode, and restore the model.

    Raises:
        ShapeUnresolvedError: the model refuses the image, or its output isn't one row of logits.
    """
    shape = _format_shape(spec)

    def refuse(text: str) -> ShapeUnresolvedError:
        return ShapeUnresolvedError(f"the model refuses an image of {shape!r} with {text}")

    with preserving_state(model), torch.inference_mode():
        logits = checked_logits(model.eval(), torch.zeros(spec.batch(1), device=device_of(model)), refuse)
    if logits.dim() != 2 or len(logits) != 1:
        raise ShapeUnresolvedError(f"the model answers one image of {shape!r}, but not with one row of logits")


def check_processor(model: nn.Module, processor: Any) -> InputSpec | None:
    """Return the shape of the processor's images, or if they have several that of the config, verified by a forward pass.

    None if neither gives one.

    Raises:
        ShapeUnresolvedError: the model refuses it.
    """
    problems = _proposals(model, processor)
    if not problems:
        return None
    spec, problem = next(iter(problems.items()))
    if problem:
        stated = ", ".join(f"{spec.source}: {_format_shape(spec)}" for spec in problems)
        advice = "correct size, crop_size, image_mean or image_std of the image processor, or image_size of the model"
        raise ShapeUnresolvedError(f"the image processor doesn't fit the model, {problem} ({stated}); {advice}")
    return spec


def resolve_input_shape(model: nn.Module, processor: Any) -> InputSpec:
    """Return the shape of `check_processor`; ShapeUnresolvedError if there is none too."""
    if (spec := check_processor(model, processor)) is None:
        raise ShapeUnresolvedError(
            "neither the image processor nor config.json gives an input shape: set image_size there"
        )
    return spec


def survey(model: nn.Module, processor: Any) -> ShapeFacts:
    """Return each shape that is stated, whether the model accepts it, and the image settings.

    The shape is certain if the processor and the config, as far as they have one, agree on it, and the model accepts it.
    """
    problems = _proposals(model, processor)
    findings = tuple(
        f"{spec.source}: {_format_shape(spec)}, {f'but {problem}' if problem else 'which the model accepts'}"
        for spec, problem in problems.items()
    )
    sources: dict[str, Any] = {"model config": model.config, "image processor": processor}
    settings = [
        f"{title}: {name} = {value!r}"
        for title, source in sources.items()
        for name, value in sorted(source.to_dict().items())
        if any(part in name for part in KEYWORDS)
    ]
    is_certain = len({spec.batch(1) for spec in problems}) == 1 and not any(problems.values())
    return ShapeFacts(settings=tuple(settings), findings=findings, is_certain=is_certain)


def _format_shape(spec: InputSpec) -> str:
    return "x".join(map(str, spec.batch(1)[1:]))


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    """Resolve `auto`, `cpu` or `cuda` to a device; `auto` is the CPU, which is better tested.

    Raises:
        RequestError: CUDA was requested and this machine has none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("device is 'cuda' but torch finds no CUDA device: use auto or cpu")
    return "cuda" if name == "cuda" else "cpu"


def device_note(name: str, *, has_cuda: bool) -> str | None:
    """Return a note if `auto` left a CUDA device unused, else None."""
    if name != "auto" or not has_cuda:
        return None
    return "a CUDA device is there and was left alone, as nothing was measured on one yet: --device cuda asks for it"
