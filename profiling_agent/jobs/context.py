"""Context of a job: what its handler is given besides its task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from profiling_agent.artifacts.recipe import RECIPE
from profiling_agent.files import file_sha256
from profiling_agent.progress import Progress
from profiling_agent.records import ArtifactRef
from profiling_agent.workspace import Workspace


@dataclass(frozen=True)
class JobContext:
    """Where one job works: it writes under `folder`, which becomes `final` (relative to `root`) when it is done."""

    root: Path
    folder: Path
    final: str
    progress: Progress

    def path(self, ref: ArtifactRef) -> Path:
        """Return where an artifact of an earlier job lies; ArtifactError where that isn't in the run folder."""
        return Workspace(self.root).path(ref)

    def ref(
        self, path: Path, kind: Literal["model", "profile", "trace", "predictions", "split", "onnx"]
    ) -> ArtifactRef:
        """Return the reference that `path`, under this job's folder, will have."""
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        return ArtifactRef(
            path=f"{self.final}/{path.relative_to(self.folder).as_posix()}",
            sha256=file_sha256(path / RECIPE if path.is_dir() else path),
            size_bytes=sum(file.stat().st_size for file in files),
            kind=kind,
        )
