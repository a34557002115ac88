"""Saved torch modules, read and written as safetensors, without pickle and without remote code."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.lib.io import first_line, parse_json
from profiling_agent.lib.logs import SETTINGS_LOCK, checked_logits, is_out_of_memory, muted, third_party_errors
from profiling_agent.lib.timm_config import MODEL_TYPE as TIMM
from profiling_agent.lib.timm_config import check_timm, make_plain_
from profiling_agent.modules.inference import floating_dtype, logits_of, preserving_state, random_batch
from profiling_agent.modules.norms import Folded
from profiling_agent.pruning.attention import head_sizes, set_head_attributes_
from profiling_agent.quantization.kinds import quantized_modules, rebuild_layer
from profiling_agent.quantization.layers import QuantizedModule
from profiling_agent.runtimes.artifact import (
    NUM_IMAGES,
    PROCESSOR,
    WEIGHTS,
    Description,
    Golden,
    PreparedFiles,
    QuantizedLayer,
    Recipe,
    check_golden,
    named_folder,
    open_folder,
    write_artifact,
)
from profiling_agent.schemas import Cut, Deployment, InputSpec


def fit_widths_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace every tensor of `model` whose shape differs in `tensors` by an empty one, and update its module's widths.

    The new tensors hold no values (meta device): a strict load with `assign=True` has to follow.
    """
    resized: dict[str, nn.Module] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in tensors or tensors[name].shape == tensor.shape:
            continue
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        empty = torch.empty_like(tensors[name], device="meta")
        setattr(owner, leaf, nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty)
        resized[owner_name] = owner
    for owner in resized.values():
        _update_widths_(owner)


def _update_widths_(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Conv2d):
        if module.groups > 1:
            # Whole groups are cut, so each keeps its number of filters.
            module.groups = module.groups * module.weight.shape[0] // module.out_channels
        module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
    elif isinstance(module, _BatchNorm):
        module.num_features = module.weight.shape[0]
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(module.weight.shape)


# Errors of building and filling a model that other versions of the libraries saved.
MISFITS = (QuantizationError, StrictDataclassError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)


def load_recipe(path: str | Path) -> Recipe:
    """Return the recipe of a saved model; ArtifactError if a file is missing."""
    return open_folder(named_folder(path), verify=False)


def load_processor(path: str | Path) -> Any:
    """Return the image processor that was saved with the model, on its PIL backend."""
    folder = named_folder(path)
    open_folder(folder, verify=False)
    return read_processor(folder)


def read_processor(folder: Path) -> Any:
    """Return the image processor that a folder's preprocessor_config.json describes; no other file is read.

    Raises:
        ArtifactError: the file is missing, or describes none.
    """

    def refuse(text: str) -> ArtifactError:
        return ArtifactError(f"{str(folder)!r} has no image processor that can be read ({text}): save the model again")

    with muted("transformers"), third_party_errors(refuse):
        return AutoImageProcessor.from_pretrained(
            folder,
            # By default the processor would be read from a timm model's config.
            image_processor_filename=PROCESSOR,
            backend="pil",
            local_files_only=True,
            trust_remote_code=False,
        )


def load_module(path: str | Path, *, verify: bool = True) -> nn.Module:
    """Return a saved model in eval mode on the CPU: `load_module(path)(pixel_values=batch).logits`.

    `verify` compares every file with its sha256, and the logits of two images with those at saving. Names and shapes
    always have to match strictly.

    Raises:
        ArtifactError: a file is missing or damaged, or the model doesn't compute what it did.
    """
    folder = named_folder(path)
    recipe = open_folder(folder, verify=verify)
    model = _build_model(folder, recipe, dequantize=False)
    if verify:

        def refuse(message: str) -> ArtifactError:
            return ArtifactError(f"the model gives {message}: save it again")

        with preserving_state(model), torch.inference_mode():
            dtype = floating_dtype(model)
            check_golden(
                lambda images: checked_logits(model, torch.from_numpy(images).to(dtype), refuse).float().numpy(),
                folder,
                recipe,
            )
    return model


def load_skeleton(path: str | Path) -> nn.Module:
    """Return the saved model in plain float32 at its own widths, with quantized weights dequantized.

    Raises:
        ArtifactError: a file is missing, or the weights don't fit the architecture.
    """
    folder = named_folder(path)
    return _build_model(folder, open_folder(folder, verify=False), dequantize=True).float()


def _build_model(folder: Path, recipe: Recipe, *, dequantize: bool) -> nn.Module:
    path = folder / recipe.model_files[0]
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{str(path)!r} is damaged ({first_line(error)}): save the model again") from error
    try:
        model = _build_architecture(recipe)
        sizes = head_sizes(model)
        for norm in recipe.folded:
            # No stored tensor has its width.
            folded = Folded(model.get_submodule(norm))
            for cut in recipe.cuts:
                if norm in cut.unit.inner:
                    folded.num_features = folded.num_features * cut.keep // cut.unit.width
            model.set_submodule(norm, folded, strict=True)
        for layer in recipe.quantized:
            _insert_layer_(model, layer, tensors, dequantize=dequantize)
        tensors |= {name: tensors[first] for name, first in recipe.tied.items()}
        fit_widths_(model, tensors)
        model.load_state_dict(tensors, strict=True, assign=True)
        for name, first in recipe.tied.items():
            owner, _, leaf = name.rpartition(".")
            source, _, source_leaf = first.rpartition(".")
            setattr(model.get_submodule(owner), leaf, getattr(model.get_submodule(source), source_leaf))
        set_head_attributes_(model, sizes)
        _halve_rest_(model)
    except MISFITS as error:
        if is_out_of_memory(error):
            raise
        raise ArtifactError(
            f"the weights in {str(folder)!r} don't fit {recipe.architecture} ({first_line(error)}): save the model again "
            "with the installed libraries"
        ) from error
    return model.eval()


def _halve_rest_(model: nn.Module) -> None:
    """Convert unsaved buffers, as Swin v2's table of coordinates, if the whole model is in one half precision."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        return
    (dtype,) = dtypes
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not isinstance(module, QuantizedModule) and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _build_architecture(recipe: Recipe) -> nn.Module:
    """Build the model that the config describes with arbitrary weights, all of which are replaced.

    It is built on the CPU, not on the meta device: buffers that aren't saved (Swin's position index) are computed in
    building. Random initialization, which would take long, is left out.
    """
    fields = dict(recipe.config)
    name = str(fields.pop("model_type", ""))
    if name == TIMM:
        check_timm(fields, lambda problem: ArtifactError(f"{recipe.base_model!r} can't be built: {problem}"))
    # Transformers removes torch's initialisers for all threads, which share torch's generator too.
    with SETTINGS_LOCK, torch.random.fork_rng(devices=[]), no_init_weights():
        config = AutoConfig.for_model(name, **fields)
        model = AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    make_plain_(model)
    return model


def _insert_layer_(model: nn.Module, layer: QuantizedLayer, tensors: dict[str, Tensor], *, dequantize: bool) -> None:
    """Insert a quantized layer and remove its tensors, or insert its float layer and replace its tensors by float ones."""
    prefix = f"{layer.name}."
    stored = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    plain = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    quantized = rebuild_layer(layer.kind, plain, model.get_submodule(layer.name), reduce_range=layer.reduce_range)
    module = quantized.dequantized() if dequantize else quantized
    if dequantize:
        tensors |= {f"{prefix}{leaf}": tensor for leaf, tensor in module.state_dict().items()}
    model.set_submodule(layer.name, module, strict=True)


def save_model(  # noqa: PLR0913 (a recipe says where a model comes from)
    model: nn.Module,
    folder: Path,
    *,
    spec: InputSpec,
    processor: Any,
    base_model: str,
    base_revision: str | None = None,
    cuts: Sequence[Cut] = (),
    folded: Sequence[str] = (),
    deployment: Deployment | None = None,
) -> Recipe:
    """Write `model` and its image processor to `folder`, complete or not at all; return its recipe.

    `model` is a Hugging Face image classifier, pruned or quantized or neither. `cuts` are those that gave its widths,
    `folded` the batch norms that change nothing now, and `deployment` is what runs it, eager torch by default.
    Weights keep their live names; quantized layers are stored as plain int8 or fp16 tensors, shared tensors once.

    Raises:
        ArtifactError: `folder` exists.
    """

    def ask(_folder: Path, _recipe: Recipe) -> Golden:
        images = random_batch(spec, NUM_IMAGES).half()
        return Golden(images.numpy(), logits_of(model, images.float()).numpy())

    description = Description(
        base_model=base_model,
        base_revision=base_revision,
        architecture=type(model).__name__,
        config=config_of(model),
        input=spec,
        cuts=tuple(cuts),
        deployment=deployment or Deployment(),
    )
    return write_artifact(
        description,
        folder,
        processor=processor,
        write_model=partial(write_weights, model, folded=folded),
        ask=ask,
    )


def save_derived(
    model: nn.Module,
    source: Path,
    folder: Path,
    *,
    cuts: Sequence[Cut] | None = None,
    folded: Sequence[str] | None = None,
    deployment: Deployment | None = None,
) -> None:
    """Write `model`, derived from the saved model in `source`, to `folder`: same input, same processor, same origin.

    `cuts`, `folded` (the batch norms that change nothing) and `deployment` are by default those of the source.

    Raises:
        ArtifactError: `folder` exists, or `source` is damaged.
    """
    recipe = load_recipe(source)
    save_model(
        model,
        folder,
        spec=recipe.input,
        processor=load_processor(source),
        base_model=recipe.base_model,
        base_revision=recipe.base_revision,
        cuts=recipe.cuts if cuts is None else cuts,
        folded=recipe.folded if folded is None else folded,
        deployment=recipe.deployment if deployment is None else deployment,
    )


def write_weights(
    model: nn.Module, folder: Path, *, folded: Sequence[str] = (), dtype: torch.dtype | None = None
) -> PreparedFiles:
    """Write `weights.safetensors`: floating tensors in `dtype`, if given, except those of quantized layers."""
    tensors, tied = _split_ties(model)
    layers = quantized_modules(model)
    for name, tensor in tensors.items():
        if dtype is not None and tensor.is_floating_point() and name.rpartition(".")[0] not in layers:
            tensors[name] = tensor.to(dtype)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return PreparedFiles(quantized=quantized_rows(model), tied=tied, folded=tuple(folded))


def quantized_rows(model: nn.Module) -> tuple[QuantizedLayer, ...]:
    """Return the recipe's rows of a model's quantized layers."""
    return tuple(
        QuantizedLayer(name=name, kind=module.kind, dtype=module.dtype, reduce_range=module.reduce_range)
        for name, module in quantized_modules(model).items()
    )


def _split_ties(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor under its first name, and the first name of every further one."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            tied[name] = first
            continue
        # A clone, because safetensors refuses tensors that are views of the same memory.
        tensors[name] = tensor.detach().cpu().clone().contiguous()
    return tensors, tied


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the Hugging Face config as JSON data, with the model's class and all names of classes.

    A timm config has the names only as a list, which only transformers' reading of a config.json understands.
    """
    config: Any = model.config
    written = parse_json(config.to_json_string(use_diff=False))
    names = {str(index): name for index, name in config.id2label.items()}
    return written | {"architectures": [type(model).__name__], "id2label": names}
