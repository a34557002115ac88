"""How replies are read, a kind a row, by a scripted LangChain model."""

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from profiling_agent.errors import AdvisorError
from profiling_agent.llm.chat import Chat, read_answer
from profiling_agent.llm.transcript import FILE, Question, Transcript
from profiling_agent.planning.llm_planner import PlanAnswer

ANSWER = '{"reason": "the evidence", "target": {"metric": "macs", "saving": 0.2}}'
# Longer than the answer, and as valid.
DRAFT = (
    '{"reason": "a first idea, which is bolder than what the evidence allows", "target": {"metric": "macs", "saving": 0.7}, '
    '"caps": [{"layer": "mlp", "max_ratio": 0.5}]}'
)


def call(arguments: str) -> dict[str, Any]:
    return {"name": "PlanAnswer", "args": json.loads(arguments), "id": "call_0", "type": "tool_call"}


ANSWERS: dict[str, AIMessage | str] = {
    "the object alone": ANSWER,
    "in a code fence": f"```json\n{ANSWER}\n```",
    "in a code fence without a language": f"Sure!\n```\n{ANSWER}\n```\nGood luck!",
    "between words": f"My plan is {ANSWER}, as the frontier says.",
    "before an object of another kind": f'{ANSWER}\nThat gives {{"macs": 0.2}}.',
    "after a draft in the same text": f"First I thought of {DRAFT} but the better plan is {ANSWER}",
    "after a draft in a code fence": f"```json\n{DRAFT}\n```\nThat costs too much. Final:\n```json\n{ANSWER}\n```",
    "after a draft in think": f"<think>{DRAFT}</think>\n{ANSWER}",
    "after a draft in reasoning": f"<reasoning>{DRAFT}</reasoning>{ANSWER}",
    "after a draft in thought": f"<thought>\n{DRAFT}\n</thought>\n{ANSWER}",
    "after reasoning without its first tag": f"perhaps {DRAFT}\n</think>\n\n{ANSWER}",
    "after a draft in THINK": f"[THINK]{DRAFT}[/THINK]{ANSWER}",
    "after a draft in another channel": (
        f"<|channel|>analysis<|message|>{DRAFT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}"
    ),
    "after braces that are no JSON": f"{{see above}} {ANSWER}",
    "inside another object": f'{{"answer": {ANSWER}}}',
    "in a list": f"[{ANSWER}]",
    "as a call written as text": f'<tool_call>\n{{"name": "PlanAnswer", "arguments": {ANSWER}}}\n</tool_call>',
    "as a call after a call of a draft": (
        f'[TOOL_CALLS][{{"name": "PlanAnswer", "arguments": {DRAFT}}}, {{"name": "PlanAnswer", "arguments": {ANSWER}}}]'
    ),
    "as a call": AIMessage("", tool_calls=[call(ANSWER)]),
    "as parts": AIMessage([{"type": "reasoning", "reasoning": DRAFT}, {"type": "text", "text": ANSWER}]),
    "beside a draft in the reasoning": AIMessage(ANSWER, additional_kwargs={"reasoning_content": DRAFT}),
    "as reasoning without content": AIMessage("", additional_kwargs={"reasoning_content": f"\n```json\n{ANSWER}\n```"}),
}
NO_ANSWERS: dict[str, tuple[AIMessage | str, str]] = {
    "nothing": ("", "there is no JSON object"),
    "words": ("I can't plan that.", "there is no JSON object"),
    "a draft alone, in reasoning without an end": (f"<think>perhaps {DRAFT}", "there is no JSON object"),
    "a draft alone, in the reasoning": (
        AIMessage("", additional_kwargs={"reasoning_content": f"perhaps {DRAFT}"}),
        "there is no JSON object",
    ),
    "cut off": ('{"reason": "cut", "target": {"metric": "params", "sav', "there is no JSON object"),
    "of the wrong types": ('{"reason": 7, "pruning": "all"}', "reason: "),
    "after a draft, and invalid": (
        f'{DRAFT} then {{"reason": "more", "target": {{"metric": "macs", "saving": 7}}}}',
        "target.saving: Input should be less than",
    ),
    "an object of another kind": ('{"macs": 0.2}', "there is no JSON object"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_last_valid_object_after_the_reasoning_is_the_answer(kind: str):
    reply = ANSWERS[kind]
    value, complaint = read_answer(reply if isinstance(reply, AIMessage) else AIMessage(reply), PlanAnswer)

    assert complaint is None
    assert value == PlanAnswer.model_validate_json(ANSWER)


@pytest.mark.parametrize("kind", NO_ANSWERS)
def test_what_is_no_answer_goes_back_with_what_is_wrong_and_the_next_reply_counts(kind: str, tmp_path: Path):
    reply, complaint = NO_ANSWERS[kind]
    model = GenericFakeChatModel(messages=iter([reply, ANSWER]))
    advice = Chat(model, "scripted", Transcript(tmp_path / FILE, max_tokens=10**6), timeout_s=60.0).ask(
        Question(agent="analysis", instructions="Answer in JSON.", evidence="?"), PlanAnswer
    )

    assert (advice.value.reason, advice.repairs) == ("the evidence", 1)
    assert Transcript(tmp_path / FILE).of("complaint")[0]["text"].startswith(complaint)


def test_after_two_repairs_the_question_is_given_up(tmp_path: Path):
    model = GenericFakeChatModel(messages=iter(["no"] * 9))
    chat = Chat(model, "scripted", Transcript(tmp_path / FILE, max_tokens=10**6), timeout_s=60.0)

    with pytest.raises(AdvisorError, match=r"scripted gave no valid answer in 3 turns \(there is no JSON object"):
        chat.ask(Question(agent="analysis", instructions="Answer in JSON.", evidence="?"), PlanAnswer)
    assert len(Transcript(tmp_path / FILE).of("turn")) == 3
