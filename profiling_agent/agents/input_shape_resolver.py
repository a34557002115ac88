"""Input shape resolver agent: finds the input shape and saves the baseline with it."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.errors import AdvisorError, ShapeUnresolvedError
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import ResolvedShape, ResolveShapeTask, SurveyShapeTask
from profiling_agent.llm.transcript import LanguageModel
from profiling_agent.shapes.advised import advised_shape


def input_shape_resolver(state: RunState, session: RunSession) -> Update:
    """Resolve the input shape by the ordered rules, or by a language model where they disagree or don't know."""
    assert state.acquired is not None, "acquisition comes first"
    source = state.acquired.source
    task = ResolveShapeTask(model=source.name, revision=source.revision, device=source.device)
    advisor = session.advisor(state)
    return {"resolved": resolve_with(advisor, task, session.jobs) if advisor else session.jobs.run(task)}


def resolve_with(advisor: LanguageModel, task: ResolveShapeTask, jobs: Jobs) -> ResolvedShape:
    """Resolve by the rules where they are certain, else by the language model, and by the rules again where it fails."""
    facts = jobs.run(SurveyShapeTask(model=task.model, revision=task.revision, device=task.device))
    if facts.is_certain:
        return jobs.run(task)
    try:
        return advised_shape(advisor, facts, lambda spec: jobs.run(task.model_copy(update={"stated": spec})))
    except (AdvisorError, ShapeUnresolvedError) as error:
        resolved = jobs.run(task)
        told = resolved.input.model_copy(update={"source": f"{resolved.input.source}; {error}"})
        return resolved.model_copy(update={"input": told})
