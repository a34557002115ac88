"""Export of a saved model to a folder with an ONNX file, an OpenVINO graph or a Hugging Face model, which runs without profiling-agent.

Preprocessing is exported as plain numbers. Part of it is in a processor's code, not in its settings. So candidates are read from the settings and
tried on images: the first that prepares all of them as the processor does is used.
"""

import itertools
import json
import math
import shutil
from collections.abc import Generator, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import ModelCard
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.data import pixels
from profiling_agent.data.pixels import RESAMPLE, prepare
from profiling_agent.errors import ArtifactError, RequestError
from profiling_agent.exporting.pick import MANIFEST, ExportManifest, model_folder, new_folder
from profiling_agent.lib.io import file_sha256, write_text
from profiling_agent.lib.logs import SETTINGS_LOCK, quiet, third_party_errors
from profiling_agent.lib.modules import logits_of, random_batch, relative_distance
from profiling_agent.lib.timm_config import MODEL_TYPE as TIMM
from profiling_agent.lib.timm_config import PACKAGES as TIMM_PACKAGES
from profiling_agent.runtimes import artifact
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import runtime
from profiling_agent.runtimes.torch_artifact import HALVES, config_of, load_module, load_processor, load_skeleton
from profiling_agent.schemas import Cut, InputSpec, UnitKind

# Absolute, in prepared images, where a step of an 8-bit channel is 0.004 to 0.02.
TOLERANCE = 1e-5
# Height and width of test images in multiples of the model's: wide, high, small, and the model's own.
PROBE_SCALES = ((1.3, 1.9), (1.7, 1.2), (0.6, 0.5), (1.0, 1.0))
# LeViT crops 256 pixels to 224, which only its code states.
OVER_CROP = 256 / 224


def preprocessing_of(processor: Any, spec: InputSpec) -> dict[str, Any] | None:
    """Return the arguments of `pixels.prepare` that reproduce `processor` on test images, or None if there are none.

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


FORMATS = ("onnx", "openvino", "hf")
SCRIPT, PREPARE, PREPROCESSING, LABELS = "run.py", "prepare.py", "preprocessing.json", "labels.json"
PICK = "pick another candidate (`profiling-agent pick RUN`)"


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
    folder = artifact.named_folder(model_folder(source))
    recipe = artifact.open_folder(folder, verify=True)
    executor = runtime(recipe.deployment.runtime)
    format_ = format_ or executor.graph_format or "hf"
    if batch_size is not None and (format_ != "onnx" or not executor.is_torch):
        raise RequestError("batch_size is for models of torch in the format onnx: leave it out")
    if refusal := _refusal(recipe, format_):
        raise ArtifactError(f"{str(folder)!r} is for {recipe.deployment.name}, {refusal}")
    with new_folder(output) as temporary:
        if format_ == "hf":
            summary = _write_hf(folder, recipe, temporary)
        else:
            summary, batch_size = _write_graph(folder, recipe, format_, temporary, batch_size)
        _write_card(folder, recipe, format_, temporary, batch_size)
    return f"wrote {output}; {summary}. Run it without profiling-agent: python {output / SCRIPT} image.png"


def _refusal(recipe: artifact.Recipe, format_: str) -> str | None:
    """Return why a format can't hold a deployment and what to do, or None if it can."""
    executor = runtime(recipe.deployment.runtime)
    graph = executor.graph_format
    if not executor.is_torch:
        if graph is None:
            return f"and no export format holds its graph: {PICK}"
        return None if format_ == graph else f"whose graph has only one format: use --format {graph}, or {PICK}"
    if any(layer.dtype == "qint8" or layer.kind == "rowwise" for layer in recipe.quantized):
        return f"and no export format holds quantized layers of torch: {PICK}, or run it with `profiling_agent.load`"
    if format_ == "openvino":
        return f"and only models for OpenVINO are exported to openvino: use --format onnx or hf, or {PICK}"
    if format_ == "onnx" and (recipe.quantized or recipe.deployment.scheme != "float32"):
        return f"and an export to onnx has to be float32: use --format hf, or {PICK}"
    return None


def _write_graph(
    folder: Path, recipe: artifact.Recipe, format_: str, temporary: Path, batch_size: int | None
) -> tuple[str, int | None]:
    """Write graph, labels, preprocessing and script; return what was checked and the fixed batch size."""
    spec, label_names, processor = recipe.input, recipe.config["id2label"], load_processor(folder)
    executor = runtime(recipe.deployment.runtime)
    if executor.is_torch:
        distance = export_onnx(
            load_module(folder), temporary / artifact.ONNX, spec=spec, batch_size=batch_size, is_bare=True
        )
        summary = f"ONNX Runtime's logits are {distance:.1g} from torch's (relative)"
    else:
        session = artifact.open_session(folder)
        artifact.check_golden(session.run, folder, recipe)
        summary, batch_size = "it gives the saved model's logits", session.fixed_size
        if instructions := executor.needed_instructions(recipe.quantized):
            summary += f" here; on a processor without {' or '.join(instructions)} its int8 sums may saturate"
        for name in recipe.model_files:
            shutil.copyfile(folder / name, temporary / name)
    preprocessing = preprocessing_of(processor, spec)
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
        is_prepared=preprocessing is not None,
        mode="L" if spec.channels == 1 else "RGB",
        batch_size=batch_size,
        precision="bf16" if recipe.deployment.scheme == "bfloat16" else "f32",
        # With fixed shapes OpenVINO decomposes our int8 layers and is slower; all else is faster.
        is_reshaped=format_ == "openvino" and recipe.deployment.scheme != "static",
    )
    write_text(temporary / SCRIPT, script)
    return summary, batch_size


def _write_hf(folder: Path, recipe: artifact.Recipe, temporary: Path) -> str:
    """Write a Hugging Face model; a model with half-precision layers in half precision as a whole, if its logits allow it."""
    half = HALVES.get(recipe.deployment.scheme)
    model, processor = load_skeleton(folder) if half else load_module(folder), load_processor(folder)
    plain, golden = temporary / "plain", folder if half else None
    reason = save_plain(
        model, plain, spec=recipe.input, processor=processor, cuts=recipe.cuts, half=half, golden_of=golden
    )
    if reason:
        hint = PICK if half else "use --format onnx"
        raise ArtifactError(f"{str(folder)!r} is no ordinary Hugging Face model: {reason}; {hint}")
    for path in plain.iterdir():
        path.rename(temporary / path.name)
    plain.rmdir()
    write_text(temporary / SCRIPT, _render("run.py.jinja", format="hf"))
    whole = f", in {recipe.deployment.scheme} as a whole" if half else ""
    return f"from_pretrained loads it{whole}, with the saved model's logits"


def _write_card(folder: Path, recipe: artifact.Recipe, format_: str, temporary: Path, batch_size: int | None) -> None:
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
        batch_size=batch_size,
        instructions=runtime(recipe.deployment.runtime).needed_instructions(recipe.quantized),
        runtime=recipe.deployment.runtime,
    )
    labels_file = "`config.json`." if format_ == "hf" else f"`{LABELS}`."
    card = ModelCard(
        f"{artifact.card_head(folder).replace('`recipe.json`.', labels_file)}{usage}", ignore_metadata_errors=True
    )
    metadata: Any = card.data
    # The Hub has its own name for the library.
    metadata.library_name = "transformers" if format_ == "hf" else format_
    write_text(temporary / artifact.CARD, str(card))


def _render(template: str, **values: Any) -> str:
    return artifact.text_templates("profiling_agent.exporting").get_template(template).render(values)


# Parts of field names over all model families; trying finds the field that counts.
HEAD_FIELDS = ("heads",)
WIDTH_FIELDS = ("intermediate_size", "ratio", "expan", "ffn_multiplier")
# Relative distance of the logits: weights and layers are the same, at most the attention kernel is another.
SAME_TOLERANCE = 1e-6
# The same if everything between layers is rounded to half precision as well; bfloat16 has steps of 0.8%.
HALF_TOLERANCE = 2e-2

Fields = dict[str, Any]


def save_plain(
    model: nn.Module,
    folder: Path,
    *,
    spec: InputSpec,
    processor: Any,
    cuts: Sequence[Cut] = (),
    half: torch.dtype | None = None,
    golden_of: Path | None = None,
) -> str | None:
    """Write `model` so that `AutoModelForImageClassification.from_pretrained(folder)` loads it; None if written.

    If no config can express the cuts, nothing is written and the reason is returned as a phrase. The folder appears complete or
    not at all, after it was loaded and gave the model's logits for two images. `half` is the precision of the whole model; the
    loaded model then has to give the golden logits of the saved model in `golden_of`.

    Raises:
        ArtifactError: `folder` exists, transformers can't write and load the model, or the loaded model's logits are more than
            1e-6 apart (relative), in half precision more than 2e-2.
    """
    fields = _plain_config(model, cuts)
    if isinstance(fields, str):
        return fields
    plain_model: Any = _build(fields)
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if half is not None:
        tensors = {name: tensor.to(half) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    plain_model.load_state_dict(tensors, assign=True)
    plain_model.tie_weights()

    def refuse(cause: str) -> ArtifactError:
        return ArtifactError(f"transformers can't write and load the model ({cause}): deploy the saved folder instead")

    # While loading, transformers disables initialisers in all threads.
    with artifact.appearing(folder) as temporary, quiet(), SETTINGS_LOCK:
        with third_party_errors(refuse):
            plain_model.save_pretrained(temporary)
            processor.save_pretrained(temporary)
            loaded: Any = AutoModelForImageClassification.from_pretrained(
                temporary, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        if golden_of is None:
            batch, tolerance = random_batch(spec, 2), SAME_TOLERANCE
            distance = relative_distance(logits_of(loaded, batch), logits_of(model, batch))
        else:
            tolerance = HALF_TOLERANCE
            distance = artifact.golden_distance(
                lambda images: logits_of(loaded, torch.from_numpy(images)).numpy(), golden_of
            )
        # `not <=` so that a NaN fails.
        if not distance <= tolerance:
            raise ArtifactError(
                f"the model that transformers loads from its config computes logits {distance:.2g} apart (relative), "
                f"{tolerance:g} is allowed: run it with `profiling_agent.load`, or pick another candidate"
            )
    return None


def _plain_config(model: nn.Module, cuts: Sequence[Cut]) -> Fields | str:
    """Return the config from which transformers itself builds `model`, or a phrase on why there is none.

    Fields of the original config that count heads or widths are scaled as the cuts were. A config is accepted if the model
    built from it (without weights) has a state dict of the same names, shapes and shared tensors.
    """
    expected = _structure(model)
    nearest: list[str] | None = None
    for fields in _candidate_configs(model, cuts):
        with suppress(ArtifactError), third_party_errors(ArtifactError):
            structure = _structure(_build(fields))
            if structure == expected:
                return fields
            mismatches = [name for name in expected | structure if expected.get(name) != structure.get(name)]
            nearest = min(nearest or mismatches, mismatches, key=len)
    example = f" (of {nearest[0]!r}, for one)" if nearest else ""
    return f"no {type(model.config).__name__} has fields for the widths of this model{example}"


def _build(fields: Fields) -> nn.Module:
    """Build the model of a config on the meta device: names and shapes without weights."""
    settings = {name: value for name, value in fields.items() if name != "model_type"}
    with SETTINGS_LOCK, torch.random.fork_rng(devices=[]), torch.device("meta"), no_init_weights(), quiet():
        config = AutoConfig.for_model(fields["model_type"], **settings)
        return AutoModelForImageClassification.from_config(config, trust_remote_code=False)


def _structure(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape of every saved tensor, and the first of the names that share it."""
    first_names: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: (tuple(tensor.shape), first_names.setdefault(id(tensor), name)) for name, tensor in tensors.items()}


def _candidate_configs(model: nn.Module, cuts: Sequence[Cut]) -> Generator[Fields]:
    """Yield every config that may express the cuts: each field of heads with each field of widths."""
    original, tensors = config_of(model), dict(model.named_parameters())
    head_cuts = [cut for cut in cuts if cut.unit.kind is UnitKind.HEADS]
    width_cuts = [cut for cut in cuts if cut.unit.kind is not UnitKind.HEADS]
    head_sizes = {tensors[f"{cut.unit.consumer}.weight"].shape[1] // cut.keep for cut in head_cuts}
    # Heads keep their size, which transformers otherwise derives from the number of heads.
    head_dims = [{"head_dim": head_sizes.pop()}, {}] if len(head_sizes) == 1 else [{}]
    sections = [name for name, value in original.items() if isinstance(value, dict) and "model_type" in value]
    for section in (None, *sections):
        fields = original[section] if section else original
        for changes in itertools.product(
            _scaled_fields(fields, HEAD_FIELDS, head_cuts), head_dims, _scaled_fields(fields, WIDTH_FIELDS, width_cuts)
        ):
            changed = {name: value for part in (fields, *changes) for name, value in part.items()}
            yield original | {section: changed} if section else changed


def _scaled_fields(fields: Fields, words: Sequence[str], cuts: Sequence[Cut]) -> Generator[Fields]:
    """Yield changes of each field whose name contains one of `words`, a number or one for each stage, scaled as the cuts scaled widths.

    Each is tried as integers, as floats, and as the next floats above: transformers truncates ratio times width to an integer.
    """
    if not cuts:
        yield {}
    # In network order, to fit lists of one entry per stage.
    shares = list({cut.unit.width: Fraction(cut.keep, cut.unit.width) for cut in cuts}.values())
    for name, value in fields.items():
        entries = value if isinstance(value, list) else [value]
        fitting = shares if len(shares) == len(entries) else shares[:1] * len(entries) if len({*shares}) == 1 else []
        if not fitting or not any(word in name for word in words) or not all(type(e) in (int, float) for e in entries):
            continue
        exact = [Fraction(entry) * share for entry, share in zip(entries, fitting, strict=True)]
        for scaled in (
            [int(entry) for entry in exact],
            [float(entry) for entry in exact],
            [math.nextafter(float(entry), math.inf) for entry in exact],
        ):
            yield {name: scaled if isinstance(value, list) else scaled[0]}
