"""What the agents of one run share in one process: its folder, the lock on it, and the warm worker."""

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import BaseFileLock

from profiling_agent.agents.state import RunState
from profiling_agent.errors import RunError
from profiling_agent.iteration.deployments import asked_schemes, supported_deployments
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.jobs.profile import profile_artifact, read_profile
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import Profiled
from profiling_agent.llm.ledger import read_spent
from profiling_agent.llm.question import Asks
from profiling_agent.records import ModelProfile, Spent
from profiling_agent.request import RUN_ID, Request
from profiling_agent.workspace import MANIFEST, SCHEMA_VERSION, Workspace, open_workspace, read_manifest

if TYPE_CHECKING:
    from profiling_agent.llm.advisor import Advisor


class RunSession:
    """One run in this process; closed when the run ends, fails, or the process does."""

    def __init__(self, workspace: Workspace, lock: BaseFileLock, *, created: bool) -> None:
        """Take over the lock; clear what a killed process left."""
        self.workspace = workspace
        self.jobs = Jobs(workspace)
        self.chat_model: Any = None
        self._advisor: Advisor | None = None
        self._lock = lock
        self._created = created
        workspace.sweep()

    def measured(self, state: RunState) -> Profiled:
        """Return where the baseline's profile lies, measured where it isn't there."""
        assert state.acquired is not None, "acquisition comes first"
        assert state.resolved is not None, "the input shape resolver comes first"
        return profile_artifact(
            self.jobs,
            state.resolved.baseline,
            batch_size=state.batch_size,
            device=state.acquired.source.device,
            calibration=state.acquired.calibration,
            criterion=state.criterion,
            seed=state.seed,
        )

    def profile(self, state: RunState) -> ModelProfile:
        """Return the baseline's full profile; one that was removed, because it was damaged, is measured again."""
        assert state.profiled is not None, "profiling comes first"
        is_there = self.workspace.path(state.profiled.profile).parent.exists()
        return read_profile(self.workspace, state.profiled if is_there else self.measured(state))

    def advisor(self, state: RunState) -> Asks | None:
        """Return the language model that may plan, None where the rules plan alone."""
        if state.planner == "rules" or (state.endpoint is None and state.advisor_object is None):
            return None
        if state.advisor_object is not None and self.chat_model is None:
            raise RunError(
                f"this run was begun with the chat model {state.advisor_object}, passed as an object, which is never stored: "
                "pass it again, as build_graph(advisor=...) or resume(..., advisor=...)"
            )
        if self._advisor is None:
            # Importing the provider takes seconds, which runs without a model needn't wait for.
            from profiling_agent.llm.open import open_advisor

            self._advisor = open_advisor(state, self.workspace.root, state.endpoint, self.chat_model)
        return self._advisor

    def spent(self, state: RunState) -> Spent | None:
        """Return what was asked of the language model; None where there is none."""
        if state.endpoint is None and state.advisor_object is None:
            return None
        return read_spent(self.workspace.root)

    def evaluator(self, state: RunState) -> Evaluator:
        """Return what attempts are measured with."""
        assert state.acquired is not None, "acquisition comes first"
        assert state.resolved is not None, "the input shape resolver comes first"
        device = state.acquired.source.device
        supported, notes = supported_deployments(state.runtime_names, device)
        return Evaluator(
            jobs=self.jobs,
            acquired=state.acquired,
            baseline=state.resolved.baseline,
            profile=self.profile(state),
            goal=state.goal,
            batch_size=state.batch_size,
            seed=state.seed,
            recover_epochs=state.recover_epochs,
            supported=supported,
            schemes=asked_schemes(state.quantize_dtype),
            quantize_layers=state.quantize_layers,
            runtime_notes=notes,
        )

    def close(self) -> None:
        """End the worker and give the run free."""
        SESSIONS.pop(self.workspace.root.name, None)
        self.jobs.close()
        self._lock.release()

    def discard(self) -> None:
        """Close; where this session created the run folder, take its contents away again."""
        self.close()
        root = self.workspace.root
        if not self._created:
            return
        for folder in (self.workspace.jobs, root / "recovery"):
            shutil.rmtree(folder, ignore_errors=True)
        for name in (MANIFEST, "worker.log", "run.lock"):
            (root / name).unlink(missing_ok=True)
        # A checkpointer's file may lie here, and it is the checkpointer's to remove.
        if not any(root.iterdir()):
            root.rmdir()


# By run id. Whoever drives a run from outside the graph opens its session first; otherwise its first node does.
SESSIONS: dict[str, RunSession] = {}


def open_session(workspace: Workspace, *, created: bool = False) -> RunSession:
    """Take the run for this process; RunError where another process has it, or this one has its namesake."""
    known = SESSIONS.get(workspace.root.name)
    if known is None:
        known = SESSIONS[workspace.root.name] = RunSession(workspace, workspace.lock(), created=created)
    if known.workspace.root.resolve() != workspace.root.resolve():
        raise RunError(f"a run called {workspace.root.name!r} is under way in this process: choose another run_id")
    return known


def close_session(workspace: Workspace) -> None:
    """Close the session that this process has of a run; does nothing where it has none."""
    if (known := SESSIONS.get(workspace.root.name)) is not None:
        known.close()


def choose_run_id(request: Request, thread: str | None) -> str:
    """Return the run's name: the request's, the checkpointer's thread's, or one made from the request itself."""
    if thread is not None and request.run_id not in (None, thread):
        raise RunError(
            f"run_id is {request.run_id!r} but the checkpointer's thread_id is {thread!r}: "
            "a run's id is its thread's, so leave one out"
        )
    made_up = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:12]
    run_id = request.run_id or thread or f"run-{made_up}"
    if not RUN_ID.fullmatch(run_id):
        raise RunError(f"thread_id {run_id!r} can't name a folder: use letters, digits, '.', '_' and '-', at most 100")
    return run_id


def begin(request: Request, thread: str | None) -> RunSession:
    """Start, or start again, the run that the request asks for."""
    run_id = choose_run_id(request, thread)
    if (known := SESSIONS.get(run_id)) is not None:
        return known
    created = not (request.output_dir / run_id / MANIFEST).exists()
    return open_session(open_workspace(request, run_id), created=created)


def get_session(state: RunState) -> RunSession:
    """Return the session of a run that is under way, opening it where this process has none yet."""
    root = Path(state.run_dir)
    if state.schema_version != SCHEMA_VERSION:
        raise RunError(
            f"run {root.name!r} was checkpointed with schema version {state.schema_version}, this version reads "
            f"{SCHEMA_VERSION}: resume it with the version that wrote it"
        )
    if (known := SESSIONS.get(root.name)) is not None:
        return known
    read_manifest(root)
    return open_session(Workspace(root))
