"""Image classifiers and their image processors from the Hub, a folder or the references; and the device to run on."""

import json
import math
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - of the transport library
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, TimmWrapperConfig
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from profiling_agent.data import is_local
from profiling_agent.data.reference import PREFIX, reference_model
from profiling_agent.errors import AcquisitionError, RequestError
from profiling_agent.lib.logs import Progress, quiet, silent, third_party_errors
from profiling_agent.lib.timm_config import MODEL_TYPE as TIMM
from profiling_agent.lib.timm_config import check_timm, make_plain_, processor_of_timm

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files of this package's saved and exported models, whose int8 weights transformers may read as floats.
OUTPUT_FILES = ("recipe.json", "layers.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MODEL_FILES = ["config.json", *PROCESSOR_FILES, WEIGHTS, INDEX, "model-*-of-*.safetensors"]
LOGIN = "set the HF_TOKEN environment variable or run `hf auth login`"
MAX_TEXT = 200
HALF_DTYPES = {"F16": "float16", "BF16": "bfloat16"}

Kind = Literal["model", "dataset"]


def local_folder(name: str, kind: Kind) -> Path:
    """Return the absolute path of an existing folder; AcquisitionError if there is none."""
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise AcquisitionError(f"{kind} path {name!r} {problem}: give an existing folder or a Hub id{_suggest(path)}")
    return path


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return "; did you mean 'x'?" for the closest of `names`, or an empty string if none is close."""
    matches = get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _suggest(path: Path) -> str:
    try:
        return did_you_mean(path.name, [folder.name for folder in path.parent.iterdir() if folder.is_dir()])
    except OSError:
        return ""


@contextmanager
def hub_errors(kind: Kind, name: str, revision: str | None) -> Generator[None]:
    """Raise a one-line AcquisitionError for each kind of Hub error."""
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    try:
        yield
    except (HTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        near = _suggest(Path(name[:MAX_TEXT]))
        match error:
            case errors.GatedRepoError():
                problem = f"is gated: accept its terms at {page}, then {LOGIN}"
            case errors.RevisionNotFoundError():
                problem = f"has no revision {revision!r}: see {page}"
            case errors.RepositoryNotFoundError() | errors.HFValidationError():
                problem = f"is no local folder and no public Hub id: check the name; if it is private, {LOGIN}{near}"
            case _:
                text = f"{constants.ENDPOINT} can't be reached for it ({type(error).__name__})"
                problem = f"is no local folder and {text}: check the network, or give a local folder{near}"
        raise AcquisitionError(f"{kind} {name[:MAX_TEXT]!r} {problem}") from error


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
        model: Any = _read_weights(folder, name, config)
        processor, note = _read_processor(folder, name, config), _precision_note(folder)
        model.config.name_or_path = model.name_or_path = str(folder)
    return LoadedModel(
        model=model.to(device).eval(),
        processor=processor,
        source=str(folder) if is_local(name) else name,
        revision=commit,
        architecture=type(model).__name__,
        note=note,
    )


def _precision_note(folder: Path) -> str | None:
    """Return a note if the first file's largest tensor is in half precision, else None."""
    with safe_open(min(folder.glob("*.safetensors")), framework="pt") as file:
        tensors = [file.get_slice(key) for key in file.keys()]  # noqa: SIM118 - no mapping
    _, stored = max((math.prod(tensor.get_shape()), str(tensor.get_dtype())) for tensor in tensors)
    if (name := HALF_DTYPES.get(stored)) is None:
        return None
    return f"the weights are stored in {name}: the baseline, with which sizes and speeds are compared, is float32"


def _refused(start: str, advice: str, problem: str) -> AcquisitionError:
    return AcquisitionError(f"{start}{problem}{advice}")


def _read_config(folder: Path, name: str) -> Any:
    """Return the config of an unquantized image classifier that transformers itself implements, with a name for every class."""
    if any((folder / file).exists() for file in OUTPUT_FILES):
        raise AcquisitionError(f"model {name!r} was written by profiling-agent: give the model that it was made from")
    if (folder / "adapter_config.json").exists():
        raise AcquisitionError(f"model {name!r} is an adapter of another: merge it into its base model, and save that")
    if not (folder / "config.json").exists():
        raise AcquisitionError(f"model {name!r} has no config.json: give an ordinary Hugging Face model folder or id")
    refuse = partial(_refused, f"model {name!r} has a config.json that can't be used, ", ": correct it")
    with third_party_errors(refuse):
        fields: dict[str, Any] = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    is_timm = fields.get("model_type", TIMM if "pretrained_cfg" in fields else None) == TIMM
    model_type = TIMM if is_timm else fields.get("model_type")
    if fields.get("quantization_config") is not None:
        raise AcquisitionError(f"model {name!r} is quantized already: give the model that it was made from")
    if model_type not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        if fields.get("auto_map"):
            raise AcquisitionError(f"model {name!r} needs Python code of its own, which is never run: choose another")
        if model_type not in CONFIG_MAPPING_NAMES:
            near = did_you_mean(str(model_type), list(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES))
            unknown = f"model_type {model_type!r}, which transformers {transformers.__version__} doesn't know"
            raise AcquisitionError(f"model {name!r} has a config.json of {unknown}{near}")
        built_for = ", ".join(fields.get("architectures") or [str(model_type)])
        raise AcquisitionError(f"model {name!r} is no image classifier ({built_for}): choose one that is")
    with third_party_errors(refuse):
        if is_timm:
            fields = check_timm(fields, partial(_refused, f"model {name!r} can't be built: ", ""))
            config: Any = TimmWrapperConfig.from_dict(fields)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        labels = dict(config.id2label)
    # Labels of a data set become these numbers, and are compared with the indices of logits.
    if set(labels) != set(range(len(labels))) or not all(isinstance(label, str) for label in labels.values()):
        advice = f'from 0 to {len(labels) - 1}: give them as {{"0": "cat", "1": "dog"}}'
        raise AcquisitionError(f"model {name!r} has names of classes (id2label) that aren't numbered {advice}")
    if len(labels) < 2:
        raise AcquisitionError(f"model {name!r} has one output, the same answer for every image: give a classifier")
    return config


def _read_weights(folder: Path, name: str, config: Any) -> nn.Module:
    """Return the model with all of its weights, which are in safetensors files of its folder."""
    if not any((folder / file).exists() for file in (WEIGHTS, INDEX)):
        raise AcquisitionError(f"model {name!r} has no {WEIGHTS}: save it as safetensors, as pickles are never loaded")
    refuse = partial(_refused, f"model {name!r} can't be loaded from {WEIGHTS}, ", ": download or save it again")
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
    if mismatches := sorted((key, tuple(stored), tuple(built)) for key, stored, built in info["mismatched_keys"]):
        (key, stored, built), num_names = mismatches[0], len(config.id2label)
        if all(shape[:1] == (num_names,) for _, _, shape in mismatches):
            names = "num_classes and label_names" if config.model_type == TIMM else "id2label; 2 where it has none"
            stated = f"{num_names} classes by its config.json ({names})"
            raise AcquisitionError(f"model {name!r} has {stated}, and {stored[0]} by its weights ({key!r}): name each")
        shapes = f"{key!r} is {stored}, {built} by the config, and {len(mismatches) - 1} more differ"
        raise AcquisitionError(f"model {name!r} has weights of another config.json: {shapes}")
    if missing := sorted(info["missing_keys"]):
        built_for = ", ".join(config.architectures or ["an unknown task"])
        lacking = f"its weights ({built_for}) lack {missing[0]!r} and {len(missing) - 1} more"
        raise AcquisitionError(f"model {name!r} is no complete image classifier: {lacking}")
    make_plain_(model)
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise AcquisitionError(f"model {name!r} holds NaN or infinite values in {key!r}: its weights are damaged")
    return model


def _read_processor(folder: Path, name: str, config: Any) -> Any:
    start = f"model {name!r} has no image processor that can be used: "
    refuse = partial(_refused, start, "; save the one that it was trained with into its folder")
    if not any((folder / file).exists() for file in PROCESSOR_FILES):
        if timm_config := getattr(config, "pretrained_cfg", None):
            return processor_of_timm(timm_config, refuse)
        raise refuse(f"{PROCESSOR_FILES[0]} is missing")
    with third_party_errors(refuse):
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
