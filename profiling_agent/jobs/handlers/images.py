"""Images of a shard, decoded and processed once for all jobs of a run."""

from profiling_agent.acquisition.images import SplitImages
from profiling_agent.acquisition.prepared import write_prepared
from profiling_agent.artifacts.load import read_processor
from profiling_agent.artifacts.recipe import PROCESSOR
from profiling_agent.errors import ArtifactError
from profiling_agent.files import write_text
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import Prepared, PrepareTask


def prepare(task: PrepareTask, job: JobContext) -> Prepared:
    """Write what the processor makes of the shard's images, and the processor beside it."""
    path = job.path(task.split.file)
    split, rows = SplitImages(path), task.split.rows(task.shard)
    # A run that is short of time takes the first of them alone.
    if len(split) < task.split.num_images:
        raise ArtifactError(
            f"split {str(path)!r} holds {len(split)} images, {task.split.num_images} were drawn: run again"
        )
    write_text(job.folder / PROCESSOR, task.processor)
    shape, dtype = write_prepared(job.folder, split, rows, read_processor(job.folder), progress=job.progress)
    return Prepared(shape=shape, dtype=dtype)
