"""The chat model: clients, replies of many kinds, recorded transcripts and personas."""

import json
import operator
import time
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from advisors import advisor_of
from chat_server import Said, Script, chat_server, error, in_turn
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph
from llm_personas import PERSONAS
from pydantic import BaseModel, Field
from sample_records import GOAL, evidence, profile
from simulated_runs import NUM_ATTEMPTS, best_saving, loop

from profiling_agent.errors import AdvisorError, ContextTooLongError, RequestError
from profiling_agent.llm.chat import Chat, Endpoint, chat_client, check_endpoint, read_answer
from profiling_agent.llm.transcript import FILE, Question, Recorded, Transcript, open_recording
from profiling_agent.planning.allocation import allowed_kl
from profiling_agent.planning.llm_planner import PlanAnswer
from profiling_agent.schemas import ModelProfile
from profiling_agent.search.planners import Planner

QUESTION = Question(agent="analysis", instructions="Answer in JSON.", evidence="How much?")
ANSWER = Said(content='{"ratio": 0.5}')


class Ratio(BaseModel):
    ratio: float = Field(ge=0, le=1)


def look(layer: str, keep: int = 1) -> str:
    """Look at a layer."""
    return f"{layer} kept at {keep}"


def chat_of(model: Any, folder: Path) -> Chat:
    """Return a client of a LangChain model."""
    return Chat(model, "scripted", Transcript(folder / FILE, max_tokens=10**6), timeout_s=9.0)


def scripted(*replies: AIMessage | str) -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter(replies))


def knows(*features: str, status: int = 400) -> Script:
    """Return a server that refuses every other response format, and tools."""

    def script(payload: dict[str, Any], number: int) -> Said:
        wanted = payload.get("response_format", {}).get("type") or ("tools" if "tools" in payload else "text")
        return ANSWER if wanted in features else error(status, f"unknown: {wanted}")

    return script


@pytest.mark.parametrize("status", [400, 404, 422])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_server_that_does_not_know_a_response_format_is_asked_by_the_next_and_that_is_kept(
    tmp_path: Path, status: int, number: int
):
    *first, known = ["json_schema", "json_object", "text"][:number]
    with chat_server(knows(known, status=status)) as server:
        chat = advisor_of(server, tmp_path)
        assert chat.ask(QUESTION, Ratio).value.ratio == 0.5
        chat.ask(QUESTION.model_copy(update={"evidence": "And now?"}), Ratio)

        wanted = [payload.get("response_format", {}).get("type", "text") for payload in server.asked]
        assert wanted == [*first, known, known]
        # Nor does it know tools.
        other = QUESTION.model_copy(update={"evidence": "And then?"})
        assert advisor_of(server, tmp_path).ask(other, Ratio, tools=[look]).value.ratio == 0.5
        assert ["tools" in payload for payload in server.asked[number + 1 :]] == [True] + [False] * number


@pytest.mark.parametrize(
    "calls",
    [
        Said(tool_calls=(("look", {"layer": "a", "keep": "3"}), ("look", {}), ("shell", {"command": "ls"}))),
        Said(
            content='<think>{"name": "look"}</think>{"name": "look", "arguments": {"layer": "a", "keep": 3}}\n'
            '<tool_call>{"name": "look", "parameters": {}}</tool_call>'
        ),
    ],
    ids=["calls", "calls written as text"],
)
def test_tools_are_called_and_what_they_return_goes_back(tmp_path: Path, calls: Said):
    with chat_server(in_turn(calls, ANSWER)) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=[look]).value.ratio == 0.5
        results = [message["content"] for message in server.asked[1]["messages"] if message["role"] == "tool"]

    assert results[0] == "a kept at 3"
    assert results[1].startswith("layer: Field required")
    assert results[2:] in ([], ["no such tool; there are look"])


def test_a_model_that_calls_tools_on_and_on_is_asked_without_them_and_sees_what_they_returned(tmp_path: Path):
    endless = Said(tool_calls=(("look", {"layer": "a"}),))
    with chat_server(lambda payload, _: endless if "tools" in payload else ANSWER) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=[look]).value.ratio == 0.5
        assert ["tools" in payload for payload in server.asked] == [True] * 4 + [False]
        assert server.asked[-1]["messages"][-1]["content"].count('look({"layer": "a"}): a kept at 1') == 4


def test_reasoning_next_to_an_empty_content_is_the_answer_when_it_is_one(tmp_path: Path):
    message = {"role": "assistant", "content": None, "reasoning_content": '{"ratio": 0.25}'}
    head = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    with chat_server(in_turn(Said(body=json.dumps(head | {"choices": [{"index": 0, "message": message}]})))) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio).value.ratio == 0.25
        # This server counts no tokens.
        assert Transcript(tmp_path / FILE).spent.input_tokens is None


def test_the_questions_own_check_goes_back_too_and_the_last_valid_answer_is_kept(tmp_path: Path):
    with chat_server(in_turn(ANSWER, Said(content='{"ratio": 0.4}'), error(500))) as server:
        advice = advisor_of(server, tmp_path).ask(QUESTION, Ratio, check=lambda answer: f"{answer.ratio} is too much")
        assert "0.5 is too much" in server.asked[1]["messages"][-1]["content"]

    assert (advice.value.ratio, advice.complaint, advice.repairs) == (0.4, "0.4 is too much", 1)


@pytest.mark.parametrize(
    "passing", [error(429, retry_after="1"), error(500), Said(drops=True)], ids=["429", "500", "cut"]
)
def test_what_passes_is_tried_again(tmp_path: Path, passing: Said):
    started = time.monotonic()
    with chat_server(in_turn(passing, ANSWER)) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio).value.ratio == 0.5
        assert len(server.asked) == 2

    if passing.status == 429:
        assert time.monotonic() - started >= 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (error(401), "openai:scripted gave no answer"),
        (Said(refusal="I don't plan."), "openai:scripted refuses to answer: I don't plan."),
        (Said(body="<html>busy</html>"), "openai:scripted gave no answer"),
        (Said(body='{"error": "no"}'), "openai:scripted gave no answer"),
        (Said(content='{"ratio": 0.5}', delay_s=3.0), "openai:scripted gave no answer .*imed out"),
        (error(400, "This model's maximum context length is 4096 tokens"), "maximum context length"),
    ],
    ids=["wrong key", "refusal", "page", "error", "timeout", "too long"],
)
def test_what_does_not_pass_is_one_line(tmp_path: Path, reply: Said, message: str):
    with chat_server(in_turn(reply)) as server, pytest.raises(AdvisorError, match=message) as caught:
        advisor_of(server, tmp_path, timeout_s=0.3).ask(QUESTION, Ratio)

    assert isinstance(caught.value, ContextTooLongError) == (reply.status == 400)
    assert reply.status != 400 or len(server.asked) == 1
    assert "\n" not in str(caught.value)
    assert Transcript(tmp_path / FILE).spent.failures == (str(caught.value),)


def test_repairs_end_when_the_time_of_the_question_has_passed(tmp_path: Path):
    slow = Said(content="no", delay_s=0.6)
    with chat_server(in_turn(slow)) as server, pytest.raises(AdvisorError, match="took longer than 1 s: llm_timeout_s"):
        advisor_of(server, tmp_path, timeout_s=1.0).ask(QUESTION, Ratio)
    assert len(server.asked) == 2


def test_a_budget_of_tokens_is_for_the_run_and_outlives_the_process(tmp_path: Path):
    with chat_server(in_turn(Said(content="no"))) as server:
        for number in range(3):
            question = QUESTION.model_copy(update={"evidence": f"{number}"})
            with pytest.raises(
                AdvisorError, match="no valid answer" if number == 0 else "the budget of 330 tokens is spent"
            ):
                # Each turn is of 110 tokens.
                advisor_of(server, tmp_path, max_tokens=330).ask(question, Ratio)
        assert len(server.asked) == 3
    spent = Transcript(tmp_path / FILE).spent
    assert (spent.requests, spent.input_tokens, spent.output_tokens, spent.repairs) == (3, 300, 30, 3)


def test_turns_of_a_server_that_counts_no_tokens_are_estimated_for_the_budget(tmp_path: Path):
    reply = Said(content="x" * 4000, has_usage=False)
    with chat_server(in_turn(reply)) as server, pytest.raises(AdvisorError, match="budget of 1500 tokens is spent"):
        advisor_of(server, tmp_path, max_tokens=1500).ask(QUESTION, Ratio)
    assert len(server.asked) == 2


def test_an_accepted_answer_and_a_failure_are_replayed_without_a_request(tmp_path: Path):
    other = QUESTION.model_copy(update={"evidence": "And now?"})
    with chat_server(in_turn(ANSWER, error(401))) as server:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)
        with pytest.raises(AdvisorError):
            advisor_of(server, tmp_path).ask(other, Ratio)
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio).value.ratio == 0.5
        with pytest.raises(AdvisorError, match="gave no answer"):
            advisor_of(server, tmp_path).ask(other, Ratio)
        assert len(server.asked) == 2


def test_a_line_that_a_kill_cut_off_is_passed_over_and_counted(tmp_path: Path):
    (tmp_path / FILE).write_text('{"kind": "request"}\nnonsense\n[1]\n{"kind": "answer", "que')
    with chat_server(in_turn(ANSWER)) as server:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)

    transcript = Transcript(tmp_path / FILE)
    assert len(transcript.of("answer")) == 1
    assert transcript.spent.unread_lines == 3


def test_the_key_is_in_the_header_and_in_no_file_when_a_server_quotes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with chat_server(in_turn(Said(content="is it sk-secret?"), error(401, "wrong key sk-secret"))) as server:
        model = chat_client(Endpoint(model="m", base_url=server.url), "sk-secret", timeout_s=9.0)
        with pytest.raises(AdvisorError) as caught:
            chat_of(model, tmp_path).ask(QUESTION, Ratio)
        assert server.keys == ["Bearer sk-secret"] * 2

    assert "sk-secret" not in str(caught.value) + (tmp_path / FILE).read_text()
    assert "(OPENAI_API_KEY)" in (tmp_path / FILE).read_text()


def test_a_redirect_takes_no_key_along(tmp_path: Path):
    with chat_server(in_turn(ANSWER)) as other:
        away = Said(status=307, body="", headers={"location": f"{other.url}/chat/completions"})
        with chat_server(in_turn(away)) as server:
            model = chat_client(Endpoint(model="m", base_url=server.url), "sk-secret", timeout_s=9.0)
            chat_of(model, tmp_path).ask(QUESTION, Ratio)
    assert other.keys == [""]


def test_an_endpoint_is_tried_by_one_request():
    with chat_server(in_turn(ANSWER, error(401), error(404))) as server:
        endpoint = Endpoint(model="m", base_url=server.url)
        check_endpoint(endpoint, "EMPTY", timeout_s=9.0)
        for message in ("AuthenticationError.*check the address, the model's name and the key", "NotFoundError"):
            with pytest.raises(RequestError, match=message):
                check_endpoint(endpoint, "EMPTY", timeout_s=9.0)
        assert len(server.asked) == 3
    with pytest.raises(RequestError, match=r"openai:m at http://127\.0\.0\.1:9/v1 gave no answer .*Connection"):
        check_endpoint(Endpoint(model="m", base_url="http://127.0.0.1:9/v1"), "EMPTY", timeout_s=9.0)


class State(TypedDict):
    ratios: Annotated[list[float], operator.add]


def test_tokens_are_streamed_under_the_name_of_the_node_and_counted(tmp_path: Path):
    with chat_server(in_turn(Said(content='{"ratio": 0.5}', piece=4))) as server:
        chat = advisor_of(server, tmp_path)
        graph = StateGraph(State)
        graph.add_node("analysis", lambda state: {"ratios": [chat.ask(QUESTION, Ratio).value.ratio]})
        graph.add_edge(START, "analysis")
        graph.add_edge("analysis", END)
        pieces: list[Any] = list(graph.compile().stream({"ratios": []}, stream_mode="messages"))

    assert (
        "".join(message.text for message, _ in pieces if type(message).__name__ == "AIMessageChunk") == '{"ratio": 0.5}'
    )
    assert {metadata["langgraph_node"] for _, metadata in pieces} == {"analysis"}
    assert Transcript(tmp_path / FILE).spent.input_tokens == 100


REPLY = '{"reason": "the evidence", "target": {"metric": "macs", "saving": 0.2}}'
# Longer than the answer, and as valid.
DRAFT = (
    '{"reason": "a first idea, which is bolder than what the evidence allows", "target": {"metric": "macs", "saving": 0.7}, '
    '"caps": [{"layer": "mlp", "max_ratio": 0.5}]}'
)


ANSWERS: dict[str, AIMessage | str] = {
    "the object alone": REPLY,
    "in a code fence": f"```json\n{REPLY}\n```",
    "in a code fence without a language": f"Sure!\n```\n{REPLY}\n```\nGood luck!",
    "between words": f"My plan is {REPLY}, as the frontier says.",
    "before an object of another kind": f'{REPLY}\nThat gives {{"macs": 0.2}}.',
    "after a draft in the same text": f"First I thought of {DRAFT} but the better plan is {REPLY}",
    "after a draft in a code fence": f"```json\n{DRAFT}\n```\nThat costs too much. Final:\n```json\n{REPLY}\n```",
    "after a draft in think": f"<think>{DRAFT}</think>\n{REPLY}",
    "after a draft in reasoning": f"<reasoning>{DRAFT}</reasoning>{REPLY}",
    "after a draft in thought": f"<thought>\n{DRAFT}\n</thought>\n{REPLY}",
    "after reasoning without its first tag": f"perhaps {DRAFT}\n</think>\n\n{REPLY}",
    "after a draft in THINK": f"[THINK]{DRAFT}[/THINK]{REPLY}",
    "after a draft in another channel": (
        f"<|channel|>analysis<|message|>{DRAFT}<|end|><|start|>assistant<|channel|>final<|message|>{REPLY}"
    ),
    "after braces that are no JSON": f"{{see above}} {REPLY}",
    "inside another object": f'{{"answer": {REPLY}}}',
    "in a list": f"[{REPLY}]",
    "as a call written as text": f'<tool_call>\n{{"name": "PlanAnswer", "arguments": {REPLY}}}\n</tool_call>',
    "as a call after a call of a draft": (
        f'[TOOL_CALLS][{{"name": "PlanAnswer", "arguments": {DRAFT}}}, {{"name": "PlanAnswer", "arguments": {REPLY}}}]'
    ),
    "as a call": AIMessage("", tool_calls=[{"name": "PlanAnswer", "args": json.loads(REPLY), "id": "call_0"}]),
    "as parts": AIMessage([{"type": "reasoning", "reasoning": DRAFT}, {"type": "text", "text": REPLY}]),
    "beside a draft in the reasoning": AIMessage(REPLY, additional_kwargs={"reasoning_content": DRAFT}),
    "as reasoning without content": AIMessage("", additional_kwargs={"reasoning_content": f"\n```json\n{REPLY}\n```"}),
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
    assert value == PlanAnswer.model_validate_json(REPLY)


@pytest.mark.parametrize("kind", NO_ANSWERS)
def test_what_is_no_answer_goes_back_with_what_is_wrong_and_the_next_reply_counts(kind: str, tmp_path: Path):
    reply, complaint = NO_ANSWERS[kind]
    advice = chat_of(scripted(reply, REPLY), tmp_path).ask(QUESTION, PlanAnswer)

    assert (advice.value.reason, advice.repairs) == ("the evidence", 1)
    assert Transcript(tmp_path / FILE).of("complaint")[0]["text"].startswith(complaint)


def test_after_two_repairs_the_question_is_given_up(tmp_path: Path):
    with pytest.raises(AdvisorError, match=r"scripted gave no valid answer in 3 turns \(there is no JSON object"):
        chat_of(scripted(*["no"] * 9), tmp_path).ask(QUESTION, PlanAnswer)
    assert len(Transcript(tmp_path / FILE).of("turn")) == 3


NEXT, LAST = (
    QUESTION.model_copy(update={"agent": "iterative_pruning", "evidence": evidence})
    for evidence in ("1 attempt", "2 attempts")
)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return a transcript as an earlier version wrote it, with a line that a kill cut off."""
    lines = [
        {"kind": "request"},
        {"kind": "turn", "model": "openai:m", "complaint": None, "input_tokens": 5, "output_tokens": 1},
        {"kind": "answer", "agent": "analysis", "question": "a", "answer": {"ratio": 0.5}},
        {"kind": "answer", "agent": "iterative_pruning", "question": "b", "answer": {"ratio": 0.25}},
        {"kind": "failure", "agent": "iterative_pruning", "question": "c", "reason": "openai:m gave no answer"},
    ]
    path = tmp_path / "recorded.jsonl"
    path.write_text('{"kind": "tur\n' + "".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def replayed(record: Path, folder: Path) -> Recorded:
    return Recorded(open_recording(str(record)), Transcript(folder / FILE))


def test_each_agent_gets_its_answers_in_order_and_a_resumed_run_goes_on_where_it_was(record: Path, tmp_path: Path):
    assert replayed(record, tmp_path).name == "openai:m, recorded"
    assert replayed(record, tmp_path).ask(NEXT, Ratio, check=lambda _: "too much").complaint == "too much"
    assert replayed(record, tmp_path).ask(QUESTION, Ratio).value.ratio == 0.5
    # The same questions again, as of a run that was cut before its next checkpoint.
    assert replayed(record, tmp_path).ask(NEXT, Ratio).value.ratio == 0.25
    for _ in range(2):
        with pytest.raises(AdvisorError, match="openai:m, recorded: openai:m gave no answer"):
            replayed(record, tmp_path).ask(LAST, Ratio)
    with pytest.raises(AdvisorError, match="its 1 answers for analysis are used up"):
        replayed(record, tmp_path).ask(QUESTION.model_copy(update={"evidence": "more"}), Ratio)
    # What it cost was paid for by the run that asked.
    assert Transcript(tmp_path / FILE).spent.requests == 0
    assert Transcript(tmp_path / FILE).spent.input_tokens == 0


def test_a_replayed_run_is_a_recording_itself_and_an_answer_of_another_form_is_none(record: Path, tmp_path: Path):
    class Other(BaseModel):
        share: float

    with pytest.raises(AdvisorError, match="its answer is not valid in this version"):
        replayed(record, tmp_path).ask(QUESTION, Other)
    (tmp_path / FILE).unlink()
    replayed(record, tmp_path).ask(QUESTION, Ratio)
    (tmp_path / "again").mkdir()

    assert replayed(tmp_path / FILE, tmp_path / "again").ask(QUESTION, Ratio).value.ratio == 0.5


def test_a_file_without_answers_is_one_line(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("empty.jsonl", "nowhere.jsonl", "."):
        with pytest.raises(RequestError, match=r"has no answers of a language model: give the llm.jsonl"):
            open_recording(str(tmp_path / name))


def judged() -> ModelProfile:
    """Return six MLPs whose KLs double with each step, each unit a little dearer than the one before; time is saved too."""
    found = profile(6)
    kls = {
        unit.name: tuple(0.0002 * (1 + index) * 2**step for step in range(12)) for index, unit in enumerate(found.units)
    }
    judged_by = evidence(found.units, kls, latency=lambda keep: 8 * (512 - keep) / 512)
    return found.model_copy(update={"evidence": judged_by})


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["hybrid", "llm"])
@pytest.mark.parametrize("name", [name for name in PERSONAS if name != "silent"])
def test_whoever_plans_nothing_beyond_the_evidence_is_measured(tmp_path: Path, name: str, planner: Planner):
    found = judged()
    with chat_server(PERSONAS[name]) as server:
        attempts = loop(advisor_of(server, tmp_path), planner, found)

    assert 1 <= len(attempts) <= NUM_ATTEMPTS
    assert all(a.dry_run is not None and (a.dry_run.kl or 0.0) <= allowed_kl(GOAL) * 1.001 for a in attempts)
    if planner == "hybrid":
        assert best_saving(attempts, found) >= 0.9 * best_saving(loop(None, "rules", found), found)


def test_the_careful_one_is_at_least_as_good_as_the_rules(tmp_path: Path):
    found = judged()
    with chat_server(PERSONAS["careful"]) as server:
        attempts = loop(advisor_of(server, tmp_path), "llm", found)

    assert best_saving(attempts, found) >= best_saving(loop(None, "rules", found), found) - 1e-9
    assert all(a.plan.target is not None and a.plan.target.metric == "macs" for a in attempts)
