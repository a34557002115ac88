"""How the recovery job turns artifact references into one stage call, and goes on where a killed one ended.

Imported by the warm worker only, like the catalogue.
"""

import contextlib
import shutil
from functools import partial
from pathlib import Path

from profiling_agent.acquisition.batches import iter_batches, shuffled_batches
from profiling_agent.artifacts.load import load_module, load_processor
from profiling_agent.jobs.context import Desk
from profiling_agent.jobs.keeping import keep_model
from profiling_agent.jobs.tasks import RecoverTask
from profiling_agent.modules.inference import device_of
from profiling_agent.pruning.calibration import Calibration
from profiling_agent.pruning.recovery import recover
from profiling_agent.records import RecoveredModel


def recover_job(task: RecoverTask, desk: Desk) -> RecoveredModel:
    """Recover, judged on the images that compensation wasn't fitted to; save what was recovered.

    Each epoch is kept in `recovery/<job key>` of the run folder, because a job's own folder goes when the job is cut.
    """
    folder = desk.root / "recovery" / Path(desk.final).name
    dense, pruned = (load_module(desk.path(ref)).to(task.device) for ref in (task.baseline, task.model))
    processor = load_processor(desk.path(task.baseline))
    calibration = Calibration(
        batches=partial(iter_batches, desk.path(task.calibration.file), processor, batch_size=task.batch_size),
        device=device_of(dense),
        dtype=next(dense.parameters()).dtype,
    )
    recovered = recover(
        dense,
        pruned,
        shuffled_batches(desk.path(task.recovery.file), processor, batch_size=task.batch_size, seed=task.seed),
        calibration.judged,
        epochs=task.epochs,
        folder=folder,
        seed=task.seed,
        progress=desk.progress,
    )
    model = task.model if recovered.model is pruned else keep_model(recovered.model.cpu(), task.model, desk)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        # Empty unless another attempt's recovery was cut.
        folder.parent.rmdir()
    return RecoveredModel(
        model=model,
        epochs_run=recovered.epochs_run,
        kl_before=recovered.kl_before,
        kl_after=recovered.kl_after,
        stopped=recovered.stopped,
        note=recovered.note,
    )
