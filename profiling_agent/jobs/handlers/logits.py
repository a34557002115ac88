"""Reference logits: what a float32 model says of the images that others, made of it, are compared on."""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from profiling_agent.acquisition.prepared import iter_batches
from profiling_agent.artifacts.load import load_module
from profiling_agent.errors import ArtifactError, RequestError
from profiling_agent.files import write_bytes
from profiling_agent.foreign import foreign_code
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import Answered, LogitsTask
from profiling_agent.modules.fused import fuse_norms_
from profiling_agent.modules.inference import device_of, logits_of, on_device
from profiling_agent.modules.products import quick_products
from profiling_agent.pruning.compensation import Calibration

FILE, NAME = "logits.safetensors", "logits"


def ask(task: LogitsTask, job: JobContext) -> Answered:
    """Run the model over the images and write down its logits."""
    model = on_device(load_module(job.path(task.model)), task.device)
    read = partial(iter_batches, job.images("images"), batch_size=task.batch_size, limit=task.num_images)
    images = Calibration(batches=read, device=device_of(model), dtype=next(model.parameters()).dtype)
    if task.device == "cpu":
        fuse_norms_(model.eval(), next(images.every())[:2])
    with quick_products():
        logits = [logits_of(model, batch).float() for batch in (images.judged() if task.judged else images.every())]
    # Fewer than 32 images have none that judge; whoever compares then does it on all of them.
    if not logits and not task.judged:
        raise RequestError("there are 0 images to ask a model about: raise num_samples")
    found = torch.cat(logits).cpu() if logits else torch.empty(0, 0)
    write_bytes(job.folder / FILE, save({NAME: found}))
    return Answered(num_images=len(found))


def given_logits(job: JobContext) -> Tensor | None:
    """Return the reference logits, float32 (images, classes), that a job's task needs; None where it needs none.

    Raises:
        ArtifactError: they can't be read.
    """
    folders: list[Path] = job.folders("logits")
    if not folders:
        return None
    path = folders[0] / FILE
    with foreign_code(lambda said: ArtifactError(f"{str(path)!r} can't be read ({said}): run again")):
        held = load_file(path)
    if held.keys() != {NAME} or held[NAME].dim() != 2 or held[NAME].dtype != torch.float32:
        raise ArtifactError(f"{str(path)!r} holds no logits: run again")
    return held[NAME]
