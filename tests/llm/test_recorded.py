"""A recorded model: a run's ledger gives the same answers again, and what is no whole record of this model is refused in one line."""

import json
from pathlib import Path

import pytest
from advisors import advisor_of
from chat_server import Said, chat_server, error, in_turn
from made import BASELINE, GOAL, evidence, profile

from profiling_agent.analysis.rules import analyse
from profiling_agent.errors import RequestError
from profiling_agent.iteration.planners import first_proposal, next_proposal
from profiling_agent.llm.ledger import FILE, Ledger, note_end
from profiling_agent.llm.recorded import Recorded, Recording, Step, read_recording, recorded_file
from profiling_agent.records import Attempt, Journal, ModelProfile, Plan

SAVINGS = (0.2, 0.3, 0.4)
KLS = tuple(0.0001 * 2**step for step in range(12))
VIT, OTHER = "ViTForImageClassification", "SwinForImageClassification"


def judged(num_layers: int = 4) -> ModelProfile:
    found = profile(num_layers)
    return found.model_copy(update={"evidence": evidence(found.units, {unit.name: KLS for unit in found.units})})


def target(saving: float) -> Said:
    return Said(content=json.dumps({"reason": f"{saving}", "target": {"metric": "params", "saving": saving}}))


def seen(*plans: Plan) -> Journal:
    attempts = (
        Attempt(number=number, plan=plan, accepted=True, reason="made") for number, plan in enumerate(plans, start=1)
    )
    return Journal(baseline=BASELINE, attempts=tuple(attempts))


def plans_of(advisor, found: ModelProfile) -> list[Plan]:
    """Return the first plan and two more."""
    plans = [first_proposal(advisor, "llm", found, GOAL, analyse(found, GOAL))[0]]
    for _ in range(2):
        choice = next_proposal(advisor, "llm", found, GOAL, seen(*plans), max_iterations=5)
        assert isinstance(choice, tuple)
        plans.append(choice[0])
    return plans


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return the ledger of a run in which three plans were asked for, the second after a repair."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    said = (target(0.2), Said(content="hm"), target(0.3), target(0.4))
    with chat_server(in_turn(*said)) as server:
        Ledger(folder, max_requests=0, max_tokens=0).begin(VIT)
        advisor = advisor_of(server, folder)
        assert [plan.target.saving for plan in plans_of(advisor, judged()) if plan.target] == list(SAVINGS)
        note_end(folder)
    return folder / FILE


def replayed(record: Path, folder: Path) -> Recorded:
    folder.mkdir(exist_ok=True)
    return Recorded(read_recording(str(record)), Ledger(folder, max_requests=9, max_tokens=9), VIT)


def test_a_record_gives_the_same_plans_without_a_request(record: Path, tmp_path: Path):
    found = judged()
    again = replayed(record, tmp_path / "again")

    assert [plan.target.saving for plan in plans_of(again, found) if plan.target] == list(SAVINGS)
    assert again.name == "openai:scripted, recorded"
    told = read_recording(str(record))
    # Four requests of 100 tokens read and 10 written: one of the answers was none.
    assert (told.requests, told.input_tokens, told.output_tokens) == (4, 400, 40)
    assert (told.architecture, told.params) == ('"ViTForImageClassification"', found.params)
    assert Ledger(tmp_path / "again", max_requests=0, max_tokens=0).spent.requests == 0


def test_another_machines_times_change_the_questions_and_not_the_answers(record: Path, tmp_path: Path):
    found = judged()
    headline = found.headline.model_copy(
        update={"latency": found.headline.latency.model_copy(update={"median_ms": 77.0})}
    )
    elsewhere = found.model_copy(update={"headline": headline})

    plan, origin = first_proposal(replayed(record, tmp_path / "again"), "llm", elsewhere, GOAL, Plan())
    assert plan.target is not None
    assert (plan.target.saving, origin.by) == (0.2, "openai:scripted, recorded")


def test_a_resumed_run_goes_on_where_it_was(record: Path, tmp_path: Path):
    found = judged()
    plan, _ = first_proposal(replayed(record, tmp_path / "again"), "llm", found, GOAL, analyse(found, GOAL))
    # Asked once more, as after a cut, the same question has the same answer; the next one has the next.
    again = replayed(record, tmp_path / "again")
    assert first_proposal(again, "llm", found, GOAL, analyse(found, GOAL))[0] == plan
    choice = next_proposal(again, "llm", found, GOAL, seen(plan), max_iterations=5)
    assert isinstance(choice, tuple)
    assert choice[0].target is not None
    assert choice[0].target.saving == SAVINGS[1]


def test_a_replayed_run_is_a_record_itself(record: Path, tmp_path: Path):
    again = replayed(record, tmp_path / "again")
    plans_of(again, judged())
    note_end(tmp_path / "again")

    second = read_recording(str(tmp_path / "again" / FILE))
    assert second.steps == read_recording(str(record)).steps
    assert second.model == "openai:scripted"


def test_who_asks_more_than_was_recorded_is_left_to_the_rules(record: Path, tmp_path: Path):
    found = judged()
    again = replayed(record, tmp_path / "again")
    plans = plans_of(again, found)
    by_rules = next_proposal(None, "rules", found, GOAL, seen(*plans), max_iterations=9)
    choice = next_proposal(again, "llm", found, GOAL, seen(*plans), max_iterations=9)

    assert isinstance(choice, tuple)
    assert isinstance(by_rules, tuple)
    assert choice[0] == by_rules[0]
    assert "has for iterative_pruning are used up" in (choice[1].note or "")


def test_a_question_that_had_no_answer_has_none_again(tmp_path: Path):
    found = judged()
    with chat_server(in_turn(target(0.2), error(401))) as server:
        advisor = advisor_of(server, tmp_path)
        plan, _ = first_proposal(advisor, "llm", found, GOAL, analyse(found, GOAL))
        next_proposal(advisor, "llm", found, GOAL, seen(plan), max_iterations=5)
    again = replayed(tmp_path / FILE, tmp_path / "again")
    first_proposal(again, "llm", found, GOAL, analyse(found, GOAL))
    choice = next_proposal(again, "llm", found, GOAL, seen(plan), max_iterations=5)

    assert isinstance(choice, tuple)
    assert choice[1].by == "rules"
    assert "can't be asked" in (choice[1].note or "")
    # Asked once more, as after a cut, it uses up no other answer.
    cut = replayed(tmp_path / FILE, tmp_path / "again")
    assert next_proposal(cut, "llm", found, GOAL, seen(plan), max_iterations=5) == choice
    assert Ledger(tmp_path / "again", max_requests=9, max_tokens=9).num_settled("iterative_pruning") == 1


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: text[:-20], "its last line is none that a run writes"),
        (lambda text: "", "its last line is none that a run writes"),
        (lambda text: "\x89PNG", "its last line is none that a run writes"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-1]), "its run did not come to an end"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-2]), "nothing came of its last turn"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-3]), "its last request has no answer"),
        (lambda text: text.splitlines(keepends=True)[0] + '{"kind": "end"}\n', "holds no answers of a language model"),
    ],
)
def test_a_record_that_was_cut_short_is_refused_in_one_line(record: Path, edit, said: str):
    record.write_text(edit(record.read_text()))

    with pytest.raises(RequestError, match=said) as refused:
        read_recording(str(record))
    assert "\n" not in str(refused.value)
    assert "recorded:FILE" in str(refused.value)


def test_a_record_of_before_such_marks_is_read_and_bad_lines_are_read_round(record: Path):
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join([lines[1], '{"kind": "request", "torn\n', *lines[2:-1]]))

    assert len(read_recording(str(record)).steps) == len(SAVINGS)


def test_a_record_of_another_model_is_refused_as_soon_as_it_shows(record: Path, tmp_path: Path):
    told = read_recording(str(record))
    told.check('"ViTForImageClassification"')
    with pytest.raises(RequestError, match=f'was recorded for "ViTForImageClassification" .* is "{OTHER}"'):
        told.check(f'"{OTHER}"')

    larger = judged(num_layers=5)
    with pytest.raises(
        RequestError, match=f"of {judged().params} params, and this run's model .* of {larger.params} params"
    ):
        first_proposal(replayed(record, tmp_path / "again"), "hybrid", larger, GOAL, analyse(larger, GOAL))


def test_what_is_no_file_is_said_with_what_to_name(tmp_path: Path):
    assert recorded_file("openai:gpt-4o") is None
    assert recorded_file("recorded:a/b.jsonl") == "a/b.jsonl"
    with pytest.raises(RequestError, match="names no file"):
        recorded_file("recorded:")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RequestError, match="can't be read"):
            read_recording(str(path))


def test_an_answer_that_is_none_any_more_is_left_to_the_rules(tmp_path: Path):
    steps = Recording(file="f", model="m", steps=(Step(agent="analysis", answer='{"cut": "everything"}'),))
    found = judged()
    plan, origin = first_proposal(
        Recorded(steps, Ledger(tmp_path, max_requests=9, max_tokens=9), VIT), "llm", found, GOAL, analyse(found, GOAL)
    )

    assert plan == analyse(found, GOAL)
    assert "is none that this version knows" in (origin.note or "")


def test_a_record_of_a_strangers_is_bounded_in_what_it_holds(record: Path):
    lines = record.read_text().splitlines(keepends=True)
    answer = json.dumps({"kind": "answer", "agent": "analysis", "question": "q", "answer": {"reason": "x" * 40_000}})
    record.write_text("".join([*lines[:-1], *[f"{answer}\n"] * 30, lines[-1]]))
    with pytest.raises(RequestError, match="answers of more than 1,000,000 characters"):
        read_recording(str(record))

    named = json.dumps(f'Model: "{VIT}", {"9" * 20} params')
    text = "".join(lines)
    start = text.index('Model: \\"')
    end = text.index(" params", start)
    record.write_text(text[:start] + named[1:-8] + text[end:])
    params = read_recording(str(record)).params
    assert params is not None
    assert params < 2**63
