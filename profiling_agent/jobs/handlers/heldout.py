"""Held-out images: that they are opened for a test is noted."""

from profiling_agent.acquisition.images import SplitImages
from profiling_agent.artifacts.folder import open_folder
from profiling_agent.evaluation.openings import note_opening
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import OpenHeldoutTask
from profiling_agent.records import Opening


def open_heldout(task: OpenHeldoutTask, job: JobContext) -> Opening:
    """Note in the user's ledger that a candidate is tested."""
    baseline = open_folder(job.path(task.baseline), verify=False)
    weights = baseline.files[baseline.model_files[0]]
    images = SplitImages(job.path(task.heldout.file))
    encoded = (images.encoded(row) for row in range(len(images)))
    return note_opening(weights, task.candidate.sha256, encoded, task.fresh)
