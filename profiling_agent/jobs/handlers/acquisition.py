"""Acquisition and input shape: check the model, draw the images, find the shape, save the baseline."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from profiling_agent.acquisition.data import DataQuery
from profiling_agent.acquisition.images import SplitImages, relabel_split
from profiling_agent.acquisition.labels import choose_matching
from profiling_agent.acquisition.models import LoadedModel, device_note, load_model, resolve_device
from profiling_agent.acquisition.prepared import processed_batches
from profiling_agent.acquisition.splits import DrawnSplit, DrawnSplits, draw_splits, look_up_labels
from profiling_agent.artifacts.save import save_model
from profiling_agent.errors import AcquisitionError
from profiling_agent.evaluation.predictions import answers_of
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import (
    AcquireTask,
    MatchedLabels,
    MatchLabelsTask,
    ResolvedShape,
    ResolveShapeTask,
    SurveyShapeTask,
)
from profiling_agent.records import Acquired, ModelSource, ShapeFacts, SplitInfo
from profiling_agent.shapes.resolve import check_processor, resolve_input_shape, survey, verify


def acquire(task: AcquireTask, job: JobContext) -> Acquired:
    """Check the model, draw the images."""
    device, note = resolve_device(task.device), device_note(task.device, has_cuda=torch.cuda.is_available())
    if note:
        job.progress(note, 0, 0)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=job.progress)
    check_processor(loaded.model, loaded.processor)
    shared = task.model_dump(include=set(DataQuery.model_fields))
    config: Any = loaded.model.config
    drawn = draw_splits(DataQuery(**shared), id2label=config.id2label, folder=job.folder, progress=job.progress)
    drawn = _with_chosen_labels(drawn, loaded, job)
    if len(measured := np.unique(SplitImages(drawn.search.path).labels)) < 2:
        raise AcquisitionError(
            f"all {drawn.search.num_images} images to search on are of one class ({config.id2label[int(measured[0])]!r}), so that no loss of "
            "accuracy would show: give a split of several classes; in folders of images, each class has its own"
        )
    notes = (*drawn.notes, *([loaded.note] if loaded.note else []))
    for line in notes:
        job.progress(line, 0, 0)

    def info(name: Any, split: DrawnSplit) -> SplitInfo:
        return SplitInfo(
            name=name,
            source_split=split.source_split,
            num_images=split.num_images,
            num_skipped=split.num_skipped,
            file=job.ref(split.path, "split"),
        )

    return Acquired(
        source=ModelSource(
            name=loaded.source,
            revision=loaded.revision,
            architecture=loaded.architecture,
            device=device,
        ),
        calibration=info("calibration", drawn.calibration),
        search=info("search", drawn.search),
        heldout=info("heldout", drawn.heldout),
        recovery=info("recovery", drawn.recovery) if drawn.recovery else None,
        labels=drawn.labels,
        notes=(*notes, *([note] if note else [])),
    )


def _with_chosen_labels(drawn: DrawnSplits, loaded: LoadedModel, job: JobContext) -> DrawnSplits:
    """Return the images labelled by the matching that the model's answers on the calibration images fit.

    Raises:
        AcquisitionError: several matchings fit, and the answers don't decide.
    """
    if len(drawn.matchings) == 1:
        return drawn
    job.progress(f"labels fit in {len(drawn.matchings)} ways, of which the model's answers choose one", 0, 0)
    split = SplitImages(drawn.calibration.path)
    device = next(loaded.model.parameters()).device
    with torch.inference_mode():
        logits = [
            loaded.model(pixel_values=torch.from_numpy(pixels).to(device)).logits.cpu().numpy()
            for pixels in processed_batches(split, range(len(split)), loaded.processor)
        ]
    predicted = answers_of(np.concatenate(logits), split.labels).predicted
    chosen, note = choose_matching(drawn.matchings, predicted, split.labels)
    if chosen != drawn.matchings[0]:
        for part in filter(None, (drawn.calibration, drawn.search, drawn.heldout, drawn.recovery)):
            relabel_split(part.path, drawn.matchings[0].becomes(chosen))
    return replace(drawn, matchings=(chosen,), notes=(note, *drawn.notes))


def match_labels(task: MatchLabelsTask, job: JobContext) -> MatchedLabels:
    """Open the model and the data set, and match their classes."""
    loaded = load_model(task.model, revision=task.revision, device="cpu", progress=job.progress)
    check_processor(loaded.model, loaded.processor)
    shared = task.model_dump(include=set(DataQuery.model_fields))
    config: Any = loaded.model.config
    split, matches = look_up_labels(DataQuery(**shared), id2label=config.id2label, progress=job.progress)
    return MatchedLabels(split=split, labels=matches, num_classes=len(config.id2label))


def survey_shape(task: SurveyShapeTask, job: JobContext) -> ShapeFacts:
    """Gather what is known of the input shape."""
    device = resolve_device(task.device)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=job.progress)
    return survey(loaded.model, loaded.processor)


def resolve_shape(task: ResolveShapeTask, job: JobContext) -> ResolvedShape:
    """Find the input shape; save the baseline with it."""
    device = resolve_device(task.device)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=job.progress)
    spec = task.stated or resolve_input_shape(loaded.model, loaded.processor)
    if task.stated is not None:
        verify(loaded.model, spec)
    folder = job.folder / "model"
    save_model(
        loaded.model.cpu(),
        folder,
        spec=spec,
        processor=loaded.processor,
        base_model=task.model,
        base_revision=loaded.revision,
    )
    return ResolvedShape(input=spec, baseline=job.ref(folder, "model"), device=device)
