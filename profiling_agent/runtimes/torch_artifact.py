"""Writing a saved model: one writer for all runtimes, and the one for torch's own, safetensors and JSON, no pickle."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from profiling_agent.artifacts.card import write_card
from profiling_agent.artifacts.folder import appearing
from profiling_agent.artifacts.golden import NUM_IMAGES, Golden, write_golden
from profiling_agent.artifacts.load import load_processor, load_recipe
from profiling_agent.artifacts.recipe import (
    CARD,
    GOLDEN,
    MODEL_FILES,
    PACKAGES,
    RECIPE,
    WEIGHTS,
    Counts,
    Description,
    PreparedFiles,
    QuantizedLayer,
    Recipe,
)
from profiling_agent.documents import parse_json
from profiling_agent.files import file_sha256, write_text
from profiling_agent.modules.inference import logits_of, random_batch
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.records import Cut, Deployment, InputSpec
from profiling_agent.reproducibility import environment


def write_artifact(
    description: Description,
    folder: Path,
    *,
    processor: Any,
    write_model: Callable[[Path], PreparedFiles],
    ask: Callable[[Path, Recipe], Golden],
    complexity: tuple[int, int] | None = None,
    has_card: bool = False,
) -> Recipe:
    """Write a saved model to `folder`, which appears complete or not at all; return its recipe.

    `write_model` writes the files of the runtime into a folder; then come processor, what `ask` hears from the
    model in that folder, as golden logits, the recipe with all hashes, and a card where one is wanted. `complexity` is
    params and MACs, for files that torch can't count.

    Raises:
        ArtifactError: `folder` exists, or there is no space for it; and whatever `write_model` and `ask` raise.
    """
    with appearing(folder) as temporary:
        prepared = write_model(temporary)
        processor.save_pretrained(temporary)
        # A recipe names its golden file, and a runtime is opened by a recipe.
        (temporary / GOLDEN).touch()
        draft = _recipe(description, prepared, temporary, complexity)
        _write_recipe(draft, temporary)
        write_golden(ask(temporary, draft), temporary)
        files = draft.files | {GOLDEN: file_sha256(temporary / GOLDEN)}
        recipe = draft.model_copy(update={"files": files})
        _write_recipe(recipe, temporary)
        if has_card:
            write_card(temporary)
    return recipe


def _recipe(
    description: Description, prepared: PreparedFiles, folder: Path, complexity: tuple[int, int] | None
) -> Recipe:
    deployment = description.deployment
    counts = None
    if complexity is not None:
        files = (folder / name for name in MODEL_FILES[deployment.runtime] if not name.endswith(".xml"))
        weights = sum(path.stat().st_size for path in files)
        counts = Counts(params=complexity[0], macs=complexity[1], parameter_bytes=weights)
    versions = {name: metadata.version(name) for name in PACKAGES[deployment.runtime] if find_spec(name)}
    return Recipe(
        **dict(description),
        quantized=prepared.quantized,
        counts=counts,
        folded=prepared.folded,
        tied=prepared.tied,
        # The card may be rewritten when more is known; nothing is read from it.
        files={path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name != CARD},
        libraries=environment().libraries | versions,
        cpu=environment().cpu,
    )


def _write_recipe(recipe: Recipe, folder: Path) -> None:
    write_text(folder / RECIPE, recipe.model_dump_json(indent=1) + "\n")


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
    """Write `model` and its image processor to `folder`, which appears complete or not at all; return its recipe.

    `model` is a Hugging Face image classifier, pruned or quantized or neither; `cuts` say how its widths came about,
    `folded` names the batch norms that change nothing now, and `deployment` what runs it, eager torch by default.
    Weights keep their live names; quantized layers are stored as plain int8 or fp16 tensors; shared ones once.

    Raises:
        ArtifactError: `folder` exists.
    """
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
        ask=lambda _folder, _recipe: _golden(model, spec),
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
    """Write `model`, made of the saved model in `source`, to `folder`: same input, same processor, same origin.

    Without `cuts` it has those of its source, and so with `folded`, the batch norms that change nothing, and `deployment`.

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
    """Write `weights.safetensors`, floating tensors in `dtype` or as they are, of quantized layers always."""
    tensors, tied = _split_ties(model)
    layers = quantized_modules(model)
    for name, held in tensors.items():
        if dtype is not None and held.is_floating_point() and name.rpartition(".")[0] not in layers:
            tensors[name] = held.to(dtype)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    quantized = tuple(
        QuantizedLayer(name=name, kind=module.kind, dtype=module.dtype, reduce_range=module.reduce_range)
        for name, module in layers.items()
    )
    return PreparedFiles(quantized=quantized, tied=tied, folded=tuple(folded))


def _split_ties(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor under its first name, and the first name of every further one."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    held = model.state_dict(keep_vars=True)
    for name, tensor in held.items():
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            tied[name] = first
            continue
        # A clone, because safetensors refuses tensors that are views of the same memory.
        tensors[name] = tensor.detach().cpu().clone().contiguous()
    return tensors, tied


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the Hugging Face config as JSON has it, with the class that is to be built from it and all names of classes.

    timm's has their list alone, which only transformers' reading of a config.json understands.
    """
    config: Any = model.config
    written = parse_json(config.to_json_string(use_diff=False))
    names = {str(index): name for index, name in config.id2label.items()}
    return written | {"architectures": [type(model).__name__], "id2label": names}


def _golden(model: nn.Module, spec: InputSpec) -> Golden:
    pixel_values = random_batch(spec, NUM_IMAGES).half()
    return Golden(pixel_values.numpy(), logits_of(model, pixel_values.float()).float().numpy())
