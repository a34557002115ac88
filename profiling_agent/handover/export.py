"""Export of a saved model: as plain files that run without us, as one ONNX file, or as a Hugging Face folder."""

import os
import shutil
from pathlib import Path

from profiling_agent.artifacts.folder import named_folder, open_folder
from profiling_agent.artifacts.golden import check_golden, golden_distance
from profiling_agent.artifacts.load import load_module, load_processor, load_skeleton
from profiling_agent.artifacts.recipe import ONNX, Recipe
from profiling_agent.deployment.onnx_export import export_onnx
from profiling_agent.deployment.plain import save_half, save_plain
from profiling_agent.deployment.registry import open_session
from profiling_agent.deployment.torch_conversion import HALVES
from profiling_agent.errors import ArtifactError, RequestError
from profiling_agent.files import make_folders, replacing
from profiling_agent.handover.plain_files import export_files
from profiling_agent.handover.source import model_folder
from profiling_agent.quantization.vnni import needed_instructions

FORMATS = ("files", "onnx", "hf")
TORCH = frozenset({"eager", "graphed", "inductor"})
# What the format takes as it is, and a run has usually measured.
MORE = {
    "onnx": ", pick a candidate for ONNX Runtime (`profiling-agent pick RUN` lists what was measured), or run with --runtimes onnxruntime"
}


def export(source: Path, format_: str, output: Path, *, batch_size: int | None = None) -> str:
    """Write the model in `source`, a run or a saved model's folder, to `output`; return a line that says how it went.

    "files" writes a folder that runs by numpy, pillow and the model's own runtime, whatever the deployment; "onnx" one file, of
    a float32 model of torch for batches of `batch_size` images or of any number, of one for ONNX Runtime as it is; "hf" a
    folder that `AutoModelForImageClassification.from_pretrained` loads. Each is checked against the saved model before it appears.

    Raises:
        RequestError: there is no such format, or `batch_size` was given for a model that has its own or takes any.
        RunError: the run has no model yet.
        ArtifactError: the saved model is damaged, `output` exists or can't be written, the format can't hold the model (with
            those that can), or what was written computes something else; nothing is left behind.
    """
    if format_ not in FORMATS:
        raise RequestError(f"there is no format {format_!r}: choose one of {', '.join(FORMATS)}")
    if batch_size is not None and format_ != "onnx":
        raise RequestError("batch_size is for the format onnx alone: leave it out")
    folder = named_folder(model_folder(source))
    recipe = open_folder(folder, verify=True)
    if refused := _refused(recipe, format_):
        raise ArtifactError(
            f"{str(folder)!r} is for {recipe.deployment.name}, {refused}: use --format files{MORE.get(format_, '')}"
        )
    write = {"files": _write_files, "onnx": _write_onnx, "hf": _write_hf}[format_]
    try:
        return write(folder, recipe, output, batch_size)
    except OSError as error:
        raise ArtifactError(
            f"{str(output)!r} can't be written ({error.strerror or error}): choose another place"
        ) from error


def _write_files(folder: Path, recipe: Recipe, output: Path, batch_size: int | None) -> str:
    del batch_size
    return export_files(folder, recipe, output, others=[one for one in ("onnx", "hf") if not _refused(recipe, one)])


def _write_onnx(folder: Path, recipe: Recipe, output: Path, batch_size: int | None) -> str:
    if recipe.deployment.runtime == "onnxruntime":
        return _copy_graph(folder, recipe, output, batch_size)
    distance = export_onnx(load_module(folder), output, spec=recipe.input, batch_size=batch_size, is_bare=True)
    return f"wrote {output}; ONNX Runtime's logits are {distance:.1g} from torch's (relative)"


def _write_hf(folder: Path, recipe: Recipe, output: Path, batch_size: int | None) -> str:
    """Write a model as transformers does; layers in half precision as one that is so as a whole, where that gives its logits."""
    del batch_size
    scheme, processor = recipe.deployment.scheme, load_processor(folder)
    if scheme in HALVES:
        others, how = "files", f", in {scheme} as a whole"
        reason = save_half(
            load_skeleton(folder),
            output,
            dtype=HALVES[scheme],
            golden=lambda run: golden_distance(run, folder),
            processor=processor,
            cuts=recipe.cuts,
        )
    else:
        others, how = "files or onnx", ""
        reason = save_plain(load_module(folder), output, spec=recipe.input, processor=processor, cuts=recipe.cuts)
    if reason:
        raise ArtifactError(
            f"{str(folder)!r} is no ordinary Hugging Face model: {reason}; export it to {others} instead"
        )
    return (
        f"wrote {output}{how}; AutoModelForImageClassification.from_pretrained loads it, with the saved model's logits"
    )


def _refused(recipe: Recipe, format_: str) -> str | None:
    """Return why a format can't hold a deployment, or None where it may."""
    runtime = recipe.deployment.runtime
    if any(layer.kind == "rowwise" for layer in recipe.quantized):
        return "whose int8 or float8 layers are for CUDA and have no place in other formats"
    if format_ == "files" or (format_ == "onnx" and runtime == "onnxruntime"):
        return None
    if runtime not in TORCH:
        return f"whose graph is no {'ONNX file' if format_ == 'onnx' else 'Hugging Face model'}"
    if format_ == "onnx" and not recipe.quantized and recipe.deployment.scheme != "float32":
        return "whose weights are all in half precision, and an export to ONNX is of float32"
    if format_ == "hf" and not any(layer.dtype == "qint8" for layer in recipe.quantized):
        return None
    if recipe.quantized:
        what = "an ONNX file" if format_ == "onnx" else "a Hugging Face folder"
        return f"and quantized layers of torch have no place in {what}"
    return None


def _copy_graph(folder: Path, recipe: Recipe, output: Path, batch_size: int | None) -> str:
    """Copy the graph of a model for ONNX Runtime, once it gave the saved logits."""
    if batch_size is not None:
        raise RequestError("batch_size is for models of torch alone: a graph for ONNX Runtime is exported as it is")
    if os.path.lexists(output):
        raise ArtifactError(f"{str(output)!r} exists already: exports never overwrite, choose another file")
    check_golden(open_session(folder).run, folder, recipe)
    make_folders(output.parent)
    with (folder / ONNX).open("rb") as graph, replacing(output) as stream:
        shutil.copyfileobj(graph, stream)
    needed = needed_instructions(recipe.deployment.runtime, recipe.quantized)
    where = f" here; on a processor without {' or '.join(needed)} its int8 sums may saturate" if needed else ""
    return f"wrote {output}, the graph as ONNX Runtime runs it; it gives the saved model's logits{where}"
