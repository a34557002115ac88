"""A scratch run folder in which benchmarks bring models into deployments, by the product's own jobs."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from profiling_agent.data.images import write_rows
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.runner import Jobs
from profiling_agent.lib.io import file_sha256
from profiling_agent.runtimes import registry
from profiling_agent.runtimes.artifact import model_bytes
from profiling_agent.runtimes.registry import recommend
from profiling_agent.runtimes.torch_artifact import save_model
from profiling_agent.schemas import RUNTIMES, ArtifactRef, Cut, DeployedModel, Deployment, InputSpec, SplitInfo
from profiling_agent.search.deployments import Deployer
from profiling_agent.workspace import Workspace


@dataclass(frozen=True)
class Made:
    """A deployment of a model, or why there is none."""

    deployment: Deployment
    deployed: DeployedModel | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """Return the deployment's name."""
        return self.deployment.name


def deployments() -> list[Deployment]:
    """Return every deployment whose runtime is installed, each for all layers; prints what isn't."""
    found: list[Deployment] = []
    for name in RUNTIMES:
        if line := registry.missing(name):
            print(f"{name} is left out: {line}", flush=True)
            continue
        schemes = registry.runtime(name).schemes("cpu")
        found += [Deployment(runtime=name, scheme=scheme, recommendations=recommend(scheme)) for scheme in schemes]
    return found


class Workshop:
    """One scratch folder; a context manager that ends its worker."""

    def __init__(self, root: Path) -> None:
        """Work in `root`."""
        (root / "jobs").mkdir(parents=True, exist_ok=True)
        self.root = root
        self.jobs = Jobs(Workspace(root))

    def __enter__(self) -> "Workshop":
        return self

    def __exit__(self, *_: object) -> None:
        self.jobs.close()

    def add(
        self, model: nn.Module, name: str, *, spec: InputSpec, processor: Any, cuts: Sequence[Cut] = ()
    ) -> ArtifactRef:
        """Save a float32 model; return the reference to it."""
        folder = self.root / name
        save_model(model, folder, spec=spec, processor=processor, base_model=name, cuts=cuts)
        return ArtifactRef(
            path=folder.relative_to(self.root).as_posix(),
            sha256=file_sha256(folder / "recipe.json"),
            size_bytes=model_bytes(folder),
        )

    def split(self, name: Any, images: Sequence[bytes], labels: Sequence[int], *, draw: int = 0) -> SplitInfo:
        """Store encoded images and their class ids as a split, one of several draws."""
        path = self.root / f"{name}-{len(images)}-{draw}.arrow"
        write_rows(path, zip(list(images), list(labels), strict=True))
        file = ArtifactRef(path=path.name, sha256=file_sha256(path), size_bytes=path.stat().st_size)
        return SplitInfo(name=name, source_split="benchmark", num_images=len(images), file=file)

    def noise(self, num_images: int, side: int) -> SplitInfo:
        """Return calibration images that show nothing: smooth noise, since photographs aren't white."""
        rng = np.random.default_rng(0)
        encoded: list[bytes] = []
        for _ in range(num_images):
            coarse = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
            buffer = io.BytesIO()
            coarse.resize((side, side), Image.Resampling.BICUBIC).save(buffer, format="PNG")
            encoded.append(buffer.getvalue())
        return self.split("calibration", encoded, [0] * num_images)

    def deploy(
        self,
        model: ArtifactRef,
        deployment: Deployment,
        calibration: SplitInfo,
        *,
        batch_size: int,
        tuned: bool = False,
    ) -> Made:
        """Bring a float32 model into a deployment, `tuned` for int8 first where asked; what fails is said."""
        deployer = Deployer(self.jobs, calibration, batch_size)
        if tuned:
            option = deployer.make(model, deployment, choose_layers=True)
            if option.deployed is None:
                print(f"  {deployment.name} could not be made: {option.reason}", flush=True)
            return Made(option.deployment, option.deployed, reason=option.reason)
        try:
            return Made(deployment, self.jobs.run(deployer.deploy_task(model, deployment)))
        except ProfilingAgentError as error:
            print(f"  {deployment.name} could not be made: {error}", flush=True)
            return Made(deployment, reason=str(error))

    def path(self, made: Made) -> Path:
        """Return where a deployment lies."""
        assert made.deployed is not None, "only what was made lies somewhere"
        return self.root / made.deployed.model.path
