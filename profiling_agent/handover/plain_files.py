"""Plain files: any deployment as a folder that runs by numpy, pillow and its runtime alone, and is proven to before it appears."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import ModelCard
from numpy.typing import NDArray

from profiling_agent.acquisition import pixels
from profiling_agent.artifacts.card import card_head, text_templates
from profiling_agent.artifacts.folder import appearing
from profiling_agent.artifacts.golden import golden_distance, tolerance
from profiling_agent.artifacts.load import load_module, load_processor
from profiling_agent.artifacts.recipe import CARD, WEIGHTS, Recipe
from profiling_agent.artifacts.save import write_weights
from profiling_agent.deployment.plain import save_plain
from profiling_agent.deployment.registry import open_session
from profiling_agent.deployment.torch_session import memory_format
from profiling_agent.documents import clean
from profiling_agent.errors import ArtifactError
from profiling_agent.files import file_sha256, write_text
from profiling_agent.handover.described import describe
from profiling_agent.handover.manifest import MANIFEST, Exported
from profiling_agent.handover.preprocessing import preprocessing_of
from profiling_agent.modules.inference import floating_dtype
from profiling_agent.processes.environment import child_environment
from profiling_agent.quantization.vnni import needed_instructions
from profiling_agent.timm_config import MODEL_TYPE as TIMM
from profiling_agent.timm_config import PACKAGES as TIMM_PACKAGES

LOADER, PREPARE, LAYERS = "load.py", "prepare.py", "layers.py"
DESCRIBED, PREPROCESSING, LABELS = "layers.json", "preprocessing.json", "labels.json"
HERE = Path(__file__).parent
TORCH = frozenset({"eager", "graphed", "inductor"})
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


@dataclass(frozen=True, slots=True)
class _Torch:
    """How torch runs what was written: from the config alone, or with layers that are described."""

    is_ordinary: bool
    is_channels_last: bool
    dtype: str


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
    labels = _labels(recipe)
    with appearing(output) as temporary:
        written = None
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
            "is_ordinary": written is not None and written.is_ordinary,
            "is_channels_last": written is not None and written.is_channels_last,
            "dtype": written.dtype if written else "float32",
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
        _write_card(folder, recipe, temporary, how, is_ordinary=told["is_ordinary"])
    return f"wrote {output}, which runs without profiling-agent and gives the saved model's logits: python {output / LOADER} image.png"


def _rendered(template: str, told: Mapping[str, Any]) -> str:
    return text_templates("profiling_agent.handover").get_template(template).render(told)


def _labels(recipe: Recipe) -> list[str]:
    """Return the names of the classes in their order."""
    names = recipe.config["id2label"]
    return [names[str(number)] for number in range(len(names))]


def _requirements(recipe: Recipe) -> tuple[str, ...]:
    runtime = recipe.deployment.runtime
    wanted = {
        "eager": ("torch", "transformers", "safetensors"),
        "graphed": ("torch", "transformers", "safetensors"),
        "inductor": (
            "torch",
            "transformers",
            "safetensors",
            *(["torchao"] if recipe.deployment.scheme == "static" else []),
        ),
    }.get(runtime, (runtime,))
    if runtime in TORCH and recipe.config.get("model_type") == TIMM:
        wanted = (*wanted, *TIMM_PACKAGES)
    known = recipe.libraries
    # A local version, 2.13.0+cpu, is on no index.
    pinned = (f"{name}=={known[name].partition('+')[0]}" if name in known else name for name in wanted)
    return ("numpy", "pillow", *pinned)


def _write_torch(folder: Path, recipe: Recipe, temporary: Path) -> _Torch:
    """Write a torch model, as an ordinary Hugging Face folder where a config can say all of it, or with its layers described."""
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
    return _Torch(is_ordinary=is_ordinary, is_channels_last=layout == torch.channels_last, dtype=dtype)


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
            raise refuse(clean(_last_line(ended.stderr.splitlines()))[:200])
        return np.load(heard, allow_pickle=False)


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a word")


def _offered(recipe: Recipe) -> str:
    """Return what else can be done with a model of this deployment."""
    if recipe.deployment.runtime in TORCH:
        return "export its float32 parent, or the same model in ONNX Runtime or OpenVINO (`profiling-agent pick` lists them)"
    return f"copy {' and '.join(recipe.model_files)} from the saved folder"


def _unprepared(recipe: Recipe, others: Sequence[str]) -> str:
    """Return what can be done with a model whose images only its processor can prepare."""
    if others:
        return f"use --format {' or '.join(others)}, and prepare images with transformers"
    if recipe.deployment.runtime in TORCH:
        return "run it by `profiling_agent.load`, which prepares images itself"
    return f"{_offered(recipe)}, and prepare images with transformers"


def _write_card(folder: Path, recipe: Recipe, temporary: Path, how: str, *, is_ordinary: bool) -> None:
    head = card_head(folder).replace("`config.json`.", f"`{LABELS}`.").replace("`recipe.json`.", f"`{LABELS}`.")
    card = ModelCard(f"{head}{how}", ignore_metadata_errors=True)
    metadata: Any = card.data
    metadata.library_name = LIBRARIES.get(recipe.deployment.runtime, "transformers" if is_ordinary else "pytorch")
    write_text(temporary / CARD, str(card))
