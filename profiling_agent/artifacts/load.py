"""Read a model that `save_model` wrote, in any process, without pickle and without remote code."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.artifacts.folder import open_folder
from profiling_agent.artifacts.golden import check_golden
from profiling_agent.artifacts.recipe import GOLDEN, WEIGHTS, QuantizedLayer, Recipe
from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.modules.widths import fit_widths_, say_heads_
from profiling_agent.quantization.kinds import rebuilt


def load_recipe(path: str | Path) -> Recipe:
    """Return what a saved model is made of; ArtifactError where a file is missing or foreign."""
    return open_folder(Path(path).resolve(), verify=False)


def load_processor(path: str | Path) -> Any:
    """Return the image processor that was saved with the model, on its PIL backend."""
    folder = Path(path).resolve()
    open_folder(folder, verify=False)
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{str(folder)!r} has no image processor that can be read: save the model again") from error


def load_module(path: str | Path, *, verify: bool = True) -> nn.Module:
    """Return a saved model in eval mode on the CPU: `load_module(path)(pixel_values=batch).logits`.

    `verify` compares every file with its sha256, and what the model says of two images with what it said when it was
    saved. The strict match of names and shapes isn't optional.

    Raises:
        ArtifactError: a file is missing, foreign or damaged, or the model doesn't compute what it did.
    """
    folder = Path(path).resolve()
    recipe = open_folder(folder, verify=verify)
    model = _build(folder, recipe, dequantize=False)
    if verify:
        check_golden(model, _read_tensors(folder / GOLDEN), recipe)
    return model


def load_skeleton(path: str | Path) -> nn.Module:
    """Return the saved model in plain float32 at its own widths, quantized weights as the numbers that they stand for.

    Raises:
        ArtifactError: a file is missing or foreign, or the weights don't fit the architecture.
    """
    folder = Path(path).resolve()
    return _build(folder, open_folder(folder, verify=False), dequantize=True)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{str(path)!r} is damaged and can't be read ({error}): save the model again") from error


def _build(folder: Path, recipe: Recipe, *, dequantize: bool) -> nn.Module:
    tensors = _read_tensors(folder / WEIGHTS)
    try:
        model = _architecture(recipe)
        for norm in recipe.folded:
            model.set_submodule(norm, nn.Identity(), strict=True)
        for layer in recipe.quantized:
            _place_(model, layer, tensors, dequantize=dequantize)
        _fill_(model, tensors, recipe)
        say_heads_(model, recipe.cuts)
    except (RuntimeError, ValueError, KeyError, AttributeError, QuantizationError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ArtifactError(
            f"the weights in {str(folder)!r} don't fit {recipe.architecture} ({first_line}): save the model again"
        ) from error
    return model.eval()


def _architecture(recipe: Recipe) -> nn.Module:
    """Build the model that the config describes, its weights arbitrary: every one is replaced.

    It is built on the CPU and not on the meta device, because buffers that aren't saved (Swin's position index) are
    computed while it is built; filling in random weights is what would take long, and is left out.
    """
    fields = dict(recipe.config)
    with torch.random.fork_rng(devices=[]), no_init_weights():
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        return AutoModelForImageClassification.from_config(config, trust_remote_code=False)


def _place_(model: nn.Module, layer: QuantizedLayer, tensors: dict[str, Tensor], *, dequantize: bool) -> None:
    """Set a quantized layer in its place, taking its tensors; or its float layer, putting tensors in their stead."""
    prefix = f"{layer.name}."
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    plain = {name.removeprefix(prefix): tensor for name, tensor in own.items()}
    like = model.get_submodule(layer.name)
    module = rebuilt(layer.kind, plain, like, reduce_range=layer.reduce_range)
    if dequantize:
        float_layer = module.dequantized()
        tensors |= {f"{prefix}{leaf}": tensor for leaf, tensor in float_layer.state_dict().items()}
        model.set_submodule(layer.name, float_layer, strict=True)
    else:
        model.set_submodule(layer.name, module, strict=True)


def _fill_(model: nn.Module, tensors: dict[str, Tensor], recipe: Recipe) -> None:
    tensors |= {name: tensors[first] for name, first in recipe.tied.items()}
    fit_widths_(model, tensors)
    model.load_state_dict(tensors, strict=True, assign=True)
    for name, first in recipe.tied.items():
        owner, _, leaf = name.rpartition(".")
        source, _, source_leaf = first.rpartition(".")
        setattr(model.get_submodule(owner), leaf, getattr(model.get_submodule(source), source_leaf))
