"""Run sessions: the resources that a run keeps open in a process, its time forecast, and the registry of open runs.

Forecasts add passes (the baseline in eager float32 on one image) to seconds that any model takes: conversions, processes, turns of races. Both are
from timesheets of a ViT-B/16 at 224 px and a ViT at 32 px, all runtimes, two cores of an Intel Xeon (docs/decisions/LOG.md, 2026-11-23). Another
machine may be twice as fast or slow, so measured attempts replace their forecasts.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling_agent.errors import RunError
from profiling_agent.graph.state import Limits, RunState, key_for, trusted_addresses
from profiling_agent.jobs.local import JOB_LOG
from profiling_agent.jobs.runner import Jobs, measure_headline, profile_artifact, read_profile
from profiling_agent.jobs.store import TIMESHEET_FILE
from profiling_agent.jobs.tasks import Profiled
from profiling_agent.lib.io import resolved
from profiling_agent.llm.chat import Chat, name_of, open_model
from profiling_agent.llm.transcript import FILE, LanguageModel, Recorded, Transcript, open_recording
from profiling_agent.request import RUN_ID, Request
from profiling_agent.schemas import SHARD, ModelProfile, Plan, Spent, SplitInfo
from profiling_agent.search.deadline import (
    DEPLOYED,
    EFFORTS,
    NUM_UNITS,
    PRUNE_PASSES,
    Deadline,
    affordable_images,
    evidence_passes,
    race_s,
    search_deadline,
)
from profiling_agent.search.deployments import deployment_choices, possible_deployments
from profiling_agent.search.evaluator import Evaluator, Settings, most_searched
from profiling_agent.workspace import (
    HOLDER,
    LOCK,
    MANIFEST,
    SCHEMA_VERSION,
    Workspace,
    open_workspace,
    read_manifest,
    storage_errors,
)

# A conversion with its KL, and the reference logits and layers before the first one.
DEPLOY_S, DEPLOY_PASSES, FIRST_DEPLOY_S = 2.5, 150, 15.0
# One session of the final speed estimate.
SESSION_S, SESSION_PASSES = 5.0, 230
# A test on held-out images usually ends by then.
NUM_HELDOUT = 2_048
# The winner's profile and the report.
LAST_S, LAST_PASSES = 12.0, 200
# Stages of every attempt, those at the end of a run, and all from the profile on.
ROUND, LAST = ("pruning", "quantization", "evaluation"), ("verdict", "report")
STAGES = ("profiling", "deployment_search", "analysis", "approval", *ROUND, "iterative_pruning", *LAST)


@dataclass(frozen=True)
class WorkLimits:
    """Upper limits of a run's work: images, deployments, sessions and plans."""

    num_calibration: int
    num_search: int
    num_heldout: int
    num_deployments: int
    num_measured: int
    num_sessions: int
    num_attempts: int


@dataclass(frozen=True)
class RunPosition:
    """Position of a run: its stage and the seconds in it, attempts measured, and the longest attempt."""

    stage: str
    in_stage_s: float = 0.0
    num_measured: int = 0
    longest_s: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """Seconds that the stage and the run still take."""

    stage_s: float
    run_s: float


def stage_seconds(work: WorkLimits, pass_s: float) -> Mapping[str, float]:
    """Return the expected seconds of each stage; the deployment search runs once, before the first attempt."""
    deploy_s = DEPLOY_S + DEPLOY_PASSES * pass_s
    judge_s = DEPLOYED * work.num_search * pass_s
    search_s = 0.0
    if work.num_deployments:
        race = race_s(pass_s)
        others_s = (
            min(work.num_measured - 1, work.num_deployments - 1) * DEPLOYED * min(SHARD, work.num_search) * pass_s
        )
        search_s = (
            FIRST_DEPLOY_S + work.num_deployments * deploy_s + race + work.num_search * pass_s + judge_s + others_s
        )
    sessions_s = work.num_sessions * (SESSION_S + SESSION_PASSES * pass_s)
    heldout_s = min(NUM_HELDOUT, work.num_heldout) * (1 + DEPLOYED) * pass_s
    return {
        "profiling": evidence_passes(work.num_calibration, NUM_UNITS) * pass_s,
        "pruning": PRUNE_PASSES * work.num_calibration * pass_s,
        "deployment_search": search_s,
        "quantization": deploy_s if work.num_deployments else 0.0,
        "evaluation": judge_s,
        "verdict": race_s(pass_s) + sessions_s + heldout_s,
        "report": LAST_S + LAST_PASSES * pass_s,
    }


def forecast(work: WorkLimits, deadline: Deadline, pass_s: float, now: RunPosition) -> Forecast:
    """Return the remaining time, with as many attempts as the deadline allows."""
    expected = stage_seconds(work, pass_s)
    stage_s = max(expected.get(now.stage, 0.0) - now.in_stage_s, 0.0)
    later = STAGES[STAGES.index(now.stage if now.stage in STAGES else "profiling") + 1 :]
    sure_s = stage_s + sum(expected.get(stage, 0.0) for stage in later)
    num_begun = now.num_measured + (now.stage != "iterative_pruning")
    num_more = 0 if now.stage in LAST else max(work.num_attempts - num_begun, 0)
    attempt_s = now.longest_s or sum(expected[stage] for stage in ROUND)
    last_s = sum(expected[stage] for stage in later if stage in LAST)
    return Forecast(stage_s, sure_s + min(num_more * attempt_s, max(deadline.free_s - (sure_s - last_s), 0.0)))


# Seconds to wait for a node after its job ended: it may do work without a child process, such as a download.
NODE_END_S = 10.0
# Fields that an evaluator depends on: a fork or an edit changes some, and a new one is built.
EVALUATED = (
    *("acquired", "resolved", "profiled", "goal", "batch_size", "seed", "recover_epochs", "fresh_ledger"),
    *("num_sessions", "time_budget", "effort", "runtime_names", "quantize_dtype", "quantize_layers"),
    *("planner", "endpoint", "advisor_object", "recorded"),
)


def _has_advisor(state: RunState) -> bool:
    return any(source is not None for source in (state.endpoint, state.advisor_object, state.recorded))


def _is_advised(state: RunState) -> bool:
    return state.planner != "rules" and _has_advisor(state)


class RunSession:
    """Resources of a run in this process: folder, lock, warm worker, and what was read and built.

    Closed when the run ends, fails or waits for an answer, and when the process ends.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        chat_model: Any = None,
        addresses: Iterable[str] = (),
        created: bool = False,
    ) -> None:
        """Lock the run for this process and clean up after a killed one; raises RunError if another process has it."""
        self.workspace = workspace
        self.chat_model = chat_model
        # Addresses that a person allowed for keys, in addition to the environment's. Never stored.
        self.addresses = set(addresses)
        # Whether requests come from outside, through a server.
        self.is_served = False
        # Whether a graph opened it without a driver; then another request may come under the same id.
        self.is_begun = False
        # Locked by the running node.
        self.working = threading.Lock()
        # Closed in reverse order: the lock must outlast the worker.
        with storage_errors(workspace.root), ExitStack() as opened:
            opened.callback(workspace.lock().release)
            workspace.sweep()
            self.resources = opened.pop_all()
        self.jobs = self.resources.enter_context(closing(Jobs(workspace)))
        self._created = created
        self._advisor: LanguageModel | None = None
        self._profile: tuple[Profiled, ModelProfile] | None = None
        self._num_deployments: int | None = None
        self._evaluator: tuple[dict[str, Any], Evaluator] | None = None

    def forecast(self, state: RunState, stage: str, in_stage_s: float) -> Forecast | None:
        """Return the remaining seconds of a stage and the run, None before the headline gives the time of a pass."""
        if self.jobs.pass_s is None or state.acquired is None:
            return None
        acquired, attempts = state.acquired, state.journal.attempts if state.journal else ()
        now = RunPosition(stage=stage, in_stage_s=in_stage_s, num_measured=len(attempts), longest_s=state.longest_s)
        effort, pass_s = EFFORTS[state.effort], self.jobs.pass_s
        deadline = search_deadline(self.jobs.timesheet, effort, pass_s, state.time_budget_s)
        if self._num_deployments is None:
            choices = deployment_choices(state, acquired.source.device)
            is_paper = state.selection == "paper"
            self._num_deployments = 0 if is_paper else len(possible_deployments(state.proposal or Plan(), choices))
        work = WorkLimits(
            num_calibration=acquired.calibration.num_images,
            num_search=most_searched(acquired.search.num_images, effort, pass_s, state.goal),
            num_heldout=acquired.heldout.num_images,
            num_deployments=self._num_deployments,
            num_measured=effort.num_deployments,
            num_sessions=min(state.num_sessions, effort.num_sessions),
            num_attempts=min(state.max_iterations, effort.num_attempts) if state.iterate else 1,
        )
        return forecast(work, deadline, pass_s, now)

    def calibration(self, state: RunState) -> SplitInfo:
        """Return the calibration images that fit the run's time; raises RequestError if the budget is too small for any run."""
        assert state.acquired is not None, "acquisition comes first"
        assert state.resolved is not None, "the input shape resolver comes first"
        split, device = state.acquired.calibration, state.acquired.source.device
        headline = measure_headline(self.jobs, state.resolved.baseline, batch_size=state.batch_size, device=device)
        num_affordable = affordable_images(
            state.time_budget_s,
            headline.pass_s,
            min(split.num_images, EFFORTS[state.effort].num_calibration),
            headline.quietest_pass_s,
            num_heldout=state.acquired.heldout.num_images,
        )
        return split.model_copy(update={"num_images": num_affordable})

    def measured(self, state: RunState, calibration: SplitInfo) -> Profiled:
        """Return the reference to the baseline's profile, measured if missing."""
        assert state.acquired is not None, "acquisition comes first"
        assert state.resolved is not None, "the input shape resolver comes first"
        return profile_artifact(
            self.jobs,
            state.resolved.baseline,
            batch_size=state.batch_size,
            device=state.acquired.source.device,
            # Without calibration, widths depend on the weights and the plan only.
            calibration=calibration if state.calibrate else None,
            seed=state.seed,
            cache=state.cache,
        )

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
        if not _is_advised(state):
            return None
        if state.advisor_object is not None and self.chat_model is None:
            raise RunError(
                f"this run was begun with the chat model {state.advisor_object}, passed as an object, which is never stored: "
                "pass it again, as build_graph(advisor=...) or resume(..., advisor=...)"
            )
        if self._advisor is None:
            transcript = Transcript(self.workspace.root / FILE, max_tokens=state.llm_tokens)
            if state.recorded is not None:
                self._advisor = Recorded(open_recording(state.recorded), transcript)
            elif self.chat_model is not None:
                name, timeout_s = name_of(self.chat_model), state.llm_timeout_s
                self._advisor = Chat(self.chat_model, name, transcript, timeout_s=timeout_s)
            else:
                assert state.endpoint is not None, "there is a language model"
                key, timeout_s = key_for(state.endpoint, self.trusted), state.llm_timeout_s
                model = open_model(state.endpoint, key, timeout_s=timeout_s)
                self._advisor = Chat(model, state.endpoint.name, transcript, timeout_s=timeout_s)
        return self._advisor

    def spent(self, state: RunState) -> Spent | None:
        """Return the language model's usage, None if there is none."""
        return Transcript(self.workspace.root / FILE).spent if _has_advisor(state) else None

    def evaluator(self, state: RunState) -> Evaluator:
        """Return the evaluator of attempts, cached while its inputs are the same."""
        inputs = {name: getattr(state, name) for name in EVALUATED}
        if self._evaluator is not None and self._evaluator[0] == inputs:
            return self._evaluator[1]
        assert state.acquired is not None, "acquisition comes first"
        assert state.resolved is not None, "the input shape resolver comes first"
        profile = self.profile(state)
        self.jobs.set_limits_from(profile.headline, profile.device)
        evaluator = Evaluator(
            jobs=self.jobs,
            acquired=state.acquired,
            baseline=state.resolved.baseline,
            profile=profile,
            goal=state.goal,
            settings=Settings(
                batch_size=state.batch_size,
                seed=state.seed,
                recover_epochs=state.recover_epochs,
                num_sessions=state.num_sessions,
                fresh_ledger=state.fresh_ledger,
                time_budget_s=state.time_budget_s,
                effort=state.effort,
                is_advised=_is_advised(state),
            ),
            choices=deployment_choices(state, state.acquired.source.device),
        )
        self._evaluator = inputs, evaluator
        return evaluator

    def close(self) -> None:
        """End the worker and release the run."""
        self.resources.close()

    def discard(self) -> None:
        """Close, and empty the run folder if it was created here."""
        self.close()
        root = self.workspace.root
        if not self._created:
            return
        shutil.rmtree(self.workspace.jobs, ignore_errors=True)
        for name in (MANIFEST, TIMESHEET_FILE, JOB_LOG, LOCK, HOLDER):
            (root / name).unlink(missing_ok=True)
        # A checkpointer's file may be here, which the checkpointer removes.
        if not any(root.iterdir()):
            root.rmdir()


class Sessions:
    """Runs that are open in this process, by run id.

    A compiled graph has its own, or its driver's. A run's first node opens its session, unless the driver did. Its last node closes it, or the graph
    when a stream is left early.
    """

    def __init__(
        self, chat_model: Any = None, *, addresses: Iterable[str | None] = (), limits: Limits | None = None
    ) -> None:
        """Plan with `chat_model`, if given; it is the caller's and never stored.

        `addresses` are given by a person in this call: keys of the environment may go there. With `limits`, requests come from outside, and what they
        name is checked before anything is opened.
        """
        self.chat_model = chat_model
        self.addresses = frozenset(url for url in addresses if url) | (limits.addresses if limits else frozenset())
        self.limits = limits
        self.by_run: dict[str, RunSession] = {}

    def open(self, workspace: Workspace, *, created: bool = False) -> RunSession:
        """Return the run's session; raises RunError if another process has it, or this one a run of the same id."""
        run_id = workspace.root.name
        if (session := self.by_run.get(run_id)) is None:
            session = RunSession(workspace, chat_model=self.chat_model, addresses=self.addresses, created=created)
            session.is_served = self.limits is not None
            session.resources.callback(self.by_run.pop, run_id)
            self.by_run[run_id] = session
        if session.workspace.root.resolve() != workspace.root.resolve():
            raise RunError(f"a run called {run_id!r} is under way in this process: choose another run_id")
        return session

    def begin(self, request: Request, thread: str | None) -> RunSession:
        """Start or restart the requested run; raises RequestError if this server's limits forbid it."""
        if self.limits is not None:
            self.limits.check(request)
        run_id = choose_run_id(request, thread)
        session, root = self.by_run.get(run_id), request.output_dir / run_id
        if session is not None and not session.is_begun:
            # Its driver has compared the requests, and has the folder of a run that was moved.
            return session
        if session is not None and not _is_same_path(session.workspace.root, root):
            return self.open(Workspace(root))
        created = not (root / MANIFEST).exists()
        workspace = open_workspace(request, run_id)
        new_session = self.open(workspace, created=created)
        new_session.is_begun = True
        return new_session

    def get_session(self, state: RunState, thread: str | None) -> RunSession:
        """Return the session of a run under way, opened if this process has none yet.

        `thread` is the checkpointer's, if any: its state opens that thread's own run only.
        """
        root = Path(state.run_dir)
        if state.schema_version != SCHEMA_VERSION:
            raise RunError(
                f"run {root.name!r} was checkpointed with schema version {state.schema_version}, this version reads "
                f"{SCHEMA_VERSION}: resume it with the version that wrote it"
            )
        if self.limits is not None:
            self.limits.check(state)
        run_id = thread or root.name
        known = self.by_run.get(run_id)
        is_own_folder = root.name == run_id and (known is not None or _is_same_path(root, state.output_dir / run_id))
        if not is_own_folder:
            raise RunError(
                f"the checkpoint of run {run_id!r} names the folder {state.run_dir!r}, which isn't its own: start a new run"
            )
        if known is None:
            read_manifest(root)
        session = known or self.open(Workspace(root))
        session.is_begun |= known is None
        # Checked at once, not at the first call to the language model's server.
        if state.endpoint is not None and self.chat_model is None:
            try:
                key_for(state.endpoint, session.trusted)
            except RunError:
                session.close()
                raise
        return session

    def leave(self, run_id: str | None) -> None:
        """Close a run's session, if open: end its job, and wait for its node, which may run in another thread."""
        if run_id is not None and (session := self.by_run.get(run_id)):
            session.jobs.close()
            if session.working.acquire(timeout=NODE_END_S):
                session.working.release()
            session.close()

    def close(self) -> None:
        """Close every session."""
        for session in tuple(self.by_run.values()):
            session.close()


def _is_same_path(first: Path, second: Path) -> bool:
    try:
        return resolved(first) == resolved(second)
    except OSError:
        return False


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
