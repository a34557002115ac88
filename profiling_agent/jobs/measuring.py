"""Tasks that measure: headline, profile, evaluation, held-out openings, races, memory and layer times.

Torch is imported only for its own runtimes.
"""

from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from profiling_agent import schemas
from profiling_agent.data.images import PreparedImages, SplitImages, iter_batches
from profiling_agent.errors import PruningError
from profiling_agent.jobs.base import HOUR, Find, JobContext, ResultT, Task, prepared
from profiling_agent.lib.io import FileRefusedError, cache_folder, read_record, write_text
from profiling_agent.lib.logs import Progress
from profiling_agent.lib.machine import available_threads, environment
from profiling_agent.measure import intervals, race, worker
from profiling_agent.processes.child import inherited
from profiling_agent.runtimes import artifact
from profiling_agent.runtimes.registry import ModelSession

PROFILE = "profile.json"


class RuntimeTask(Task[ResultT]):
    """A job on models in their runtimes, which set torch if they use it."""

    timeout_s = HOUR
    sets_torch = False
    uses_runtimes = True


class HeadlineTask(RuntimeTask[schemas.Headline]):
    """Measure the latency and memory of a model in a process that does nothing else."""

    spawned = True
    is_timed = True
    isolated: bool = True
    model: schemas.ArtifactRef
    batch_size: int
    device: str

    def run(self, context: JobContext) -> schemas.Headline:
        """Time the model and its memory."""
        path = context.path(self.model)
        session = artifact.open_session(path, device=self.device, num_threads=available_threads())
        spec = context.recipe(self.model).input
        return worker.measure_headline(session, spec, batch_size=self.batch_size)


class Profiled(schemas.Record):
    """Reference to the full profile, and its totals."""

    profile: schemas.ArtifactRef
    params: int
    macs: int
    latency_ms: float
    peak_memory_bytes: int


class ProfileTask(Task[Profiled]):
    """Time a model and its layers; with `calibration` images also each unit at each width, and the KL divergence after pruning it.

    An earlier `profile` of the model is only added to.
    """

    passes = 100_000
    is_timed = True
    reads = (("calibration", "model"),)
    model: schemas.ArtifactRef
    batch_size: int
    device: str
    headline: schemas.Headline
    profile: schemas.ArtifactRef | None = None
    calibration: schemas.SplitInfo | None = None
    seed: int = 0
    cache: bool = True

    def run(self, context: JobContext) -> Profiled:
        """Profile the model; write profile.json and the chrome trace."""
        from profiling_agent.lib.modules import random_batch
        from profiling_agent.profiling.profile import profile_model, time_units
        from profiling_agent.runtimes.torch_artifact import load_dequantized

        path, trace = context.path(self.model), context.folder / "trace.json.gz"
        model, recipe = context.load(self.model, self.device), context.recipe(self.model)
        if self.profile is not None:
            profile = read_record(schemas.ModelProfile, context.path(self.profile))
        else:
            profile = profile_model(
                model,
                recipe.input,
                batch_size=self.batch_size,
                device=self.device,
                headline=self.headline,
                size_bytes=artifact.model_bytes(path),
                architecture=recipe.architecture,
                skeleton=load_dequantized(path),
                trace_path=trace,
                progress=context.progress,
            )
            profile = profile.model_copy(update={"trace": context.ref(trace)})
        if self.calibration is not None:
            batch = random_batch(profile.input, self.batch_size).to(self.device)
            table = time_units(model, profile.units, batch, progress=context.progress)
            del model
            evidence, note = self._evidence(context, self.calibration, profile, table)
            profile = profile.model_copy(update={"evidence": evidence, "evidence_note": note})
        write_text(context.folder / PROFILE, profile.model_dump_json(indent=1))
        return Profiled(
            profile=context.ref(context.folder / PROFILE),
            params=profile.params,
            macs=profile.macs,
            latency_ms=profile.headline.latency.median_ms,
            peak_memory_bytes=profile.headline.peak_memory_bytes,
        )

    def _evidence(
        self, context: JobContext, images: schemas.SplitInfo, profile: schemas.ModelProfile, table: Any
    ) -> tuple[schemas.Evidence | None, str | None]:
        """Return the evidence on the model's units, or why there is none."""
        from profiling_agent.lib.inference import quick_products
        from profiling_agent.profiling import evidence as stored

        path, cached_at = context.path(self.model), None
        if self.cache:
            depends_on = {
                "model": self.model.sha256,
                "images": [images.file.sha256, images.num_images, artifact.processor_text(path)],
                "requested": [self.batch_size, self.device, self.seed],
                "environment": environment(self.device).model_dump(mode="json", exclude={"runtimes"}),
            }
            # A user without a home folder has no cache.
            with suppress(FileRefusedError):
                cached_at = stored.evidence_path(cache_folder() / "evidence", depends_on)
        if cached_at is not None and (cached := stored.read_evidence(cached_at)) is not None:
            context.progress("evidence of an earlier run is used", 0, 0)
            # Only its KLs: units were timed again, so that evidence from a busy machine can be cached too.
            return stored.with_latencies(cached, profile.units, table), None
        try:
            with quick_products():
                evidence = stored.measure_sensitivity(
                    context.load(self.model, self.device),
                    profile.units,
                    partial(iter_batches, context.images("calibration"), batch_size=self.batch_size),
                    seed=self.seed,
                    progress=context.progress,
                )
        except PruningError as error:
            return None, str(error)
        if cached_at is not None:
            stored.store_evidence(cached_at, evidence)
        return stored.with_latencies(evidence, profile.units, table), None


class Evaluated(schemas.Record):
    """A model's predictions on a shard, and its footprint."""

    footprint: schemas.Footprint
    predictions: schemas.Predictions


class _OpenedModel(NamedTuple):
    session: ModelSession
    recipe: artifact.Recipe
    footprint: schemas.Footprint


# The model that the last job of this process evaluated, for its next shard.
_opened: dict[tuple[Path, str, str], _OpenedModel] = {}


class EvaluateTask(RuntimeTask[Evaluated]):
    """Evaluate a model on one shard of a split; isolate any runtime but eager torch, as it may crash.

    Request several shards of a model together (`Jobs.run_each`): they share one process, whose start takes as long as
    hundreds of images, and the opened model, which some runtimes compile for minutes. Only missing shards are done.
    """

    model: schemas.ArtifactRef
    split: schemas.SplitInfo
    shard: int = Field(ge=0)
    batch_size: int
    device: str

    def needs(self, find: Find) -> dict[str, tuple[Task[Any], ...]]:
        """Return the job that prepares the shard's images."""
        return {"images": prepared(self.split, find(self.model), range(self.shard, self.shard + 1))}

    def run(self, context: JobContext) -> Evaluated:
        """Run the model over the shard; count what it takes. The next shard of the same model finds it opened."""
        images, path = context.images("images"), context.path(self.model)
        key = path, self.model.sha256, self.device
        if key not in _opened:
            # Free the previous model first: memory may not hold two large ones.
            _opened.clear()
            _opened[key] = self._open(context)
        opened, quick = _opened[key], nullcontext()
        if opened.recipe.deployment.runtime == "eager":
            from profiling_agent.lib.inference import quick_products

            quick = quick_products()
        with quick:
            is_multi_label = opened.recipe.is_multi_label
            answers = answer(opened.session, images, self.batch_size, context.progress, multi_label=is_multi_label)
        # After the images: a runtime that compiles for each batch size then has a larger one for the two golden images.
        artifact.check_golden(opened.session.run, path, opened.recipe)
        out = context.folder / "predictions.safetensors"
        intervals.write_predictions(out, answers)
        result = schemas.Predictions(
            split=self.split.name,
            num_images=len(answers.true),
            num_correct=int(answers.right.sum()),
            files=(context.ref(out),),
        )
        return Evaluated(footprint=opened.footprint, predictions=result)

    def _open(self, context: JobContext) -> _OpenedModel:
        path = context.path(self.model)
        recipe = artifact.load_recipe(path, verify=True)
        session = artifact.open_session(path, device=self.device, num_threads=available_threads())
        if (footprint := recipe.footprint) is None:
            from profiling_agent.lib.costs import count_complexity
            from profiling_agent.quantization.layers import parameter_bytes

            model = context.load(self.model)
            rows = count_complexity(model, recipe.input).values()
            footprint = schemas.Footprint(
                params=sum(row.params for row in rows),
                macs=sum(row.macs for row in rows),
                parameter_bytes=parameter_bytes(model),
                size_bytes=artifact.model_bytes(path),
            )
        return _OpenedModel(session, recipe, footprint)


def answer(
    session: ModelSession, images: PreparedImages, batch_size: int, progress: Progress, *, multi_label: bool = False
) -> intervals.Answers:
    """Return a model's answers for all images."""
    answers, done = list[intervals.Answers](), 0
    for pixel_values, true in images.batches(batch_size):
        logits = session.run(pixel_values)
        answers.append(intervals.answers_of(logits, true, multi_label=multi_label))
        done += len(true)
        progress("evaluating", done, len(images))
    return intervals.concatenate(answers)


class OpenHeldoutTask(Task[schemas.Opening]):
    """Record that a candidate, made of the baseline, is tested on held-out images; a resumed run records it once."""

    sets_torch = False
    baseline: schemas.ArtifactRef
    candidate: schemas.ArtifactRef
    heldout: schemas.SplitInfo
    fresh: str | None = None

    def run(self, context: JobContext) -> schemas.Opening:
        """Write it into the user's ledger."""
        baseline = context.recipe(self.baseline)
        images = SplitImages(context.path(self.heldout.file))
        encoded = (images.encoded(row) for row in range(len(images)))
        weights = baseline.files[baseline.model_files[0]]
        return intervals.note_opening(weights, self.candidate.sha256, encoded, self.fresh)


class RaceTask(RuntimeTask[schemas.Race]):
    """Time models in turns in one session, to choose among them; the first is the baseline."""

    is_timed = True
    isolated: bool = True
    models: tuple[schemas.ArtifactRef, ...]
    batch_size: int
    device: str
    seed: int
    batch_s: float = Field(
        default=0.0, ge=0, description="what the baseline takes for a batch: a hang takes far longer"
    )

    def run(self, context: JobContext) -> schemas.Race:
        """Let the models take turns."""
        return race.race_once(self.models, self._conditions(context), progress=context.progress)

    def _conditions(self, context: JobContext) -> race.Conditions:
        return race.Conditions(
            root=context.root,
            batch_size=self.batch_size,
            device=self.device,
            seed=self.seed,
            batch_s=self.batch_s,
            server=inherited(),
        )


class SessionTask(RaceTask):
    """Time one of several sessions, each in a new process, that together estimate speedups."""

    number: int

    def run(self, context: JobContext) -> schemas.Race:
        """Hold one session of an estimate."""
        return race.run_one_session(self.models, self._conditions(context), self.number, progress=context.progress)


class MemoryTask(RuntimeTask[schemas.MemoryUse]):
    """Measure the peak memory of a process that only loads and runs a model."""

    isolated: bool = True
    model: schemas.ArtifactRef
    batch_size: int
    device: str = "cpu"

    def run(self, context: JobContext) -> schemas.MemoryUse:
        """Start such a process and read its memory."""
        size, device = self.batch_size, self.device
        peak_bytes = race.memory_use(self.model, root=context.root, batch_size=size, device=device)
        return schemas.MemoryUse(peak_bytes=peak_bytes)
