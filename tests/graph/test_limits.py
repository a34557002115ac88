"""What a served graph lets a request name: facts of the policy, and of the graph that langgraph.json names."""

import os
from pathlib import Path

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from profiling_agent import build_graph
from profiling_agent.errors import PlanError, RequestError
from profiling_agent.request import Request
from profiling_agent.graph.session import Sessions
from profiling_agent.graph.state import Limits, RunState, operators_limits
from profiling_agent.graphs.optimization import graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.llm.chat import Endpoint
from profiling_agent.schemas import Acquired, ModelSource

EVIL, OWN = "http://evil.example/v1", "http://gpu-box:8000/v1"


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Return the limits of a server whose working folder is `here`, and whose operator named `data` and an address."""
    for name in ("here", "data", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    named = {"PROFILING_AGENT_FOLDERS": str(tmp_path / "data"), "PROFILING_AGENT_ADDRESSES": f" {OWN}/ , http://b"}
    return operators_limits(named)


def test_what_the_operator_named_is_allowed(limits: Limits, tmp_path: Path):
    (tmp_path / "here" / "model").mkdir()
    for asked in (
        Request(),
        Request(output="runs/of/mine", plan="plan.json"),
        Request(output=str(tmp_path / "data" / "runs"), model=str(tmp_path / "data" / "model")),
        Request(model="model", dataset="./data"),
        Request(model="microsoft/resnet-101", dataset="frgfm/imagenette"),
        Request(base_url=OWN),
        Request(base_url=f"{OWN}/"),
    ):
        limits.check(asked)


def test_files_outside_of_the_named_folders_are_refused_whether_they_are_there_or_not(limits: Limits, tmp_path: Path):
    (tmp_path / "elsewhere" / "plan.json").write_text("{}")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    outside = (
        "/etc/passwd",
        "../elsewhere/plan.json",
        "link/plan.json",
        "~/plan.json",
        "~nobody-of-that-name/x",
        "a\0b",
    )
    said = set[str]()
    for name in ("output", "plan", "model", "dataset"):
        for path in (*outside, str(tmp_path / "elsewhere"), str(tmp_path / "not" / "there"), "link"):
            with pytest.raises(RequestError, match="outside of the folders of this server") as refused:
                limits.check(Request.model_validate({name: path}))
            assert "\n" not in str(refused.value)
            said.add(str(refused.value).replace(repr(path), "PATH"))
    assert len(said) == 4


def test_a_record_is_a_file_like_any_other(limits: Limits, tmp_path: Path):
    limits.check(Request(llm="recorded:here.jsonl"))
    for path in ("/etc/passwd", "../elsewhere/llm.jsonl", str(tmp_path / "elsewhere" / "llm.jsonl")):
        with pytest.raises(RequestError, match=r"llm is .* outside of the folders of this server"):
            limits.check(Request(llm=f"recorded:{path}"))


@pytest.mark.parametrize(
    "url", [EVIL, f"{OWN}x", "http://gpu-box:8000", "http://gpu-box:8000/v1/../v2", "https://gpu-box:8000/v1"]
)
def test_an_address_that_nobody_named_is_refused(limits: Limits, url: str):
    with pytest.raises(RequestError, match="PROFILING_AGENT_ADDRESSES"):
        limits.check(Request(base_url=url))


def test_the_addresses_of_the_environment_are_the_operators():
    limits = operators_limits({"OPENAI_BASE_URL": OWN, "OPENAI_API_BASE": "https://r.openai.azure.com/openai/v1/"})

    limits.check(Request(base_url=OWN))
    limits.check(Request(base_url="https://r.openai.azure.com/openai/v1"))


def test_a_tracker_is_the_operators_to_name(limits: Limits):
    with pytest.raises(RequestError, match="MLFLOW_TRACKING_URI"):
        limits.check(Request(tracker="mlflow"))

    operators_limits({"MLFLOW_TRACKING_URI": "sqlite:///store.db"}).check(Request(tracker="mlflow"))


def test_what_was_written_into_a_threads_state_is_held_to_the_same(limits: Limits):
    source = ModelSource(name="/elsewhere/model", architecture="ViT", device="cpu", revision=None)
    acquired = Acquired.model_construct(source=source)

    with pytest.raises(RequestError, match="base_url is 'http://evil"):
        limits.check(RunState(endpoint=Endpoint(model="m", base_url=EVIL)))
    with pytest.raises(RequestError, match="model is '/elsewhere/model'"):
        limits.check(RunState(acquired=acquired))


def test_the_served_graph_refuses_before_anything_is_made(limits: Limits, tmp_path: Path):
    served = build_graph(InMemorySaver(), sessions=Sessions(limits=limits))

    with pytest.raises(RequestError, match="operator"):
        served.invoke(Request(output=str(tmp_path / "elsewhere" / "runs")), {"configurable": {"thread_id": "t"}})

    assert not list((tmp_path / "elsewhere").iterdir())
    assert not list((tmp_path / "here").iterdir())


def test_a_served_graph_quotes_nothing_of_a_file_that_is_no_plan(limits: Limits, tmp_path: Path):
    served = build_graph(sessions=Sessions(limits=limits))
    for number, text in enumerate(('{"pruning": "sk-secret"}', "sk-secret", '["sk-secret"]', '"sk-secret"')):
        (tmp_path / "here" / "plan.json").write_text(text)
        with pytest.raises(PlanError) as refused:
            served.invoke(Request(plan="plan.json", run_id=f"r{number}", output=str(tmp_path / "here" / "runs")))
        assert "secret" not in str(refused.value)


def test_the_graph_that_langgraph_json_names_has_its_operators_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RequestError, match="PROFILING_AGENT_FOLDERS"):
        graph.invoke(Request(output=os.path.expanduser("~/runs")))  # noqa: PTH111 - as somebody would send it
