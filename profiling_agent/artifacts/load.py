"""Reading a model that `save_model` wrote, in any process, without pickle and without remote code."""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.artifacts.folder import named_folder, open_folder
from profiling_agent.artifacts.golden import check_golden
from profiling_agent.artifacts.recipe import PROCESSOR, QuantizedLayer, Recipe
from profiling_agent.documents import DocumentError, clean, first_line, read_json
from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.foreign import foreign_code, logits_of
from profiling_agent.modules.attention import head_sizes, say_heads_
from profiling_agent.modules.inference import floating_dtype, left_as_found
from profiling_agent.modules.norms import BATCH_NORMS, Folded
from profiling_agent.modules.widths import fit_widths_
from profiling_agent.quantization.kinds import rebuilt
from profiling_agent.quiet import ALONE, muted
from profiling_agent.records import Cut, UnitKind
from profiling_agent.timm_config import MODEL_TYPE as TIMM
from profiling_agent.timm_config import check_timm, make_plain_

# The largest numbers of a classifier's config: tokens of a text tower (250,000), classes of ImageNet-21k (21,843).
MAX_NUMBER = 2**20
# InputSpec takes no larger image.
MAX_EDGE = 8192
# Of a Swin's position indices, which are computed: 144 x 144 in each of 24 blocks are half a million.
MAX_COMPUTED = 2**27
# How many times larger the architecture may be than what is left of it.
MAX_CUT = 4096


def load_recipe(path: str | Path) -> Recipe:
    """Return what a saved model is made of; ArtifactError where a file is missing or foreign."""
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

    try:
        if number := _too_large(read_json(folder / PROCESSOR), MAX_EDGE):
            raise refuse(f"it has the number {number}, {MAX_EDGE} is the largest edge of an image")
    except (OSError, DocumentError) as error:
        raise refuse(error.strerror if isinstance(error, OSError) and error.strerror else str(error)) from error
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
        ArtifactError: a file is missing, foreign or damaged, or the model doesn't compute what it did.
    """
    folder = named_folder(path)
    recipe = open_folder(folder, verify=verify)
    model = _build(folder, recipe, dequantize=False)
    if verify:
        with left_as_found(model), torch.inference_mode():
            dtype = floating_dtype(model)
            check_golden(
                lambda images: logits_of(model, torch.from_numpy(images).to(dtype), _mute).float().numpy(),
                folder,
                recipe,
            )
    return model


def _mute(said: str) -> ArtifactError:
    return ArtifactError(f"the model gives {said}: save it again")


def load_skeleton(path: str | Path) -> nn.Module:
    """Return the saved model in plain float32 at its own widths, quantized weights as the numbers that they stand for.

    Raises:
        ArtifactError: a file is missing or foreign, or the weights don't fit the architecture.
    """
    folder = named_folder(path)
    return _build(folder, open_folder(folder, verify=False), dequantize=True).float()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with foreign_code(
        lambda said: ArtifactError(f"{str(path)!r} is damaged and can't be read ({said}): save the model again")
    ):
        return load_file(path)


def _build(folder: Path, recipe: Recipe, *, dequantize: bool) -> nn.Module:
    tensors = _read_tensors(folder / recipe.model_files[0])
    try:
        model = _architecture(recipe, tensors)
        sizes = head_sizes(model)
        _check_names(model, recipe)
        for norm in recipe.folded:
            _unfold_(model, norm, recipe.cuts)
        for layer in recipe.quantized:
            _place_(model, layer, tensors, dequantize=dequantize)
        _fill_(model, tensors, recipe)
        say_heads_(model, sizes)
        _halve_rest_(model, recipe)
    except (_MisfitError, QuantizationError) as error:
        architecture = clean(recipe.architecture)[:80]
        raise ArtifactError(
            f"the weights in {str(folder)!r} don't fit {architecture} ({first_line(error)}): save the model again"
        ) from error
    return model.eval()


class _MisfitError(ArtifactError):
    """What is stored doesn't fit the architecture."""


def _halve_rest_(model: nn.Module, recipe: Recipe) -> None:
    """Take buffers that aren't saved to the dtype of a model that is in half precision as a whole: Swin v2's table of coordinates."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not recipe.quantized and len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}:
        model.to(dtypes.pop())


def _unfit(place: str) -> Callable[[str], _MisfitError]:
    """Return how to say what torch makes of what is stored for `place`."""
    return lambda said: _MisfitError(f"{clean(place)[:80]}: {said}")


def _architecture(recipe: Recipe, tensors: dict[str, Tensor]) -> nn.Module:
    """Build the model that the config describes, its weights arbitrary: every one is replaced.

    It is built on the CPU and not on the meta device, because buffers that aren't saved (Swin's position index) are
    computed while it is built; filling in random weights is what would take long, and is left out. Before that it is
    built on the meta device, where nothing takes memory, for its size: a config of a few bytes may ask for any.
    """
    fields = dict(recipe.config)
    name = str(fields.pop("model_type", ""))
    if number := _too_large(fields, MAX_NUMBER):
        raise _MisfitError(f"the config has the number {number}, {MAX_NUMBER} is the largest that is taken")

    def refuse(said: str) -> _MisfitError:
        return _MisfitError(f"transformers can't build a {clean(name)[:80]!r} from the config: {said}")

    if name == TIMM:
        check_timm(fields, refuse)
    # Transformers takes torch's initialisers away from all threads, torch's generator is everybody's.
    with ALONE, foreign_code(refuse), torch.random.fork_rng(devices=[]), no_init_weights():
        config = AutoConfig.for_model(name, **fields)
        build = partial(AutoModelForImageClassification.from_config, config, trust_remote_code=False)
        stored = sum(tensor.numel() for tensor in tensors.values())
        with _bounded(len(tensors) + len(recipe.tied) + 2 * len(recipe.folded), stored), torch.device("meta"):
            build()
        model = build()
    make_plain_(model)
    return model


class _Room(threading.local):
    """What modules may still hold that this thread builds; None where it builds none of ours."""

    left: dict[str, int] | None = None


_room = _Room()


@contextmanager
def _bounded(num_tensors: int, num_values: int) -> Generator[None]:
    """Raise _MisfitError as soon as what this thread builds has more parameters, or is far larger, than what is stored.

    What was cut away isn't stored, so that the model may be larger; a unit keeps one channel of a few thousand at least.
    """
    _watch()
    _room.left = {"tensors": num_tensors, "values": MAX_CUT * num_values, "computed": MAX_COMPUTED}
    try:
        yield
    finally:
        _room.left = None


@cache
def _watch() -> None:
    """Have torch show what modules are given, from now on: a hook can't be removed while another thread builds a module, which walks through them."""

    def take(room: dict[str, int], kind: str, amount: int) -> None:
        room[kind] -= amount
        if room[kind] < 0:
            raise _MisfitError("the config describes a larger model than is stored")

    def parameter(module: nn.Module, name: str, held: Any) -> None:
        if _room.left is not None and held is not None:
            # It takes the place of one that was counted: timm's distilled DeiT makes its position embedding twice.
            before = dict(module.named_parameters(recurse=False)).get(name)
            take(_room.left, "tensors", int(before is None))
            take(_room.left, "values", held.numel() - (0 if before is None else before.numel()))

    def buffer(_module: nn.Module, _name: str, held: Any) -> None:
        if _room.left is not None and held is not None:
            take(_room.left, "computed", held.numel())

    register_module_parameter_registration_hook(parameter)
    register_module_buffer_registration_hook(buffer)


def _too_large(document: Any, limit: int) -> int | None:
    """Return a whole number beyond `limit` that a JSON document holds, or None."""
    if isinstance(document, dict | list):
        values: Any = document.values() if isinstance(document, dict) else document
        return next((found for value in values if (found := _too_large(value, limit))), None)
    return document if isinstance(document, int) and abs(document) > limit else None


def _check_names(model: nn.Module, recipe: Recipe) -> None:
    """Raise _MisfitError where the recipe speaks of a module that the architecture doesn't have."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    cut = (cut.unit.producers[0].rpartition(".")[0] for cut in recipe.cuts if cut.unit.kind is UnitKind.HEADS)
    tied = (name.rpartition(".")[0] for name in (*recipe.tied, *recipe.tied.values()))
    consumers = (cut.unit.consumer for cut in recipe.cuts)
    for name in (*recipe.folded, *(layer.name for layer in recipe.quantized), *cut, *consumers, *tied):
        if name not in known:
            raise _MisfitError(f"there is no module {clean(name)[:80]!r}")


def _unfold_(model: nn.Module, name: str, cuts: Iterable[Cut]) -> None:
    """Set what is left of a batch norm that went into its convolution in its place; no tensor is stored that would say how wide it was."""
    norm = model.get_submodule(name)
    if not isinstance(norm, BATCH_NORMS):
        raise _MisfitError(f"{clean(name)[:80]}: no batch norm is there")
    folded = Folded(norm)
    for cut in cuts:
        if name in cut.unit.inner:
            folded.num_features = folded.num_features * cut.keep // cut.unit.width
    with foreign_code(_unfit(name)):
        model.set_submodule(name, folded, strict=True)


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
    _check_layer(layer, plain, like)
    # torch's kernels, where shapes or dtypes that are stored aren't theirs.
    try:
        module = rebuilt(layer.kind, plain, like, reduce_range=layer.reduce_range)
        float_layer = module.dequantized() if dequantize else None
    except RuntimeError as error:
        raise _MisfitError(f"{clean(layer.name)}: {first_line(error)}") from error
    if float_layer is not None:
        tensors |= {f"{prefix}{leaf}": tensor for leaf, tensor in float_layer.state_dict().items()}
    model.set_submodule(layer.name, module if float_layer is None else float_layer, strict=True)


def _check_layer(layer: QuantizedLayer, plain: dict[str, Tensor], like: nn.Module) -> None:
    """Raise _MisfitError where the weight has another rank than the layer's, or what belongs to its rows other lengths."""
    weight, expected = plain["weight"], getattr(like, "weight", None)
    if not isinstance(expected, Tensor) or weight.dim() != expected.dim() or not weight.numel():
        raise _MisfitError(f"{layer.name}: a weight of shape {tuple(weight.shape)} stands for no layer of the model")
    for name, tensor in plain.items():
        if name in ("scale", "bias") and tensor.shape != weight.shape[:1]:
            raise _MisfitError(
                f"{layer.name}: its {name} has shape {tuple(tensor.shape)}, its weight {len(weight)} rows"
            )


def _fill_(model: nn.Module, tensors: dict[str, Tensor], recipe: Recipe) -> None:
    if absent := sorted({*recipe.tied.values()} - tensors.keys()):
        raise _MisfitError(f"there is no tensor {absent[0]!r}")
    tensors |= {name: tensors[first] for name, first in recipe.tied.items()}
    _check_ranks(model, tensors)
    fit_widths_(model, tensors)
    with foreign_code(_unfit("weights")):
        model.load_state_dict(tensors, strict=True, assign=True)
    for name, first in recipe.tied.items():
        owner, _, leaf = name.rpartition(".")
        source, _, source_leaf = first.rpartition(".")
        setattr(model.get_submodule(owner), leaf, getattr(model.get_submodule(source), source_leaf))


def _check_ranks(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Raise _MisfitError where a stored tensor is no wider or narrower one of the model's, but something else."""
    held: Tensor
    for name, held in model.state_dict(keep_vars=True).items():
        found = tensors.get(name)
        if found is None:
            continue
        if found.dim() != held.dim() or bool(found.numel()) != bool(held.numel()):
            raise _MisfitError(f"{name} has shape {tuple(found.shape)}, the architecture's {tuple(held.shape)}")
        if found.is_floating_point() != held.is_floating_point():
            raise _MisfitError(f"{name} is {found.dtype}, the architecture's {held.dtype}")
