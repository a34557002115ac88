"""Advice after a miss: limits that measured candidates would meet, worked out by hand."""

from functools import partial

import pytest
import sample_records
from advisors import Scripted
from chat_server import Said
from langchain_core.messages import BaseMessage

from profiling_agent.errors import AdvisorError
from profiling_agent.schemas import Advice, Candidate, Goal, Outcome, Term, Variant, Verdict
from profiling_agent.search.advice import AdviceAnswer, advice_question, advise, explained
from profiling_agent.search.finalize import FinalChoice

GOAL = Goal(max_accuracy_drop=0.01, min_speedup=3.0, max_size_ratio=0.5, selection="contract")
# Of 4,000 bytes and 900 right answers of 1,000.
MILD = sample_records.evaluation("mild", Variant.QUANTIZED, correct=896, size_bytes=1400)
DEEP = sample_records.evaluation("deep", Variant.BOTH, correct=882, size_bytes=1000)
LARGE = sample_records.evaluation("large", Variant.PRUNED, correct=880, size_bytes=3001)
SPEEDUPS = {"mild": 2.509, "deep": 3.2, "large": 2.9}


def final(outcome: Outcome, *, refused: bool = False) -> FinalChoice:
    """Return the choice of the mild candidate, or of the baseline where the deep one was refused with 2.5 points lost."""
    race = sample_records.race(*(sample_records.race_result(n, s, s * 0.98, s * 1.02) for n, s in SPEEDUPS.items()))
    winner = sample_records.BASELINE if refused else MILD
    deep = Candidate(attempt=1, evaluation=DEEP)
    term = Term(name="accuracy", required=0.01, measured=0.025 if refused else 0.004, holds=not refused)
    return FinalChoice(
        goal=GOAL,
        winner=Candidate(evaluation=winner),
        variants=(sample_records.BASELINE, MILD, DEEP, LARGE),
        screening=race,
        race=None,
        heldout_baseline=sample_records.BASELINE,
        heldout_winner=winner,
        kept_beside=deep if refused else None,
        refused=(DEEP.model, LARGE.model) if refused else (),
        verdict=Verdict(outcome=outcome, certified=False, terms=(term,), explanation=""),
    )


def test_the_smallest_changes_come_first_rounded_to_where_the_candidate_meets_them():
    advice = advise(final(Outcome.NEAREST_MISS))

    assert [row.changes for row in advice] == [
        {"min_speedup": 2.5},
        {"max_accuracy_drop": 0.018},
        {"max_accuracy_drop": 0.02, "min_speedup": 2.9, "max_size_ratio": 0.76},
    ]
    assert advice[0].evidence == (
        "candidate 1, quantized (eager float32), lost 0.40 points on held-out images, is 2.51x as fast and has 35% of the bytes"
    )


def test_a_candidate_that_held_out_images_refused_is_judged_by_them():
    advice = advise(final(Outcome.NEAREST_MISS, refused=True))
    (deep,) = [row for row in advice if "candidate 2" in row.evidence]

    assert deep.changes == {"max_accuracy_drop": 0.025}
    assert "2.50 points on held-out images" in deep.evidence
    # Another one that they refused isn't advised by what search images say of it.
    assert not any("candidate 3" in row.evidence for row in advice)


def test_a_contract_that_is_met_needs_no_advice():
    assert advise(final(Outcome.MET)) == ()


def ranks(*rows: tuple[int, str]) -> Said:
    return Said(tool_calls=(("rank_advice", {"ranked": [{"number": number, "text": text} for number, text in rows]}),))


def ranked_by(*said: Said) -> tuple[Scripted, tuple[Advice, ...]]:
    """Return a scripted LLM that says these in turn, and the advice as it ranked it."""
    replies, options = iter(said), advise(final(Outcome.NEAREST_MISS))

    def script(messages: list[BaseMessage]) -> Said:
        return next(replies)

    chat, question = Scripted(script), advice_question(GOAL, options, "three times as fast")
    return chat, chat.fill_in(question, "rank_advice", AdviceAnswer, partial(explained, GOAL, options))


GOOD = ranks((2, "1.8 points buy 3.2x."), (1, "2.5 times instead of 3."), (3, "It gives up all three limits."))


def test_an_llm_ranks_and_explains_by_the_numbers_of_each_option():
    chat, advice = ranked_by(GOOD)

    assert [row.explanation for row in advice][:2] == ["1.8 points buy 3.2x.", "2.5 times instead of 3."]
    assert [row.changes for row in advice][:2] == [{"max_accuracy_drop": 0.018}, {"min_speedup": 2.5}]
    assert chat.asked[0][1].text.splitlines()[:2] == [
        "The user's goal: three times as fast",
        f"1. min_speedup 2.5 in place of 3: {advice[1].evidence}",
    ]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (ranks((1, "It is 2.9 times as fast."), (2, "x"), (3, "x")), "option 1 has no such number: 2.9"),
        (ranks((1, "x"), (1, "x"), (2, "x")), "rank each option once: 1, 2, 3"),
        (Said(content="the first"), "call rank_advice"),
    ],
)
def test_what_no_option_has_goes_back_once_and_then_is_refused(said: Said, problem: str):
    chat, advice = ranked_by(said, GOOD)

    assert problem in chat.asked[1][-1].text
    assert advice[0].explanation
    with pytest.raises(AdvisorError, match=problem):
        ranked_by(said, said)
