"""Description of a torch model that its config doesn't describe: what `layers.py` needs to build it, as plain JSON."""

from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.artifacts.recipe import Recipe
from profiling_agent.quiet import ALONE


def describe(model: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """Return what `layers.build` needs to build `model`, the saved model of `recipe`, besides its tensors."""
    fields = dict(recipe.config)
    name = str(fields.pop("model_type", ""))
    with ALONE, no_init_weights():
        config = AutoConfig.for_model(name, **fields)
        fresh = AutoModelForImageClassification.from_config(config, trust_remote_code=False).eval()
    return {
        "config": recipe.config,
        "attributes": _attributes(model, fresh, recipe.folded),
        "identities": list(recipe.folded),
        "layers": {
            layer.name: {"kind": layer.kind, "dtype": layer.dtype, "reduce_range": layer.reduce_range}
            for layer in recipe.quantized
        },
        "tied": dict(recipe.tied),
    }


def _attributes(model: nn.Module, fresh: nn.Module, folded: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the numbers that modules state otherwise than those of the config: widths, groups, heads.

    What was in a norm that was folded away states none: it has another name now.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, before in fresh.named_modules():
        if any(name.startswith(f"{norm}.") for norm in folded):
            continue
        after = vars(model.get_submodule(name))
        changed = {
            attribute: after[attribute]
            for attribute, value in vars(before).items()
            if _is_number(value) and attribute in after and _is_number(after[attribute]) and after[attribute] != value
        }
        if changed:
            found[name] = changed
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(each, int) for each in value)
    return isinstance(value, int) and not isinstance(value, bool)
