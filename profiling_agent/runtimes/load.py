"""Saved models opened in their runtime: pixel values to logits, or images to labels."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from profiling_agent.data.pixels import upright_rgb
from profiling_agent.data.prepared import to_processor_channels
from profiling_agent.errors import ArtifactError, CorruptImageError, RequestError
from profiling_agent.lib.logs import third_party_errors
from profiling_agent.lib.machine import environment
from profiling_agent.runtimes.artifact import Recipe, check_golden, named_folder, open_folder
from profiling_agent.runtimes.registry import ModelSession, check_images, open_session, runtime
from profiling_agent.runtimes.torch_artifact import load_processor
from profiling_agent.schemas import Environment, RuntimeName


@dataclass(frozen=True, slots=True)
class Answer:
    """Output of a model for a batch: `logits`, float32 (n, classes), on the CPU."""

    logits: Tensor


@dataclass(frozen=True, slots=True)
class Prediction:
    """The likeliest class of one image."""

    label: str
    class_id: int
    probability: float


class Deployed:
    """A saved model, opened in its runtime."""

    def __init__(self, folder: Path, recipe: Recipe, session: ModelSession) -> None:
        self.folder, self.recipe, self.session = folder, recipe, session

    @property
    def runtime(self) -> RuntimeName:
        """Return the name of the runtime."""
        return self.recipe.deployment.runtime

    @property
    def module(self) -> nn.Module:
        """Return the torch module; ArtifactError if the runtime isn't torch's."""
        module = getattr(self.session, "module", None)
        if not isinstance(module, nn.Module):
            raise ArtifactError(f"a model for {self.runtime} is no torch module: run it, or load its float32 parent")
        return module

    def __call__(self, pixel_values: Tensor | NDArray[Any]) -> Answer:
        """Return the logits of images (n, channels, height, width) that the processor prepared.

        Raises:
            ArtifactError: the shape isn't the model's, or the model was exported for another number of images.
        """
        array = pixel_values.detach().cpu().numpy() if isinstance(pixel_values, Tensor) else pixel_values
        batch = np.ascontiguousarray(array, dtype=np.float32)
        check_images(self.recipe.input, batch)
        return Answer(logits=torch.from_numpy(self.session.run(batch)))

    @cached_property
    def _processor(self) -> Any:
        return load_processor(self.folder)

    @overload
    def predict(self, images: Image.Image) -> Prediction: ...

    @overload
    def predict(self, images: Sequence[Image.Image]) -> list[Prediction]: ...

    def predict(self, images: Image.Image | Sequence[Image.Image]) -> Prediction | list[Prediction]:
        """Return the likeliest class of a PIL image, or of each of several images, which run as one batch.

        Images are prepared as for measuring accuracy: turned upright by their EXIF orientation, and 16 bits scaled to 8.

        Raises:
            ArtifactError: an image is damaged, or the model's image processor doesn't take it.
        """
        if isinstance(images, Image.Image):
            return self.predict([images])[0]
        if not images:
            return []
        names = self.recipe.config.get("id2label", {})
        likelihoods, classes = self(self._prepare(images)).logits.softmax(dim=-1).max(dim=-1)
        return [
            Prediction(label=str(names.get(str(class_id), class_id)), class_id=class_id, probability=probability)
            for class_id, probability in zip(classes.tolist(), likelihoods.tolist(), strict=True)
        ]

    def _prepare(self, images: Sequence[Image.Image]) -> NDArray[Any]:
        """Return the processor's pixel values; ArtifactError if it can't prepare the images."""

        def damaged(message: str) -> CorruptImageError:
            return CorruptImageError(f"an image can't be read: {message}")

        def refuse(message: str) -> ArtifactError:
            return ArtifactError(f"the image processor in {str(self.folder)!r} gives {message}: save the model again")

        processor = self._processor
        with third_party_errors(damaged):
            pictures = [to_processor_channels(upright_rgb(image), processor) for image in images]
        with third_party_errors(refuse):
            return processor(images=pictures, return_tensors="np")["pixel_values"]


def load(path: str | Path, *, verify: bool = True, device: str = "cpu", num_threads: int | None = None) -> Deployed:
    """Return a saved model that is called as `model(pixel_values).logits` whatever its runtime.

    `verify` compares every file with its sha256, and the logits of two images with those at saving.
    `num_threads` is the number of CPU threads, in torch of the whole process. By default ONNX Runtime and OpenVINO take
    one for each core that a container's quota has time for, and torch keeps those of the process.
    Warns if the model was made on another type of CPU: another deployment may be faster here, or int8 sums saturate.

    Raises:
        ArtifactError: a file is missing or damaged, the model doesn't compute what it did, or its runtime
            isn't installed.
        RequestError: `num_threads` isn't 1 or more.
    """
    if num_threads is not None and num_threads < 1:
        raise RequestError(f"num_threads is {num_threads}: give 1 or more, or None for as many as there are cores")
    folder = named_folder(path)
    recipe = open_folder(folder, verify=verify)
    session = open_session(folder, device=device, num_threads=num_threads)
    if note := cpu_note(folder, recipe, environment()):
        warnings.warn(note, stacklevel=2)
    if verify:
        check_golden(session.run, folder, recipe)
    return Deployed(folder, recipe, session)


def cpu_note(folder: Path, recipe: Recipe, here: Environment) -> str | None:
    """Return a warning about running a saved model on the machine `here`, or None if its CPU gives no reason."""
    cpus = f"{str(folder)!r} was made on {recipe.cpu}, this is {here.cpu}"
    executor = runtime(recipe.deployment.runtime)
    # By flags only: a cloud has one name for processors with different instructions.
    if (needed := executor.needed_instructions(recipe.quantized)) and not executor.has_vnni(here.cpu_flags):
        return (
            f"{cpus}, which has no {' or '.join(needed)}: its int8 sums may saturate here, and its answers be others; a run on this "
            "machine (`profiling-agent run`) makes a model whose sums don't"
        )
    if recipe.cpu != here.cpu:
        return (
            f"{cpus}: it computes the same, but another deployment may be faster here; `profiling-agent race` finds out"
        )
    return None
