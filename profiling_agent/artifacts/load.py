"""Reading a model that `save_model` wrote, in any process, without pickle and without remote code."""

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
from profiling_agent.artifacts.recipe import WEIGHTS, QuantizedLayer, Recipe
from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.modules.inference import logits_of
from profiling_agent.modules.widths import fit_widths_, say_heads_
from profiling_agent.quantization.kinds import rebuilt
from profiling_agent.records import UnitKind


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
        check_golden(lambda images: logits_of(model, torch.from_numpy(images)).numpy(), folder, recipe)
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
        _check_names(model, recipe)
        for norm in recipe.folded:
            model.set_submodule(norm, nn.Identity(), strict=True)
        for layer in recipe.quantized:
            _place_(model, layer, tensors, dequantize=dequantize)
        _fill_(model, tensors, recipe)
    except (_MisfitError, QuantizationError) as error:
        raise ArtifactError(
            f"the weights in {str(folder)!r} don't fit {recipe.architecture} ({_first_line(error)}): save the model again"
        ) from error
    say_heads_(model, recipe.cuts)
    return model.eval()


class _MisfitError(Exception):
    """What is stored doesn't fit the architecture."""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _architecture(recipe: Recipe) -> nn.Module:
    """Build the model that the config describes, its weights arbitrary: every one is replaced.

    It is built on the CPU and not on the meta device, because buffers that aren't saved (Swin's position index) are
    computed while it is built; filling in random weights is what would take long, and is left out.
    """
    fields = dict(recipe.config)
    name = str(fields.pop("model_type", ""))
    try:
        with torch.random.fork_rng(devices=[]), no_init_weights():
            config = AutoConfig.for_model(name, **fields)
            return AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        raise _MisfitError(f"transformers can't build a {name!r} from the config: {_first_line(error)}") from error


def _check_names(model: nn.Module, recipe: Recipe) -> None:
    """Raise _MisfitError where the recipe speaks of a module that the architecture doesn't have."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    cut = (cut.unit.producers[0].rpartition(".")[0] for cut in recipe.cuts if cut.unit.kind is UnitKind.HEADS)
    tied = (name.rpartition(".")[0] for name in (*recipe.tied, *recipe.tied.values()))
    for name in (*recipe.folded, *(layer.name for layer in recipe.quantized), *cut, *tied):
        if name not in known:
            raise _MisfitError(f"there is no module {name!r}")


class _LayerTensors(dict[str, Tensor]):
    """The stored tensors of one layer, by the names that they have in it."""

    def __missing__(self, name: str) -> Tensor:
        raise _MisfitError(f"a layer has no tensor {name!r}")


def _place_(model: nn.Module, layer: QuantizedLayer, tensors: dict[str, Tensor], *, dequantize: bool) -> None:
    """Set a quantized layer in its place, taking its tensors; or its float layer, putting tensors in their stead."""
    prefix = f"{layer.name}."
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    plain = _LayerTensors({name.removeprefix(prefix): tensor for name, tensor in own.items()})
    like = model.get_submodule(layer.name)
    try:
        module = rebuilt(layer.kind, plain, like, reduce_range=layer.reduce_range)
    # torch's kernels, where shapes or dtypes that are stored aren't theirs.
    except RuntimeError as error:
        raise _MisfitError(f"{layer.name}: {_first_line(error)}") from error
    if dequantize:
        float_layer = module.dequantized()
        tensors |= {f"{prefix}{leaf}": tensor for leaf, tensor in float_layer.state_dict().items()}
        model.set_submodule(layer.name, float_layer, strict=True)
    else:
        model.set_submodule(layer.name, module, strict=True)


def _fill_(model: nn.Module, tensors: dict[str, Tensor], recipe: Recipe) -> None:
    if absent := sorted({*recipe.tied.values()} - tensors.keys()):
        raise _MisfitError(f"there is no tensor {absent[0]!r}")
    tensors |= {name: tensors[first] for name, first in recipe.tied.items()}
    fit_widths_(model, tensors)
    try:
        model.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise _MisfitError(_first_line(error)) from error
    for name, first in recipe.tied.items():
        owner, _, leaf = name.rpartition(".")
        source, _, source_leaf = first.rpartition(".")
        setattr(model.get_submodule(owner), leaf, getattr(model.get_submodule(source), source_leaf))
