"""Image classifiers from the Hub, a folder or the references: their weights, image processors, input shapes and devices."""

import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - of the transport library
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, CLIPImageProcessorPil, TimmWrapperConfig
from transformers.models.auto.auto_factory import _get_model_class  # pyright: ignore[reportPrivateUsage]
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from profiling_agent.data import TIMM, is_local
from profiling_agent.data.images import process, to_processor_channels
from profiling_agent.data.reference import PREFIX, reference_model
from profiling_agent.errors import AcquisitionError, ArtifactError, RequestError, ShapeUnresolvedError
from profiling_agent.lib.logs import Progress, Refuse, checked_logits, quiet, silent, third_party_errors
from profiling_agent.lib.machine import TIMM_PACKAGES
from profiling_agent.lib.modules import device_of, preserving_state
from profiling_agent.schemas import InputSpec, ShapeFacts

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Other files that hold weights, and folders of adapters; a trainer's own files are none of them.
COPIES = ("*.safetensors", "*model*.bin", "*model*.pt*", "*.ckpt", "*.h5", "*.msgpack", f"*/{ADAPTER_CONFIG}")
# What torch.nn.DataParallel, torch.compile (anywhere in a name) and PEFT add to the names of tensors.
WRAPPERS = re.compile(r"^(?:module\.|base_model\.model\.|base_model\.|_orig_mod\.)+|\b_orig_mod\.")
# Ends of the names of tensors that change no logits: counters, and tables that are computed from the configuration.
HARMLESS = ("num_batches_tracked", "position_ids", "relative_position_index", "attn_mask", "total_ops", "total_params")
# Fields of a config.json on how a model is run, not on what it computes.
RUN_SETTINGS = {
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
    *("output_attentions", "_output_attentions", "output_hidden_states", "return_dict", "use_return_dict"),
    *("torchscript", "dtype", "torch_dtype", "chunk_size_feed_forward", "gradient_checkpointing", "fusion_config"),
}
MERGE = "merge it with PEFT (PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder))"
# Files of this package's saved and exported models, whose int8 weights transformers may read as floats.
OUTPUT_FILES = ("recipe.json", "layers.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MODEL_FILES = ["config.json", *PROCESSOR_FILES, WEIGHTS, INDEX, "model-*-of-*.safetensors", ADAPTER, ADAPTER_CONFIG]
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
    `notes`, for readers of the results, name weights that were converted, merged, renamed or not used.
    """

    model: nn.Module
    processor: Any
    source: str
    revision: str | None
    notes: tuple[str, ...] = ()


def load_model(
    name: str, *, revision: str | None = None, device: str = "cpu", progress: Progress = silent
) -> LoadedModel:
    """Load the image classifier `name`: a Hub id, a local folder, or reference:vit|deit|swin|resnet.

    Weights come from safetensors only, Pillow processes the images, and no code from the model repository is run. A LoRA adapter next to
    the weights is merged. Settings of config.json on how a model is run (attention kernels, outputs, dtype) are ignored.

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
        model, notes = _read_weights(folder, name, config)
        processor = _read_processor(folder, name, config)
        model.config.name_or_path = model.name_or_path = str(folder)
    return LoadedModel(
        model=model.to(device).eval(),
        processor=processor,
        source=str(folder) if is_local(name) else name,
        revision=commit,
        notes=notes,
    )


def _refused(start: str, problem: str) -> AcquisitionError:
    return AcquisitionError(f"{start}{problem}")


def _read_config(folder: Path, name: str) -> Any:
    """Return the config of a classifier that transformers itself implements, with a name for every class."""
    origin = "give the model that it was made from"
    if any((folder / file).exists() for file in OUTPUT_FILES):
        raise AcquisitionError(f"model {name!r} was written by profiling-agent: {origin}")
    if (folder / ADAPTER_CONFIG).exists() and not any((folder / file).exists() for file in (WEIGHTS, INDEX)):
        raise AcquisitionError(f"model {name!r} is an adapter without its model: {MERGE}")
    refuse = partial(_refused, f"model {name!r} can't be read from its config.json: ")
    with third_party_errors(refuse):
        text = (folder / "config.json").read_text(encoding="utf-8")
        fields: dict[str, Any] = dict(json.loads(text, object_hook=_computing))
        model_type = fields.get("model_type", TIMM if "pretrained_cfg" in fields else None)
        if model_type not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
            built_for = ", ".join([*(fields.get("architectures") or []), f"model_type {model_type!r}"])
            problem = f"is no image classifier that the installed transformers knows ({built_for})"
            if fields.get("auto_map"):
                problem = "needs Python code of its own, which is never run"
            raise AcquisitionError(f"model {name!r} {problem}: choose another")
        if model_type == TIMM:
            fields = check_timm(fields, refuse)
            config: Any = TimmWrapperConfig.from_dict(fields)
        else:
            config = AutoConfig.for_model(**fields)
        labels: dict[int, Any] = dict(config.id2label)
    count = fields.get("num_classes" if model_type == TIMM else "num_labels") or len(labels)
    has_one_output, is_regression = len(labels) == 1, len(labels) > 1 and config.problem_type == "regression"
    num_names = len(fields.get("id2label") or fields.get("label_names") or labels)
    is_numbered = set(labels) == set(range(len(labels))) and all(isinstance(label, str) for label in labels.values())
    problems = {
        f"is quantized already: {origin}": fields.get("quantization_config") is not None,
        f"has weights elsewhere (transformers_weights): name them {WEIGHTS}": "transformers_weights" in fields,
        f"has {count} classes by its config.json, which names {num_names}: make them agree": count != num_names,
        f"has problem_type 'regression', whose {len(labels)} outputs are no classes: give a classifier": is_regression,
        # The softmax of 0 and a logit is its sigmoid.
        "has one output, a score (regression) or a yes-or-no logit: give a classifier of two or more classes; a yes-or-no logit becomes "
        "two by a row of zeros before the classifier's weight and bias, two names in id2label, and no problem_type": has_one_output,
        # Labels of a data set become these numbers, and are compared with the indices of logits.
        f"has names of classes (id2label) that aren't numbered from 0 to {len(labels) - 1}": not is_numbered,
    }
    if problem := next((text for text, is_so in problems.items() if is_so), None):
        raise AcquisitionError(f"model {name!r} {problem}")
    return config


def _computing(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in RUN_SETTINGS}


def _read_weights(folder: Path, name: str, config: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the model with all of its weights, merged with a LoRA adapter if there is one, and notes on them."""
    refuse = partial(_refused, f"model {name!r} can't be loaded from its weights: ")
    with third_party_errors(refuse):
        tensors, notes = _read_tensors(folder, refuse)
        model, info = _build(config, tensors)
        replaced = set[str]()
        if any((folder / file).exists() for file in (ADAPTER, ADAPTER_CONFIG)):
            replaced, note = _merge_adapter_(model, folder, refuse)
            notes.append(note)
    if mismatched := sorted(each for each in info["mismatched_keys"] if each[0] not in replaced):
        key, stored, built = mismatched[0]
        classes = f"it names {built[0]} classes by id2label or num_labels (2 if it has neither) or label_names"
        cause = classes if built[0] == config.num_labels else "these are of different models"
        sizes = f"of {tuple(stored)}, and by its config.json of {tuple(built)}"
        raise AcquisitionError(f"model {name!r} has {key!r} {sizes}: {cause}")
    unused = sorted(key for key in info["unexpected_keys"] if not key.endswith(HARMLESS))
    if missing := sorted(key for key in info["missing_keys"] - replaced if not key.endswith("num_batches_tracked")):
        lacking = f"its weights ({', '.join(config.architectures or ['an unknown task'])}) lack {_first_of(missing)}"
        having = f", and have {_first_of(unused)} instead" if unused else ""
        raise AcquisitionError(f"model {name!r} is no complete image classifier: {lacking}{having}")
    if bad := [key for key, each in model.state_dict().items() if not each.isfinite().all()]:
        raise AcquisitionError(f"model {name!r} has weights that are not finite: {_first_of(bad)}")
    if unused:
        notes.append(f"a {type(model).__name__} does not use {_first_of(unused)} of the weights")
    if getattr(config, "auto_map", None):
        notes.append(f"the model's own Python code is not run: it is a {type(model).__name__} of transformers")
    make_plain_(model)
    return model, tuple(notes)


def _first_of(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _build(config: Any, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """Return the config's classifier with these tensors in float32, which may have older names, and what didn't fit."""
    return _get_model_class(config, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING).from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=torch.float32,
        # Reported in one line, not as a table on the terminal.
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )


def _read_tensors(folder: Path, refuse: Refuse) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights of a folder without wrappers' names, and notes on what was read otherwise than stored, or not read."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        for file in files:
            if (folder / file).parent != folder or not file.endswith(".safetensors"):
                raise refuse(f"{INDEX} names {file!r}, which is no safetensors file in its folder")
    copies = {path.relative_to(folder).as_posix() for pattern in COPIES for path in folder.glob(pattern)}
    unread = sorted(copies - {*files, ADAPTER})
    others = f"; not read: {_first_of(unread)}" if unread else ""
    if absent := [file for file in files if not (folder / file).exists()]:
        raise refuse(f"{_first_of(absent)} is not there{others}: save it as safetensors, as pickles are never loaded")
    notes = [f"the weights are those in {_first_of(files)}{others}"] if unread else []
    tensors, wrapped = _load_files(folder, files, refuse)
    if wrapped:
        notes.append(f"a wrapper's prefixes are left out of the names of weights, as in {wrapped[0]!r}")
    if any(".lora_" in name for name in tensors):
        raise refuse(f"they hold an adapter that is not merged: {MERGE}")
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    if any(tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool for tensor in tensors.values()):
        raise refuse("they are quantized already: give the model that it was made from")
    if dtype := " and ".join(sorted(dtypes - {"float32"})):
        baseline = "the baseline that sizes and speeds are compared with is float32"
        notes.append(f"the weights are stored in {dtype}: {baseline}")
    return tensors, notes


def _load_files(folder: Path, files: Sequence[str], refuse: Refuse) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors in these files by their names without wrappers' prefixes, and the names that had one."""
    with third_party_errors(lambda text: refuse(f"{_first_of(files)} is missing, damaged or not copied whole: {text}")):
        stored = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in stored.items()}
    if len(tensors) < len(stored):
        raise refuse("they hold a tensor twice, once with the name that a wrapper gave it: save one of them")
    return tensors, sorted({*stored} - {*tensors})


def _merge_adapter_(model: Any, folder: Path, refuse: Refuse) -> tuple[set[str], str]:
    """Add a folder's LoRA adapter to `model`; return the names of the tensors that it replaces, and a note.

    A layer's weight W becomes W + scale B A, where `scale` is lora_alpha / r, or lora_alpha / sqrt(r) if rank-stabilized.
    """
    settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    (replaced, _), added = _load_files(folder, [ADAPTER], refuse), dict[str, Tensor]()
    for layer in [name.removesuffix(".lora_A.weight") for name in replaced if name.endswith(".lora_A.weight")]:
        down, up = (replaced.pop(f"{layer}.{part}.weight").float() for part in ("lora_A", "lora_B"))
        scale = settings["lora_alpha"] / (math.sqrt(len(down)) if settings.get("use_rslora") else len(down))
        added[f"{layer}.weight"] = scale * (up.flatten(1) @ down.flatten(1)).view(len(up), *down.shape[1:])
    replaced = {re.sub(r"\b(modules_to_save|base_layer)\.", "", name): tensor for name, tensor in replaced.items()}
    # Some ways to initialise an adapter change the weights that it is added to.
    is_added = settings.get("init_lora_weights") in (None, True, False, "gaussian", "orthogonal")
    is_plain = settings.get("peft_type") == "LORA" and not settings.get("alpha_pattern") and added
    if not is_plain or not is_added or any(".lora_" in name for name in replaced):
        raise refuse(f"its adapter is more than low-rank matrices of one scale: {MERGE}")
    state = model.state_dict()
    for tensors, apply_ in ((added, Tensor.add_), (replaced, Tensor.copy_)):
        source, info = _build(model.config, tensors)
        fitting = {name: each for name, each in source.state_dict().items() if name not in info["missing_keys"]}
        if len(fitting) < len(tensors) or info["unexpected_keys"] or info["mismatched_keys"]:
            raise refuse(f"its adapter is of another model, with {_first_of(sorted(tensors))}: give its own")
        for name, tensor in fitting.items():
            apply_(state[name], tensor)
    changes = f"an adapter ({ADAPTER}) is merged into {len(added)} layers"
    return {*fitting}, f"{changes} and replaces {len(replaced)} tensors" if replaced else changes


def _read_processor(folder: Path, name: str, config: Any) -> Any:
    start = f"model {name!r} has no image processor that can be used; save the one that it was trained with: "
    with third_party_errors(partial(_refused, start)):
        if not any((folder / file).exists() for file in PROCESSOR_FILES) and config.model_type == TIMM:
            return processor_of_timm(config.pretrained_cfg)
        processor = AutoImageProcessor.from_pretrained(
            folder,
            # By default it first looks into a timm config.
            image_processor_filename=PROCESSOR_FILES[0],
            backend="pil",
            trust_remote_code=False,
            local_files_only=True,
        )
    # A list of one mean marks gray images; a number, or equal means, are the same for a model of one channel.
    neutral = {"image_mean": 0.0, "image_std": 1.0}
    values = [np.unique(getattr(processor, name, None) or plain).tolist() for name, plain in neutral.items()]
    if getattr(config, "num_channels", 3) == 1 and all(len(each) == 1 for each in values):
        processor.image_mean, processor.image_std = values
    return processor


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
