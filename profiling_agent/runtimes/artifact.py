"""Recipe of a saved model: enough to build it again without pickle, and to notice damage."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from profiling_agent.documents import DocumentError, first_problem, read_json
from profiling_agent.errors import ArtifactError
from profiling_agent.records import Cut, Deployment, InputSpec, Record, RuntimeName

SCHEMA_VERSION = 3
# Schema 2 is read only: its folders have a config.json and model.safetensors, which transformers opens and misreads.
OLD_SCHEMA, OLD_WEIGHTS = 2, "model.safetensors"
RECIPE, PROCESSOR = "recipe.json", "preprocessor_config.json"
WEIGHTS, GOLDEN = "weights.safetensors", "golden.safetensors"
ONNX, IR, IR_WEIGHTS, CARD = "model.onnx", "model.xml", "model.bin", "README.md"
# What each runtime reads its weights from.
MODEL_FILES: dict[RuntimeName, tuple[str, ...]] = {
    "eager": (WEIGHTS,),
    "graphed": (WEIGHTS,),
    "inductor": (WEIGHTS,),
    "onnxruntime": (ONNX,),
    "openvino": (IR, IR_WEIGHTS),
}
# Runtimes whose processes import torch.
TORCH = frozenset({"eager", "graphed", "inductor"})
# Whose versions go into the recipe, beside those of what is always there.
PACKAGES: dict[RuntimeName, tuple[str, ...]] = {
    "eager": (),
    "graphed": (),
    "inductor": ("torchao",),
    "onnxruntime": ("onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}
# None of these formats can carry code of ours or of Python's.
SUFFIXES = frozenset({".json", ".safetensors", ".onnx", ".xml", ".md"})


class QuantizedLayer(Record):
    """One layer that is not plain float32, as it was saved; `reduce_range`: activations have 7 bits, or ONNX Runtime's or NNCF's weights."""

    name: str
    kind: Literal["dynamic", "static", "cast", "rowwise"] = "dynamic"
    dtype: Literal["qint8", "float16", "bfloat16", "float8"]
    reduce_range: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFiles:
    """What became of the layers, as the recipe says it; `tied` and `folded` for weights that torch reads alone."""

    quantized: tuple[QuantizedLayer, ...]
    tied: dict[str, str]
    folded: tuple[str, ...] = ()


class Counts(Record):
    """What was counted on the float32 parent, for files that torch can't count; `parameter_bytes` as held here."""

    params: int
    macs: int
    parameter_bytes: int


class Description(Record):
    """A saved model as it is known before its files are there: what it was made from, what was done, what executes it."""

    base_revision: str | None = Field(description="commit on the Hub, None for a folder or a reference")
    base_model: str = Field(description="id on the Hub, or the name of a folder without its path")
    architecture: str
    config: dict[str, Any]
    input: InputSpec
    cuts: tuple[Cut, ...]
    deployment: Deployment = Field(default=Deployment(), description="the runtime that executes it, and the scheme")

    @field_validator("base_model")
    @classmethod
    def _without_path(cls, name: str, info: ValidationInfo) -> str:
        return name if info.data.get("base_revision") else Path(name).name or name

    @field_validator("config")
    @classmethod
    def _without_source(cls, config: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name != "_name_or_path"}


class Recipe(Description):
    """A saved model: what is known of it, and the sha256 of every other file in its folder."""

    schema_version: int = SCHEMA_VERSION
    quantized: tuple[QuantizedLayer, ...]
    counts: Counts | None = Field(default=None, description="None where the weights are torch's and can be counted")
    folded: tuple[str, ...] = Field(default=(), description="batch norms that went into the convolutions before them")
    tied: dict[str, str] = Field(description="parameters that are stored under the name of another one")
    files: dict[str, str]
    libraries: dict[str, str]
    cpu: str

    @property
    def model_files(self) -> tuple[str, ...]:
        """The files that the runtime reads."""
        names = MODEL_FILES[self.deployment.runtime]
        is_old = self.schema_version == OLD_SCHEMA
        return tuple(OLD_WEIGHTS if is_old and name == WEIGHTS else name for name in names)

    def deployed_as(self, deployment: Deployment) -> Description:
        """Return what is known of the same model in another deployment, before its files are there."""
        known = {name: getattr(self, name) for name in Description.model_fields if name != "deployment"}
        return Description(**known, deployment=deployment)

    @field_validator("files")
    @classmethod
    def _plain_files(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if PurePosixPath(name).name != name or "\\" in name or name == RECIPE:
                raise ValueError(f"file {name[:80]!r} doesn't lie in the folder itself")
            # A .bin is a pickle elsewhere: the one that OpenVINO reads is a list of numbers.
            if PurePosixPath(name).suffix not in SUFFIXES and name != IR_WEIGHTS:
                raise ValueError(f"file {name[:80]!r} is none of {', '.join(sorted(SUFFIXES))}")
        return files


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of a saved model.

    Raises:
        ArtifactError: there is none, it is damaged, or another schema version wrote it.
    """
    path = folder / RECIPE
    try:
        raw = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        lacks = f"it has no {RECIPE!r}" if folder.is_dir() else "there is no such folder"
        raise ArtifactError(
            f"{str(folder)!r} is no saved model: {lacks}; give the `best` of a run, or a folder that `profiling-agent pick` wrote"
        ) from None
    except OSError as error:
        raise ArtifactError(f"{str(path)!r} can't be read ({error.strerror}): save the model again") from error
    except DocumentError as error:
        raise ArtifactError(f"{str(path)!r} is damaged and can't be read ({error}): save the model again") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version not in (OLD_SCHEMA, SCHEMA_VERSION):
        raise ArtifactError(
            f"{str(folder)!r} was saved with schema version {version}, this version reads {SCHEMA_VERSION}: load it with "
            "the version that saved it"
        )
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise ArtifactError(f"{str(path)!r} is no valid recipe: {first_problem(error)}; save the model again") from None
