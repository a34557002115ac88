"""Models: an image classifier and its image processor, from the Hub, a folder or the references, and where it runs."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from profiling_agent.acquisition.hub import fetch_model, hub_files, is_local, local_folder
from profiling_agent.acquisition.reference import PREFIX, reference_model
from profiling_agent.errors import AcquisitionError, RequestError
from profiling_agent.progress import Progress, silent
from profiling_agent.quiet import quiet

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
LOAD_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError, AttributeError, TypeError, SafetensorError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A classifier in eval mode and float32 on its device, and where it came from.

    `source` is the name that was asked for, `revision` the Hub commit, or None for a folder.
    """

    model: nn.Module
    processor: Any
    source: str
    revision: str | None
    architecture: str


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0][:200]


def _locate(name: str, revision: str | None, progress: Progress) -> tuple[Path, str | None]:
    """Return the folder of the model and its commit."""
    if name.startswith(PREFIX):
        return reference_model(name, progress), None
    if is_local(name):
        return local_folder(name, "model"), None
    progress(f"fetching {name}", 0, 0)
    folder = fetch_model(name, revision)
    return folder, folder.name


def _check_files(folder: Path, name: str, commit: str | None) -> None:
    if not (folder / "config.json").is_file():
        raise AcquisitionError(f"model {name!r} has no config.json: give an ordinary Hugging Face model folder or id")
    if any((folder / file).is_file() for file in SAFETENSORS):
        return
    files: Iterable[str] = hub_files(name, commit) if commit else (path.name for path in folder.iterdir())
    pickles = sorted(file for file in files if file.endswith(PICKLES))
    if pickles:
        raise AcquisitionError(
            f"model {name!r} has its weights only as pickle ({pickles[0]!r}), which is never loaded: "
            "convert them to safetensors"
        )
    raise AcquisitionError(f"model {name!r} has no weights: model.safetensors is missing")


def _read_config(folder: Path, name: str) -> Any:
    """Return the configuration of an image classifier that transformers itself implements."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = raw["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise AcquisitionError(f"model {name!r} has a config.json without a model_type: it is damaged") from error
    if model_type not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        if raw.get("auto_map"):
            raise AcquisitionError(f"model {name!r} needs Python code of its own, which is never run: choose another")
        built_for = ", ".join(raw.get("architectures") or [str(model_type)])
        raise AcquisitionError(f"model {name!r} is no image classifier ({built_for}): choose one that is")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except LOAD_ERRORS as error:
        raise AcquisitionError(f"model {name!r} has an unreadable configuration: {_first_line(error)}") from error


def _read_weights(folder: Path, name: str, config: Any) -> nn.Module:
    try:
        model, info = AutoModelForImageClassification.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        raise AcquisitionError(f"model {name!r} can't be loaded: {_first_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        built_for = ", ".join(config.architectures or ["an unknown task"])
        raise AcquisitionError(
            f"model {name!r} is no complete image classifier: its weights ({built_for}) lack {missing[0]!r} "
            f"and {len(missing) - 1} more; choose a checkpoint that was fine-tuned for classification"
        )
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise AcquisitionError(f"model {name!r} holds NaN or infinite values in {key!r}: its weights are damaged")
    return model


def _read_processor(folder: Path, name: str) -> Any:
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False, local_files_only=True)
    except LOAD_ERRORS as error:
        raise AcquisitionError(
            f"model {name!r} has no usable image processor: preprocessor_config.json is missing or wrong "
            f"({_first_line(error)})"
        ) from error


def load_model(
    name: str, *, revision: str | None = None, device: str = "cpu", progress: Progress = silent
) -> LoadedModel:
    """Return the image classifier `name`: a Hub id, a local folder, or reference:vit|deit|swin|resnet.

    Weights come from safetensors only, images are processed by Pillow, and no code of the model's own is run.

    Raises:
        AcquisitionError: the model can't be had, is no image classifier, or its weights are incomplete or not finite.
    """
    with quiet():
        folder, commit = _locate(name, revision, progress)
        _check_files(folder, name, commit)
        progress(f"loading {name}", 0, 0)
        config = _read_config(folder, name)
        model = _read_weights(folder, name, config)
        processor = _read_processor(folder, name)
    return LoadedModel(
        model=model.to(device).eval(),
        processor=processor,
        source=name,
        revision=commit,
        architecture=type(model).__name__,
    )


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    """Return `cpu` or `cuda` for `auto`, `cpu` or `cuda`.

    Raises:
        RequestError: CUDA was asked for and this machine has none, or the name is another one.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device is {name!r}: use auto, cpu or cuda")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise RequestError("device is 'cuda' but torch finds no CUDA device: use auto or cpu")
    return "cuda" if has_cuda and name != "cpu" else "cpu"
