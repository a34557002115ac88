"""Export of a saved model: as plain files that run without us, as one ONNX file, or as a Hugging Face folder.

Preprocessing as plain numbers: what a processor does follows from its code as much as from its settings, and some of the code is a model's own. So
what it may do is read from the settings and tried on images: the first guess that prepares all of them as it does is the answer.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub import ModelCard
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.data import pixels
from profiling_agent.data.pixels import RESAMPLE, prepare
from profiling_agent.errors import ArtifactError, RequestError
from profiling_agent.exporting.hugging_face import save_plain
from profiling_agent.exporting.pick import MANIFEST, Exported, model_folder
from profiling_agent.lib.io import clean, file_sha256, make_folders, replacing, write_text
from profiling_agent.lib.machine import needed_instructions
from profiling_agent.lib.third_party import ALONE
from profiling_agent.lib.timm_config import MODEL_TYPE as TIMM
from profiling_agent.lib.timm_config import PACKAGES as TIMM_PACKAGES
from profiling_agent.modules.inference import floating_dtype
from profiling_agent.processes.child import child_environment
from profiling_agent.runtimes.artifact import (
    CARD,
    ONNX,
    TORCH,
    WEIGHTS,
    Recipe,
    appearing,
    card_head,
    check_golden,
    golden_distance,
    named_folder,
    open_folder,
    text_templates,
    tolerance,
)
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import open_session
from profiling_agent.runtimes.save import HALVES
from profiling_agent.runtimes.torch_artifact import load_module, load_processor, load_skeleton, write_weights
from profiling_agent.runtimes.torch_session import memory_format
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


def preprocessing_of(processor: Any, spec: InputSpec, *, otherwise: str) -> Preprocessing:
    """Return what `processor` does to the images of a model, found by trying it.

    Raises:
        ArtifactError: it prepares images in a way that resizing, cropping in the middle and scaling can't express, so that what
            `otherwise` says has to be done.
    """
    refused = (
        f"{type(processor).__name__} prepares images in a way that can't be written as a resize, a crop in the middle and a "
        f"scale for each channel: {otherwise}"
    )
    if spec.channels != 3:
        raise ArtifactError(f"the model takes images of {spec.channels} channels, not RGB: {otherwise}")
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
    raise ArtifactError(refused)


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


LOADER, PREPARE, LAYERS = "load.py", "prepare.py", "layers.py"
DESCRIBED, PREPROCESSING, LABELS = "layers.json", "preprocessing.json", "labels.json"
HERE = Path(__file__).parent
# Of a model of a gigabyte the loading of torch and transformers included; compiling is left out.
TIMEOUT_S = 600
# What the Hub calls the libraries.
LIBRARIES = {"onnxruntime": "onnx", "openvino": "openvino"}
MEANINGS = {
    "model.onnx": "the graph with its weights, for ONNX Runtime",
    "model.xml": "the graph, for OpenVINO",
    "model.bin": "its weights",
    WEIGHTS: "the weights, as plain tensors",
    "model.safetensors": "the weights, as transformers reads them",
    "config.json": "what transformers builds the model from",
    DESCRIBED: "the model's config, which layers aren't as it says, and what they are",
    LAYERS: "these layers, by torch alone",
    PREPROCESSING: "how an image becomes pixel values",
    LABELS: "the names of the classes, in the order of the logits",
    PREPARE: "images to pixel values, by numpy and pillow",
    LOADER: "the model as a function, and a command",
    MANIFEST: "what this is, and the sha256 of each file",
}
# Run beside the files in another process; what it can't import, it can't need.
CHECK = """
import sys
sys.modules["profiling_agent"] = None
# OpenVINO reports its import to its maker where it finds this, which nobody asked for.
sys.modules["openvino_telemetry"] = None
sys.path.insert(0, sys.argv[1])
import numpy as np
import load
# Compiling takes minutes and changes nothing but the order of sums.
model = load.load(is_compiled=False) if sys.argv[4] == "inductor" else load.load()
np.save(sys.argv[3], model(np.load(sys.argv[2])))
"""


def export_files(folder: Path, recipe: Recipe, output: Path, *, others: Sequence[str]) -> str:
    """Write the saved model in `folder` as plain files to `output`; return a line that says how to run it.

    `others` are the formats that can hold it too, offered where plain numbers can't say how its images are prepared.

    Raises:
        ArtifactError: `output` exists; the runtime isn't installed; the images' preparation, or the model, can't be written
            so; or what was written computes something else. Nothing is left behind.
    """
    spec = recipe.input
    prepared = preprocessing_of(load_processor(folder), spec, otherwise=_unprepared(recipe, others))
    session = open_session(folder)
    names = recipe.config["id2label"]
    labels = [names[str(number)] for number in range(len(names))]
    with appearing(output) as temporary:
        written: dict[str, Any] = {"is_ordinary": False, "is_channels_last": False, "dtype": "float32"}
        if recipe.deployment.runtime in TORCH:
            written = _write_torch(folder, recipe, temporary)
        else:
            for name in recipe.model_files:
                shutil.copyfile(folder / name, temporary / name)
        write_text(temporary / PREPROCESSING, prepared.model_dump_json(indent=1) + "\n")
        write_text(temporary / LABELS, json.dumps(labels, indent=1, ensure_ascii=False) + "\n")
        shutil.copyfile(pixels.__file__, temporary / PREPARE)
        requirements = _requirements(recipe)
        told: dict[str, Any] = {
            "title": f"{recipe.architecture} for {recipe.deployment.name}",
            "runtime": recipe.deployment.runtime,
            "scheme": recipe.deployment.scheme,
            "packages": ", ".join(name.partition("==")[0] for name in requirements),
            "requirements": requirements,
            "shape": spec.batch(1)[1:],
            "num_classes": len(labels),
            "fixed_size": session.fixed_size,
            "instructions": needed_instructions(recipe.deployment.runtime, recipe.quantized),
            **written,
        }
        write_text(temporary / LOADER, _rendered("load.py.jinja", told))
        distance = golden_distance(lambda images: _said(temporary, images, recipe), folder)
        # `not <=` so that a NaN fails.
        if not distance <= (allowed := tolerance(recipe)):
            said = f"as plain files the model gives logits {distance:.2g} from the saved ones (relative), {allowed:g} is allowed"
            raise ArtifactError(f"{said}: {_offered(recipe)}")
        exported = Exported(
            base_model=recipe.base_model,
            base_revision=recipe.base_revision,
            architecture=recipe.architecture,
            deployment=recipe.deployment,
            input=spec,
            batch_size=session.fixed_size,
            libraries=recipe.libraries,
            files={path.name: file_sha256(path) for path in sorted(temporary.iterdir())},
        )
        write_text(temporary / MANIFEST, exported.model_dump_json(indent=1) + "\n")
        files = {name: MEANINGS.get(name, "what transformers reads beside it") for name in (*exported.files, MANIFEST)}
        how = _rendered("files.md.jinja", told | {"files": files})
        head = card_head(folder).replace("`config.json`.", f"`{LABELS}`.").replace("`recipe.json`.", f"`{LABELS}`.")
        card = ModelCard(f"{head}{how}", ignore_metadata_errors=True)
        metadata: Any = card.data
        ordinary = "transformers" if told["is_ordinary"] else "pytorch"
        metadata.library_name = LIBRARIES.get(recipe.deployment.runtime, ordinary)
        write_text(temporary / CARD, str(card))
    return f"wrote {output}, which runs without profiling-agent and gives the saved model's logits: python {output / LOADER} image.png"


def _rendered(template: str, told: Mapping[str, Any]) -> str:
    return text_templates("profiling_agent.exporting").get_template(template).render(told)


def _requirements(recipe: Recipe) -> tuple[str, ...]:
    runtime = recipe.deployment.runtime
    wanted = {
        "eager": ("torch", "transformers", "safetensors"),
        "graphed": ("torch", "transformers", "safetensors"),
        "inductor": ("torch", "transformers", "safetensors")
        + (("torchao",) if recipe.deployment.scheme == "static" else ()),
    }.get(runtime, (runtime,))
    if runtime in TORCH and recipe.config.get("model_type") == TIMM:
        wanted = (*wanted, *TIMM_PACKAGES)
    known = recipe.libraries
    # A local version, 2.13.0+cpu, is on no index.
    pinned = (f"{name}=={known[name].partition('+')[0]}" if name in known else name for name in wanted)
    return ("numpy", "pillow", *pinned)


def _write_torch(folder: Path, recipe: Recipe, temporary: Path) -> dict[str, Any]:
    """Write a torch model, as an ordinary Hugging Face folder where a config can say all of it, or with its layers described; return how torch runs it."""
    model = load_module(folder)
    layout = memory_format(model) if recipe.deployment.runtime == "inductor" else None
    dtype = str(floating_dtype(model)).removeprefix("torch.")
    is_ordinary = False
    if recipe.deployment.scheme == "float32" and not recipe.quantized:
        plain = temporary / "plain"
        is_ordinary = (
            save_plain(model, plain, spec=recipe.input, processor=load_processor(folder), cuts=recipe.cuts) is None
        )
        if is_ordinary:
            for path in plain.iterdir():
                path.rename(temporary / path.name)
            plain.rmdir()
    if not is_ordinary:
        write_weights(model, temporary)
        write_text(temporary / DESCRIBED, json.dumps(describe(model, recipe), indent=1) + "\n")
        shutil.copyfile(HERE / LAYERS, temporary / LAYERS)
    return {"is_ordinary": is_ordinary, "is_channels_last": layout == torch.channels_last, "dtype": dtype}


def _said(folder: Path, images: NDArray[np.float32], recipe: Recipe) -> NDArray[Any]:
    """Return the logits that `load.py` gives in a process of its own, which can't import us.

    Raises:
        ArtifactError: it fails; with the last line of what it said.
    """

    def refuse(said: str) -> ArtifactError:
        return ArtifactError(f"the model doesn't run as plain files ({said}): {_offered(recipe)}")

    with tempfile.TemporaryDirectory() as scratch:
        given, heard = Path(scratch) / "pixel_values.npy", Path(scratch) / "logits.npy"
        np.save(given, images)
        command = [
            sys.executable,
            "-c",
            CHECK,
            str(folder.resolve()),
            str(given),
            str(heard),
            recipe.deployment.runtime,
        ]
        try:
            ended = subprocess.run(
                command,
                env=child_environment() | {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise refuse(f"it takes more than {TIMEOUT_S} s") from error
        if ended.returncode or not heard.is_file():
            raise refuse(clean((ended.stderr.strip().splitlines() or ["it ended without a word"])[-1].strip())[:200])
        return np.load(heard, allow_pickle=False)


def _offered(recipe: Recipe) -> str:
    if recipe.deployment.runtime in TORCH:
        return "export its float32 parent, or the same model in ONNX Runtime or OpenVINO (`profiling-agent pick` lists them)"
    return f"copy {' and '.join(recipe.model_files)} from the saved folder"


def _unprepared(recipe: Recipe, others: Sequence[str]) -> str:
    if others:
        return f"use --format {' or '.join(others)}, and prepare images with transformers"
    if recipe.deployment.runtime in TORCH:
        return "run it by `profiling_agent.load`, which prepares images itself"
    return f"{_offered(recipe)}, and prepare images with transformers"


FORMATS = ("files", "onnx", "hf")


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
            f"{str(folder)!r} is for {recipe.deployment.name}, {refused}: use --format files, or pick another candidate (`profiling-agent pick RUN`)"
        )
    try:
        if format_ == "files":
            others = [one for one in ("onnx", "hf") if not _refused(recipe, one)]
            return export_files(folder, recipe, output, others=others)
        if format_ == "onnx":
            return _write_onnx(folder, recipe, output, batch_size)
        return _write_hf(folder, recipe, output)
    except OSError as error:
        raise ArtifactError(
            f"{str(output)!r} can't be written ({error.strerror or error}): choose another place"
        ) from error


def _write_onnx(folder: Path, recipe: Recipe, output: Path, batch_size: int | None) -> str:
    if recipe.deployment.runtime == "onnxruntime":
        # Copy the graph of a model for ONNX Runtime, once it gave the saved logits.
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
    distance = export_onnx(load_module(folder), output, spec=recipe.input, batch_size=batch_size, is_bare=True)
    return f"wrote {output}; ONNX Runtime's logits are {distance:.1g} from torch's (relative)"


def _write_hf(folder: Path, recipe: Recipe, output: Path) -> str:
    """Write a model as transformers does; layers in half precision as one that is so as a whole, where that gives its logits."""
    scheme = recipe.deployment.scheme
    is_half = scheme in HALVES
    others, how = ("files", f", in {scheme} as a whole") if is_half else ("files or onnx", "")
    reason = save_plain(
        load_skeleton(folder) if is_half else load_module(folder),
        output,
        spec=recipe.input,
        processor=load_processor(folder),
        cuts=recipe.cuts,
        half=HALVES.get(scheme),
        golden=(lambda run: golden_distance(run, folder)) if is_half else None,
    )
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
