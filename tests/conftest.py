"""Shared fixtures. The world and the run through it are made once a session, on first use."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Side by side (`pytest -n auto`), each on a core of its own with all that it starts: nobody waits for another's threads.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

import torch  # it counts the cores when it is imported
import world as made_world
from datasets import config as datasets_config
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from profiling_agent import Request
from profiling_agent.jobs.tasks import MODULES
from profiling_agent.processes.child import fork_server

# The models are so small that a second thread costs more than it gives.
torch.set_num_threads(1)
# Nearly as a worker has it: tests alone end their Python, for which two tenths of a second are enough.
datasets_config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.2


@dataclass(frozen=True)
class World:
    """A trained tiny model and its data, as local folders."""

    model: Path
    data: Path

    def request(self, output: Path, **asked) -> Request:
        """Return a request that is quick to carry out."""
        quick: dict[str, Any] = {
            "batch_size": 16,
            "max_iterations": 3,
            "num_sessions": 2,
            "run_id": "quick",
            "runtimes": "eager",
            "quantize_dtype": "qint8",
        }
        return Request(model=str(self.model), dataset=str(self.data), output=str(output), **(quick | asked))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Let the files whose tests look at the run of `finished`, which takes a minute, share one process.

    xdist's own groups are lost with pytest 9.2, which doesn't let it rename a test.
    """
    return _OneRun(config, log) if config.getvalue("dist") == "loadfile" else None


class _OneRun(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "finished" if _looks_at_the_run(self.config.rootpath / file) else file


@cache
def _looks_at_the_run(file: Path) -> bool:
    return re.search(r"\bdef \w+\([^)]*\bfinished\b", file.read_text(encoding="utf-8")) is not None


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave the user's folders alone: no test reads them or writes to them, nor does a process that one starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROFILING_AGENT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PROFILING_AGENT_DATA", str(tmp_path_factory.mktemp("data")))
        # Threads that wait leave the cores to other tests.
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        # The profiler sets it in whatever process it is used, and children could be no copies of the server from then on.
        patch.setenv("KINETO_LOG_LEVEL", "99")
        # Children find the toy jobs, and timm where `make test-timm` has it.
        found = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        patch.setenv("PYTHONPATH", os.pathsep.join(dict.fromkeys((str(Path(__file__).parent), *found))))
        # Whoever runs the tests may have a key; no test is to use it.
        for name in (
            *("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE"),
            *("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_ENDPOINT"),
        ):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def _imported_once(_own_cache: None) -> Iterator[None]:
    """Keep what the children of all jobs are copies of, which imports torch once for all tests of this process."""
    with fork_server(MODULES):
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, _imported_once: None) -> World:
    folder = tmp_path_factory.mktemp("world")
    return World(model=made_world.write_model(folder / "model"), data=made_world.write_data(folder / "data"))


@pytest.fixture(scope="session")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that `optimize` carried to its verdict."""
    from profiling_agent import optimize

    output = tmp_path_factory.mktemp("runs")
    optimize(world.request(output))
    return output / "quick"


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that gives the tiny model of a family, saved and exported once."""
    from deployments import source_of

    return cache(lambda family: source_of(family, tmp_path_factory.mktemp("source") / family))


@pytest.fixture
def source(sources: Callable[[str], Any]) -> Any:
    return sources("vit")
