"""Task: one kind of job, a record in and a record out, with its limits; and the context in which a child process runs it.

No torch here, nor where tasks are defined: `run` imports it. The parent of a run imports no torch, and a process that times a model only
what the model's runtime needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from profiling_agent.data.images import PreparedImages, SplitImages, write_prepared
from profiling_agent.lib.io import file_sha256, write_text
from profiling_agent.lib.logs import Progress
from profiling_agent.runtimes.artifact import PROCESSOR, RECIPE, Recipe, load_recipe, model_bytes, processor_text
from profiling_agent.schemas import ArtifactRef, Cut, Record, SplitInfo
from profiling_agent.workspace import Workspace

if TYPE_CHECKING:
    from torch import nn

ResultT = TypeVar("ResultT", bound=Record)
Device = Literal["auto", "cpu", "cuda"]
# Returns the path of an artifact.
Find = Callable[[ArtifactRef], Path]
HOUR = 3600.0


class Task(Record, Generic[ResultT]):
    """One job; an `isolated` one gets a process of its own and shares no memory, caches or crash with others.

    Its class variables say how it is run. The time limit is at least that of `passes` of the baseline over one image, several
    times what the job should need. With `sets_torch` the process sets torch's threads and seed first. A `spawned` job
    measures its own process, to which a fork's imports would add. A run waits a little for other programs before one that
    `is_timed`. Installing another runtime changes the keys of jobs that use them. `reads` has the fields of splits whose
    prepared images the job reads, each with the field of the model that they are prepared for.
    """

    timeout_s: ClassVar[float] = 4 * HOUR
    passes: ClassVar[int] = 10_000
    sets_torch: ClassVar[bool] = True
    spawned: ClassVar[bool] = False
    is_timed: ClassVar[bool] = False
    uses_runtimes: ClassVar[bool] = False
    reads: ClassVar[tuple[tuple[str, str], ...]] = ()

    isolated: bool = False

    @classmethod
    def result_type(cls) -> type[Record]:
        """Return the type of the result, the argument of `Task[...]`."""
        return next(args[0] for base in cls.__mro__ if (args := getattr(base, "__pydantic_generic_metadata__")["args"]))  # noqa: B009

    @classmethod
    def kind(cls) -> str:
        """Return the name that the keys of such jobs begin with."""
        return cls.__name__.removesuffix("Task").lower()

    def limit_s(self, pass_s: float | None = None) -> float:
        """Return the time limit in seconds, if the baseline takes `pass_s` for an image."""
        return max(self.timeout_s, self.passes * (pass_s or 0.0))

    def needs(self, find: Find) -> Mapping[str, tuple["Task[Any]", ...]]:
        """Return the jobs that are done before this one, by the names under which `run` finds their folders.

        They follow from the task and are no part of its key: once it has a result, they aren't needed.
        """
        splits = {name: (getattr(self, name), getattr(self, model)) for name, model in self.reads}
        return {name: prepared(split, find(model)) for name, (split, model) in splits.items() if split is not None}

    def run(self, context: "JobContext") -> ResultT:
        """Do the job in a child process, with files under the context's folder."""
        raise NotImplementedError


@dataclass(frozen=True)
class JobContext:
    """Context of one job, which writes under `folder`; that becomes `final` (relative to `root`) when it is done.

    `given` has the keys of the jobs that its task needs, by name.
    """

    root: Path
    folder: Path
    final: str
    progress: Progress
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def path(self, ref: ArtifactRef) -> Path:
        """Return the path of an earlier job's artifact; ArtifactError if that isn't in the run folder, RunError if it is missing."""
        return Workspace(self.root).path(ref)

    def images(self, name: str) -> PreparedImages:
        """Return the images that the task needs under this name; ArtifactError if they can't be read."""
        return PreparedImages([Workspace(self.root).jobs / key for key in self.given[name]])

    def recipe(self, ref: ArtifactRef) -> Recipe:
        """Return the recipe of a saved model; ArtifactError if a file is missing."""
        return load_recipe(self.path(ref))

    def load(self, ref: ArtifactRef, device: str = "cpu") -> "nn.Module":
        """Return a saved float32 model on a device; ArtifactError if it is damaged."""
        from profiling_agent.lib.modules import on_device
        from profiling_agent.runtimes.torch_artifact import load_module

        return on_device(load_module(self.path(ref)), device)

    def ref(self, path: Path) -> ArtifactRef:
        """Return the reference that `path`, under this job's folder, will have."""
        return ArtifactRef(
            path=f"{self.final}/{path.relative_to(self.folder).as_posix()}",
            sha256=file_sha256(path / RECIPE if path.is_dir() else path),
            size_bytes=model_bytes(path) if path.is_dir() else path.stat().st_size,
        )

    def save_derived(
        self, model: "nn.Module", source: ArtifactRef, *, cuts: tuple[Cut, ...] | None = None
    ) -> ArtifactRef:
        """Save a model made of the saved one, and return its reference; `cuts` default to the source's.

        Raises:
            ArtifactError: it doesn't load as it was saved, or `source` is damaged.
        """
        from profiling_agent.runtimes.torch_artifact import load_module, load_processor, save_model

        folder, origin = self.folder / "model", self.recipe(source)
        save_model(
            model.cpu(),
            folder,
            spec=origin.input,
            processor=load_processor(self.path(source)),
            base_model=origin.base_model,
            base_revision=origin.base_revision,
            cuts=origin.cuts if cuts is None else cuts,
        )
        load_module(folder)
        return self.ref(folder)


class PrepareTask(Task[Record]):
    """Decode and process the images of a shard, once for all jobs of a run that read it; `data.images` describes the file.

    `processor` is the text of the file that describes the image processor: models with the same one share the images.
    """

    split: SplitInfo
    shard: int = Field(ge=0)
    processor: str

    def run(self, context: JobContext) -> Record:
        """Write what the processor makes of the shard's images, and the processor next to it."""
        from profiling_agent.runtimes.torch_artifact import load_processor

        images, folder = SplitImages(context.path(self.split.file)), context.folder
        write_text(folder / PROCESSOR, self.processor)
        rows = self.split.rows(self.shard)
        write_prepared(folder, images, rows, load_processor(folder), progress=context.progress)
        return Record()


def prepared(split: SplitInfo, model: Path, shards: range | None = None) -> tuple[PrepareTask, ...]:
    """Return the jobs that prepare shards of a split, by default all, with the saved model's processor."""
    text = processor_text(model)
    return tuple(PrepareTask(split=split, shard=shard, processor=text) for shard in shards or split.shards())
