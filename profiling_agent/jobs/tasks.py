"""Tasks that make models and read data: acquisition, shapes, logits, pruning, recovery, tuning, export, deployment."""

import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from profiling_agent import schemas
from profiling_agent.data.images import (
    PreparedImages,
    SplitImages,
    iter_batches,
    relabel_split,
    shuffled_batches,
    write_prepared,
)
from profiling_agent.data.labels import choose_matching, format_names
from profiling_agent.errors import AcquisitionError, QuantizationError
from profiling_agent.jobs.base import HOUR, Device, JobContext, ResultT, Task
from profiling_agent.jobs.measuring import *  # noqa: F403 - re-exported
from profiling_agent.lib.logs import quiet
from profiling_agent.lib.machine import available_threads
from profiling_agent.measure.intervals import answers_of
from profiling_agent.runtimes import artifact

if TYPE_CHECKING:
    from profiling_agent.data.dataset import DataQuery
    from profiling_agent.data.models import LoadedModel
    from profiling_agent.data.splits import DrawnSplits

# What forks have imported: the worker, the measurements, and what nearly every run needs late.
MODULES = (
    *("torch", "transformers.models.auto.modeling_auto", "profiling_agent.jobs.worker"),
    *("profiling_agent.data.splits", "profiling_agent.profiling.evidence", "profiling_agent.profiling.profile"),
    *("profiling_agent.quantization.quantize", "profiling_agent.runtimes.torch_artifact"),
    "profiling_agent.runtimes.onnx_export",
)
# Images on which each deployment is compared with its parent: float32 takes longest, and large errors show on half of them.
MAX_COMPARED = 64
# Images: activation ranges and NNCF's statistics settle well before; more only take longer.
MAX_CALIBRATION = 128


class ModelTask(Task[ResultT]):
    """A job on a model at its source."""

    model: str
    revision: str | None = None

    def load(self, context: JobContext, device: str) -> "LoadedModel":
        """Load the model on a device."""
        from profiling_agent.data.models import load_model, resolve_device

        on = resolve_device(device)
        return load_model(self.model, revision=self.revision, device=on, progress=context.progress)


class SourceTask(ModelTask[ResultT]):
    """A job on a model and a data set at their sources."""

    dataset: str
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    label_match: schemas.MatchBy = "auto"

    def query(self, loaded: "LoadedModel") -> "DataQuery":
        """Return the query for images that the model's answers can be compared with."""
        from profiling_agent.data.dataset import DataQuery

        config: Any = loaded.model.config
        fields = self.model_dump(include=set(DataQuery.model_fields))
        return DataQuery(**fields, multi_label=config.problem_type == schemas.MULTI_LABEL)


class AcquireTask(SourceTask[schemas.Acquired]):
    """Check that the model can be loaded, and draw the images."""

    device: Device = "auto"
    num_samples: int | None = None
    num_recovery: int = 0
    seed: int = 0

    def run(self, context: JobContext) -> schemas.Acquired:
        """Check the model, draw the images."""
        import torch

        from profiling_agent.data.models import check_processor, device_note, resolve_device
        from profiling_agent.data.splits import draw_splits

        device, note = resolve_device(self.device), device_note(self.device, has_cuda=torch.cuda.is_available())
        loaded = self.load(context, device)
        check_processor(loaded.model, loaded.processor)
        config: Any = loaded.model.config
        names: dict[int, str] = config.id2label
        drawn = draw_splits(self.query(loaded), id2label=names, folder=context.folder, progress=context.progress)
        drawn = _choose_labels(drawn, loaded, context)
        if len(classes := np.unique(SplitImages(drawn.search.path).labels)) < 2:
            only = names.get(int(classes[0]))
            shared = "have the same labels" if only is None else f"are of one class ({only!r})"
            if unmapped := [match.dataset_label for match in drawn.matchings[0].matches if match.model_id is None]:
                shared += f", as {format_names(unmapped)} match none of the model's"
            raise AcquisitionError(
                f"all {drawn.search.num_images} images to search on {shared}, so that no loss of "
                "accuracy would show: give a split of several classes; in folders of images, each class has its own"
            )
        notes = tuple(filter(None, (*drawn.notes, *loaded.notes, note)))
        for text in notes:
            context.progress(text, 0, 0)

        splits: dict[str, Any] = {}
        for name in ("calibration", "search", "heldout", "recovery"):
            if (split := getattr(drawn, name)) is not None:
                fields = {"name": name, "file": context.ref(split.path), "source_split": split.source_split}
                fields |= {"num_images": split.num_images, "num_skipped": split.num_skipped}
                splits[name] = schemas.SplitInfo.model_validate(fields)
        source = schemas.ModelSource(
            name=loaded.source, revision=loaded.revision, architecture=type(loaded.model).__name__, device=device
        )
        return schemas.Acquired(source=source, labels=drawn.matchings[0].matches, notes=notes, **splits)


def _choose_labels(drawn: "DrawnSplits", loaded: "LoadedModel", context: JobContext) -> "DrawnSplits":
    """Label the images by the matching that fits the model's predictions on the calibration images.

    Raises:
        AcquisitionError: the predictions don't decide between matchings.
    """
    import torch

    if len(drawn.matchings) == 1:
        return drawn
    context.progress(f"labels fit in {len(drawn.matchings)} ways, of which the model's answers choose one", 0, 0)
    split, device = SplitImages(drawn.calibration.path), next(loaded.model.parameters()).device
    with torch.inference_mode(), tempfile.TemporaryDirectory(dir=context.folder) as folder:
        write_prepared(Path(folder), split, range(len(split)), loaded.processor)
        logits = [
            loaded.model(pixel_values=pixels.to(device)).logits.cpu().numpy()
            for pixels, _ in iter_batches(PreparedImages([Path(folder)]), batch_size=32)
        ]
    predicted = answers_of(np.concatenate(logits), split.labels).predicted
    chosen, note = choose_matching(drawn.matchings, predicted, split.labels)
    if chosen != drawn.matchings[0]:
        for part in filter(None, (drawn.calibration, drawn.search, drawn.heldout, drawn.recovery)):
            relabel_split(part.path, drawn.matchings[0].becomes(chosen))
    return replace(drawn, matchings=(chosen,), notes=(note, *drawn.notes))


class MatchedLabels(schemas.Record):
    """Match of a data set's labels with a model's classes."""

    labels: tuple[schemas.LabelMatch, ...]


class MatchLabelsTask(SourceTask[MatchedLabels]):
    """Check that a model and a data set can be loaded and match, before images are drawn."""

    def run(self, context: JobContext) -> MatchedLabels:
        """Open the model and the data set, and match their classes."""
        from profiling_agent.data.dataset import choose_columns, open_data
        from profiling_agent.data.models import check_processor

        loaded = self.load(context, "cpu")
        check_processor(loaded.model, loaded.processor)
        config: Any = loaded.model.config
        with quiet(), tempfile.TemporaryDirectory() as cache:
            data = open_data(self.query(loaded), cache=Path(cache), progress=context.progress)
            return MatchedLabels(labels=choose_columns(data, config.id2label).matchings[0].matches)


class ResolvedShape(schemas.Record):
    """The model's input shape, verified by a forward pass, and the baseline saved as an artifact of ours."""

    input: schemas.InputSpec
    baseline: schemas.ArtifactRef
    device: str


class ResolveShapeTask(ModelTask[ResolvedShape]):
    """Find the input shape of a model, or verify the `stated` one, and save the model with it."""

    device: Device = "auto"
    stated: schemas.InputSpec | None = None

    def run(self, context: JobContext) -> ResolvedShape:
        """Find the input shape; save the baseline with it."""
        from profiling_agent.data.models import resolve_device, resolve_input_shape, verify
        from profiling_agent.runtimes.torch_artifact import save_model

        loaded, folder = self.load(context, self.device), context.folder / "model"
        model, processor = loaded.model, loaded.processor
        spec = self.stated or resolve_input_shape(model, processor)
        if self.stated is not None:
            verify(model, spec)
        source: dict[str, Any] = {"base_model": self.model, "base_revision": loaded.revision}
        save_model(model.cpu(), folder, spec=spec, processor=processor, **source)
        return ResolvedShape(input=spec, baseline=context.ref(folder), device=resolve_device(self.device))


class SurveyShapeTask(ModelTask[schemas.ShapeFacts]):
    """Apply every rule for a model's input shape, and verify each result by the model."""

    device: Device = "auto"

    def run(self, context: JobContext) -> schemas.ShapeFacts:
        """Gather what is known of the input shape."""
        from profiling_agent.data.models import survey

        loaded = self.load(context, self.device)
        return survey(loaded.model, loaded.processor)


class PruneTask(Task[schemas.PrunedModel]):
    """Cut units of the unpruned model, and by default compensate without training.

    `keep` has the kept channels or heads by unit name; for other units the weights decide.
    """

    reads = (("calibration", "baseline"),)
    baseline: schemas.ArtifactRef
    cuts: tuple[schemas.Cut, ...]
    keep: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    calibration: schemas.SplitInfo
    compensate: bool = True
    batch_size: int = 32
    device: str = "cpu"

    def run(self, context: JobContext) -> schemas.PrunedModel:
        """Cut the units, pass the gates, compensate, save the candidate."""
        from profiling_agent.lib.inference import quick_products
        from profiling_agent.pruning.compensation import compensate
        from profiling_agent.pruning.prune import NUM_GATE_IMAGES, prune_model

        dense, spec = context.load(self.baseline, self.device), context.recipe(self.baseline).input
        read_batches = partial(iter_batches, context.images("calibration"), batch_size=self.batch_size)
        images, _ = next(read_batches(batch_size=NUM_GATE_IMAGES))
        pruned = prune_model(dense, self.cuts, spec=spec, images=images, keep=self.keep)
        model, effect = pruned.model, dict[str, Any]()
        if self.compensate:
            with quick_products():
                compensated = compensate(
                    dense,
                    model,
                    self.cuts,
                    pruned.keep,
                    read_batches,
                    progress=context.progress,
                )
            model = compensated.model
            effect: dict[str, Any] = {
                "kl": compensated.kl_after,
                "kl_uncompensated": compensated.kl_before,
                "compensation": compensated.steps,
                "compensation_note": compensated.note,
            }
        saved = context.save_derived(model, self.baseline, cuts=self.cuts)
        return schemas.PrunedModel(model=saved, cuts=self.cuts, **effect)


class RecoverTask(Task[schemas.RecoveredModel]):
    """Train a pruned float32 model to match the unpruned one's logits, judged on calibration images.

    `batch_size` is for training and isn't the request's: with a batch of 1 or 4096 the learning rate would be wrong.
    """

    # A hundred epochs may take a day.
    timeout_s = 24 * HOUR
    passes = 1_000_000
    reads = (("recovery", "baseline"), ("calibration", "baseline"))
    model: schemas.ArtifactRef
    baseline: schemas.ArtifactRef
    recovery: schemas.SplitInfo
    calibration: schemas.SplitInfo
    epochs: int
    seed: int
    batch_size: int = 32
    device: str = "cpu"

    def run(self, context: JobContext) -> schemas.RecoveredModel:
        """Recover, judged on the images that compensation wasn't fitted to; save what was recovered."""
        from profiling_agent.lib.inference import quick_products
        from profiling_agent.pruning.compensation import Calibration, recover

        dense, pruned = (context.load(ref, self.device) for ref in (self.baseline, self.model))
        read_batches = partial(iter_batches, context.images("calibration"), batch_size=self.batch_size)
        with quick_products():
            recovered = recover(
                dense,
                pruned,
                partial(shuffled_batches, context.images("recovery"), batch_size=self.batch_size, seed=self.seed),
                Calibration(dense, read_batches).judged,
                epochs=self.epochs,
                progress=context.progress,
            )
        return schemas.RecoveredModel(
            model=self.model if recovered.model is pruned else context.save_derived(recovered.model, self.model),
            epochs_run=recovered.epochs_run,
            kl_before=recovered.kl_before,
            kl_after=recovered.kl_after,
            stopped=recovered.stopped,
        )


class TuneTask(Task[schemas.Tuned]):
    """Measure the KL of quantizing all layers to int8, and each by itself, on calibration images."""

    reads = (("calibration", "model"),)
    model: schemas.ArtifactRef
    scheme: Literal["dynamic", "static"]
    calibration: schemas.SplitInfo
    latency_shares: dict[str, float] = Field(default_factory=dict, description="of the layers' time, by layer name")
    batch_size: int = 32

    def run(self, context: JobContext) -> schemas.Tuned:
        """Measure what int8 costs the model, and each of its layers."""
        from profiling_agent.lib.inference import quick_products
        from profiling_agent.quantization.quantize import measure_quantization_sensitivity

        model = context.load(self.model)
        images = (pixels for pixels, _ in iter_batches(context.images("calibration"), batch_size=self.batch_size))
        with quick_products():
            kl, layers, num_images = measure_quantization_sensitivity(
                model, images, self.scheme, self.latency_shares, progress=context.progress
            )
        return schemas.Tuned(layers=layers, kl=kl, num_images=num_images)


class ExportTask(Task[schemas.ArtifactRef]):
    """Export a float32 model to ONNX, for the runtimes that read it; isolated, because exporters crash."""

    timeout_s = HOUR / 2
    uses_runtimes = True
    isolated: bool = True
    model: schemas.ArtifactRef

    def run(self, context: JobContext) -> schemas.ArtifactRef:
        """Write a float32 model as ONNX; return the file's reference."""
        from profiling_agent.runtimes.onnx_export import export_onnx

        path = context.folder / "model.onnx"
        export_onnx(context.load(self.model), path, spec=context.recipe(self.model).input)
        return context.ref(path)


class DeployTask(Task[schemas.DeployedModel]):
    """Make one deployment of a float32 model; isolate any but eager torch: converters crash and hang."""

    timeout_s = HOUR / 2
    uses_runtimes = True
    reads = (("calibration", "model"),)
    model: schemas.ArtifactRef
    deployment: schemas.Deployment
    calibration: schemas.SplitInfo
    onnx: schemas.ArtifactRef | None = Field(
        default=None, description="the model as ONNX, for the runtimes that read it"
    )
    batch_size: int
    device: str = "cpu"

    def run(self, context: JobContext) -> schemas.DeployedModel:
        """Bring a float32 model into a deployment, save it, open it again, and see how far it is from its parent."""
        import torch

        from profiling_agent.lib.inference import quick_products
        from profiling_agent.lib.modules import logits_of, mean_kl, relative_distance
        from profiling_agent.runtimes.torch_artifact import read_source, save_deployed

        batches = context.images("calibration").batches(self.batch_size, limit=MAX_CALIBRATION)
        images = np.concatenate([pixel_values for pixel_values, _ in batches])
        parent, onnx = context.path(self.model), context.path(self.onnx) if self.onnx else None
        source = read_source(parent, images, batch_size=self.batch_size, onnx=onnx, device=self.device)
        folder, num_threads = context.folder / "model", available_threads()
        # In batches of the same size, so that equal models have equal logits.
        compared = torch.from_numpy(source.calibration[:MAX_COMPARED]).split(self.batch_size)
        with quick_products():
            expected = torch.cat([logits_of(source.module, batch) for batch in compared]).double()
        context.progress(f"converting to {self.deployment.name}", 0, 0)
        started = time.perf_counter()
        recipe = save_deployed(source, self.deployment, folder, num_threads=num_threads)
        seconds = time.perf_counter() - started
        session = artifact.open_session(folder, device=self.device, num_threads=num_threads)
        logits = torch.cat([torch.from_numpy(session.run(batch.numpy())) for batch in compared]).double()
        if not logits.isfinite().all():
            raise QuantizationError("on calibration images the logits aren't finite in this deployment: leave it out")
        artifact.check_golden(session.run, folder, recipe)
        return schemas.DeployedModel(
            model=context.ref(folder),
            deployment=self.deployment,
            layers=tuple(layer.name for layer in recipe.quantized),
            distance=relative_distance(logits, expected),
            # Rounding makes it slightly negative if both are equal.
            kl=max(0.0, mean_kl(expected, logits, source.module)),
            seconds=seconds,
        )
