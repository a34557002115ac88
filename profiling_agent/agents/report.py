"""Report agent: profiles the winner as the baseline was, and writes down what was decided and why."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.artifacts.card import write_card
from profiling_agent.artifacts.recipe import CARD
from profiling_agent.files import make_folders
from profiling_agent.iteration.finalists import torch_model
from profiling_agent.iteration.finalize import finalize
from profiling_agent.iteration.speed import raced_headline
from profiling_agent.jobs.profile import profile_artifact, read_profile
from profiling_agent.reporting.card import card_judged, card_notes, card_rows
from profiling_agent.reporting.report import Sources, build_report
from profiling_agent.reporting.results import results_folder
from profiling_agent.reporting.tracking import track
from profiling_agent.reporting.write import write_report


def report(state: RunState, session: RunSession) -> Update:
    """Profile the winner, write the report, and let go of the run."""
    assert state.acquired is not None, "acquisition comes first"
    assert state.resolved is not None, "the input shape resolver comes first"
    assert state.profiled is not None, "profiling comes first"
    assert state.stopped is not None, "the loop says why it stopped"
    assert state.final is not None, "the verdict comes first"
    evaluator, workspace, journal = session.evaluator(state), session.workspace, state.seen
    # Whoever forked the run behind its verdict may have changed the contract.
    final = state.final if state.final.goal == state.goal else finalize(evaluator, journal)
    best = final.winner.evaluation.model
    profiles = {"baseline": (state.profiled, evaluator.profile)}
    if (seen := torch_model(final.winner, journal, state.resolved.baseline)) != state.resolved.baseline:
        profiled = profile_artifact(
            session.jobs,
            seen,
            batch_size=state.batch_size,
            device=evaluator.device,
            headline=raced_headline(evaluator, final.race, seen),
        )
        profiles["best"] = (profiled, read_profile(session.jobs, profiled))
    written = build_report(
        state.request,
        final,
        Sources(
            acquired=state.acquired,
            input=state.resolved.input,
            deployment_search=journal.deployment_search,
            peak_memory_bytes=(evaluator.peak_memory(evaluator.baseline), evaluator.peak_memory(best)),
            attempts=journal.attempts,
            stopped=state.stopped,
            planned_by=state.advisor_note,
            spent=session.spent(state),
            decisions=state.decisions,
            profiles=profiles,
            times=session.jobs.timesheet.by_kind(),
        ),
    )
    folder = results_folder(workspace.root, written)
    make_folders(folder)
    # A fork may return the model that its parent did, whose card tells of the parent's verdict.
    if folder == workspace.root or not (session.jobs.path(best) / CARD).exists():
        write_card(session.jobs.path(best), card_rows(written), card_notes(written), judged=card_judged(written))
    workspace.point_best(best, folder)
    write_report(written, folder)
    if line := track(written, folder):
        session.jobs.progress(line, 0, 0)
    session.jobs.forget_images()
    session.close()
    return {"verdict": written.verdict, "report": written, "results_dir": str(folder)}
