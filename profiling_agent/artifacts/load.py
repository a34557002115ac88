"""Reading a model that `save_model` wrote, in any process, without pickle and without remote code."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.artifacts.folder import named_folder, open_folder
from profiling_agent.artifacts.golden import check_golden
from profiling_agent.artifacts.recipe import PROCESSOR, QuantizedLayer, Recipe
from profiling_agent.documents import first_line
from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.foreign import foreign_code, is_out_of_memory, logits_of
from profiling_agent.modules.attention import head_sizes, say_heads_
from profiling_agent.modules.inference import floating_dtype, left_as_found
from profiling_agent.modules.norms import Folded
from profiling_agent.modules.widths import fit_widths_
from profiling_agent.quantization.kinds import rebuilt
from profiling_agent.quantization.module import QuantizedModule
from profiling_agent.quiet import ALONE, muted
from profiling_agent.timm_config import MODEL_TYPE as TIMM
from profiling_agent.timm_config import check_timm, make_plain_

# What building a model and filling it raises when another version of the libraries saved it.
MISFIT = (QuantizationError, StrictDataclassError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)


def load_recipe(path: str | Path) -> Recipe:
    """Return what a saved model is made of; ArtifactError where a file is missing."""
    return open_folder(named_folder(path), verify=False)


def load_processor(path: str | Path) -> Any:
    """Return the image processor that was saved with the model, on its PIL backend."""
    folder = named_folder(path)
    open_folder(folder, verify=False)
    return read_processor(folder)


def read_processor(folder: Path) -> Any:
    """Return the image processor that a folder's preprocessor_config.json describes, which alone is read.

    Raises:
        ArtifactError: the file is missing, or describes none.
    """

    def refuse(said: str) -> ArtifactError:
        return ArtifactError(f"{str(folder)!r} has no image processor that can be read ({said}): save the model again")

    with muted("transformers"), foreign_code(refuse):
        return AutoImageProcessor.from_pretrained(
            folder,
            # Where a config is timm's, it would be read for the processor.
            image_processor_filename=PROCESSOR,
            backend="pil",
            local_files_only=True,
            trust_remote_code=False,
        )


def load_module(path: str | Path, *, verify: bool = True) -> nn.Module:
    """Return a saved model in eval mode on the CPU: `load_module(path)(pixel_values=batch).logits`.

    `verify` compares every file with its sha256, and what the model says of two images with what it said when it was
    saved. The strict match of names and shapes isn't optional.

    Raises:
        ArtifactError: a file is missing or damaged, or the model doesn't compute what it did.
    """
    folder = named_folder(path)
    recipe = open_folder(folder, verify=verify)
    model = _build(folder, recipe, dequantize=False)
    if verify:

        def refuse(said: str) -> ArtifactError:
            return ArtifactError(f"the model gives {said}: save it again")

        with left_as_found(model), torch.inference_mode():
            dtype = floating_dtype(model)
            check_golden(
                lambda images: logits_of(model, torch.from_numpy(images).to(dtype), refuse).float().numpy(),
                folder,
                recipe,
            )
    return model


def load_skeleton(path: str | Path) -> nn.Module:
    """Return the saved model in plain float32 at its own widths, quantized weights as the numbers that they stand for.

    Raises:
        ArtifactError: a file is missing, or the weights don't fit the architecture.
    """
    folder = named_folder(path)
    return _build(folder, open_folder(folder, verify=False), dequantize=True).float()


def _build(folder: Path, recipe: Recipe, *, dequantize: bool) -> nn.Module:
    path = folder / recipe.model_files[0]
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{str(path)!r} is damaged ({first_line(error)}): save the model again") from error
    try:
        model = _architecture(recipe)
        sizes = head_sizes(model)
        for norm in recipe.folded:
            # No tensor is stored that would say how wide it was.
            folded = Folded(model.get_submodule(norm))
            for cut in recipe.cuts:
                if norm in cut.unit.inner:
                    folded.num_features = folded.num_features * cut.keep // cut.unit.width
            model.set_submodule(norm, folded, strict=True)
        for layer in recipe.quantized:
            _place_(model, layer, tensors, dequantize=dequantize)
        tensors |= {name: tensors[first] for name, first in recipe.tied.items()}
        fit_widths_(model, tensors)
        model.load_state_dict(tensors, strict=True, assign=True)
        for name, first in recipe.tied.items():
            owner, _, leaf = name.rpartition(".")
            source, _, source_leaf = first.rpartition(".")
            setattr(model.get_submodule(owner), leaf, getattr(model.get_submodule(source), source_leaf))
        say_heads_(model, sizes)
        _halve_rest_(model)
    except MISFIT as error:
        if is_out_of_memory(error):
            raise
        raise ArtifactError(
            f"the weights in {str(folder)!r} don't fit {recipe.architecture} ({first_line(error)}): save the model again "
            "with the installed libraries"
        ) from error
    return model.eval()


def _halve_rest_(model: nn.Module) -> None:
    """Take buffers that aren't saved to the dtype of a model that is in half precision as a whole: Swin v2's table of coordinates."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        return
    (dtype,) = dtypes
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not isinstance(module, QuantizedModule) and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _architecture(recipe: Recipe) -> nn.Module:
    """Build the model that the config describes, its weights arbitrary: every one is replaced.

    It is built on the CPU and not on the meta device, because buffers that aren't saved (Swin's position index) are
    computed while it is built; filling in random weights is what would take long, and is left out.
    """
    fields = dict(recipe.config)
    name = str(fields.pop("model_type", ""))
    if name == TIMM:
        check_timm(fields, lambda problem: ArtifactError(f"{recipe.base_model!r} can't be built: {problem}"))
    # Transformers takes torch's initialisers away from all threads, torch's generator is everybody's.
    with ALONE, torch.random.fork_rng(devices=[]), no_init_weights():
        config = AutoConfig.for_model(name, **fields)
        model = AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    make_plain_(model)
    return model


def _place_(model: nn.Module, layer: QuantizedLayer, tensors: dict[str, Tensor], *, dequantize: bool) -> None:
    """Set a quantized layer in its place, taking its tensors; or its float layer, putting tensors in their stead."""
    prefix = f"{layer.name}."
    stored = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    plain = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    quantized = rebuilt(layer.kind, plain, model.get_submodule(layer.name), reduce_range=layer.reduce_range)
    module = quantized.dequantized() if dequantize else quantized
    if dequantize:
        tensors |= {f"{prefix}{leaf}": tensor for leaf, tensor in module.state_dict().items()}
    model.set_submodule(layer.name, module, strict=True)
