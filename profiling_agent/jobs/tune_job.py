"""How the tuning job turns artifact references into one stage call and the result back into artifacts.

Imported by the warm worker only, like the catalogue.
"""

import time

from profiling_agent.acquisition.batches import iter_batches
from profiling_agent.artifacts.load import load_module, load_processor
from profiling_agent.jobs.context import Desk
from profiling_agent.jobs.keeping import keep_model
from profiling_agent.jobs.tasks import TuneTask
from profiling_agent.quantization.tune import MAX_IMAGES, tune
from profiling_agent.records import Tuned


def tune_job(task: TuneTask, desk: Desk) -> Tuned:
    """Even out activations, find what each layer costs; save the model if it was changed."""
    started = time.perf_counter()
    path = desk.path(task.model)
    batches = iter_batches(
        desk.path(task.calibration.file), load_processor(path), batch_size=task.batch_size, limit=MAX_IMAGES
    )
    model = load_module(path)
    tuning = tune(model, (images for images, _ in batches), task.scheme, task.latency_shares, progress=desk.progress)
    return Tuned(
        model=task.model if tuning.model is model else keep_model(tuning.model, task.model, desk),
        sites=tuning.sites,
        layers=tuning.rows,
        kl=tuning.kl,
        kl_unfolded=tuning.kl_unfolded,
        num_images=tuning.num_images,
        seconds=time.perf_counter() - started,
    )
