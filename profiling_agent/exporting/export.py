"""Export of a saved model: a folder with an ONNX file, OpenVINO's graph, or a Hugging Face model, which runs without us.

Preprocessing as plain numbers: what a processor does follows from its code as much as from its settings, and some of the code is a model's own. So
what it may do is read from the settings and tried on images: the first guess that prepares all of them as it does is the answer.
"""

import json
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from huggingface_hub import ModelCard
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from profiling_agent.data import pixels
from profiling_agent.data.pixels import RESAMPLE, prepare
from profiling_agent.errors import ArtifactError, RequestError
from profiling_agent.exporting.hugging_face import save_plain
from profiling_agent.exporting.pick import MANIFEST, ExportManifest, model_folder
from profiling_agent.lib.io import file_sha256, write_text
from profiling_agent.lib.machine import needed_instructions
from profiling_agent.lib.timm_config import MODEL_TYPE as TIMM
from profiling_agent.lib.timm_config import PACKAGES as TIMM_PACKAGES
from profiling_agent.runtimes.artifact import (
    CARD,
    ONNX,
    TORCH,
    Recipe,
    appearing,
    card_head,
    check_golden,
    golden_distance,
    named_folder,
    open_folder,
    text_templates,
)
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import open_session
from profiling_agent.runtimes.save import HALVES
from profiling_agent.runtimes.torch_artifact import load_module, load_processor, load_skeleton
from profiling_agent.schemas import InputSpec, Record

# In units of the prepared images, where a step of an 8-bit channel is 0.004 to 0.02.
TOLERANCE = 1e-5
# Wide, high, smaller than the model's images, and these as they are: in multiples of the model's own edges.
PROBED = ((1.3, 1.9), (1.7, 1.2), (0.6, 0.5), (1.0, 1.0))
# Of what was measured: float32 has no more.
DIGITS = 7
# LeViT's own, in its code alone: 256 pixels are cropped to 224.
OVER_CROP = 256 / 224

Size = tuple[int, int]


class Preprocessing(Record):
    """What becomes of an RGB image, in this order."""

    resize: Size | int | None = Field(
        description="height and width, or the length of the shorter edge; null: not resized"
    )
    resample: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
    crop: Size | None = Field(description="height and width of the middle that is kept; null: all of it")
    channels: Literal["RGB", "BGR"] = Field(description="the order in which the model takes them")
    mean: tuple[float, float, float] = Field(description="taken from each channel, which goes from 0 to 1")
    std: tuple[float, float, float] = Field(description="what divides what is left")


def preprocessing_of(processor: Any, spec: InputSpec) -> Preprocessing | None:
    """Return what `processor` does to the images of a model, found by trying it.

    None if resizing, cropping in the middle and scaling RGB images can't express it.
    """
    if spec.channels != 3:
        return None
    probes = list(_probes(spec))
    wanted = [_as_prepared(processor, image) for image in probes]
    scaled = _scale(processor, spec)
    for guess in _guesses(processor, spec):
        if scaled is None:
            break
        found = Preprocessing(**guess, **scaled)
        how = found.model_dump()
        if all(_is_near(prepare([image], how), seen) for image, seen in zip(probes, wanted, strict=True)):
            return found
    return None


def _probes(spec: InputSpec) -> Iterator[Image.Image]:
    """Yield images on which ways of resizing differ: noise, coarse and fine."""
    generator = np.random.default_rng(0)
    for high, wide in PROBED:
        size = max(2, round(spec.height * high)), max(2, round(spec.width * wide))
        yield Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8))


def _as_prepared(processor: Any, image: Image.Image) -> NDArray[Any]:
    return np.asarray(processor(images=[image], return_tensors="pt")["pixel_values"])


def _is_near(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= TOLERANCE)


def _scale(processor: Any, spec: InputSpec) -> dict[str, Any] | None:
    """Return order, mean and std of the channels, measured: what becomes of black, of white and of red; None where it isn't that."""

    def colour(*value: int) -> NDArray[Any]:
        plain = Image.new("RGB", (spec.width, spec.height), value)
        return _as_prepared(processor, plain)[0].astype(np.float64)

    black, white, red = colour(0, 0, 0), colour(255, 255, 255), colour(255, 0, 0)
    if black.shape != spec.batch(1)[1:]:
        return None
    low, high = (seen[:, spec.height // 2, spec.width // 2] for seen in (black, white))
    gain = high - low
    if not (np.isfinite(gain).all() and (gain > 0).all()):
        return None
    is_red = (red - black)[:, spec.height // 2, spec.width // 2] > gain / 2
    return {
        "channels": "BGR" if is_red[2] else "RGB",
        "mean": tuple(_rounded(value) for value in -low / gain),
        "std": tuple(_rounded(value) for value in 1 / gain),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") + 0.0


def _guesses(processor: Any, spec: InputSpec) -> Generator[dict[str, Any]]:
    names = {int(number): name for name, number in RESAMPLE.items()}
    resample = names.get(_integer(getattr(processor, "resample", None)) or 0, "bilinear")
    own = (spec.height, spec.width)
    edge, size = _edge(processor, "shortest_edge"), (_edge(processor, "height"), _edge(processor, "width"))
    cropped: Any = getattr(processor, "crop_size", None)
    high, wide = (_integer(_entry(cropped, name)) for name in ("height", "width"))
    crop = (high, wide) if high and wide else None
    resizes: list[Size | int | None] = [None]
    if all(size):
        resizes.append((size[0] or 0, size[1] or 0))
    if length := edge or min(own):
        share = getattr(processor, "crop_pct", None)
        kept = share if isinstance(share, float) and 0 < share <= 1 else 1.0
        resizes += [length, int(length / kept), int(OVER_CROP * length), (length, length)]
    for resize in dict.fromkeys(resizes):
        for middle in dict.fromkeys((None, crop, own)):
            yield {"resize": resize, "resample": resample, "crop": middle}


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _edge(processor: Any, name: str) -> int | None:
    size: Any = getattr(processor, "size", None)
    return _integer(_entry(size, name))


def _entry(size: Any, name: str) -> Any:
    return size.get(name) if hasattr(size, "get") else getattr(size, name, None)


FORMATS = ("onnx", "openvino", "hf")
# The only format that can hold the graph of a runtime that is not torch's.
GRAPHS = {"onnxruntime": "onnx", "openvino": "openvino"}
SCRIPT, PREPARE, PREPROCESSING, LABELS = "run.py", "prepare.py", "preprocessing.json", "labels.json"
MEANINGS = {
    ONNX: "the graph with its weights, for ONNX Runtime",
    "model.xml": "the graph, for OpenVINO",
    "model.bin": "its weights",
    "model.safetensors": "the weights",
    PREPROCESSING: "how an image becomes pixel values",
    LABELS: "the names of the classes, in the order of the logits",
    PREPARE: "images to pixel values, by numpy and pillow",
    SCRIPT: "the lines that print the class of an image",
    MANIFEST: "what this is, and the sha256 of each file",
}


def export(source: Path, format_: str | None, output: Path, *, batch_size: int | None = None) -> str:
    """Write the model in `source`, a run or a saved model's folder, to the folder `output`; return a line that says how it went.

    "onnx" takes models for ONNX Runtime as they are, and float32 models of torch, for batches of `batch_size` images or of any
    number; "openvino" takes models for OpenVINO as they are; "hf" takes models of torch that have no int8 layers, and writes what
    `AutoModelForImageClassification.from_pretrained` loads. None stands for the first that takes the model as it is. Each is
    checked against the saved model before it appears.

    Raises:
        RequestError: there is no such format, or `batch_size` was given for a model that has its own or takes any.
        RunError: the run has no model yet.
        ArtifactError: the saved model is damaged, `output` exists or can't be written, the format can't hold the model, or what
            was written computes something else; nothing is left behind.
    """
    if format_ is not None and format_ not in FORMATS:
        raise RequestError(f"there is no format {format_!r}: choose one of {', '.join(FORMATS)}")
    folder = named_folder(model_folder(source))
    recipe = open_folder(folder, verify=True)
    format_ = format_ or GRAPHS.get(recipe.deployment.runtime, "hf")
    if batch_size is not None and (format_ != "onnx" or recipe.deployment.runtime not in TORCH):
        raise RequestError("batch_size is for models of torch in the format onnx: leave it out")
    if refused := _refusal(recipe, format_):
        raise ArtifactError(f"{str(folder)!r} is for {recipe.deployment.name}, {refused}")
    try:
        with appearing(output) as temporary:
            if format_ == "hf":
                checked = _write_hf(folder, recipe, temporary)
            else:
                checked, batch_size = _write_graph(folder, recipe, format_, temporary, batch_size)
            _write_card(folder, recipe, format_, temporary, batch_size)
    except OSError as error:
        raise ArtifactError(
            f"{str(output)!r} can't be written ({error.strerror or error}): choose another place"
        ) from error
    return f"wrote {output}; {checked}. Run it without profiling-agent: python {output / SCRIPT} image.png"


def _refusal(recipe: Recipe, format_: str) -> str | None:
    """Return why a format can't hold a deployment and what to do, or None when it can."""
    runtime, others = recipe.deployment.runtime, "pick another candidate (`profiling-agent pick RUN`)"
    if runtime not in TORCH:
        own = GRAPHS[runtime]
        return None if format_ == own else f"whose graph has only one format: use --format {own}, or {others}"
    if any(layer.dtype == "qint8" or layer.kind == "rowwise" for layer in recipe.quantized):
        return f"and no export format holds quantized layers of torch: {others}, or run it with `profiling_agent.load`"
    if format_ == "openvino":
        return f"and only models for OpenVINO are exported to openvino: use --format onnx or hf, or {others}"
    if format_ == "onnx" and (recipe.quantized or recipe.deployment.scheme != "float32"):
        return f"and an export to onnx has to be float32: use --format hf, or {others}"
    return None


def _write_graph(
    folder: Path, recipe: Recipe, format_: str, temporary: Path, batch_size: int | None
) -> tuple[str, int | None]:
    """Write the graph, the labels, the images' preparation and the script; return what was checked and the fixed batch size."""
    spec, names, processor = recipe.input, recipe.config["id2label"], load_processor(folder)
    if recipe.deployment.runtime in TORCH:
        distance = export_onnx(load_module(folder), temporary / ONNX, spec=spec, batch_size=batch_size, is_bare=True)
        checked = f"ONNX Runtime's logits are {distance:.1g} from torch's (relative)"
    else:
        session = open_session(folder)
        check_golden(session.run, folder, recipe)
        checked, batch_size = "it gives the saved model's logits", session.fixed_size
        if needed := needed_instructions(recipe.deployment.runtime, recipe.quantized):
            checked += f" here; on a processor without {' or '.join(needed)} its int8 sums may saturate"
        for name in recipe.model_files:
            shutil.copyfile(folder / name, temporary / name)
    prepared = preprocessing_of(processor, spec)
    if prepared is None:
        processor.save_pretrained(temporary)
    else:
        write_text(temporary / PREPROCESSING, prepared.model_dump_json(indent=1) + "\n")
        shutil.copyfile(pixels.__file__, temporary / PREPARE)
    labels = [names[str(number)] for number in range(len(names))]
    write_text(temporary / LABELS, json.dumps(labels, indent=1, ensure_ascii=False) + "\n")
    script = _rendered(
        "run.py.jinja",
        format=format_,
        is_prepared=prepared is not None,
        mode="L" if spec.channels == 1 else "RGB",
        batch_size=batch_size,
        precision="bf16" if recipe.deployment.scheme == "bfloat16" else "f32",
        # With all shapes known OpenVINO takes our int8 layers apart, and is slower; all else is faster.
        is_reshaped=format_ == "openvino" and recipe.deployment.scheme != "static",
    )
    write_text(temporary / SCRIPT, script)
    return checked, batch_size


def _write_hf(folder: Path, recipe: Recipe, temporary: Path) -> str:
    """Write a model as transformers does; layers in half precision as one that is so as a whole, if that gives its logits."""
    scheme = recipe.deployment.scheme
    is_half = scheme in HALVES
    plain = temporary / "plain"
    reason = save_plain(
        load_skeleton(folder) if is_half else load_module(folder),
        plain,
        spec=recipe.input,
        processor=load_processor(folder),
        cuts=recipe.cuts,
        half=HALVES.get(scheme),
        golden=(lambda run: golden_distance(run, folder)) if is_half else None,
    )
    if reason:
        others = "pick another candidate (`profiling-agent pick RUN`)" if is_half else "use --format onnx"
        raise ArtifactError(f"{str(folder)!r} is no ordinary Hugging Face model: {reason}; {others}")
    for path in plain.iterdir():
        path.rename(temporary / path.name)
    plain.rmdir()
    write_text(temporary / SCRIPT, _rendered("run.py.jinja", format="hf"))
    return f"from_pretrained loads it{f', in {scheme} as a whole' if is_half else ''}, with the saved model's logits"


def _write_card(folder: Path, recipe: Recipe, format_: str, temporary: Path, batch_size: int | None) -> None:
    manifest = ExportManifest(
        base_model=recipe.base_model,
        base_revision=recipe.base_revision,
        architecture=recipe.architecture,
        deployment=recipe.deployment,
        input=recipe.input,
        batch_size=batch_size,
        libraries=recipe.libraries,
        files={path.name: file_sha256(path) for path in sorted(temporary.iterdir())},
    )
    write_text(temporary / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    how = _rendered(
        "run.md.jinja",
        requirements=_requirements(recipe, format_, is_prepared=PREPARE in manifest.files),
        script=(temporary / SCRIPT).read_text(encoding="utf-8"),
        batch_size=batch_size,
        instructions=needed_instructions(recipe.deployment.runtime, recipe.quantized),
        runtime=recipe.deployment.runtime,
        files={name: MEANINGS.get(name, "what transformers reads") for name in (*manifest.files, MANIFEST)},
    )
    named = "`config.json`." if format_ == "hf" else f"`{LABELS}`."
    card = ModelCard(f"{card_head(folder).replace('`recipe.json`.', named)}{how}", ignore_metadata_errors=True)
    metadata: Any = card.data
    # The Hub's names of the libraries.
    metadata.library_name = {"hf": "transformers"}.get(format_, format_)
    write_text(temporary / CARD, str(card))


def _rendered(template: str, **values: Any) -> str:
    return text_templates("profiling_agent.exporting").get_template(template).render(values)


def _requirements(recipe: Recipe, format_: str, *, is_prepared: bool) -> tuple[str, ...]:
    if format_ == "hf":
        is_timm = recipe.config.get("model_type") == TIMM
        wanted = ("pillow", "torch", "transformers", *(TIMM_PACKAGES if is_timm else ()))
    else:
        prepared = () if is_prepared else ("torch", "transformers")
        wanted = ("numpy", "pillow", "onnxruntime" if format_ == "onnx" else "openvino", *prepared)
    # A local version, 2.13.0+cpu, is on no index.
    known = {name: version.partition("+")[0] for name, version in recipe.libraries.items()}
    return tuple(f"{name}=={known[name]}" if name in known else name for name in wanted)
