"""The real ChatOpenAI client against a real server: what comes back is valid, or an error that says why."""

import json
from pathlib import Path

import pytest
from advisors import advisor_of
from chat_server import Said, chat_server, error, in_turn
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, ConfigDict, Field

from profiling_agent.errors import AdvisorError, ContextTooLongError
from profiling_agent.llm.advisor import Advisor
from profiling_agent.llm.chat import Chat
from profiling_agent.llm.ledger import FILE, Ledger
from profiling_agent.llm.question import Question


class Ratio(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    ratio: float = Field(ge=0, le=1, allow_inf_nan=False)


QUESTION = Question(agent="analysis", instructions="Answer in JSON.", evidence="How much?")
GOOD = Said(content='{"ratio": 0.25}')


def entries(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


@pytest.mark.parametrize(
    "content",
    [
        '{"ratio": 0.25}',
        'Sure:\n```json\n{"ratio": 0.25}\n```',
        '<think>is it {"ratio": 0.9}?</think> {"ratio": 0.25}',
    ],
)
def test_an_answer_is_read_out_of_what_surrounds_it(tmp_path: Path, content: str):
    with chat_server(in_turn(Said(content=content))) as server:
        found = advisor_of(server, tmp_path).ask(QUESTION, Ratio)

    assert found.value.ratio == 0.25
    assert found.repairs == 0
    assert server.asked[0]["response_format"]["type"] == "json_schema"
    assert [message["role"] for message in server.asked[0]["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("bad", "quoted"),
    [
        (Said(content="a quarter, I'd say"), "no JSON object"),
        (Said(content='{"ratio": 0.2', finish="length"), "no valid JSON"),
        (Said(content='{"ratio": NaN}'), "NaN is no number"),
        (Said(content='{"ratio": 1e9}'), "less than or equal to 1"),
        (Said(content='{"ratio": "half"}'), "valid number"),
        (Said(content='{"ratio": 0.2, "also": 1}'), "Extra inputs"),
        (Said(content=None), "no JSON object"),
        (Said(content=None, refusal="I can't help with that"), "no JSON object"),
    ],
)
def test_an_answer_that_cant_be_used_goes_back_with_what_is_wrong(tmp_path: Path, bad: Said, quoted: str):
    with chat_server(in_turn(bad, GOOD)) as server:
        asked = advisor_of(server, tmp_path)
        found = asked.ask(QUESTION, Ratio)

    assert found.value.ratio == 0.25
    assert found.repairs == 1
    assert quoted in server.asked[1]["messages"][-1]["content"]


def test_after_two_repairs_the_question_is_given_up(tmp_path: Path):
    with chat_server(in_turn(Said(content="no"))) as server, pytest.raises(AdvisorError, match="no valid answer in 3"):
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)

    assert len(server.asked) == 3


def test_the_askers_own_check_is_a_repair_too_and_its_last_word_is_kept(tmp_path: Path):
    def check(answer: Ratio) -> str | None:
        return "too much" if answer.ratio > 0.2 else None

    with chat_server(in_turn(GOOD)) as server:
        found = advisor_of(server, tmp_path).ask(QUESTION, Ratio, check=check)

    assert found.complaint == "too much"
    assert len(server.asked) == 3
    assert "too much" in server.asked[1]["messages"][-1]["content"]


def test_a_valid_answer_is_kept_where_its_repair_gets_none(tmp_path: Path):
    with chat_server(in_turn(GOOD, error(401))) as server:
        found = advisor_of(server, tmp_path).ask(QUESTION, Ratio, check=lambda answer: "too much")

    assert (found.value.ratio, found.complaint, len(server.asked)) == (0.25, "too much", 2)


@pytest.mark.parametrize(
    ("refusal", "tries"),
    [
        (error(400, "response_format is not supported"), 1),
        (error(404, "No endpoints found that can handle the requested parameters"), 1),
        (error(422, "no such field"), 1),
        (error(501), 1),
        (error(500, retry_after="0"), 4),
    ],
    ids=["400", "404", "422", "501", "500"],
)
def test_servers_that_know_no_schema_are_asked_in_simpler_ways_and_that_is_remembered(
    tmp_path: Path, refusal: Said, tries: int
):
    def script(payload: dict, number: int) -> Said:
        return refusal if "response_format" in payload else GOOD

    with chat_server(script) as server:
        asked = advisor_of(server, tmp_path)
        asked.ask(QUESTION, Ratio)
        asked.ask(QUESTION.model_copy(update={"evidence": "And now?"}), Ratio)

    kinds = [payload.get("response_format", {}).get("type") for payload in server.asked]
    assert kinds == ["json_schema"] * tries + ["json_object", None, None]


def test_a_server_that_fails_whatever_it_is_asked_is_asked_as_before_when_it_is_back(tmp_path: Path):
    down = error(500, retry_after="0")
    with chat_server(in_turn(*[down] * 6, GOOD)) as server:
        asked = advisor_of(server, tmp_path)
        with pytest.raises(AdvisorError, match="gave no answer"):
            asked.ask(QUESTION, Ratio)
        asked.ask(QUESTION, Ratio)

    assert len(server.asked) == 7
    assert server.asked[-1]["response_format"]["type"] == "json_schema"


def test_an_answer_that_comes_as_a_call_is_one(tmp_path: Path):
    class Calls(FakeListChatModel):
        def bind_tools(self, tools, **options):
            call = {"name": "Ratio", "args": {"ratio": 0.25}, "id": "1"}
            return RunnableLambda(lambda messages: AIMessage("Here it is.", tool_calls=[call]))

    ledger = Ledger(tmp_path, max_requests=9, max_tokens=1000)
    found = Advisor(Chat(Calls(responses=[""]), "object", spend=ledger.spend), ledger, deadline_s=20).ask(
        QUESTION, Ratio
    )

    assert (found.value.ratio, found.repairs) == (0.25, 0)


@pytest.mark.parametrize(
    "passing",
    [error(429, retry_after="0"), error(500), error(503), Said(drops=True)],
    ids=["429", "500", "503", "drop"],
)
def test_what_passes_is_tried_again(tmp_path: Path, passing: Said):
    with chat_server(in_turn(passing, passing, GOOD)) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio).value.ratio == 0.25
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_will_not_pass_is_not(tmp_path: Path, status: int):
    with chat_server(in_turn(error(status))) as server, pytest.raises(AdvisorError, match="can't be asked"):
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)
    assert len(server.asked) == 1


def test_a_server_that_hangs_is_left_at_the_deadline(tmp_path: Path):
    with (
        chat_server(in_turn(Said(content="{}", delay_s=2.0))) as server,
        pytest.raises(AdvisorError, match="no answer"),
    ):
        advisor_of(server, tmp_path, deadline_s=0.3).ask(QUESTION, Ratio)


def test_what_came_too_late_says_what_gives_it_longer(tmp_path: Path):
    with (
        chat_server(in_turn(GOOD)) as server,
        pytest.raises(AdvisorError, match=r"passed.*: --advisor-timeout-s gives"),
    ):
        advisor_of(server, tmp_path, deadline_s=1e-9).ask(QUESTION, Ratio)
    assert server.asked == []


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("<html>Welcome</html>", "text/html"),
        ("[]", "application/json"),
        ("null", "application/json"),
        ('{"choices": []}', "application/json"),
        ('{"choices": [{}]}', "application/json"),
        ('{"choices": [{"message": 7}]}', "application/json"),
    ],
)
def test_what_is_no_completion_is_no_answer(tmp_path: Path, body: str, kind: str):
    said = Said(body=body, headers={"content-type": kind})
    with chat_server(in_turn(said)) as server, pytest.raises(AdvisorError):
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)


class BrokenLedger(Ledger):
    """A ledger with a bug in one of its methods."""

    def __init__(self, folder: Path, broken: str) -> None:
        super().__init__(folder, max_requests=9, max_tokens=1000)
        self.broken = broken

    def _trip(self, method: str) -> None:
        if method == self.broken:
            raise KeyError("a bug of ours")

    def spend(self) -> None:
        self._trip("spend")
        super().spend()

    def answer(self, key: str) -> object:
        self._trip("answer")
        return super().answer(key)

    def note_turn(self, **said: object) -> None:
        self._trip("note_turn")
        super().note_turn(**said)

    def accept(self, key: str, agent: str, answer: object) -> None:
        self._trip("accept")
        super().accept(key, agent, answer)


@pytest.mark.parametrize("broken", ["spend", "answer", "note_turn", "accept"])
def test_a_bug_of_the_ledger_comes_out_as_what_it_is(tmp_path: Path, broken: str):
    ledger = BrokenLedger(tmp_path, broken)
    chat = Chat(FakeListChatModel(responses=['{"ratio": 0.25}']), "object", spend=ledger.spend)

    with pytest.raises(KeyError, match="a bug of ours") as caught:
        Advisor(chat, ledger, deadline_s=20).ask(QUESTION, Ratio)

    assert "_trip" in [entry.name for entry in caught.traceback]


def test_a_bug_of_a_tool_comes_out_as_what_it_is_and_a_call_that_doesnt_fit_goes_back(tmp_path: Path):
    def width_of(group: str) -> str:
        """Return how wide a group of layers is."""
        raise ValueError("a bug of ours")

    wrong = Said(tool_calls=tuple(("width_of", given) for given in ({"unit": "mlp"}, {"group": 7}, {"group": None})))
    right = Said(tool_calls=(("width_of", {"group": "mlp"}),))
    with chat_server(in_turn(wrong, right)) as server, pytest.raises(ValueError, match="a bug of ours"):
        advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=[width_of])

    said = [message["content"] for message in server.asked[1]["messages"] if message["role"] == "tool"]
    assert len(said) == 3
    assert all("width_of can't be called so" in line for line in said)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, {"message": "too long", "code": "context_length_exceeded"}),
        (400, {"message": "This model's maximum context length is 4096 tokens. However, you requested 9000."}),
        (400, {"message": "the request exceeds the available context size"}),
        (413, {"message": "Request body too large for this model. Max size: 8000 tokens."}),
    ],
)
def test_a_question_that_is_too_long_says_so(tmp_path: Path, status: int, said: dict):
    body = json.dumps({"error": said})
    with chat_server(in_turn(Said(status=status, body=body))) as server, pytest.raises(ContextTooLongError):
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)


def test_an_accepted_answer_is_replayed_and_another_question_is_not(tmp_path: Path):
    with chat_server(in_turn(GOOD)) as server:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)
        again = advisor_of(server, tmp_path).ask(QUESTION, Ratio)
        other = advisor_of(server, tmp_path).ask(QUESTION.model_copy(update={"evidence": "More?"}), Ratio)

    assert again.is_replayed
    assert again.value.ratio == 0.25
    assert not other.is_replayed
    assert len(server.asked) == 2


def test_a_budget_is_for_the_run_and_outlives_the_process(tmp_path: Path):
    with chat_server(in_turn(Said(content="no"))) as server:
        with pytest.raises(AdvisorError):
            advisor_of(server, tmp_path, max_requests=4).ask(QUESTION, Ratio)
        with pytest.raises(AdvisorError, match="budget of 4 requests"):
            advisor_of(server, tmp_path, max_requests=4).ask(QUESTION, Ratio)
    assert len(server.asked) == 4


def test_tokens_are_counted_and_unknown_where_a_server_counts_none(tmp_path: Path):
    with chat_server(in_turn(Said(content="no"), GOOD)) as server:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)
    counted = Ledger(tmp_path, max_requests=9, max_tokens=9).spent
    assert (counted.requests, counted.input_tokens, counted.output_tokens, counted.repairs) == (2, 200, 20, 1)

    with chat_server(in_turn(Said(content='{"ratio": 0.1}', has_usage=False))) as server:
        advisor_of(server, tmp_path).ask(QUESTION.model_copy(update={"evidence": "?"}), Ratio)
    assert Ledger(tmp_path, max_requests=9, max_tokens=9).spent.input_tokens is None


def test_a_budget_of_tokens_ends_the_questions(tmp_path: Path):
    with chat_server(in_turn(Said(content="no"))) as server, pytest.raises(AdvisorError, match="budget of 150 tokens"):
        advisor_of(server, tmp_path, max_tokens=150).ask(QUESTION, Ratio)
    assert len(server.asked) == 2


def test_the_key_is_sent_and_never_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with chat_server(in_turn(GOOD)) as server:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)

    assert server.keys == ["Bearer sk-very-secret"]
    assert "very-secret" not in (tmp_path / FILE).read_text()
    assert [entry["kind"] for entry in entries(tmp_path)] == ["request", "turn", "answer"]


@pytest.mark.parametrize(
    "said",
    [
        error(401, "wrong key: sk-very-secret"),
        error(500, "while using sk-very-secret", retry_after="0"),
        Said(content='{"ratio": "sk-very-secret"}'),
        Said(tool_calls=(("look", {"key": "sk-very-secret"}),)),
    ],
)
def test_a_server_that_quotes_the_key_is_not_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said):
    def look() -> str:
        """Look."""
        return "nothing"

    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with chat_server(in_turn(said)) as server, pytest.raises(AdvisorError) as caught:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=[look])

    assert "very-secret" not in str(caught.value)
    assert "very-secret" not in (tmp_path / FILE).read_text()


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path):
    with chat_server(in_turn(GOOD)) as server:
        advisor_of(server, tmp_path).ask(QUESTION, Ratio)
        text = (tmp_path / FILE).read_text()
        (tmp_path / FILE).write_text(text[:-20])
        assert not advisor_of(server, tmp_path).ask(QUESTION, Ratio).is_replayed
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio).is_replayed


def test_tools_are_called_and_what_they_return_goes_back(tmp_path: Path):
    def width_of(group: str) -> str:
        """Return how wide a group of layers is."""
        return f"{group} is 64 wide"

    script = in_turn(Said(tool_calls=(("width_of", {"group": "mlp"}), ("nothing", {}))), GOOD)
    with chat_server(script) as server:
        found = advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=[width_of])

    results = [message["content"] for message in server.asked[1]["messages"] if message["role"] == "tool"]
    assert results == ["mlp is 64 wide", "there is no tool 'nothing'; there are width_of"]
    assert found.value.ratio == 0.25


def test_calls_of_tools_are_bounded_and_a_server_without_tools_is_asked_plainly(tmp_path: Path):
    def look() -> str:
        """Look."""
        return "nothing new"

    def script(payload: dict, number: int) -> Said:
        return Said(tool_calls=(("look", {}),)) if "tools" in payload else GOOD

    with chat_server(script) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=[look]).value.ratio == 0.25
    assert sum("tools" in payload for payload in server.asked) == 4


@pytest.mark.parametrize(
    "refusal",
    [error(400, "tools?"), error(404, "No endpoints found that support tool use"), error(422), error(501)],
    ids=["400", "404", "422", "501"],
)
@pytest.mark.parametrize("num_calls", [0, 1])
def test_a_server_that_refuses_tools_or_what_comes_of_them_is_asked_plainly(
    tmp_path: Path, refusal: Said, num_calls: int
):
    def width_of(group: str) -> str:
        """Return how wide a group of layers is."""
        return f"{group} is 64 wide"

    def script(payload: dict, number: int) -> Said:
        if number < num_calls:
            return Said(tool_calls=(("width_of", {"group": "mlp"}),))
        return refusal if "tools" in payload or len(payload["messages"]) > 2 else GOOD

    with chat_server(script) as server:
        asked = advisor_of(server, tmp_path, max_requests=2 + num_calls)
        assert asked.ask(QUESTION, Ratio, tools=[width_of]).repairs == 0

    told = server.asked[-1]["messages"][1]["content"]
    assert told.startswith("How much?")
    assert told.count('width_of({"group": "mlp"}): mlp is 64 wide') == num_calls


def test_a_chat_model_that_knows_neither_schemas_nor_tools_is_asked_in_words(tmp_path: Path):
    model = FakeListChatModel(responses=["a quarter", '{"ratio": 0.25}'])
    ledger = Ledger(tmp_path, max_requests=9, max_tokens=1000)
    asked = Advisor(Chat(model, "object", spend=ledger.spend), ledger, deadline_s=20)

    found = asked.ask(QUESTION, Ratio, tools=(lambda: "more",))

    assert found.value.ratio == 0.25
    assert found.repairs == 1
    assert ledger.spent.input_tokens is None


def test_a_ledger_that_somebody_wrote_in_is_read_as_far_as_it_can_be(tmp_path: Path):
    lines = [
        '{"kind": "answer"}',
        '{"kind": "turn"}',
        "[]",
        '{"kind": {}}',
        '{"kind": "answer", "question": "x", "answer": 7}',
    ]
    (tmp_path / FILE).write_text("\n".join(lines))
    with chat_server(in_turn(GOOD)) as server:
        found = advisor_of(server, tmp_path).ask(QUESTION, Ratio)

    assert found.value.ratio == 0.25
    assert len(entries(tmp_path)) == 5 + 3


@pytest.mark.parametrize("odd", ["\\ud83d", "a line\u2028a line", "\u0085"])
def test_text_that_files_trip_over_is_kept_and_read_back(tmp_path: Path, odd: str):
    with chat_server(in_turn(Said(content=f'{{"ratio": "{odd}"}}'), GOOD)) as server:
        assert advisor_of(server, tmp_path).ask(QUESTION, Ratio).repairs == 1

    with chat_server(in_turn()) as silent:
        assert advisor_of(silent, tmp_path).ask(QUESTION, Ratio).is_replayed


def test_a_call_with_numbers_that_are_none_costs_nothing_but_a_turn(tmp_path: Path):
    def details(pattern: str) -> str:
        """Return what is known."""
        return f"nothing of {pattern}"

    calls = Said(tool_calls=(("details", {"pattern": float("nan")}),))
    with chat_server(in_turn(calls, GOOD)) as server:
        found = advisor_of(server, tmp_path).ask(QUESTION, Ratio, tools=(details,))

    assert found.value.ratio == 0.25
