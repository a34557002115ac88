"""Image classifiers and their image processors from the Hub, a folder or the references; and the device to run on."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, TimmWrapperConfig
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from profiling_agent.data.hub import did_you_mean, fetch_model, is_local, library_errors, local_folder
from profiling_agent.data.reference import PREFIX, reference_model
from profiling_agent.errors import AcquisitionError, RequestError
from profiling_agent.lib.logs import Progress, quiet, silent
from profiling_agent.lib.timm_config import MODEL_TYPE as TIMM
from profiling_agent.lib.timm_config import check_timm, is_timm, make_plain_, normalize_config, processor_of_timm

WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
# Files of this package's saved and exported models, whose int8 weights transformers may read as floats.
OUTPUT_FILES = ("recipe.json", "layers.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Half precisions by their names in safetensors.
HALF_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A classifier in eval mode and float32 on its device.

    `source` is the requested name, or the absolute path of a folder; `revision` is the Hub commit, or None for a folder.
    `note`, for readers of the results, is set if the weights are stored in fewer bits.
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
        model: Any = _read_weights(folder, name, config)
        processor = _read_processor(folder, name, config)
        model.config.name_or_path = model.name_or_path = str(folder)
    return LoadedModel(
        model=model.to(device).eval(),
        processor=processor,
        source=str(folder) if is_local(name) else name,
        revision=commit,
        architecture=type(model).__name__,
        note=_precision_note(folder, model),
    )


def _precision_note(folder: Path, model: nn.Module) -> str | None:
    """Return a note on weights in half precision, as the first file stores its largest tensor, or None."""
    with safe_open(min(folder.glob("*.safetensors")), framework="pt") as file:
        tensors = [file.get_slice(key) for key in file.keys()]  # noqa: SIM118 - no mapping
    _, dtype = max((math.prod(tensor.get_shape()), str(tensor.get_dtype())) for tensor in tensors)
    if dtype not in HALF_DTYPES:
        return None
    megabytes = sum(2 * parameter.numel() for parameter in model.parameters()) / 1e6
    return (
        f"the weights are stored in {HALF_DTYPES[dtype]}, {megabytes:.3g} MB: the baseline is float32, of twice that, and all sizes "
        "and speeds are compared with that"
    )


def _read_config(folder: Path, name: str) -> Any:
    """Return the configuration of a transformers image classifier, with a name for every class."""
    if any((folder / file).exists() for file in OUTPUT_FILES):
        raise AcquisitionError(f"model {name!r} was written by profiling-agent: give the model that it was made from")
    if (folder / ADAPTER).exists():
        raise AcquisitionError(
            f"model {name!r} is an adapter of another ({ADAPTER}): merge it into its base model, and save that"
        )
    if not (folder / "config.json").exists():
        raise AcquisitionError(f"model {name!r} has no config.json: give an ordinary Hugging Face model folder or id")
    with library_errors(f"model {name!r} has a config.json that is damaged, or can't be read: "):
        fields: dict[str, Any] = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    _check_kind(fields, name)
    with library_errors(
        f"model {name!r} has a config.json that can't be used, ", ": correct it, or save the model again"
    ):
        if is_timm(fields):

            def refuse(problem: str) -> AcquisitionError:
                return AcquisitionError(f"model {name!r} can't be built: {problem}")

            fields = normalize_config(fields, refuse)
            check_timm(fields, refuse)
            config: Any = TimmWrapperConfig.from_dict(fields)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        labels = dict(config.id2label)
    # Labels of a data set become these numbers, and are compared with the indices of logits.
    if set(labels) != set(range(len(labels))) or not all(isinstance(label, str) for label in labels.values()):
        raise AcquisitionError(
            f"model {name!r} has a config.json whose names of classes (id2label) aren't numbered from 0 to {len(labels) - 1}: "
            'give them as {"0": "cat", "1": "dog"}'
        )
    if len(labels) < 2:
        raise AcquisitionError(
            f"model {name!r} has one output ({labels.get(0)!r}), whose answer is the same for every image: give a classifier with "
            "an output for each of two classes or more"
        )
    return config


def _check_kind(fields: dict[str, Any], name: str) -> None:
    """Reject any model but an unquantized image classifier that transformers itself implements."""
    if fields.get("quantization_config") is not None:
        raise AcquisitionError(
            f"model {name!r} is quantized already (quantization_config): give the one it was made from"
        )
    model_type = TIMM if is_timm(fields) else fields.get("model_type")
    if model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return
    if fields.get("auto_map"):
        raise AcquisitionError(f"model {name!r} needs Python code of its own, which is never run: choose another")
    if model_type not in CONFIG_MAPPING_NAMES:
        raise AcquisitionError(
            f"model {name!r} has a config.json with model_type {model_type!r}, which transformers "
            f"{transformers.__version__} doesn't know: choose an architecture that it implements"
            f"{did_you_mean(str(model_type), list(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES))}"
        )
    built_for = ", ".join(fields.get("architectures") or [str(model_type)])
    raise AcquisitionError(f"model {name!r} is no image classifier ({built_for}): choose one that is")


def _read_weights(folder: Path, name: str, config: Any) -> nn.Module:
    """Return the model with all of its weights, which are in safetensors files of its folder."""
    if not any((folder / file).exists() for file in (WEIGHTS, INDEX)):
        raise AcquisitionError(
            f"model {name!r} has no {WEIGHTS}: save its weights as safetensors, as pickles (.bin, .pt, .pth, .ckpt) are never loaded"
        )
    with library_errors(f"model {name!r} can't be loaded from {WEIGHTS}, ", ": download it again, or save it again"):
        if not (folder / WEIGHTS).exists():
            files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            paths = {file: folder / file for file in files}
            refused = [file for file, path in paths.items() if path.parent != folder or path.suffix != ".safetensors"]
            if refused:
                raise AcquisitionError(
                    f"model {name!r} has a {INDEX} that names {refused[0]!r}, which is no safetensors file in its folder"
                )
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
    _check_shapes(name, config, info["mismatched_keys"])
    make_plain_(model)
    if missing := sorted(info["missing_keys"]):
        built_for = ", ".join(config.architectures or ["an unknown task"])
        raise AcquisitionError(
            f"model {name!r} is no complete image classifier: its weights ({built_for}) lack {missing[0]!r} "
            f"and {len(missing) - 1} more; choose a checkpoint that was fine-tuned for classification"
        )
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise AcquisitionError(f"model {name!r} holds NaN or infinite values in {key!r}: its weights are damaged")
    return model


def _check_shapes(name: str, config: Any, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Reject weights whose shapes differ from config.json; `mismatched` holds (tensor name, shape in the file, shape by the config)."""
    if not (mismatches := sorted((key, tuple(stored), tuple(built)) for key, stored, built in mismatched)):
        return
    (key, stored, built), num_names = mismatches[0], len(config.id2label)
    if all(built_shape[:1] == (num_names,) for _, _, built_shape in mismatches):
        names = "num_classes and label_names" if config.model_type == TIMM else "id2label; 2 where it has none"
        raise AcquisitionError(
            f"model {name!r} has {num_names} classes by its config.json ({names}), and {stored[0]} by its weights ({key!r}): "
            "name each of these"
        )
    raise AcquisitionError(
        f"model {name!r} has weights that aren't its config.json's: {key!r} has the shape {stored}, {built} by the config, and "
        f"{len(mismatches) - 1} more differ: take both from one checkpoint"
    )


def _read_processor(folder: Path, name: str, config: Any) -> Any:
    has_processor = any((folder / file).exists() for file in PROCESSOR_FILES)
    if not has_processor and (timm_config := getattr(config, "pretrained_cfg", None)):

        def refuse(problem: str) -> AcquisitionError:
            start = f"model {name!r} prepares images in a way that isn't done here"
            return AcquisitionError(f"{start} ({problem}): save an image processor into its folder")

        return processor_of_timm(timm_config, refuse)
    prefix = f"model {name!r} has no image processor that can be used, as its preprocessor_config.json "
    advice = ": save the processor that it was trained with into its folder"
    if not has_processor:
        raise AcquisitionError(f"{prefix}is missing{advice}")
    with library_errors(f"{prefix}is wrong, ", advice):
        return AutoImageProcessor.from_pretrained(
            folder,
            # By default it first looks into a timm config.
            image_processor_filename=PROCESSOR_FILES[0],
            backend="pil",
            trust_remote_code=False,
            local_files_only=True,
        )


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    """Resolve `auto`, `cpu` or `cuda` to a device; `auto` is the CPU, which is better tested.

    Raises:
        RequestError: CUDA was requested and this machine has none, or the name is another one.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device is {name!r}: use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("device is 'cuda' but torch finds no CUDA device: use auto or cpu")
    return "cuda" if name == "cuda" else "cpu"


def device_note(name: str, *, has_cuda: bool) -> str | None:
    """Return a note if `auto` left a CUDA device unused, else None."""
    if name != "auto" or not has_cuda:
        return None
    return "a CUDA device is there and was left alone, as nothing was measured on one yet: --device cuda asks for it"
