"""Export of a saved model to a folder with an ONNX file, an OpenVINO graph or a Hugging Face model, which runs without profiling-agent.

Preprocessing is exported as plain numbers. Part of it is in a processor's code, not in its settings. So candidates are read from the settings and
tried on images: the first that prepares all of them as the processor does is used.
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
from profiling_agent.lib.timm_config import MODEL_TYPE as TIMM
from profiling_agent.lib.timm_config import PACKAGES as TIMM_PACKAGES
from profiling_agent.runtimes.artifact import (
    CARD,
    ONNX,
    Recipe,
    appearing,
    card_head,
    check_golden,
    golden_distance,
    named_folder,
    open_folder,
    open_session,
    text_templates,
)
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import runtime
from profiling_agent.runtimes.torch_artifact import HALVES, load_module, load_processor, load_skeleton
from profiling_agent.schemas import InputSpec, Record

# Absolute, in prepared images, where a step of an 8-bit channel is 0.004 to 0.02.
TOLERANCE = 1e-5
# Height and width of test images in multiples of the model's: wide, high, small, and the model's own.
PROBE_SCALES = ((1.3, 1.9), (1.7, 1.2), (0.6, 0.5), (1.0, 1.0))
# Significant digits of measured numbers: float32 has no more.
DIGITS = 7
# LeViT crops 256 pixels to 224, which only its code states.
OVER_CROP = 256 / 224

Size = tuple[int, int]


class Preprocessing(Record):
    """Operations on an RGB image, in this order."""

    resize: Size | int | None = Field(
        description="height and width, or the length of the shorter edge; null: not resized"
    )
    resample: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
    crop: Size | None = Field(description="height and width of the middle that is kept; null: all of it")
    channels: Literal["RGB", "BGR"] = Field(description="the order in which the model takes them")
    mean: tuple[float, float, float] = Field(description="taken from each channel, which goes from 0 to 1")
    std: tuple[float, float, float] = Field(description="what divides what is left")


def preprocessing_of(processor: Any, spec: InputSpec) -> Preprocessing | None:
    """Return preprocessing that reproduces `processor` on test images, or None if resize, center crop and scaling can't."""
    if spec.channels != 3:
        return None
    probes = list(_test_images(spec))
    expected = [_prepare_with(processor, image) for image in probes]
    scaling = _measure_scaling(processor, spec)
    for guess in _candidates(processor, spec):
        if scaling is None:
            break
        result = Preprocessing(**guess, **scaling)
        settings = result.model_dump()
        if all(_is_close(prepare([image], settings), target) for image, target in zip(probes, expected, strict=True)):
            return result
    return None


def _test_images(spec: InputSpec) -> Iterator[Image.Image]:
    """Yield noise images, coarse and fine, on which ways of resizing differ."""
    rng = np.random.default_rng(0)
    for height, width in PROBE_SCALES:
        size = max(2, round(spec.height * height)), max(2, round(spec.width * width))
        yield Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))


def _prepare_with(processor: Any, image: Image.Image) -> NDArray[Any]:
    return np.asarray(processor(images=[image], return_tensors="pt")["pixel_values"])


def _is_close(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    return actual.shape == expected.shape and bool(np.abs(actual - expected).max() <= TOLERANCE)


def _measure_scaling(processor: Any, spec: InputSpec) -> dict[str, Any] | None:
    """Return order, mean and std of the channels, measured on black, white and red, or None if it isn't plain scaling."""

    def prepare_color(*value: int) -> NDArray[Any]:
        image = Image.new("RGB", (spec.width, spec.height), value)
        return _prepare_with(processor, image)[0].astype(np.float64)

    black, white, red = prepare_color(0, 0, 0), prepare_color(255, 255, 255), prepare_color(255, 0, 0)
    if black.shape != spec.batch(1)[1:]:
        return None
    low, high = (prepared[:, spec.height // 2, spec.width // 2] for prepared in (black, white))
    gain = high - low
    if not (np.isfinite(gain).all() and (gain > 0).all()):
        return None
    is_red = (red - black)[:, spec.height // 2, spec.width // 2] > gain / 2
    return {
        "channels": "BGR" if is_red[2] else "RGB",
        "mean": tuple(_round_digits(value) for value in -low / gain),
        "std": tuple(_round_digits(value) for value in 1 / gain),
    }


def _round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") + 0.0


def _candidates(processor: Any, spec: InputSpec) -> Generator[dict[str, Any]]:
    resample_names = {int(number): name for name, number in RESAMPLE.items()}
    resample = resample_names.get(_integer(processor, "resample") or 0, "bilinear")
    size, crop_size = (getattr(processor, name, None) for name in ("size", "crop_size"))
    model_size, resized, crop = (spec.height, spec.width), _height_and_width(size), _height_and_width(crop_size)
    resizes: list[Size | int | None] = [None, *([resized] if resized else [])]
    if length := _integer(size, "shortest_edge") or min(model_size):
        crop_pct = getattr(processor, "crop_pct", None)
        crop_share = crop_pct if isinstance(crop_pct, float) and 0 < crop_pct <= 1 else 1.0
        resizes += [length, int(length / crop_share), int(OVER_CROP * length), (length, length)]
    for resize in dict.fromkeys(resizes):
        for center in dict.fromkeys((None, crop, model_size)):
            yield {"resize": resize, "resample": resample, "crop": center}


def _integer(settings: Any, name: str) -> int | None:
    value = settings.get(name) if hasattr(settings, "get") else getattr(settings, name, None)
    return int(value) if isinstance(value, int) else None


def _height_and_width(size: Any) -> Size | None:
    height, width = _integer(size, "height"), _integer(size, "width")
    return (height, width) if height and width else None


FORMATS = ("onnx", "openvino", "hf")
SCRIPT, PREPARE, PREPROCESSING, LABELS = "run.py", "prepare.py", "preprocessing.json", "labels.json"
FILE_DESCRIPTIONS = {
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
    """Export the model in `source`, a run or a saved model's folder, to the folder `output`; return a line on the result.

    - "onnx": models for ONNX Runtime as they are, and float32 models of torch, for `batch_size` images or any number.
    - "openvino": models for OpenVINO as they are.
    - "hf": models of torch without int8 layers, for `AutoModelForImageClassification.from_pretrained`.
    - None: the first format that takes the model as it is.

    Each is checked against the saved model before it appears.

    Raises:
        RequestError: there is no such format, or `batch_size` was given for a model that has its own or takes any.
        RunError: the run has no model yet.
        ArtifactError: the saved model is damaged, `output` exists or can't be written, the format can't hold the model, or the
            exported model computes something else; nothing is left behind.
    """
    if format_ is not None and format_ not in FORMATS:
        raise RequestError(f"there is no format {format_!r}: choose one of {', '.join(FORMATS)}")
    folder = named_folder(model_folder(source))
    recipe = open_folder(folder, verify=True)
    executor = runtime(recipe.deployment.runtime)
    format_ = format_ or executor.graph_format or "hf"
    if batch_size is not None and (format_ != "onnx" or not executor.is_torch):
        raise RequestError("batch_size is for models of torch in the format onnx: leave it out")
    if refusal := _refusal(recipe, format_):
        raise ArtifactError(f"{str(folder)!r} is for {recipe.deployment.name}, {refusal}")
    try:
        with appearing(output) as temporary:
            if format_ == "hf":
                summary = _write_hf(folder, recipe, temporary)
            else:
                summary, batch_size = _write_graph(folder, recipe, format_, temporary, batch_size)
            _write_card(folder, recipe, format_, temporary, batch_size)
    except OSError as error:
        raise ArtifactError(
            f"{str(output)!r} can't be written ({error.strerror or error}): choose another place"
        ) from error
    return f"wrote {output}; {summary}. Run it without profiling-agent: python {output / SCRIPT} image.png"


def _refusal(recipe: Recipe, format_: str) -> str | None:
    """Return why a format can't hold a deployment and what to do, or None if it can."""
    executor, hint = runtime(recipe.deployment.runtime), "pick another candidate (`profiling-agent pick RUN`)"
    if not executor.is_torch:
        graph = executor.graph_format
        if graph is None:
            return f"and no export format holds its graph: {hint}"
        return None if format_ == graph else f"whose graph has only one format: use --format {graph}, or {hint}"
    if any(layer.dtype == "qint8" or layer.kind == "rowwise" for layer in recipe.quantized):
        return f"and no export format holds quantized layers of torch: {hint}, or run it with `profiling_agent.load`"
    if format_ == "openvino":
        return f"and only models for OpenVINO are exported to openvino: use --format onnx or hf, or {hint}"
    if format_ == "onnx" and (recipe.quantized or recipe.deployment.scheme != "float32"):
        return f"and an export to onnx has to be float32: use --format hf, or {hint}"
    return None


def _write_graph(
    folder: Path, recipe: Recipe, format_: str, temporary: Path, batch_size: int | None
) -> tuple[str, int | None]:
    """Write graph, labels, preprocessing and script; return what was checked and the fixed batch size."""
    spec, label_names, processor = recipe.input, recipe.config["id2label"], load_processor(folder)
    executor = runtime(recipe.deployment.runtime)
    if executor.is_torch:
        distance = export_onnx(load_module(folder), temporary / ONNX, spec=spec, batch_size=batch_size, is_bare=True)
        summary = f"ONNX Runtime's logits are {distance:.1g} from torch's (relative)"
    else:
        session = open_session(folder)
        check_golden(session.run, folder, recipe)
        summary, batch_size = "it gives the saved model's logits", session.fixed_size
        if instructions := executor.needed_instructions(recipe.quantized):
            summary += f" here; on a processor without {' or '.join(instructions)} its int8 sums may saturate"
        for name in recipe.model_files:
            shutil.copyfile(folder / name, temporary / name)
    preprocessing = preprocessing_of(processor, spec)
    if preprocessing is None:
        processor.save_pretrained(temporary)
    else:
        write_text(temporary / PREPROCESSING, preprocessing.model_dump_json(indent=1) + "\n")
        shutil.copyfile(pixels.__file__, temporary / PREPARE)
    labels = [label_names[str(number)] for number in range(len(label_names))]
    write_text(temporary / LABELS, json.dumps(labels, indent=1, ensure_ascii=False) + "\n")
    script = _render(
        "run.py.jinja",
        format=format_,
        is_prepared=preprocessing is not None,
        mode="L" if spec.channels == 1 else "RGB",
        batch_size=batch_size,
        precision="bf16" if recipe.deployment.scheme == "bfloat16" else "f32",
        # With fixed shapes OpenVINO decomposes our int8 layers and is slower; all else is faster.
        is_reshaped=format_ == "openvino" and recipe.deployment.scheme != "static",
    )
    write_text(temporary / SCRIPT, script)
    return summary, batch_size


def _write_hf(folder: Path, recipe: Recipe, temporary: Path) -> str:
    """Write a Hugging Face model; a model with half-precision layers in half precision as a whole, if its logits allow it."""
    scheme = recipe.deployment.scheme
    is_half = scheme in HALVES
    plain_folder = temporary / "plain"
    reason = save_plain(
        load_skeleton(folder) if is_half else load_module(folder),
        plain_folder,
        spec=recipe.input,
        processor=load_processor(folder),
        cuts=recipe.cuts,
        half=HALVES.get(scheme),
        golden=(lambda run: golden_distance(run, folder)) if is_half else None,
    )
    if reason:
        hint = "pick another candidate (`profiling-agent pick RUN`)" if is_half else "use --format onnx"
        raise ArtifactError(f"{str(folder)!r} is no ordinary Hugging Face model: {reason}; {hint}")
    for path in plain_folder.iterdir():
        path.rename(temporary / path.name)
    plain_folder.rmdir()
    write_text(temporary / SCRIPT, _render("run.py.jinja", format="hf"))
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
    if format_ == "hf":
        is_timm = recipe.config.get("model_type") == TIMM
        packages = ("pillow", "torch", "transformers", *(TIMM_PACKAGES if is_timm else ()))
    else:
        processor_packages = () if PREPARE in manifest.files else ("torch", "transformers")
        packages = ("numpy", "pillow", "onnxruntime" if format_ == "onnx" else "openvino", *processor_packages)
    # Package indexes have no local versions such as 2.13.0+cpu.
    versions = {name: version.partition("+")[0] for name, version in recipe.libraries.items()}
    usage = _render(
        "run.md.jinja",
        requirements=tuple(f"{name}=={versions[name]}" if name in versions else name for name in packages),
        script=(temporary / SCRIPT).read_text(encoding="utf-8"),
        batch_size=batch_size,
        instructions=runtime(recipe.deployment.runtime).needed_instructions(recipe.quantized),
        runtime=recipe.deployment.runtime,
        files={name: FILE_DESCRIPTIONS.get(name, "what transformers reads") for name in (*manifest.files, MANIFEST)},
    )
    labels_file = "`config.json`." if format_ == "hf" else f"`{LABELS}`."
    card = ModelCard(f"{card_head(folder).replace('`recipe.json`.', labels_file)}{usage}", ignore_metadata_errors=True)
    metadata: Any = card.data
    # The Hub has its own names for the libraries.
    metadata.library_name = {"hf": "transformers"}.get(format_, format_)
    write_text(temporary / CARD, str(card))


def _render(template: str, **values: Any) -> str:
    return text_templates("profiling_agent.exporting").get_template(template).render(values)
