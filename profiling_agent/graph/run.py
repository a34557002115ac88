"""Run in this process: its folder, lock and jobs, what was read and built of it, and the time that it still takes.

A forecast adds passes (the baseline in eager float32 on one image) to seconds that any model takes: conversions, processes, turns of races. Both are
from timesheets of a ViT-B/16 at 224 px and a ViT at 32 px, all runtimes, two cores of an Intel Xeon (docs/decisions/LOG.md, 2026-11-23). Another
machine may be twice as fast or slow, so measured attempts replace their forecasts.
"""

import asyncio
import hashlib
import math
import operator
import os
import shutil
import threading
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

from profiling_agent.errors import RequestError, RunError
from profiling_agent.graph.state import Limits, RunState, key_for, trusted_addresses
from profiling_agent.jobs.runner import JOB_LOG, Jobs, read_profile
from profiling_agent.jobs.store import TIMESHEET_FILE
from profiling_agent.jobs.tasks import Profiled
from profiling_agent.llm.chat import Chat, name_of, open_model
from profiling_agent.llm.transcript import FILE, LanguageModel, Recorded, Transcript, open_recording
from profiling_agent.request import RUN_ID, Request
from profiling_agent.schemas import ModelProfile
from profiling_agent.search.deadline import EFFORTS, search_deadline
from profiling_agent.search.deployments import deployment_choices
from profiling_agent.search.evaluator import Evaluator, Settings
from profiling_agent.workspace import MANIFEST, Workspace, open_workspace, read_manifest, storage_errors

# Cost of each stage: seconds, passes, and passes for each calibration, search and held-out image. The deployment search, which runs once,
# tries ten deployments; the verdict has five sessions.
COSTS = {
    "profiling": (0.0, 864, 3.5, 0.0, 0.0),
    "deployment_search": (60.0, 1800, 0.0, 2.0, 0.0),
    "pruning": (0.0, 0, 3.7, 0.0, 0.0),
    "quantization": (2.5, 150, 0.0, 0.0, 0.0),
    "evaluation": (0.0, 0, 0.0, 0.5, 0.0),
    "verdict": (45.0, 1450, 0.0, 0.0, 1.5),
    "report": (12.0, 200, 0.0, 0.0, 0.0),
}
# A test on held-out images usually ends by then.
NUM_HELDOUT = 2_048
# Stages of every attempt, those at the end of a run, and all from the profile on.
ROUND, LAST = ("pruning", "quantization", "evaluation"), ("verdict", "report")
STAGES = ("profiling", "deployment_search", "analysis", "approval", *ROUND, "iterative_pruning", *LAST)


def seconds_left(state: RunState, stage: str, jobs: Jobs, in_stage_s: float) -> tuple[float, float] | None:
    """Return the seconds that a stage and the run still take, with as many more attempts as are worth their time.

    None before the headline gives the time of a pass. `in_stage_s` is what the stage has taken so far.
    """
    if jobs.pass_s is None or state.acquired is None or stage not in STAGES:
        return None
    effort, acquired = EFFORTS[state.effort], state.acquired
    deadline = search_deadline(jobs.timesheet, effort, jobs.pass_s, state.time_budget_s)
    num_images = [split.num_images for split in (acquired.calibration, acquired.search)]
    num_images.append(min(acquired.heldout.num_images, NUM_HELDOUT))
    expected = {
        name: seconds + jobs.pass_s * (passes + sum(map(operator.mul, each, num_images)))
        for name, (seconds, passes, *each) in COSTS.items()
    }
    stage_s = max(expected.get(stage, 0.0) - in_stage_s, 0.0)
    last_s = sum(expected[later] for later in LAST if stage not in (later, "report"))
    middle_s = sum(expected.get(later, 0.0) for later in STAGES[STAGES.index(stage) + 1 :] if later not in LAST)
    num_begun = (len(state.journal.attempts) if state.journal else 0) + (stage != "iterative_pruning")
    num_more = max((state.num_attempts if state.iterate else 1) - num_begun, 0)
    attempts_s = num_more * (state.longest_s or sum(expected[each] for each in ROUND))
    spare_s = 0.0 if stage in LAST else max(deadline.free_s - stage_s - middle_s, 0.0)
    run_s = stage_s + middle_s + min(attempts_s, spare_s) + last_s
    left_s = math.inf if state.time_budget_s is None else state.time_budget_s - jobs.timesheet.spent_s
    return stage_s, max(min(run_s, left_s), stage_s)


# Seconds to wait for a node after its job ended: it may do work without a child process, such as a download.
NODE_END_S = 10.0


class Run:
    """A run that is under way in this process: a context that one invocation of the graph opens and closes.

    The first node opens the folder, unless the caller of the graph did. A run that ended, failed or waits for an answer holds nothing.
    """

    workspace: Workspace
    jobs: Jobs

    def __init__(
        self,
        workspace: Workspace | None = None,
        *,
        advisor: Any = None,
        addresses: Iterable[str | None] = (),
        limits: Limits | None = None,
    ) -> None:
        """Plan with the chat model `advisor`, if given; it is the caller's and never stored.

        `addresses` are given by a person in this call: keys of the environment may go there. With `limits`, requests come from outside, and what they
        name is checked before anything is opened.
        """
        self.chat_model = advisor
        self.addresses = {url for url in addresses if url} | (limits.addresses if limits else frozenset[str]())
        self.limits = limits
        # Whether this invocation can be resumed; then a request's address may be from an old call or a third party.
        self.is_checkpointed = False
        # Locked by the running node.
        self.working = threading.Lock()
        self._resources: ExitStack | None = None
        self._is_closed = False
        # What a request that can't be carried out leaves behind, removed in the end: the folder, or the manifest in a folder that was there.
        self._made: Path | None = None
        self._language_model: LanguageModel | None = None
        self._profile: tuple[Profiled, ModelProfile] | None = None
        self._evaluator: tuple[tuple[Any, ...], Evaluator] | None = None
        if workspace is not None:
            self._open(workspace)

    def _open(self, workspace: Workspace) -> None:
        """Lock the run for this process and clean up after a killed one; RunError if another process has it."""
        if self._is_closed:
            raise RunError(f"run {workspace.root.name!r} was left before it ended: resume it")
        with storage_errors(workspace.root), ExitStack() as opened:
            opened.callback(workspace.lock().release)
            workspace.sweep()
            # Closed in reverse order: the lock must outlast the worker.
            self.jobs = opened.enter_context(closing(Jobs(workspace)))
            self._resources = opened.pop_all()
        self.workspace = workspace

    def enter(self, request: Request, thread: str | None) -> None:
        """Open the folder of a requested run, created if missing, or of the run of a state; nothing if it is open.

        `thread` is the checkpointer's, if any. Raises RequestError for what a server's limits forbid.
        """
        if self.limits is not None:
            self.limits.check(request)
        # A caller that opened it has compared the requests, and has the folder of a run that was moved.
        if self._resources is None:
            run_id = choose_run_id(request, thread)
            root = request.output_dir / run_id
            if isinstance(request, RunState):
                read_manifest(root)
                self._open(Workspace(root))
            else:
                self._made = next((path for path in (root, root / MANIFEST) if not path.exists()), None)
                self._open(open_workspace(request, run_id))
        # Checked at once, not at the first call to the language model's server.
        if isinstance(request, RunState) and request.endpoint is not None and self.chat_model is None:
            key_for(request.endpoint, self.trusted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """End the run's job, wait for its node, which may run in another thread, and release the run."""
        self._is_closed = True
        if self._resources is not None:
            self.jobs.close()
        if self.working.acquire(timeout=NODE_END_S):
            self.working.release()
        if self._resources is None:
            return
        self._resources.close()
        self._resources = None
        # A run's measurements are kept.
        if self._made is not None and isinstance(error, RequestError) and not isinstance(error, RunError):
            if self._made.is_dir():
                shutil.rmtree(self._made, ignore_errors=True)
            else:
                # A checkpointer made the folder, and may still write to it.
                self._made.unlink(missing_ok=True)
                shutil.rmtree(self.jobs.workspace.jobs, ignore_errors=True)
                for name in (TIMESHEET_FILE, JOB_LOG):
                    (self._made.parent / name).unlink(missing_ok=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ending: Any) -> None:
        await asyncio.to_thread(self.__exit__, *ending)

    def profile(self, state: RunState) -> ModelProfile:
        """Return the baseline's full profile, parsed once."""
        assert state.profiled is not None, "profiling comes first"
        if self._profile is None or self._profile[0] != state.profiled:
            self._profile = state.profiled, read_profile(self.jobs, state.profiled)
        return self._profile[1]

    @property
    def trusted(self) -> frozenset[str]:
        """Return the addresses that the environment's keys may go to."""
        return trusted_addresses(os.environ, *self.addresses)

    def advisor(self, state: RunState) -> LanguageModel | None:
        """Return the language model that may plan, None if only the rules plan; raises RunError if its object is missing."""
        if not state.is_advised:
            return None
        if state.advisor_object is not None and self.chat_model is None:
            raise RunError(
                f"this run was begun with the chat model {state.advisor_object}, passed as an object, which is never stored: "
                "pass it again, as build_graph(advisor=...) or resume(..., advisor=...)"
            )
        if self._language_model is None:
            transcript = Transcript(self.workspace.root / FILE, max_tokens=state.llm_tokens)
            if state.recorded is not None:
                self._language_model = Recorded(open_recording(state.recorded), transcript)
                return self._language_model
            if self.chat_model is not None:
                model, name = self.chat_model, name_of(self.chat_model)
            else:
                assert state.endpoint is not None, "there is a language model"
                key, name = key_for(state.endpoint, self.trusted), state.endpoint.name
                model = open_model(state.endpoint, key, timeout_s=state.llm_timeout_s)
            self._language_model = Chat(model, name, transcript, timeout_s=state.llm_timeout_s)
        return self._language_model

    def evaluator(self, state: RunState) -> Evaluator:
        """Return the evaluator of attempts, cached while its inputs are the same."""
        assert state.acquired is not None, "acquisition comes first"
        assert state.resolved is not None, "the input shape resolver comes first"
        settings = Settings.model_validate({name: getattr(state, name) for name in Settings.model_fields})
        # A fork or an edit changes some of it.
        inputs = (
            *(state.acquired, state.resolved, state.profiled, state.goal, settings),
            *(state.runtimes, state.quantize_dtype, state.quantize_layers),
        )
        if self._evaluator is None or self._evaluator[0] != inputs:
            profile = self.profile(state)
            self.jobs.set_limits_from(profile.headline, profile.device)
            evaluator = Evaluator(
                jobs=self.jobs,
                acquired=state.acquired,
                baseline=state.resolved.baseline,
                profile=profile,
                goal=state.goal,
                settings=settings,
                choices=deployment_choices(state, state.acquired.source.device),
            )
            self._evaluator = inputs, evaluator
        return self._evaluator[1]


def choose_run_id(request: Request, thread: str | None) -> str:
    """Return the run's id: the request's, the checkpointer thread's, or a hash of the request."""
    if thread is not None and request.run_id not in (None, thread):
        raise RunError(
            f"run_id is {request.run_id!r} but the checkpointer's thread_id is {thread!r}: "
            "a run's id is its thread's, so leave one out"
        )
    digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:12]
    run_id = request.run_id or thread or f"run-{digest}"
    if not RUN_ID.fullmatch(run_id):
        raise RunError(f"thread_id {run_id!r} can't name a folder: use letters, digits, '.', '_' and '-', at most 100")
    return run_id
