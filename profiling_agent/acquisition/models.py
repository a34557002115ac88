"""Models: an image classifier and its image processor, from the Hub, a folder or the references, and where it runs."""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from profiling_agent.acquisition.hub import fetch_model, hub_files, is_local, local_folder
from profiling_agent.acquisition.model_folder import CONFIG, PICKLES, PROCESSORS, checked, has_weights, read_settings
from profiling_agent.acquisition.reference import PREFIX, reference_model
from profiling_agent.acquisition.timm_processor import processor_of_timm
from profiling_agent.documents import MAX_QUOTED, clean
from profiling_agent.errors import AcquisitionError, RequestError
from profiling_agent.foreign import foreign_code
from profiling_agent.progress import Progress, silent
from profiling_agent.quiet import quiet
from profiling_agent.timm_config import MODEL_TYPE as TIMM
from profiling_agent.timm_config import is_timm, make_plain_

# As safetensors calls them.
HALVES = {"BF16": "bfloat16", "F16": "float16"}
# A head of ImageNet-21k on the widest of models has fifty million parameters.
MAX_MISSING = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A classifier in eval mode and float32 on its device, and where it came from.

    `source` is the name that was asked for, `revision` the Hub commit, or None for a folder. `note` says where its weights are stored in fewer bits
    than it has here.
    """

    model: nn.Module
    processor: Any
    source: str
    revision: str | None
    architecture: str
    note: str | None = None


def _locate(name: str, revision: str | None, progress: Progress) -> tuple[Path, str | None]:
    """Return the folder of the model and its commit."""
    if name.startswith(PREFIX):
        return reference_model(name, progress), None
    if is_local(name):
        return local_folder(name, "model"), None
    progress(f"fetching {name}", 0, 0)
    folder = fetch_model(name, revision)
    return folder, folder.name


def _check_weights(folder: Path, name: str, commit: str | None) -> None:
    """Refuse a model without weights that are loaded, and say whether it has others."""
    if has_weights(folder):
        return
    pickles = _pickles(path.name for path in folder.iterdir())
    # They aren't fetched, so that as a rule the Hub alone knows of them; it may be out of reach where some lie here.
    if commit and not pickles:
        pickles = _pickles(hub_files(name, commit))
    if pickles:
        raise AcquisitionError(
            f"model {name!r} has its weights only as pickle ({pickles[0]!r}), which is never loaded: "
            "convert them to safetensors"
        )
    raise AcquisitionError(f"model {name!r} has no weights: model.safetensors is missing")


def _pickles(files: Iterable[str]) -> list[str]:
    return sorted(file for file in files if file.endswith(PICKLES))


def _check_kind(raw: Any, name: str) -> None:
    """Refuse what isn't an image classifier that transformers itself implements."""
    model_type = TIMM if is_timm(raw) else raw.get("model_type")
    if not isinstance(model_type, str):
        raise AcquisitionError(f"model {name!r} has a config.json without a model_type: it is damaged")
    if model_type not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        if raw.get("auto_map"):
            raise AcquisitionError(f"model {name!r} needs Python code of its own, which is never run: choose another")
        if model_type not in CONFIG_MAPPING_NAMES:
            raise AcquisitionError(
                f"model {name!r} has a config.json with model_type {clean(model_type)[:MAX_QUOTED]!r}, which transformers "
                f"{transformers.__version__} doesn't know: choose an architecture that it implements"
            )
        raise AcquisitionError(
            f"model {name!r} is no image classifier ({_built_for(raw.get('architectures')) or clean(model_type)}): "
            "choose one that is"
        )


def _built_for(architectures: Any) -> str:
    names = architectures if isinstance(architectures, list) else []
    return clean(", ".join(str(name) for name in names))[:MAX_QUOTED]


def _read_config(staged: Path, name: str) -> Any:
    """Return the configuration, with a name for every class."""

    def refuse(raised: str) -> AcquisitionError:
        return AcquisitionError(
            f"model {name!r} has a config.json that can't be used, {raised}: correct it, or save the model again"
        )

    with foreign_code(refuse):
        config: Any = AutoConfig.from_pretrained(staged, trust_remote_code=False, local_files_only=True)
    names = getattr(config, "id2label", None)
    if not isinstance(names, dict) or not names:
        raise refuse("it has no names of classes (id2label)")
    if any(not isinstance(index, int) or not isinstance(label, str) for index, label in names.items()):
        raise refuse("its names of classes (id2label) are no texts")
    # Labels of a data set become these numbers, and are compared with the places of logits.
    if set(names) != set(range(len(names))):
        raise refuse(f"its {len(names)} names of classes (id2label) aren't numbered from 0 to {len(names) - 1}")
    return config


def _check_size(staged: Path, name: str, config: Any) -> None:
    """Refuse a configuration of far more parameters than its weights hold: transformers would make up the rest of them."""
    try:
        with foreign_code(AcquisitionError), torch.device("meta"):
            empty = AutoModelForImageClassification.from_config(copy.deepcopy(config))
    # Loading will say what is wrong with it, if anything is.
    except AcquisitionError:
        return
    num_params = sum(tensor.numel() for tensor in empty.parameters())
    # A weight takes a byte or more; a head that is missing, which has an error of its own, few.
    num_bytes = sum(path.stat().st_size for path in staged.glob("*.safetensors"))
    if num_params > num_bytes + MAX_MISSING:
        raise AcquisitionError(
            f"model {name!r} has a config.json that describes {num_params} parameters, and weights of {num_bytes} bytes: "
            "they don't belong together"
        )


def _check_shapes(name: str, config: Any, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuse weights of other shapes than config.json says; each is a tensor's name, its shape in the file and by the config."""
    if not (found := sorted((key, tuple(held), tuple(said)) for key, held, said in mismatched)):
        return
    (key, held, said), num_names = found[0], len(config.id2label)
    if all(by_config[:1] == (num_names,) for _, _, by_config in found):
        is_timms = config.model_type == TIMM
        by, advice = (
            ("num_classes", "say so there, in label_names too")
            if is_timms
            else ("id2label; 2 where it has none", "name each of these in id2label")
        )
        raise AcquisitionError(
            f"model {name!r} has {num_names} classes by its config.json ({by}), and {held[0]} by its weights ({key!r}): {advice}"
        )
    raise AcquisitionError(
        f"model {name!r} has weights that aren't its config.json's: {key!r} has the shape {held}, {said} by the config, and "
        f"{len(found) - 1} more differ: take both from one checkpoint"
    )


def _read_weights(staged: Path, name: str, config: Any) -> nn.Module:
    def refuse(raised: str) -> AcquisitionError:
        return AcquisitionError(
            f"model {name!r} can't be loaded, {raised.replace(str(staged), name)}: download it again, or save it again"
        )

    with foreign_code(refuse):
        model, info = AutoModelForImageClassification.from_pretrained(
            staged,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            # Told below, and not by a table on the terminal.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_shapes(name, config, info["mismatched_keys"])
    make_plain_(model)
    missing = sorted(info["missing_keys"])
    if missing:
        raise AcquisitionError(
            f"model {name!r} is no complete image classifier: its weights ({_built_for(config.architectures) or 'an unknown task'}) lack {missing[0]!r} "
            f"and {len(missing) - 1} more; choose a checkpoint that was fine-tuned for classification"
        )
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise AcquisitionError(f"model {name!r} holds NaN or infinite values in {key!r}: its weights are damaged")
    return model


def _without(staged: Path, name: str, raised: str) -> str:
    """Return what is wrong with a model's settings for images, of which transformers says the same whether they are there or not."""
    if any((staged / file).exists() for file in PROCESSORS):
        return f"is wrong ({raised.replace(str(staged), name)})"
    return "is missing"


def _read_processor(staged: Path, name: str, config: Any) -> Any:
    def refuse(raised: str) -> AcquisitionError:
        return AcquisitionError(
            f"model {name!r} has no image processor that can be used, as its preprocessor_config.json "
            f"{_without(staged, name, raised)}: save the processor that it was trained with into its folder"
        )

    if (how := getattr(config, "pretrained_cfg", None)) and not any((staged / file).exists() for file in PROCESSORS):
        return processor_of_timm(
            how,
            lambda said: AcquisitionError(
                f"model {name!r} prepares images in a way that isn't done here ({said}): save an image processor into its folder"
            ),
        )
    with foreign_code(refuse):
        return AutoImageProcessor.from_pretrained(
            staged,
            # Where a config is timm's, it would be read for the processor.
            image_processor_filename=PROCESSORS[0],
            backend="pil",
            trust_remote_code=False,
            local_files_only=True,
        )


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
        progress(f"loading {name}", 0, 0)
        with checked(folder, name) as staged:
            _check_kind(read_settings(staged, name, CONFIG), name)
            _check_weights(folder, name, commit)
            config = _read_config(staged, name)
            _check_size(staged, name, config)
            model: Any = _read_weights(staged, name, config)
            processor = _read_processor(staged, name, config)
            note = _stored_note(staged)
        # transformers notes where it loaded from.
        model.config.name_or_path = model.name_or_path = str(folder)
    return LoadedModel(
        model=model.to(device).eval(),
        processor=processor,
        source=name,
        revision=commit,
        architecture=type(model).__name__,
        note=note,
    )


def _stored_note(staged: Path) -> str | None:
    """Return a line where most of a checkpoint's numbers are in half precision: what it is compared with is float32, of twice the bytes."""
    numbers = Counter[str]()
    for file in staged.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (no mapping)
                held = opened.get_slice(key)
                numbers[held.get_dtype()] += math.prod(held.get_shape())
    stored, num_stored = max(numbers.items(), key=lambda each: each[1], default=("", 0))
    if stored not in HALVES:
        return None
    return (
        f"the weights are stored in {HALVES[stored]}, {2 * num_stored / 1e6:.3g} MB: the baseline is float32, of twice that, and all sizes and "
        "speeds are told beside that"
    )


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    """Return `cpu` or `cuda` for `auto`, `cpu` or `cuda`; `auto` is the CPU, as nothing of this has been run on CUDA yet.

    Raises:
        RequestError: CUDA was asked for and this machine has none, or the name is another one.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device is {name!r}: use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("device is 'cuda' but torch finds no CUDA device: use auto or cpu")
    return "cuda" if name == "cuda" else "cpu"


def device_note(name: str, *, has_cuda: bool) -> str | None:
    """Return a line for whoever left the device to us where CUDA was there; None where there is nothing to say."""
    if name != "auto" or not has_cuda:
        return None
    return (
        "a CUDA device is there and was left alone, as this has run on one for minutes only: --device cuda asks for it"
    )
