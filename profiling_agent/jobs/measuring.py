"""Tasks that measure: headline, profile, evaluation, held-out openings, races, memory and layer times.

Torch is imported only for its own runtimes.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from pydantic import Field

from profiling_agent import schemas
from profiling_agent.data.images import PreparedImages, SplitImages, iter_batches
from profiling_agent.errors import PruningError, RequestError
from profiling_agent.jobs.base import HOUR, Find, JobContext, Task, complexity_of, prepared
from profiling_agent.lib.io import cache_subfolder, read_record, write_text
from profiling_agent.lib.logs import Progress
from profiling_agent.lib.machine import available_threads, environment
from profiling_agent.measure import intervals, race, worker
from profiling_agent.processes.child import inherited
from profiling_agent.runtimes import artifact
from profiling_agent.runtimes.registry import ModelSession

PROFILE, WIDTHS = "profile.json", "widths.json"


class HeadlineTask(Task[schemas.Headline]):
    """Measure the latency and memory of a model in a process that does nothing else."""

    sets_torch = False
    isolated_timeout_s = HOUR / 2
    spawned = timed = uses_runtimes = True
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
    forward_passes: int


def _save_profile(profile: schemas.ModelProfile, context: JobContext) -> Profiled:
    path = context.folder / PROFILE
    write_text(path, profile.model_dump_json(indent=1))
    return Profiled(
        profile=context.ref(path, "profile"),
        params=profile.params,
        macs=profile.macs,
        latency_ms=profile.headline.latency.median_ms,
        peak_memory_bytes=profile.headline.peak_memory_bytes,
        forward_passes=profile.forward_passes,
    )


class ProfileTask(Task[Profiled]):
    """Time a model and its layers; with `times_widths` also each unit at each width."""

    timed = True
    model: schemas.ArtifactRef
    batch_size: int
    device: str
    headline: schemas.Headline
    times_widths: bool = False

    def run(self, context: JobContext) -> Profiled:
        """Profile the model; write profile.json and the chrome trace, and the latency table if requested."""
        from profiling_agent.lib.modules import random_batch
        from profiling_agent.profiling.profile import profile_model, time_units
        from profiling_agent.runtimes.torch_artifact import load_dequantized

        path, trace = context.path(self.model), context.folder / "trace.json.gz"
        model, recipe = context.load(self.model, self.device), context.recipe(self.model)
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
        if self.times_widths:
            batch = random_batch(profile.input, self.batch_size).to(self.device)
            table = time_units(model, profile.units, batch, progress=context.progress)
            write_text(context.folder / WIDTHS, table.model_dump_json())
        return _save_profile(profile.model_copy(update={"trace": context.ref(trace, "trace")}), context)


class EvidenceTask(Task[Profiled]):
    """Add the KL divergence after pruning each unit to a profile; nothing is timed, so other jobs may run next to it."""

    passes = 100_000
    model: schemas.ArtifactRef
    batch_size: int
    device: str
    headline: schemas.Headline
    calibration: schemas.SplitInfo
    seed: int = 0
    cache: bool = True

    def needs(self, find: Find) -> dict[str, tuple[Task[Any], ...]]:
        """Return the job that makes the profile and latency table, and those that prepare calibration images."""
        inputs = self.model_dump(include={"model", "batch_size", "device", "headline"})
        profile = ProfileTask.model_validate({**inputs, "times_widths": True})
        return {"profile": (profile,), "calibration": prepared(self.calibration, find(self.model))}

    def run(self, context: JobContext) -> Profiled:
        """Write the profile again, with the evidence on the model's units, or why there is none."""
        from profiling_agent.profiling.profile import LatencyTable

        (folder,) = context.folders("profile")
        profile = read_record(schemas.ModelProfile, folder / PROFILE)
        evidence, note = self._evidence(context, profile, read_record(LatencyTable, folder / WIDTHS))
        return _save_profile(profile.model_copy(update={"evidence": evidence, "evidence_note": note}), context)

    def _evidence(
        self, context: JobContext, profile: schemas.ModelProfile, table: Any
    ) -> tuple[schemas.Evidence | None, str | None]:
        from profiling_agent.lib.inference import quick_products
        from profiling_agent.profiling import evidence as stored

        path, cached_at = context.path(self.model), None
        if self.cache and (cache := cache_subfolder("evidence")) is not None:
            images = self.calibration
            depends_on = {
                "model": self.model.sha256,
                "images": [images.file.sha256, images.num_images, artifact.processor_text(path)],
                "requested": [self.batch_size, self.device, self.seed],
                "environment": environment(self.device).model_dump(mode="json", exclude={"runtimes"}),
            }
            cached_at = stored.evidence_path(cache, depends_on)
            if (cached := stored.read_evidence(cached_at)) is not None:
                context.progress("evidence of an earlier run is used", 0, 0)
                # Only its KLs: units were timed again, so that evidence from a busy machine can be cached too.
                return stored.with_latencies(cached, profile.units, table), None
        try:
            with quick_products():
                evidence = stored.measure_sensitivity(
                    context.load(self.model, self.device),
                    profile.units,
                    partial(iter_batches, context.images("calibration"), batch_size=self.batch_size),
                    table=table,
                    seed=self.seed,
                    progress=context.progress,
                )
        except PruningError as error:
            return None, str(error)
        if cached_at is not None:
            stored.store_evidence(cached_at, evidence)
        return evidence, None


class Evaluated(schemas.Record):
    """A model's predictions on a shard, and its footprint."""

    footprint: schemas.Footprint
    predictions: schemas.Predictions


class _OpenedModel(NamedTuple):
    session: ModelSession
    recipe: artifact.Recipe
    footprint: schemas.Footprint


class EvaluateTask(Task[Evaluated]):
    """Evaluate a model on one shard of a split; isolate any runtime but eager torch, as it may crash.

    Request several shards of a model together (`Jobs.run_each`): they share one process, whose start takes as long as
    hundreds of images, and the opened model, which some runtimes compile for minutes. Only missing shards are done.
    """

    sets_torch = False
    uses_runtimes = True
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
        images, path, kept = context.images("images"), context.path(self.model), context.kept
        name = f"{self.model.path} {self.model.sha256} {self.device}"
        opened: _OpenedModel | None = kept.get(name)
        if is_new := opened is None:
            # Free the previous model first: memory may not hold two large ones.
            kept.clear()
            opened = self._open(context)
        quick: Any = nullcontext()
        if opened.recipe.deployment.runtime == "eager":
            from profiling_agent.lib.inference import quick_products

            quick = quick_products()
        with quick:
            answers = answer(opened.session, images, self.batch_size, context.progress)
        if is_new:
            # After the images: a runtime that compiles for each batch size then has a larger one for the two golden images.
            artifact.check_golden(opened.session.run, path, opened.recipe)
            kept[name] = opened
        out = context.folder / "predictions.safetensors"
        intervals.write_predictions(out, answers)
        result = schemas.Predictions(
            split=self.split.name,
            num_images=len(answers.true),
            num_correct=int(answers.right.sum()),
            files=(context.ref(out, "predictions"),),
        )
        return Evaluated(footprint=opened.footprint, predictions=result)

    def _open(self, context: JobContext) -> _OpenedModel:
        path = context.path(self.model)
        recipe = artifact.load_recipe(path, verify=True)
        session = artifact.open_session(path, device=self.device, num_threads=available_threads())
        if recipe.deployment == schemas.Deployment() and self.device == "cpu":
            from profiling_agent.lib.inference import fuse_norms_
            from profiling_agent.lib.modules import random_batch
            from profiling_agent.runtimes.torch_session import TorchSession

            assert isinstance(session, TorchSession), "eager float32 is torch's"
            fuse_norms_(session.module, random_batch(recipe.input, 2))
        if (counts := recipe.counts) is None:
            from profiling_agent.quantization.layers import parameter_bytes

            params, macs = complexity_of(path)
            held = parameter_bytes(context.load(self.model))
            counts = artifact.ParentCounts(params=params, macs=macs, parameter_bytes=held)
        footprint = schemas.Footprint(**counts.model_dump(), size_bytes=artifact.model_bytes(path))
        return _OpenedModel(session, recipe, footprint)


def answer(session: ModelSession, images: PreparedImages, batch_size: int, progress: Progress) -> intervals.Answers:
    """Return a session's answers for all images; RequestError if there are none."""
    answers, done = list[intervals.Answers](), 0
    for pixel_values, true in images.batches(batch_size):
        answers.append(intervals.answers_of(session.run(pixel_values), true))
        done += len(true)
        progress("evaluating", done, len(images))
    if not answers:
        raise RequestError("there are 0 images to evaluate on: raise num_samples")
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


class RaceTask(Task[schemas.Race]):
    """Time models in turns in one session, to choose among them; the first is the baseline."""

    sets_torch = False
    timed = uses_runtimes = True
    isolated: bool = True
    entries: tuple[tuple[schemas.Variant, schemas.ArtifactRef], ...]
    batch_size: int
    device: str
    seed: int
    pass_s: float = Field(default=0.0, ge=0, description="what the baseline takes for a batch: a hang takes far longer")

    def run(self, context: JobContext) -> schemas.Race:
        """Let the models take turns."""
        return race.race_once(self.entries, self._conditions(context), progress=context.progress)

    def _conditions(self, context: JobContext, *, reads_memory: bool = False) -> race.Conditions:
        return race.Conditions(
            root=context.root,
            batch_size=self.batch_size,
            device=self.device,
            seed=self.seed,
            pass_s=self.pass_s,
            server=None if reads_memory else inherited(),
        )


class SessionTask(RaceTask):
    """Time one of several sessions, each in a new process, that together estimate speedups, and memory if requested."""

    number: int
    reads_memory: bool

    def run(self, context: JobContext) -> schemas.Race:
        """Hold one session of an estimate."""
        conditions = self._conditions(context, reads_memory=self.reads_memory)
        return race.run_one_session(self.entries, conditions, self.number, progress=context.progress)


class MemoryTask(Task[schemas.MemoryUse]):
    """Measure the peak memory of a process that only loads and runs a model."""

    sets_torch = False
    isolated_timeout_s = HOUR / 2
    uses_runtimes = True
    isolated: bool = True
    model: schemas.ArtifactRef
    batch_size: int
    device: str = "cpu"

    def run(self, context: JobContext) -> schemas.MemoryUse:
        """Start such a process and read its memory."""
        size, device = self.batch_size, self.device
        peak_bytes = race.memory_use(self.model, root=context.root, batch_size=size, device=device)
        return schemas.MemoryUse(peak_bytes=peak_bytes)
