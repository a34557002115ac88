"""Agents on scripted jobs: acquisition, the input shape, and the allowlist of requests."""

import json
import os
from pathlib import Path

import pytest
import zoo
from advisors import chat_of
from chat_server import Said, chat_server, in_turn
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langgraph.checkpoint.memory import InMemorySaver
from transformers import ViTImageProcessorPil

from profiling_agent import build_graph
from profiling_agent.errors import RequestError
from profiling_agent.graph.context import choose_advisor
from profiling_agent.graph.nodes import resolve_with
from profiling_agent.graph.state import Allowlist, RunState, allowlist_from_env
from profiling_agent.graphs.optimization import graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.jobs.runner import scratch_jobs
from profiling_agent.jobs.tasks import ResolveShapeTask
from profiling_agent.llm.chat import Endpoint
from profiling_agent.request import Request
from profiling_agent.schemas import Acquired, ModelSource


def test_the_language_model_is_the_one_that_was_requested_and_a_key_is_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = FakeListChatModel(responses=[])
    note = "FakeListChatModel plans beside the built-in rules"
    assert choose_advisor(Request(), model, ()) == {"advisor_object": "FakeListChatModel", "advisor_note": note}
    note = "the built-in rules plan: they were requested"
    assert choose_advisor(Request(planner="rules"), model, ()) == {"advisor_note": note}
    with chat_server(in_turn(Said(content="ready"))) as server:
        chosen = choose_advisor(Request(llm="openai:m", base_url=server.url, planner="llm"), None, ())
    assert (chosen["endpoint"].name, chosen["advisor_note"]) == ("openai:m", "openai:m plans")
    record = tmp_path / "llm.jsonl"
    lines = [{"kind": "turn", "agent": "analysis", "model": "openai:m", "text": "", "calls": []}]
    record.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    note = "openai:m, recorded plans beside the built-in rules"
    recorded = choose_advisor(Request(llm=f"recorded:{record}"), None, ())
    assert recorded == {"recorded": str(record), "advisor_note": note}
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    note = "the built-in rules plan: no language model was requested"
    assert choose_advisor(Request(), None, ()) == {"advisor_note": note}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"llm": "openai:m"}, "OPENAI_API_KEY isn't set"),
        ({"llm": "gpt-5.5"}, "use none, openai:MODEL or"),
        ({"llm": "anthropic:claude"}, "other chat models are objects"),
        ({"llm": "openai:m", "base_url": "ftp://x"}, "give an address such as"),
        ({"llm": "openai:m", "base_url": "localhost:11434/v1"}, "give an address such as"),
        ({"llm": "openai:m", "base_url": "http://127.0.0.1:9/v1"}, "gave no answer"),
        ({"base_url": "http://127.0.0.1:9/v1"}, "name its model, as in llm=openai:MODEL"),
        ({"planner": "llm"}, "planner is 'llm' but llm is 'none'"),
        ({"llm": "recorded:nowhere.jsonl"}, "has no answers of a language model"),
        ({"llm": "recorded:"}, "has no answers of a language model"),
    ],
)
def test_what_can_not_be_had_is_one_line(request_: dict[str, str], message: str):
    with pytest.raises(RequestError, match="advisor is of type str"):
        choose_advisor(Request(), "gpt-4o", ())
    with pytest.raises(RequestError) as caught:
        choose_advisor(Request.model_validate(request_), None, ())

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


RIGHT = Said(tool_calls=(("submit_shape", {"channels": 3, "height": 32, "width": 32}),))
WRONG = Said(tool_calls=(("submit_shape", {"channels": 1, "height": 32, "width": 32}),))


def task_of(folder: Path, side: int) -> ResolveShapeTask:
    """Return the task for a model of 32x32 that takes other sizes too, saved with a processor that makes images of `side`."""
    zoo.save(zoo.swin(), folder)
    ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    return ResolveShapeTask(model=str(folder), device="cpu")


@pytest.mark.slow
def test_the_language_model_settles_a_contradiction_and_the_rules_stand_where_it_fails_or_is_not_needed(
    tmp_path: Path,
):
    doubtful, other = task_of(tmp_path / "doubtful", 64), tmp_path / "other"
    other.mkdir()
    with (
        scratch_jobs() as jobs,
        chat_server(in_turn(WRONG, RIGHT)) as server,
        chat_server(in_turn(WRONG)) as stubborn,
    ):
        advised = resolve_with(chat_of(server, tmp_path), doubtful, jobs)
        advisor = chat_of(stubborn, other)
        by_rules = resolve_with(advisor, doubtful, jobs)
        certain = resolve_with(advisor, task_of(tmp_path / "certain", 32), jobs)

    assert [each.input.height for each in (advised, by_rules, certain)] == [32, 64, 32]
    assert advised.input.source == "openai:scripted"
    assert "the model refuses an image of '1x32x32'" in server.asked[1]["messages"][-1]["content"]
    assert by_rules.input.source.startswith("image processor; ")
    assert "openai:scripted: the model refuses" in by_rules.input.source
    assert certain.input.source == "image processor"
    assert len(stubborn.asked) == 2


EVIL, OWN = "http://evil.example/v1", "http://gpu-box:8000/v1"


@pytest.fixture
def allowlist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Allowlist:
    """Return the allowlist of a server whose working folder is `here`, and whose operator named `data` and an address."""
    for name in ("here", "data", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    named = {"PROFILING_AGENT_FOLDERS": str(tmp_path / "data"), "PROFILING_AGENT_ADDRESSES": f" {OWN}/ , http://b"}
    return allowlist_from_env(named)


def test_what_the_operator_named_is_allowed(allowlist: Allowlist, tmp_path: Path):
    (tmp_path / "here" / "model").mkdir()
    for asked in (
        Request(),
        Request(output="runs/of/mine", plan="plan.json"),
        Request(output=str(tmp_path / "data" / "runs"), model=str(tmp_path / "data" / "model")),
        Request(model="model", dataset="./data"),
        Request(model="microsoft/resnet-101", dataset="frgfm/imagenette"),
        Request(base_url=OWN),
        Request(base_url=f"{OWN}/"),
        Request(llm="recorded:here.jsonl"),
    ):
        allowlist.check(asked)


OUTSIDE = (
    *("/etc/passwd", "../elsewhere/plan.json", "link/plan.json", "link", "../not/there", "../elsewhere"),
    *("~/plan.json", "~nobody-of-that-name/x"),
)


@pytest.mark.parametrize("field", ["output", "plan", "model", "dataset", "llm"])
def test_files_outside_of_the_named_folders_are_refused_whether_they_are_there_or_not(
    allowlist: Allowlist, tmp_path: Path, field: str
):
    (tmp_path / "elsewhere" / "plan.json").write_text("{}")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    messages = set[str]()
    for path in (*OUTSIDE, str(tmp_path / "elsewhere")):
        asked = Request.model_validate({field: f"recorded:{path}" if field == "llm" else path})
        with pytest.raises(RequestError, match=f"{field} is .* outside of the folders of this server") as refused:
            allowlist.check(asked)
        messages.add(str(refused.value).replace(repr(path), "PATH"))
    # One line, which tells none of what is there.
    assert len(messages) == 1
    assert "\n" not in messages.pop()


@pytest.mark.parametrize(
    "url", [EVIL, f"{OWN}x", "http://gpu-box:8000", "http://gpu-box:8000/v1/../v2", "https://gpu-box:8000/v1"]
)
def test_an_address_that_nobody_named_is_refused(allowlist: Allowlist, url: str):
    with pytest.raises(RequestError, match="PROFILING_AGENT_ADDRESSES"):
        allowlist.check(Request(base_url=url))
    # The environment's are the operator's.
    own = allowlist_from_env({"OPENAI_BASE_URL": url, "OPENAI_API_BASE": "https://r.openai.azure.com/openai/v1/"})
    own.check(Request(base_url=url))
    own.check(Request(base_url="https://r.openai.azure.com/openai/v1"))


def test_what_was_written_into_a_threads_state_is_held_to_the_same(allowlist: Allowlist):
    source = ModelSource(name="/elsewhere/model", architecture="ViT", device="cpu", revision=None)

    with pytest.raises(RequestError, match="base_url is 'http://evil"):
        allowlist.check(Request(), RunState(endpoint=Endpoint(model="m", base_url=EVIL)))
    with pytest.raises(RequestError, match="model is '/elsewhere/model'"):
        allowlist.check(Request(), RunState(acquired=Acquired.model_construct(source=source)))


def test_a_served_graph_makes_nothing_elsewhere(allowlist: Allowlist, tmp_path: Path):
    served = build_graph(InMemorySaver(), allowlist=allowlist)
    thread = {"configurable": {"thread_id": "t"}}

    with pytest.raises(RequestError, match="operator"):
        served.invoke(Request(output=str(tmp_path / "elsewhere" / "runs")), thread)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not list((tmp_path / "here").iterdir())


def test_the_graph_that_langgraph_json_names_has_its_operators_allowlist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RequestError, match="PROFILING_AGENT_FOLDERS"):
        graph.invoke(Request(output=os.path.expanduser("~/runs")))  # noqa: PTH111 - as somebody would send it


def test_a_transcript_that_only_a_threads_state_names_is_refused(allowlist: Allowlist):
    with pytest.raises(RequestError, match=r"llm is '/etc/passwd', outside of the folders"):
        allowlist.check(Request(), RunState(recorded="/etc/passwd"))
