"""Runs that wait for a person: in Python, from another process, and with answers that can't be taken."""

import json
from pathlib import Path

import pytest
from conftest import World
from langgraph.types import Command

from profiling_agent import Approval, ApprovalQuestion, approve, build_graph, optimize, pending, resume
from profiling_agent.errors import ApprovalPendingError, RequestError
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.schemas import Cap

FIRST_BLOCK = r"layers\.0\.mlp"


@pytest.mark.slow
def test_a_plan_is_refused_edited_and_kept_to(world: World, tmp_path: Path):
    asked: list[ApprovalQuestion] = []
    answers = [
        Approval(decision="edit", caps=(Cap(layer="no.such.layer"),)),
        Approval(decision="reject", reason="start milder"),
        Approval(decision="edit", caps=(Cap(layer=FIRST_BLOCK),)),
    ]

    def approver(question: ApprovalQuestion) -> Approval:
        asked.append(question)
        return answers.pop(0) if answers else Approval(decision="accept")

    report = optimize(
        world.request(tmp_path, approve="each", max_iterations=2, quantize_dtype="none"), approver=approver
    )

    assert [question.attempt for question in asked] == [1, 1, 1, 2]
    assert "no.such.layer" in (asked[1].problem or "")
    assert asked[2].params_saved < asked[0].params_saved
    assert len(report.attempts) == 2
    cut = [{c.unit.name for c in attempt.dry_run.cuts} for attempt in report.attempts if attempt.dry_run]
    assert not any(FIRST_BLOCK.replace("\\", "") in name for names in cut for name in names)
    assert [row.answer.decision for row in report.decisions] == ["reject", "edit", "accept"]


@pytest.mark.slow
def test_a_run_waits_for_langgraphs_own_command_or_ours_and_refuses_an_answer_that_fits_nothing(
    world: World, tmp_path: Path
):
    run = tmp_path / "quick"
    graph, config = build_graph(RunSaver(tmp_path)), {"configurable": {"thread_id": run.name}}
    request = world.request(tmp_path, approve="plan", max_iterations=1, run_id=None, quantize_dtype="none")
    stopped = graph.invoke(request, config)
    (waiting,) = stopped["__interrupt__"]
    (action,) = json.loads(json.dumps(waiting.value))["action_requests"]
    (again,) = graph.invoke(Command(resume={"decisions": [{"type": "reject"}]}), config)["__interrupt__"]
    assert "a rejection needs a reason" in again.value["question"]["problem"]

    jobs = sorted(path.name for path in (run / "jobs").iterdir())
    with pytest.raises(ApprovalPendingError, match=r"waits for an approval of attempt 1 \(.*\): answer with"):
        resume(run)
    question = pending(run)
    assert question is not None
    assert question.cuts
    with pytest.raises(ApprovalPendingError, match=r"attempt 1 \(min_speedup|attempt 1 \(the layer pattern"):
        approve(run, Approval(decision="edit", caps=(Cap(layer="nowhere"),)))
    assert sorted(path.name for path in (run / "jobs").iterdir()) == jobs

    stricter = {"max_accuracy_drop": 0.005, "caps": [{"layer": FIRST_BLOCK}], "target": {"saving": 0.2}}
    edit = {"type": "edit", "edited_action": {"name": "apply_plan", "args": action["args"] | stricter}}
    verdict = graph.invoke(Command(resume={"decisions": [edit]}), config)["verdict"]
    values = graph.get_state(config).values
    assert {term.name: term.required for term in verdict.terms}["accuracy"] == 0.005
    assert [cap.layer for cap in values["caps"]] == [FIRST_BLOCK]
    assert list(values["pins"]) == []


def test_without_a_checkpointer_approval_is_refused_at_the_start(world: World, tmp_path: Path):
    with pytest.raises(RequestError, match="build the graph with a checkpointer"):
        build_graph().invoke(world.request(tmp_path, approve="plan"))
    assert not list(tmp_path.iterdir())
