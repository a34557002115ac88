"""Run in this process: its folder, lock and jobs, agents as nodes with their progress, and the graph that closes it.

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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, closing, suppress
from types import FunctionType
from typing import Any, Self, cast

from langchain_core.runnables.config import RunnableConfig, ensure_config
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, StateUpdate
from pydantic import Field

from profiling_agent import prompts
from profiling_agent.errors import FieldError, RequestError, RunError
from profiling_agent.graph.checkpoints import INHERITED
from profiling_agent.graph.context import FROZEN, PLANNING, ContextBase, as_context, choose_advisor, validated
from profiling_agent.graph.state import Allowlist, RunResult, RunState, key_for, require, trusted_addresses
from profiling_agent.jobs.runner import JOB_LOG, Jobs, read_profile
from profiling_agent.lib.logs import raise_if_stopped
from profiling_agent.llm.chat import Chat, Recorded, chat_client, name_of
from profiling_agent.llm.transcript import FILE, Transcript, open_recording
from profiling_agent.request import RUN_ID, Request, unknown_field
from profiling_agent.schemas import Record
from profiling_agent.search.deployments import deployment_choices
from profiling_agent.search.evaluator import EFFORTS, Evaluator, search_deadline
from profiling_agent.search.selection import ranked, size_ratio
from profiling_agent.workspace import (
    LOCK,
    MANIFEST,
    TIMESHEET_FILE,
    Workspace,
    open_workspace,
    read_manifest,
    storage_errors,
)

Update = dict[str, Any]
# Cost of each stage: seconds, passes, and passes for each calibration, search and held-out image. The deployment search, which runs once,
# tries ten deployments; the verdict has five sessions.
COSTS = {
    "profiling": (0.0, 300, 0.0, 0.0, 0.0),
    "deployment_search": (60.0, 1800, 0.0, 2.0, 0.0),
    "analysis": (0.0, 564, 3.5, 0.0, 0.0),
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
# Seconds to wait for a node after its job ended: it may do work without a child process, such as a download.
NODE_END_S = 10.0
# First fields of Studio's form.
FORM = (
    *("model", "dataset", "split", "goal_text", "max_accuracy_drop", "min_speedup", "max_size_ratio"),
    *("objective", "batch_size", "effort", "time_budget", "max_iterations", "plan", "approve"),
)


class Best(Record):
    """Best accepted attempt so far, on the search images."""

    attempt: int
    drop: float = Field(description="top-1 lost, as a fraction")
    macs_saved: float
    size_ratio: float


class ProgressEvent(Record):
    """Progress that a node streams (mode `custom`); `total` is 0 if unknown.

    `iteration` is 0 before the first plan is carried out.
    """

    stage: str
    message: str
    done: int = 0
    total: int = 0
    iteration: int = 0
    iterations: int = 0
    best: Best | None = None
    spent_s: float = Field(default=0.0, description="what the run's jobs have taken so far")
    budget_s: float | None = Field(default=None, description="what they may take, where there is a limit")
    stage_left_s: float | None = Field(default=None, description="what the stage still takes, about")
    left_s: float | None = Field(default=None, description="what the run still takes, about, the stage with it")


def seconds_left(state: RunState, stage: str, jobs: Jobs, in_stage_s: float) -> tuple[float, float] | None:
    """Return the seconds that a stage and the run still take, with as many more attempts as are worth their time.

    None before the headline gives the time of a pass. `in_stage_s` is what the stage has taken so far.
    """
    if jobs.pass_s is None or state.acquired is None or stage not in STAGES:
        return None
    deadline = search_deadline(jobs.timesheet, EFFORTS[state.request.effort], jobs.pass_s, state.request.time_budget_s)
    num_images = [split.num_images for split in (state.acquired.calibration, state.acquired.search)]
    num_images.append(min(state.acquired.heldout.num_images, NUM_HELDOUT))
    expected = dict.fromkeys(STAGES, 0.0) | {
        name: seconds + jobs.pass_s * (passes + sum(map(operator.mul, each, num_images)))
        for name, (seconds, passes, *each) in COSTS.items()
    }
    stage_s = max(expected[stage] - in_stage_s, 0.0)
    last_s = sum(expected[later] for later in LAST if stage not in (later, "report"))
    middle_s = sum(expected[later] for later in STAGES[STAGES.index(stage) + 1 :] if later not in LAST)
    num_begun = len(state.attempts) + (stage != "iterative_pruning")
    num_more = max((state.num_attempts if state.request.iterate else 1) - num_begun, 0)
    attempts_s = num_more * (state.longest_s or sum(expected[each] for each in ROUND))
    spare_s = 0.0 if stage in LAST else max(deadline.free_s - stage_s - middle_s, 0.0)
    run_s = stage_s + middle_s + min(attempts_s, spare_s) + last_s
    budget_s = state.request.time_budget_s
    left_s = math.inf if budget_s is None else budget_s - jobs.timesheet.spent_s
    return stage_s, max(min(run_s, left_s), stage_s)


def _first_event(state: RunState, stage: str) -> ProgressEvent:
    """Return a stage's event without a message: the current attempt, and the best accepted so far."""
    event = ProgressEvent(stage=stage, message="", iterations=state.num_attempts, budget_s=state.request.time_budget_s)
    if state.initial_journal is None or not (state.attempts or stage in ("approval", *ROUND)):
        return event
    journal, best = state.judged_journal, None
    if row := next((row for row in ranked(journal, state.goal) if row.attempt is not None), None):
        measured, macs = row.evaluation, journal.baseline.footprint.macs
        best = Best(
            attempt=row.attempt or 0,
            drop=measured.drop.drop if measured.drop else 0.0,
            macs_saved=1 - measured.footprint.macs / max(macs, 1),
            size_ratio=size_ratio(measured, journal.baseline),
        )
    iteration = min(len(state.attempts) + 1, state.num_attempts)
    return event.model_copy(update={"iteration": iteration, "best": best})


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
        allowlist: Allowlist | None = None,
    ) -> None:
        """Plan with the chat model `advisor`, if given; it is the caller's and never stored.

        `addresses` are given by a person in this call: keys of the environment may go there. With an `allowlist`, requests come from outside, and what they
        name is checked before anything is opened.
        """
        self.chat_model, self.allowlist = advisor, allowlist
        self.context = as_context(None)
        self.addresses = {url for url in addresses if url} | (allowlist.addresses if allowlist else frozenset[str]())
        # Whether this invocation can be resumed; then a request's address may be from an old call or a third party.
        self.is_checkpointed = False
        # Locked by the running node.
        self.working = threading.Lock()
        self._resources: ExitStack | None = None
        self._is_new = self._is_closed = False
        self._language_model: Chat | None = None
        self._evaluator: tuple[tuple[Any, ...], Evaluator] | None = None
        if workspace is not None:
            self._open(workspace)

    def _open(self, workspace: Workspace) -> None:
        """Lock the run for this process and clean up after a killed one; RunError if another process has it."""
        if self._is_closed:
            raise RunError(f"run {workspace.root.name!r} was left before it ended: resume it")
        with storage_errors(workspace.root), ExitStack() as opened:
            opened.callback(workspace.lock().release)
            workspace.remove_partial_files()
            # Closed in reverse order: the lock must outlast the worker.
            self.jobs = opened.enter_context(closing(Jobs(workspace)))
            self._resources = opened.pop_all()
        self.workspace = workspace

    def enter(self, request: Request, state: RunState | None, thread: str | None) -> None:
        """Open the folder of a requested run, created if missing, or of the run of a state; nothing if it is open.

        `thread` is the checkpointer's, if any. Raises RequestError for what a server's allowlist forbids.
        """
        if self.allowlist is not None:
            self.allowlist.check(request, state)
        # A caller that opened it has compared the requests, and has the folder of a run that was moved.
        if self._resources is None:
            run_id = choose_run_id(request, thread)
            root = request.output_dir / run_id
            if state is not None:
                read_manifest(root)
                self._open(Workspace(root))
            else:
                self._is_new = not (root / MANIFEST).exists()
                self._open(open_workspace(request, run_id))
        # Checked at once, not at the first call to the language model's server.
        if state is not None and state.endpoint is not None and self.chat_model is None:
            key_for(state.endpoint, self.trusted)

    def use(self, context: ContextBase) -> None:
        """Plan as a context says; its address, which is from this call, gets keys unless a server's client gave it."""
        self.context = context
        if self.allowlist is None and "base_url" in context.given:
            self.addresses.add(context.given["base_url"])

    def changes_by_context(self, state: RunState, request: Request) -> Update:
        """Return the update that plans on as `request`, by the context, says; RequestError for what a run can't change."""
        changes: Update = {}
        if (words := state.prompts | self.context.prompts) != state.prompts:
            changes["prompts"] = words
        if request != state.request:
            for name in FROZEN:
                was, now = getattr(state.request, name), getattr(request, name)
                if was != now:
                    raise RequestError(f"{name} was {was!r} when this run began, is now {now!r}: begin a new thread")
            asked = choose_advisor(request, self.chat_model, self.trusted)
            changes |= {"request": request, "endpoint": None, "recorded": None, "advisor_object": None} | asked
        return changes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """End the run's job, wait for its node, which may run in another thread, and release the run.

        A new run whose request can't be carried out leaves nothing; a checkpointer's and a user's own files stay.
        """
        self._is_closed = True
        if self._resources is not None:
            self.jobs.close()
        if self.working.acquire(timeout=NODE_END_S):
            self.working.release()
        if self._resources is None:
            return
        self._resources.close()
        self._resources = None
        if self._is_new and isinstance(error, RequestError) and not isinstance(error, RunError):
            shutil.rmtree(self.workspace.jobs, ignore_errors=True)
            for name in (MANIFEST, LOCK, TIMESHEET_FILE, JOB_LOG, FILE):
                (self.workspace.root / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.workspace.root.rmdir()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ending: Any) -> None:
        await asyncio.to_thread(self.__exit__, *ending)

    @property
    def trusted(self) -> frozenset[str]:
        """Return the addresses that the environment's keys may go to."""
        return trusted_addresses(os.environ, *self.addresses)

    def advisor(self, state: RunState) -> Chat | None:
        """Return the language model that may plan, None if only the rules plan; raises RunError if its object is missing."""
        if not state.is_advised:
            return None
        if state.advisor_object is not None and self.chat_model is None:
            advice = "pass it again, as build_graph(advisor=...) or resume(..., advisor=...)"
            raise RunError(
                f"this run was begun with the object {state.advisor_object}, which is never stored: {advice}"
            )
        if self._language_model is None:
            transcript = Transcript(self.workspace.root / FILE, max_tokens=state.request.llm_tokens)
            if state.recorded is not None:
                self._language_model = Recorded(open_recording(state.recorded), transcript)
                return self._language_model
            if self.chat_model is not None:
                model, name = self.chat_model, name_of(self.chat_model)
            else:
                endpoint = require(state.endpoint)
                key, name = key_for(endpoint, self.trusted), endpoint.name
                model = chat_client(endpoint, key, timeout_s=state.request.llm_timeout_s)
            self._language_model = Chat(model, name, transcript)
        return self._language_model

    def evaluator(self, state: RunState) -> Evaluator:
        """Return the evaluator of attempts, with the baseline's profile; cached while its inputs are the same."""
        acquired, resolved, profiled = require(state.acquired), require(state.resolved), require(state.profiled)
        # A fork or an edit changes some of it.
        inputs = (state.request, state.goal, acquired, resolved, profiled)
        if self._evaluator is None or self._evaluator[0] != inputs:
            profile = read_profile(self.jobs, profiled)
            self.jobs.pass_s = profile.headline.pass_s
            evaluator = Evaluator(
                jobs=self.jobs,
                acquired=acquired,
                baseline=resolved.baseline,
                profile=profile,
                goal=state.goal,
                settings=state.request,
                choices=deployment_choices(state.request, acquired.source.device),
            )
            self._evaluator = inputs, evaluator
        return self._evaluator[1]


def choose_run_id(request: Request, thread: str | None) -> str:
    """Return the run's id: the request's, the checkpointer thread's, or a hash of the request."""
    if thread is not None and request.run_id not in (None, thread):
        raise RunError(f"run_id is {request.run_id!r} but the checkpointer's thread_id is {thread!r}: leave one out")
    digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:12]
    run_id = request.run_id or thread or f"run-{digest}"
    if not RUN_ID.fullmatch(run_id):
        raise RunError(f"thread_id {run_id!r} can't name a folder: use letters, digits, '.', '_' and '-', at most 100")
    return run_id


def run_agent(agent: Callable[[Any, Run], Update], state: Request | RunState, *, runtime: Runtime[Any]) -> Update:
    """Run an agent as a node, and stream its progress; the first node of an invocation opens the run.

    Acquisition takes a request, and begins its run; every other agent takes the state of a run under way.
    """
    run: Run = runtime.context
    stage, info = cast("FunctionType", agent).__name__, runtime.execution_info
    event = ProgressEvent(stage=stage, message="")
    with run.working:
        thread, changes = info.thread_id if info else None, Update()
        if isinstance(state, RunState):
            request = run.context.applied_to(state.request)
            run.enter(request, state, thread)
            changes = run.changes_by_context(state, request)
            state = state.model_copy(update=changes)
            run.jobs.timesheet.resume_at(state.spent_s)
            run.jobs.time_budget_s = state.request.time_budget_s
            event = _first_event(state, stage)
        else:
            # It has the context's fields already, so that a run that is cut here goes on without a context.
            run.enter(state, None, thread)
        timesheet = run.jobs.timesheet
        began_s = timesheet.spent_s

        def progress(message: str, done: int, total: int) -> None:
            fields: Update = {"message": message, "done": done, "total": total, "spent_s": timesheet.spent_s}
            in_stage_s = timesheet.spent_s - began_s
            if isinstance(state, RunState) and (left := seconds_left(state, stage, run.jobs, in_stage_s)):
                fields["stage_left_s"], fields["left_s"] = left
            runtime.stream_writer(event.model_copy(update=fields).model_dump(mode="json"))

        run.jobs.progress = progress
        words = state.prompts if isinstance(state, RunState) else {}
        with storage_errors(run.workspace.root), prompts.edited(words):
            progress("started", 0, 0)
            update = agent(state, run)
        # An interrupted job may end as if done, as a compiler that received the signal too does.
        raise_if_stopped()
        return {**changes, **update, "spent_s": timesheet.spent_s}


def _checked_input(value: Any, context: ContextBase) -> Any:
    """Return an input with the fields that a context gives; raises FieldError for one that doesn't fit."""
    if isinstance(value, dict):
        # Only the given terms: a thread keeps its other ones.
        return validated(Request, value | context.given).model_dump(exclude_unset=True)
    if isinstance(value, Request):
        return context.applied_to(value)
    if isinstance(value, Command):
        _check_fields(dict(value.update) if isinstance(value.update, list) else value.update)
    return value


def _check_fields(*updates: Any) -> None:
    """Raise FieldError for an update of a field that the state, or its request, doesn't have."""
    for update in updates:
        if not isinstance(update, dict):
            continue
        if terms := [name for name in update if name in Request.model_fields]:
            raise FieldError(f"{terms[0]!r} is a term of the request: write {{'request': {{{terms[0]!r}: ...}}}}")
        if problem := unknown_field(update, {**RunState.model_fields, **Request.model_fields}):
            raise FieldError(problem)
        if isinstance(request := update.get("request"), dict):
            validated(Request, request)


class CheckedGraph(CompiledStateGraph[RunState, Any, Request, RunResult]):
    """Optimization graph that checks every input and closes the run of every invocation, however it ends.

    All calls, also on copies, go through `stream` or `astream`. The run is LangGraph's context: the caller's, who has opened it, or a new one.
    """

    def __init__(self, *, make_run: Callable[[], Run], **compiled: Any) -> None:
        super().__init__(**compiled)
        self.make_run = make_run

    def _run(self, context: Any, config: RunnableConfig | None) -> Run:
        if isinstance(context, Run):
            run = context
        else:
            run = self.make_run()
            run.use(as_context(context))
        inherited = ensure_config(config).get("configurable", {}).get(INHERITED)
        run.is_checkpointed = bool(self.checkpointer or inherited)
        return run

    def stream(
        self, input: Any, config: RunnableConfig | None = None, *, context: Any = None, **options: Any
    ) -> Iterator[Any]:
        """Stream a run's steps; raises FieldError before the first for an unknown term in the input."""
        run = self._run(context, config)
        # LangGraph waits for the running node, so its work ends first.
        with (
            closing(
                cast("Any", super().stream(_checked_input(input, run.context), config, context=run, **options))
            ) as parts,
            run,
        ):
            for part in parts:  # noqa: UP028 - `yield from` would close `parts` before the run
                yield part

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, *, context: Any = None, **options: Any
    ) -> AsyncIterator[Any]:
        """Stream a run's steps as `stream` does."""
        run = self._run(context, config)
        parts = cast("Any", super().astream(_checked_input(input, run.context), config, context=run, **options))
        async with aclosing(parts), run:
            async for part in parts:
                yield part

    def get_input_jsonschema(self, config: RunnableConfig | None = None) -> Update:
        """Return the schema of Studio's form: what a run is about first, and nothing that its assistant has."""
        schema = super().get_input_jsonschema(config)
        fields = {name: field for name, field in schema["properties"].items() if name not in PLANNING}
        return schema | {"properties": {name: fields[name] for name in dict.fromkeys((*FORM, *fields))}}

    def bulk_update_state(self, config: RunnableConfig, supersteps: Sequence[Sequence[StateUpdate]]) -> RunnableConfig:
        """Update the state; raises FieldError for a field that the state doesn't have."""
        _check_fields(*(update.values for step in supersteps for update in step))
        return super().bulk_update_state(config, supersteps)

    async def abulk_update_state(
        self, config: RunnableConfig, supersteps: Sequence[Sequence[StateUpdate]]
    ) -> RunnableConfig:
        """Update the state as `bulk_update_state` does."""
        _check_fields(*(update.values for step in supersteps for update in step))
        return await super().abulk_update_state(config, supersteps)
