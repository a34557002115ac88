"""Context of a job: its folders, the jobs that it needs, and a cache that the next job shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from profiling_agent.data.prepared import PreparedImages
from profiling_agent.lib.io import file_sha256
from profiling_agent.lib.progress import Progress
from profiling_agent.runtimes.artifact import RECIPE, model_bytes
from profiling_agent.schemas import ArtifactRef
from profiling_agent.workspace import Workspace


@dataclass(frozen=True)
class JobContext:
    """Context of one job, which writes under `folder`; that becomes `final` (relative to `root`) when it is done.

    `given` has the keys of the jobs that its task needs, by name. What a handler stores in `kept` is there for the next job
    of the process, if that is of the same kind.
    """

    root: Path
    folder: Path
    final: str
    progress: Progress
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    kept: dict[str, Any] = field(default_factory=dict[str, Any])

    def path(self, ref: ArtifactRef) -> Path:
        """Return the path of an earlier job's artifact; ArtifactError if that isn't in the run folder."""
        return Workspace(self.root).path(ref)

    def folders(self, name: str) -> list[Path]:
        """Return the folders of the jobs that the task needs under this name."""
        return [Workspace(self.root).jobs / key for key in self.given[name]]

    def images(self, name: str) -> PreparedImages:
        """Return the images that the task needs under this name; ArtifactError if they can't be read."""
        return PreparedImages(self.folders(name))

    def ref(
        self, path: Path, kind: Literal["model", "profile", "trace", "predictions", "split", "onnx"]
    ) -> ArtifactRef:
        """Return the reference that `path`, under this job's folder, will have."""
        return ArtifactRef(
            path=f"{self.final}/{path.relative_to(self.folder).as_posix()}",
            sha256=file_sha256(path / RECIPE if path.is_dir() else path),
            size_bytes=model_bytes(path) if path.is_dir() else path.stat().st_size,
            kind=kind,
        )
