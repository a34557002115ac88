"""Saved models: recipe, folder layout, opening, golden logits and model card. Imports no torch."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from profiling_agent.errors import ArtifactError, StorageError
from profiling_agent.lib import io
from profiling_agent.lib.machine import environment
from profiling_agent.runtimes.registry import INPUT, OUTPUT, Batch, ModelSession, noise_batch, runtime
from profiling_agent.schemas import MULTI_LABEL, Cut, Deployment, Footprint, InputSpec, Record

RECIPE, PROCESSOR = "recipe.json", "preprocessor_config.json"
WEIGHTS, GOLDEN = "weights.safetensors", "golden.safetensors"
ONNX, IR, IR_WEIGHTS, CARD = "model.onnx", "model.xml", "model.bin", "README.md"


class QuantizedLayer(Record):
    """A layer not in plain float32; `reduce_range`: 7-bit activations, or with ONNX Runtime and NNCF 7-bit weights."""

    name: str
    kind: Literal["dynamic", "static", "cast", "rowwise"] = "dynamic"
    dtype: Literal["qint8", "float16", "bfloat16", "float8"]
    reduce_range: bool = False


class Recipe(Record):
    """Origin of a saved model, what was done to it, the deployment that executes it, and the sha256 of its files."""

    schema_version: Literal[4] = 4
    base_revision: str | None = Field(description="commit on the Hub, None for a folder or a reference")
    base_model: str = Field(description="id on the Hub, or the name of a folder without its path")
    architecture: str
    config: dict[str, Any]
    input: InputSpec
    cuts: tuple[Cut, ...]
    deployment: Deployment = Field(default=Deployment(), description="the runtime that executes it, and the scheme")
    quantized: tuple[QuantizedLayer, ...] = ()
    footprint: Footprint | None = Field(
        default=None, description="of a deployment; params and MACs are those of its float32 parent"
    )
    folded: tuple[str, ...] = Field(default=(), description="batch norms that went into the convolutions before them")
    files: dict[str, str] = Field(default_factory=dict[str, str])
    libraries: dict[str, str] = Field(default_factory=dict[str, str])
    cpu: str = ""

    @property
    def model_files(self) -> tuple[str, ...]:
        """Return the files that the runtime reads."""
        return runtime(self.deployment.runtime).files

    @property
    def is_multi_label(self) -> bool:
        """Return whether the probability of each class is the sigmoid of its logit."""
        return self.config.get("problem_type") == MULTI_LABEL

    @field_validator("base_model")
    @classmethod
    def _without_path(cls, name: str, info: ValidationInfo) -> str:
        return name if info.data.get("base_revision") else Path(name).name

    @field_validator("files")
    @classmethod
    def _plain_files(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if PurePosixPath(name).name != name:
                raise ValueError(f"file {name[:80]!r} doesn't lie in the folder itself")
        return files

    @field_validator("config")
    @classmethod
    def _without_source(cls, config: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name != "_name_or_path"}


def _read_recipe(folder: Path) -> Recipe:
    path = folder / RECIPE
    try:
        return io.parse_record(Recipe, path.read_bytes(), quotes=True)
    except (FileNotFoundError, NotADirectoryError):
        reason = f"it has no {RECIPE!r}" if folder.is_dir() else "there is no such folder"
        advice = "give the `best` of a run, or a folder that `profiling-agent pick` wrote"
        raise ArtifactError(f"{str(folder)!r} is no saved model: {reason}; {advice}") from None
    except (OSError, io.DocumentError) as error:
        raise ArtifactError(f"{str(path)!r} is damaged and can't be read ({error}): save the model again") from None


def load_recipe(path: str | Path, *, verify: bool = False) -> Recipe:
    """Return the recipe of a saved model.

    ArtifactError if there is none, it is of another schema version, or a file is missing, leads out of the folder or,
    with `verify`, was changed.
    """
    folder = Path(path).resolve()
    recipe = _read_recipe(folder)
    for name in dict.fromkeys((*recipe.files, *recipe.model_files)):
        path = folder / name
        try:
            file = io.inside(path, io.files_root(folder))
            problem = "" if file.is_file() and name in recipe.files else "is missing"
            if verify and not problem and io.file_sha256(file) != recipe.files[name]:
                problem = "isn't the file that was saved (its sha256 differs)"
        except OSError as error:
            problem = f"can't be read ({error.strerror})"
        if problem:
            raise ArtifactError(f"{str(path)!r} {problem}: save the model again")
    return recipe


def processor_text(folder: Path) -> str:
    """Return the text that describes a saved model's image processor: equal texts prepare images alike."""
    return (folder / PROCESSOR).read_text(encoding="utf-8")


def model_bytes(folder: Path) -> int:
    """Return the bytes of a saved model's weights and graph; ArtifactError if a file is missing."""
    return sum((folder / name).stat().st_size for name in load_recipe(folder).model_files)


def open_session(folder: Path, *, device: str = "cpu", num_threads: int | None = None) -> ModelSession:
    """Open a saved model, unchecked; ArtifactError if a file can't be read, or its runtime isn't installed."""
    recipe = load_recipe(folder)
    deployment, executor = recipe.deployment, runtime(recipe.deployment.runtime)
    if line := executor.missing(device):
        raise ArtifactError(f"{str(folder)!r} was saved for {deployment.runtime}: {line}")
    if device != "cpu" and deployment.scheme not in executor.schemes(device):
        raise ArtifactError(
            f"{str(folder)!r} is for {deployment.name}, which has no kernels on {device}: use device cpu"
        )
    return executor.open(folder, recipe, device=device, num_threads=num_threads)


@contextmanager
def appearing(folder: Path) -> Generator[Path]:
    """Yield a folder that becomes `folder` unless the block raises; ArtifactError if it exists, StorageError without space."""
    try:
        with io.appearing(folder) as temporary:
            yield temporary
    except FileExistsError as error:
        raise ArtifactError(
            f"{str(folder)!r} exists already and is never overwritten: choose another folder"
        ) from error
    except (OSError, SafetensorError) as error:
        # safetensors names the system's error only in its text.
        number = re.search(r"os error (\d+)", str(error))
        if (error.errno if isinstance(error, OSError) else int(number[1]) if number else None) not in io.NO_SPACE:
            raise
        raise StorageError(
            f"there is no space for {str(folder)!r} ({error}): free some, or choose another disk; nothing was written"
        ) from error


NUM_IMAGES = 2
# Relative distances of the logits. Another CPU or thread count adds float32 in another order, about 1e-6 apart. An
# activation that this moves across a rounding edge changes by a whole step of int8 or bfloat16, and by two steps of
# int8 if 7-bit activations replace 8-bit ones.
FLOAT_TOLERANCE, STEP_TOLERANCE, REDUCED_TOLERANCE = 1e-4, 2e-2, 1e-1


def write_artifact(
    description: Recipe,
    folder: Path,
    *,
    processor: Any,
    write_model: Callable[[Path], Mapping[str, Any]],
    golden: Callable[[Path, Recipe, Batch], Batch],
    complexity: tuple[int, int] | None = None,
) -> Recipe:
    """Write a saved model to `folder`, complete or not at all; return its recipe.

    `description` has its origin, cuts and deployment. `write_model` writes the runtime's files into a folder and
    returns fields of the recipe, as `Runtime.convert` does. `golden` returns the logits (n, classes) of images (n,
    channels, height, width) by the model in the folder. A deployment has `complexity`, params and MACs of its float32
    parent, and gets a card. Raises what `appearing`, `write_model` and `golden` do.
    """
    executor = runtime(description.deployment.runtime)
    changes: dict[str, Any] = {"quantized": (), "folded": (), "cpu": environment().cpu}
    changes["libraries"] = environment().libraries | environment().runtimes
    with appearing(folder) as temporary:
        changes |= write_model(temporary)
        processor.save_pretrained(temporary)
        if complexity is not None:
            sizes = {name: (temporary / name).stat().st_size for name in executor.files}
            num_bytes = {"parameter_bytes": sum(sizes.values()) - sizes.get(IR, 0), "size_bytes": sum(sizes.values())}
            changes["footprint"] = Footprint(params=complexity[0], macs=complexity[1], **num_bytes)
        changes["files"] = {path.name: io.file_sha256(path) for path in sorted(temporary.iterdir())}
        draft = Recipe.model_validate(dict(description) | changes)
        # The runtime opens the folder by it.
        io.write_text(temporary / RECIPE, draft.model_dump_json(indent=1) + "\n")
        # In float32 they are 1.3% of ViT-B in int8.
        images = noise_batch(draft.input, NUM_IMAGES).astype(np.float16)
        logits = golden(temporary, draft, images.astype(np.float32))
        save_file({INPUT: images, OUTPUT: np.ascontiguousarray(logits)}, temporary / GOLDEN)
        recipe = draft.model_copy(update={"files": draft.files | {GOLDEN: io.file_sha256(temporary / GOLDEN)}})
        io.write_text(temporary / RECIPE, recipe.model_dump_json(indent=1) + "\n")
        if complexity is not None:
            write_card(temporary)
    return recipe


def check_golden(run: Callable[[Batch], NDArray[Any]], folder: Path, recipe: Recipe) -> None:
    """Raise ArtifactError if `run`'s logits of a folder's golden images are NaN, or too far from the saved ones."""
    distance, allowed = golden_distance(run, folder), tolerance(recipe)
    # `not <=` so that a NaN fails.
    if not distance <= allowed:
        raise ArtifactError(
            f"{str(folder)!r} doesn't compute what it did when it was saved: its logits are {distance:.2g} apart "
            f"(relative), {allowed:g} is allowed; save it again with the installed libraries"
        )


def golden_distance(run: Callable[[Batch], NDArray[Any]], folder: Path) -> float:
    """Return the relative distance between `run`'s logits for a folder's golden images and the saved ones."""
    tensors = load_file(folder / GOLDEN)
    images, expected = tensors[INPUT].astype(np.float32), tensors[OUTPUT].astype(np.float64)
    return float(np.linalg.norm(run(images) - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))


def tolerance(recipe: Recipe) -> float:
    """Return the relative distance allowed between a saved model's logits on this machine and its golden ones."""
    scheme, executor = recipe.deployment.scheme, runtime(recipe.deployment.runtime)
    if scheme == "tf32":
        return STEP_TOLERANCE
    is_half = not recipe.quantized and scheme != "float32"
    # Of a float16 layer only the weights are rounded; the activations stay float32.
    if not is_half and all(layer.dtype == "float16" for layer in recipe.quantized):
        return FLOAT_TOLERANCE
    # Models in half precision as a whole come from CUDA, whose kernels sum in another way than those of any CPU.
    is_cuda = is_half or any(layer.kind == "rowwise" for layer in recipe.quantized)
    # Another CPU may have other kernels, with 7-bit activations or sums that are rounded elsewhere. Its name isn't
    # enough: a cloud has one name for processors with different instructions.
    has_eight_bits = any(layer.dtype == "qint8" and not layer.reduce_range for layer in recipe.quantized)
    is_other = recipe.cpu != environment().cpu or (has_eight_bits and executor.saturates())
    return REDUCED_TOLERANCE if (is_cuda and executor.is_torch) or is_other else STEP_TOLERANCE


class CardRow(NamedTuple):
    """Row of the card's table, with formatted cells: `accuracy`, `88.1% (87.2 to 89.0)`, `87.9% (...)`."""

    name: str
    before: str
    after: str


class HeldOutAccuracy(Record):
    """Top-1 accuracy on held-out images of a data set on the Hub, for the card's metadata."""

    dataset: str
    config: str | None = None
    split: str
    top1: float


def render_card(
    recipe: Recipe, rows: Sequence[CardRow] = (), notes: Sequence[str] = (), judged: HeldOutAccuracy | None = None
) -> str:
    """Return a model card with a table of `rows` and a list of `notes`."""
    template = text_templates("profiling_agent.runtimes").get_template("card.md.jinja")
    return template.render(r=recipe, executor=runtime(recipe.deployment.runtime), rows=rows, notes=notes, judged=judged)


def write_card(
    folder: Path, rows: Sequence[CardRow] = (), notes: Sequence[str] = (), *, judged: HeldOutAccuracy | None = None
) -> None:
    """Write `README.md` into a saved folder; the recipe has no hash of it, so that it may be rewritten."""
    io.write_text(folder / CARD, render_card(_read_recipe(folder), rows, notes, judged))


def read_card(folder: Path) -> str:
    """Return the card of a saved folder, or a new one if it has none; ArtifactError if its card leads out of it."""
    try:
        return io.inside(folder / CARD, folder).read_text(encoding="utf-8")
    except FileNotFoundError:
        return render_card(_read_recipe(folder))
    except OSError as error:
        raise ArtifactError(f"{str(folder / CARD)!r} can't be read ({error.strerror}): remove it") from error


def text_templates(package: str) -> Environment:
    """Return the renderer of a package's Markdown and Python templates; third-party text must be cleaned before."""

    def plain(text: object) -> str:
        """Return third-party text that stays in its table cell and opens no markup."""
        return io.clean(" ".join(str(text).split()))[:300].replace("`", "'").replace("<", "&lt;").replace("|", "\\|")

    # Not HTML: autoescape would mangle them.
    options: Any = {"autoescape": False, "trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    templates = Environment(loader=PackageLoader(package, ""), undefined=StrictUndefined, **options)
    templates.filters["plain"] = plain
    return templates
