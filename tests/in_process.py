"""Jobs done in the test's own process: what a task needs first, as the runner has it, then the job itself; and what tasks read."""

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zoo
from PIL import Image

from profiling_agent.data.images import write_rows
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.tasks import JobContext, Task
from profiling_agent.lib.io import file_sha256, write_text
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.runtimes.torch_artifact import save_model
from profiling_agent.schemas import ArtifactRef, InputSpec, SplitInfo
from profiling_agent.workspace import Workspace


@contextmanager
def opened(root: Path, **given: Any) -> Iterator[Jobs]:
    """Open the jobs of a run folder, created where it is missing; end their processes afterwards."""
    workspace = Workspace(root)
    workspace.jobs.mkdir(parents=True, exist_ok=True)
    with closing(Jobs(workspace, **given)) as jobs:
        yield jobs


def drawn(root: Path, name: Any, num_images: int, *, seed: int = 0, side: int = 32) -> SplitInfo:
    """Write images of noise, of any of the zoo's classes, as the split of this name."""
    rng, path, images = np.random.default_rng(seed), root / f"{name}.arrow", list[bytes]()
    for _ in range(num_images):
        held = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(held, format="PNG")
        images.append(held.getvalue())
    write_rows(path, zip(images, rng.integers(0, len(zoo.LABELS), num_images).tolist(), strict=True))
    file = ArtifactRef(path=path.name, sha256=file_sha256(path), size_bytes=path.stat().st_size)
    return SplitInfo(name=name, source_split="train", num_images=num_images, file=file)


def saved(
    root: Path, name: str, model: Any, *, spec: InputSpec = zoo.SPEC, processor: Any = None, cuts: Any = ()
) -> ArtifactRef:
    """Save a model, by default of the zoo's input, in a folder of this name."""
    folder = root / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    processor = processor or zoo.processor()
    save_model(model, folder, spec=spec, processor=processor, base_model="zoo", cuts=cuts)
    return ArtifactRef(path=name, sha256=file_sha256(folder / "recipe.json"), size_bytes=1)


def given(task: Task[Any], root: Path) -> dict[str, tuple[str, ...]]:
    """Do what a task needs, where it isn't there; return the keys by name."""
    needs = task.needs(lambda ref: root / ref.path)
    return {name: tuple(_done(need, root) for need in needed) for name, needed in needs.items()}


def _done(task: Task[Any], root: Path) -> str:
    if not (root / "jobs" / job_key(task)).exists():
        run(task, root, job_key(task))
    return job_key(task)


def context(task: Task[Any], root: Path, name: str, progress: Progress = silent) -> JobContext:
    """Return where the job called `name` is done."""
    folder = root / "jobs" / name
    folder.mkdir(parents=True)
    return JobContext(root, folder, f"jobs/{name}", progress, given(task, root))


def run(task: Task[Any], root: Path, name: str, progress: Progress = silent) -> Any:
    """Do a job as `name`, whatever there is of it; return its result."""
    job = context(task, root, name, progress)
    result = task.run(job)
    write_text(job.folder / "result.json", result.model_dump_json())
    return result
