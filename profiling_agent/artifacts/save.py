"""Write any model that we produce: safetensors and JSON, no pickle."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from profiling_agent.artifacts.folder import appearing
from profiling_agent.artifacts.golden import golden_tensors
from profiling_agent.artifacts.load import load_processor, load_recipe
from profiling_agent.artifacts.recipe import CONFIG, GOLDEN, RECIPE, WEIGHTS, QuantizedLayer, Recipe
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.records import Cut, Deployment, InputSpec
from profiling_agent.reproducibility import environment
from profiling_agent.workspace import file_sha256


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


def _quantized_layers(model: nn.Module) -> tuple[QuantizedLayer, ...]:
    return tuple(
        QuantizedLayer(name=name, kind=module.kind, dtype=module.dtype, reduce_range=module.reduce_range)
        for name, module in quantized_modules(model).items()
    )


def _config(model: nn.Module) -> dict[str, Any]:
    """Return the Hugging Face config as JSON has it, with the class that is to be built from it."""
    config: Any = model.config
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}


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
    `folded` names the batch norms that are identities now, and `deployment` what runs it, eager torch by default.
    Weights keep their live names; quantized layers are stored as plain int8 or fp16 tensors; shared ones once.

    Raises:
        ArtifactError: `folder` exists.
    """
    tensors, tied = _split_ties(model)
    config = _config(model)
    with appearing(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        save_file(golden_tensors(model, spec), temporary / GOLDEN)
        processor.save_pretrained(temporary)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        recipe = Recipe(
            base_model=base_model,
            base_revision=base_revision,
            architecture=type(model).__name__,
            config=config,
            input=spec,
            cuts=tuple(cuts),
            quantized=_quantized_layers(model),
            deployment=deployment or Deployment(),
            folded=tuple(folded),
            tied=tied,
            files={path.name: file_sha256(path) for path in sorted(temporary.iterdir())},
            libraries=environment().libraries,
            cpu=environment().cpu,
        )
        (temporary / RECIPE).write_text(recipe.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return recipe


def save_derived(
    model: nn.Module,
    source: Path,
    folder: Path,
    *,
    cuts: Sequence[Cut] | None = None,
    folded: Sequence[str] | None = None,
    deployment: Deployment | None = None,
) -> None:
    """Write `model`, made of the saved model in `source`, to `folder`.

    Without `cuts` it has those of its source, and so with `folded`, the batch norms that are identities, and `deployment`.

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
