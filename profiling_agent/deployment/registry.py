"""Registry of the runtimes by name; each is imported when it is first used. No torch here."""

import importlib
from pathlib import Path
from typing import cast

from profiling_agent.artifacts.folder import open_folder
from profiling_agent.deployment.protocol import ModelSession, Runtime
from profiling_agent.errors import ArtifactError
from profiling_agent.records import Deployment, RuntimeName

MODULES: dict[RuntimeName, str] = {
    "eager": "profiling_agent.deployment.torch_eager",
    "graphed": "profiling_agent.deployment.torch_graphed",
    "inductor": "profiling_agent.deployment.torch_inductor",
    "onnxruntime": "profiling_agent.deployment.onnx_runtime",
    "openvino": "profiling_agent.deployment.open_vino",
}


def runtime(name: RuntimeName) -> Runtime:
    """Return a runtime, installed or not."""
    return cast("Runtime", importlib.import_module(MODULES[name]))


def missing(name: RuntimeName, device: str = "cpu") -> str | None:
    """Return what has to be installed for a runtime on a device, as one line, or None."""
    return runtime(name).missing(device)


def reads_onnx(deployment: Deployment) -> bool:
    """Return whether it is made of the float32 model as ONNX; OpenVINO's `static` is exported with its int8 layers instead."""
    return deployment.runtime == "onnxruntime" or (deployment.runtime == "openvino" and deployment.scheme != "static")


def open_session(folder: Path, *, device: str = "cpu", num_threads: int | None = None) -> ModelSession:
    """Open a saved model in the runtime that it was saved for; its hashes and golden logits aren't compared.

    Raises:
        ArtifactError: a file is missing or unreadable, or the runtime isn't installed.
    """
    recipe = open_folder(folder, verify=False)
    name = recipe.deployment.runtime
    if line := missing(name, device):
        raise ArtifactError(f"{str(folder)!r} was saved for {name}: {line}")
    if device != "cpu" and recipe.deployment.scheme not in runtime(name).schemes(device):
        raise ArtifactError(
            f"{str(folder)!r} is for {recipe.deployment.name}, which has no kernels on {device}: use device cpu"
        )
    return runtime(name).open(folder, recipe, device=device, num_threads=num_threads)
