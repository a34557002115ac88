"""Export of a saved model to a folder with an ONNX file, an OpenVINO graph or a Hugging Face model, which runs without profiling-agent.

Preprocessing is exported as plain numbers. Part of it is in a processor's code, not in its settings. So candidates are read from the settings and
tried on images: the first that prepares all of them as the processor does is used.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub import ModelCard
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoModelForImageClassification

from profiling_agent.data import TIMM, pixels
from profiling_agent.data.pixels import RESAMPLE, prepare
from profiling_agent.errors import ArtifactError
from profiling_agent.exporting.pick import MANIFEST, ExportManifest, model_folder
from profiling_agent.lib.io import file_sha256, write_text
from profiling_agent.lib.logs import SETTINGS_LOCK, quiet
from profiling_agent.lib.machine import TIMM_PACKAGES
from profiling_agent.lib.modules import logits_of
from profiling_agent.runtimes import artifact
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import runtime
from profiling_agent.runtimes.torch_artifact import HALVES, load_dequantized, load_module, load_processor
from profiling_agent.schemas import InputSpec

# Absolute, in prepared images, where a step of an 8-bit channel is 0.004 to 0.02.
TOLERANCE = 1e-5
# Relative distance of logits, if everything between half-precision layers is rounded as well.
HALF_TOLERANCE = 2e-2
# Height and width of test images in multiples of the model's: wide, high, small, and the model's own.
PROBE_SCALES = ((1.3, 1.9), (1.7, 1.2), (0.6, 0.5), (1.0, 1.0))
# LeViT crops 256 pixels to 224, which only its code states.
OVER_CROP = 256 / 224


def infer_preprocessing(processor: Any, spec: InputSpec) -> dict[str, Any] | None:
    """Find, on synthetic images, the arguments of `pixels.prepare` that reproduce `processor`; None if there are none.

    `resize`: height and width, the length of the shorter edge, or None; `crop`: height and width of the middle that is kept, or None.
    """

    def prepared(image: Image.Image) -> NDArray[np.float64]:
        return np.asarray(processor(images=[image], return_tensors="pt")["pixel_values"], np.float64)

    if spec.channels != 3:
        return None
    colors = ((0, 0, 0), (255, 255, 255), (255, 0, 0))
    plain = [prepared(Image.new("RGB", (spec.width, spec.height), color)) for color in colors]
    if plain[0].shape != spec.batch(1):
        return None
    black, white, red = (images[0, :, spec.height // 2, spec.width // 2] for images in plain)
    gain = white - black
    if not (np.isfinite(gain).all() and (gain > 0).all()):
        return None
    # Seven digits are what float32 has; adding zero removes its sign.
    mean, std = (tuple(float(f"{value:.7g}") + 0.0 for value in values) for values in (-black / gain, 1 / gain))
    scaling = {"channels": "BGR" if (red - black > gain / 2)[2] else "RGB", "mean": mean, "std": std}
    rng = np.random.default_rng(0)
    sizes = [(max(2, round(spec.height * high)), max(2, round(spec.width * wide))) for high, wide in PROBE_SCALES]
    probes = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    expected = [prepared(probe) for probe in probes]

    def reproduces(how: dict[str, Any]) -> bool:
        results = ((prepare([probe], how), target) for probe, target in zip(probes, expected, strict=True))
        return all(a.shape == b.shape and bool(np.abs(a - b).max() <= TOLERANCE) for a, b in results)

    # What the settings may mean; the test images tell them apart.
    settings = processor.to_dict()
    given = [settings.get(name) or {} for name in ("size", "crop_size")]
    resized, crop = ((size["height"], size["width"]) if size.get("height") else None for size in given)
    length = given[0].get("shortest_edge") or min(spec.height, spec.width)
    cropped, names = int(length / (settings.get("crop_pct") or 1.0)), {int(n): name for name, n in RESAMPLE.items()}
    resizes = dict.fromkeys((None, resized, length, cropped, int(OVER_CROP * length), (length, length)))
    crops = dict.fromkeys((None, crop, (spec.height, spec.width)))
    resample = {"resample": names.get(settings.get("resample") or 0, "bilinear")}
    guesses = ({"resize": r, "crop": c} | resample | scaling for r, c in itertools.product(resizes, crops))
    return next(filter(reproduces, guesses), None)


SCRIPT, PREPARE, PREPROCESSING, LABELS = "run.py", "prepare.py", "preprocessing.json", "labels.json"


def export(source: Path, format_: Literal["onnx", "openvino", "hf"] | None, output: Path) -> str:
    """Export the model in `source`, a run or a saved model's folder, to the folder `output`; return a line on the result.

    - "onnx": models for ONNX Runtime as they are, and float32 models of torch.
    - "openvino": models for OpenVINO as they are.
    - "hf": unpruned models of torch without int8 layers, for `AutoModelForImageClassification.from_pretrained`.
    - None: the first format that takes the model as it is.

    Each is checked against the saved model before it appears.

    Raises:
        RunError: the run has no model yet.
        ArtifactError: the saved model is damaged, `output` exists, the format can't hold the model, or the exported model
            computes something else; nothing is left behind.
    """
    folder = model_folder(source).resolve()
    recipe = artifact.load_recipe(folder, verify=True)
    formats = formats_of(recipe)
    chosen = format_ or next(iter(formats), "hf")
    if chosen not in formats:
        model = f"{str(folder)!r} is {'pruned, ' if recipe.cuts else ''}for {recipe.deployment.name}"
        use = f"use --format {' or '.join(formats)}" if formats else "run it with `profiling_agent.load`"
        raise ArtifactError(
            f"{model}, and can't be exported to {format_ or 'any format'}: {use}, or pick another candidate "
            "(`profiling-agent pick RUN`)"
        )
    with artifact.appearing(output) as temporary:
        if chosen == "hf":
            summary = _write_hf(folder, recipe, temporary)
        else:
            summary = _write_graph(folder, recipe, chosen, temporary)
        _write_card(folder, recipe, chosen, temporary)
    return f"wrote {output}; {summary}. Run it without profiling-agent: python {output / SCRIPT} image.png"


def formats_of(recipe: artifact.Recipe) -> tuple[str, ...]:
    """Return the formats that can hold a saved model, first the one that it is exported to by default."""
    executor = runtime(recipe.deployment.runtime)
    if not executor.is_torch:
        return (executor.graph_format,) if executor.graph_format else ()
    if any(layer.dtype == "qint8" or layer.kind == "rowwise" for layer in recipe.quantized):
        return ()
    # No config of transformers holds pruned widths.
    formats = () if recipe.cuts else ("hf",)
    is_float32 = not recipe.quantized and recipe.deployment.scheme == "float32"
    return (*formats, "onnx") if is_float32 else formats


def _write_graph(folder: Path, recipe: artifact.Recipe, format_: str, temporary: Path) -> str:
    """Write graph, labels, preprocessing and script; return what was checked."""
    spec, label_names, processor = recipe.input, recipe.config["id2label"], load_processor(folder)
    executor = runtime(recipe.deployment.runtime)
    if executor.is_torch:
        distance = export_onnx(load_module(folder), temporary / artifact.ONNX, spec=spec, is_bare=True)
        summary = f"ONNX Runtime's logits are {distance:.1g} from torch's (relative)"
    else:
        session = artifact.open_session(folder)
        artifact.check_golden(session.run, folder, recipe)
        summary = "it gives the saved model's logits"
        for name in recipe.model_files:
            shutil.copyfile(folder / name, temporary / name)
    preprocessing = infer_preprocessing(processor, spec)
    if preprocessing is None:
        processor.save_pretrained(temporary)
    else:
        write_text(temporary / PREPROCESSING, json.dumps(preprocessing, indent=1) + "\n")
        shutil.copyfile(pixels.__file__, temporary / PREPARE)
    labels = [label_names[str(number)] for number in range(len(label_names))]
    write_text(temporary / LABELS, json.dumps(labels, indent=1, ensure_ascii=False) + "\n")
    script = _render(
        "run.py.jinja",
        format=format_,
        is_multi_label=recipe.is_multi_label,
        is_prepared=preprocessing is not None,
        mode="L" if spec.channels == 1 else "RGB",
        precision="bf16" if recipe.deployment.scheme == "bfloat16" else "f32",
    )
    write_text(temporary / SCRIPT, script)
    return summary


def _write_hf(folder: Path, recipe: artifact.Recipe, temporary: Path) -> str:
    """Write a Hugging Face model; one with half-precision layers is written in half precision as a whole."""
    scheme, half = recipe.deployment.scheme, HALVES.get(recipe.deployment.scheme)
    # While loading, transformers disables initialisers in all threads.
    with quiet(), SETTINGS_LOCK:
        model: Any = load_dequantized(folder).to(half or torch.float32)
        model.save_pretrained(temporary)
        load_processor(folder).save_pretrained(temporary)
        loaded: Any = AutoModelForImageClassification.from_pretrained(
            temporary, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    allowed = HALF_TOLERANCE if half else artifact.tolerance(recipe)
    distance = artifact.golden_distance(lambda images: logits_of(loaded, torch.from_numpy(images)).numpy(), folder)
    # `not <=` so that a NaN fails.
    if not distance <= allowed:
        raise ArtifactError(
            f"the model that transformers loads from its config computes logits {distance:.2g} apart (relative), "
            f"{allowed:g} is allowed: run it with `profiling_agent.load`"
        )
    write_text(temporary / SCRIPT, _render("run.py.jinja", format="hf", is_multi_label=recipe.is_multi_label))
    whole = f", in {scheme} as a whole" if half else ""
    return f"from_pretrained loads it{whole}, with the saved model's logits"


def _write_card(folder: Path, recipe: artifact.Recipe, format_: str, temporary: Path) -> None:
    manifest = ExportManifest(
        base_model=recipe.base_model,
        base_revision=recipe.base_revision,
        libraries=recipe.libraries,
        files={path.name: file_sha256(path) for path in sorted(temporary.iterdir())},
    )
    write_text(temporary / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    packages = ["pillow"]
    if format_ != "hf":
        packages += ["numpy", "onnxruntime" if format_ == "onnx" else "openvino"]
    if PREPARE not in manifest.files:
        packages += ["torch", "transformers"]
    if format_ == "hf" and recipe.config.get("model_type") == TIMM:
        packages += TIMM_PACKAGES
    # Package indexes have no local versions such as 2.13.0+cpu.
    versions = {name: f"=={version.partition('+')[0]}" for name, version in recipe.libraries.items()}
    usage = _render(
        "run.md.jinja",
        requirements=[f"{name}{versions.get(name, '')}" for name in packages],
        script=(temporary / SCRIPT).read_text(encoding="utf-8"),
        instructions=runtime(recipe.deployment.runtime).needed_instructions(recipe.quantized),
        runtime=recipe.deployment.runtime,
    )
    labels_file = "`config.json`." if format_ == "hf" else f"`{LABELS}`."
    head = artifact.read_card(folder).partition("## Run it with profiling-agent\n")[0]
    card = ModelCard(f"{head.replace('`recipe.json`.', labels_file)}{usage}", ignore_metadata_errors=True)
    metadata: Any = card.data
    # The Hub has its own name for the library.
    metadata.library_name = "transformers" if format_ == "hf" else format_
    write_text(temporary / artifact.CARD, str(card))


def _render(template: str, **values: Any) -> str:
    return artifact.text_templates("profiling_agent.exporting").get_template(template).render(values)
