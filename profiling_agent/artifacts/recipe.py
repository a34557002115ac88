"""What a saved model is made of: enough to build it again without pickle, and to notice damage."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError, field_validator

from profiling_agent.errors import ArtifactError
from profiling_agent.quantization.linear import Dtype
from profiling_agent.records import Cut, InputSpec, Record

SCHEMA_VERSION = 1
RECIPE, WEIGHTS, CONFIG, GOLDEN = "recipe.json", "model.safetensors", "config.json", "golden.safetensors"
REQUIRED = frozenset({WEIGHTS, CONFIG, GOLDEN})
# Neither format can carry code.
SUFFIXES = frozenset({".json", ".safetensors"})


class QuantizedLayer(Record):
    """One quantized layer as it was saved; `reduce_range` says that its activations had 7 bits."""

    name: str
    dtype: Dtype
    reduce_range: bool


class Recipe(Record):
    """A saved model: what it was made from, what was done to it, and the sha256 of every other file in its folder."""

    schema_version: int = SCHEMA_VERSION
    base_model: str
    base_revision: str | None
    architecture: str
    config: dict[str, Any]
    input: InputSpec
    cuts: tuple[Cut, ...]
    quantized: tuple[QuantizedLayer, ...]
    tied: dict[str, str] = Field(description="parameters that are stored under the name of another one")
    files: dict[str, str]
    libraries: dict[str, str]
    cpu: str

    @field_validator("files")
    @classmethod
    def _plain_files(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if PurePosixPath(name).name != name or "\\" in name or name == RECIPE:
                raise ValueError(f"file {name!r} doesn't lie in the folder itself")
            if PurePosixPath(name).suffix not in SUFFIXES:
                raise ValueError(f"file {name!r} is neither JSON nor safetensors")
        if missing := sorted(REQUIRED - files.keys()):
            raise ValueError(f"file {missing[0]!r} isn't listed")
        return files


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of a saved model.

    Raises:
        ArtifactError: there is none, it is damaged, or another schema version wrote it.
    """
    path = folder / RECIPE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["schema_version"]
    except FileNotFoundError:
        raise ArtifactError(f"{str(folder)!r} is no saved model: it has no {RECIPE!r}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{str(path)!r} is damaged and can't be read: save the model again") from error
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{str(folder)!r} was saved with schema version {version!r}, this version reads {SCHEMA_VERSION}: "
            "load it with the version that saved it"
        )
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ArtifactError(
            f"{str(path)!r} is no valid recipe: {place}: {first['msg']}; save the model again"
        ) from error
