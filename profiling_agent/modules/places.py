"""Places: how often the module of a name stands in a model. One that stands in several is changed in all of them, or becomes several."""

from collections import Counter

from torch import nn


def places(model: nn.Module) -> dict[str, int]:
    """Return in how many places the module of each name stands."""
    named = list(model.named_modules(remove_duplicate=False))
    count = Counter(id(module) for _, module in named)
    return {name: count[id(module)] for name, module in named}
