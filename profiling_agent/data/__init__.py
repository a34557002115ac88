"""Image classifiers with their processors and input shapes, and disjoint splits of labelled data sets."""

from pathlib import Path

# The model_type of timm's models in transformers.
TIMM = "timm_wrapper"


def is_local(name: str) -> bool:
    """Return whether a model's or data set's name is meant as a path: it exists, or does not look like a Hub id."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or Path(name).exists()
