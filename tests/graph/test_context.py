"""Context of an invocation: it wins over the request, a thread keeps it, and an edited prompt is what the LLM reads."""

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest
from chat_server import Said, chat_server
from conftest import World
from interrupted import edited
from langgraph.checkpoint.memory import InMemorySaver

from profiling_agent import Request, build_graph
from profiling_agent.errors import RequestError
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.graph.context import PLANNING, as_context
from profiling_agent.graph.run import FORM
from profiling_agent.workspace import read_manifest


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"plannr": "llm"}, r"unknown term 'plannr': did you mean 'planner'\?"),
        ({"planner": "both"}, "planner: "),
        ({"runtimes": "tensorrt"}, "runtimes names 'tensorrt'"),
        ({"analysis_prompt": "$modell"}, r"prompt 'analysis' has no variable \$modell: use \$model, "),
        ({"analysis_prompt": "5 $ a plan"}, r"prompt 'analysis' has a \$ that names no variable: write \$\$"),
    ],
)
def test_an_unknown_or_impossible_context_is_one_line_before_anything_starts(
    context: dict[str, Any], message: str, tmp_path: Path
):
    graph, request = build_graph(), Request(output=str(tmp_path))
    for call in (graph.invoke, lambda *given, **options: asyncio.run(graph.ainvoke(*given, **options))):
        with pytest.raises(RequestError, match=message) as refused:
            call(request, context=context)
        assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_studio_has_a_form_of_what_a_run_is_about_and_edits_who_plans_and_prompts_in_their_nodes():
    graph = build_graph()
    form, context = graph.get_input_jsonschema()["properties"], graph.get_context_jsonschema()
    assert context is not None
    fields = context["properties"]

    assert [*form][: len(FORM)] == [*FORM]
    assert form.keys() | set(PLANNING) == Request.model_fields.keys()
    assert not form.keys() & set(PLANNING)
    edited_in = {name: field["langgraph_nodes"] for name, field in fields.items() if "langgraph_type" in field}
    assert {name for name in fields if name not in edited_in} == {*PLANNING, "batch_size", "objective"}
    assert edited_in["plan_form_prompt"] == ["analysis", "iterative_pruning"]
    assert {node for nodes in edited_in.values() for node in nodes} <= graph.nodes.keys()
    assert fields["analysis_role_prompt"]["default"].startswith("You are the analysis agent")


def test_the_presets_of_the_guide_are_contexts():
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    presets = ast.literal_eval(guide.split("presets = ")[1].split("\nfor ")[0])

    requests = {name: as_context(preset).applied_to(Request()) for name, preset in presets.items()}

    assert len({request.model_dump_json() for request in requests.values()}) == len(presets) == 3
    assert requests["edge box, batch 1"].batch_size == 1


def test_a_context_wins_over_the_request_and_a_resumed_thread_needs_none(world: World, tmp_path: Path):
    graph, config = build_graph(InMemorySaver()), {"configurable": {"thread_id": "preset"}}
    request = world.request(tmp_path / "elsewhere", run_id=None)
    preset = {"batch_size": 4, "output": str(tmp_path / "runs"), "device": "cpu", "objective": None}

    graph.invoke(request, config, context=preset, interrupt_after=["acquisition"])
    graph.invoke(None, config, interrupt_after=["input_shape_resolver"])

    kept = graph.get_state(config).values["request"]
    assert kept == request.model_copy(
        update={"batch_size": 4, "output": preset["output"], "device": "cpu", "run_id": "preset"}
    )
    assert read_manifest(tmp_path / "runs" / "preset").request == kept
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(RequestError, match="batch_size was 4 when this run began, is now 8: begin a new thread"):
        graph.invoke(None, config, context={"batch_size": 8})


def test_a_fork_plans_with_another_model_and_edited_prompts_and_keeps_both(finished: Path, tmp_path: Path):
    run, plan = (
        edited(finished, tmp_path, {"request": {"output": str(tmp_path)}}),
        {"reason": "mild", "plan": {"target": {"metric": "params", "saving": 0.2}}},
    )
    config: Any = {"configurable": {"thread_id": run.name}}
    with chat_server(lambda payload, number: Said(tool_calls=(("submit", plan),))) as server:
        # The address is from this call.
        context = {"llm": "openai:scripted", "base_url": server.url, "planner": "llm"}
        context |= {"analysis_role_prompt": "Be brief. $form", "analysis_prompt": "Only this: $goal"}
        graph = build_graph(RunSaver(tmp_path))
        graph.invoke(None, config, context=context, interrupt_after=["analysis"])

    (role, question) = (message["content"] for message in server.asked[-1]["messages"])
    assert role.startswith("Be brief. ")
    assert question.startswith("Only this: ")
    values = graph.get_state(config).values
    assert values["origin"].by == "openai:scripted"
    assert values["request"].llm == "openai:scripted"
    assert values["prompts"]["analysis_role"] == "Be brief. $form"
