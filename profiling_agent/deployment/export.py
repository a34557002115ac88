"""Export of a saved model in a format of other tools."""

import os
from pathlib import Path

from profiling_agent.artifacts.load import load_module, load_processor, load_recipe
from profiling_agent.artifacts.recipe import MODEL_FILES
from profiling_agent.deployment.onnx_export import export_onnx
from profiling_agent.deployment.plain import save_plain
from profiling_agent.errors import ArtifactError, RequestError, RunError
from profiling_agent.files import inside
from profiling_agent.workspace import MANIFEST

FORMATS = ("onnx", "hf")
TORCH = frozenset({"eager", "inductor"})


def export(source: Path, format_: str, output: Path, *, batch_size: int | None = None) -> str:
    """Write the model in `source`, a run or a saved model's folder, to `output`; return a line that says how it went.

    "onnx" writes one file, for batches of `batch_size` images or of any number; "hf" a folder that
    `AutoModelForImageClassification.from_pretrained` loads. Either is checked against the saved model before it appears.

    Raises:
        RequestError: there is no such format, or `batch_size` was given for "hf".
        RunError: the run has no model yet.
        ArtifactError: the saved model is damaged or quantized, `output` exists or can't be written, the format can't
            hold the model, or what was written computes something else; nothing is left behind.
    """
    if format_ not in FORMATS:
        raise RequestError(f"there is no format {format_!r}: choose one of {', '.join(FORMATS)}")
    if batch_size is not None and format_ != "onnx":
        raise RequestError("batch_size is for the format onnx alone: leave it out, a folder takes any batch")
    folder = _saved_model(source)
    recipe = load_recipe(folder)
    if (runtime := recipe.deployment.runtime) not in TORCH:
        raise ArtifactError(
            f"{str(folder)!r} is a model for {runtime}: copy {' and '.join(MODEL_FILES[runtime])} from it, or export "
            "its float32 parent"
        )
    if recipe.quantized:
        raise ArtifactError(
            f"{str(folder)!r} is quantized, and only float32 models can be exported: "
            "load it with profiling_agent.load, or export a float32 model"
        )
    model = load_module(folder)
    try:
        if format_ == "onnx":
            distance = export_onnx(model, output, spec=recipe.input, batch_size=batch_size)
            return f"wrote {output}; ONNX Runtime's logits are {distance:.1g} from torch's (relative)"
        reason = save_plain(model, output, spec=recipe.input, processor=load_processor(folder), cuts=recipe.cuts)
    except OSError as error:
        raise ArtifactError(
            f"{str(output)!r} can't be written ({error.strerror or error}): choose another place"
        ) from error
    if reason:
        raise ArtifactError(f"{str(folder)!r} is no ordinary Hugging Face model: {reason}; export it to onnx instead")
    return f"wrote {output}; AutoModelForImageClassification.from_pretrained loads it, with the saved model's logits"


def _saved_model(source: Path) -> Path:
    """Return the folder of a saved model, for a run that of the model to deploy."""
    if not (source / MANIFEST).is_file():
        return source
    if not os.path.lexists(source / "best"):
        raise RunError(f"run {str(source)!r} has no model yet: finish it with `profiling-agent resume {source}`")
    try:
        return inside(source / "best", source)
    except OSError as error:
        said = f"{str(source / 'best')!r} is no model of the run ({error.strerror})"
        raise RunError(f"{said}: name the saved model's own folder") from error
