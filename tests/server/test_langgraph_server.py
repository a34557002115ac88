"""The real LangGraph server on loopback, through its REST API, as Studio meets it."""

from pathlib import Path
from typing import Any

import pytest
from conftest import World
from langgraph_sdk.client import SyncLangGraphClient
from serving import ASSISTANT, serving

from profiling_agent import resume
from profiling_agent.errors import RunError
from profiling_agent.reporting.results import read_report


def asked(world: World, folder: Path, **more: Any) -> dict[str, Any]:
    request = world.request(folder / "runs", max_iterations=1, **({"run_id": None} | more))
    return request.model_dump(mode="json", exclude={"output"}, exclude_none=True)


def followed(client: SyncLangGraphClient, thread: str, **how: Any) -> list[dict[str, Any]]:
    """Return the progress events of a turn, which is followed to its end."""
    events: list[dict[str, Any]] = []
    for part in client.runs.stream(thread, ASSISTANT, stream_mode="custom", **how):
        if part.event == "custom":
            events.append(part.data)
        assert part.event != "error", part.data
    return events


MISTAKE = "unknown term 'max_acuracy_drop': did you mean 'max_accuracy_drop'?"
UNTIL_ASKED = ("acquisition", "input_shape_resolver", "profiling", "deployment_search", "analysis", "approval")


@pytest.mark.slow
def test_studio_sees_the_form_follows_a_run_that_is_killed_answers_it_and_forks_it(world: World, tmp_path: Path):
    with serving(tmp_path, PROFILING_AGENT_FOLDERS=str(world.model.parent)) as (server, client):
        (assistant,) = client.assistants.search(graph_id=ASSISTANT)
        schemas = client.assistants.get_schemas(assistant["assistant_id"])
        assert schemas["input_schema"] is not None
        fields = schemas["input_schema"]["properties"]
        assert {"type": "string"} in fields["max_accuracy_drop"]["anyOf"]
        assert fields["max_accuracy_drop"]["description"].startswith("top-1 that may be lost")
        assert fields["approve"]["enum"] == ["never", "plan", "each"]
        assert fields["batch_size"]["maximum"] == 4096
        assert fields["model"]["default"] == "reference:vit"

        thread = client.threads.create()["thread_id"]
        parts = client.runs.stream(thread, ASSISTANT, input={"max_acuracy_drop": 0.2})
        assert [part.data for part in parts if part.event == "error"] == [{"error": "FieldError", "message": MISTAKE}]
        assert not (tmp_path / "runs").exists()

        thread = client.threads.create()["thread_id"]
        run = tmp_path / "runs" / thread
        contract = {"max_accuracy_drop": "1%", "quantize_dtype": "int8"}
        given = asked(world, tmp_path, approve="plan") | contract
        stages: list[str] = []
        for part in client.runs.stream(thread, ASSISTANT, input=given, stream_mode="custom"):
            if part.event == "custom":
                stages.append(part.data["stage"])
                if part.data["stage"] == "profiling":
                    with pytest.raises(RunError, match="in use by another process"):
                        resume(run)
                    break
        done = {path.parent.name for path in run.glob("jobs/*/result.json")}
        # Killed in its work, started again.
        client = server.again(thread)
        stages += [event["stage"] for event in followed(client, thread, input=None)]
        assert done <= {path.parent.name for path in run.glob("jobs/*/result.json")}
        values: Any = client.threads.get_state(thread)["values"]
        assert values["quantize_dtype"] == "qint8"
        # What the server did between the last event that was read and its end isn't done again.
        seen = [*dict.fromkeys(stages)]
        assert seen == [stage for stage in UNTIL_ASKED if stage in seen]
        assert {"acquisition", "profiling", "approval"} <= {*seen}
        (waiting,) = client.threads.get_state(thread)["interrupts"]
        assert waiting["value"]["choices"] == ["accept", "edit", "reject"]

        # Killed while it waits, started again: the question is still there.
        client = server.again(thread)
        refused = followed(client, thread, command={"resume": {"decision": "perhaps"}})
        assert [event["stage"] for event in refused] == ["approval"]
        (waiting,) = client.threads.get_state(thread)["interrupts"]
        assert "decision" in waiting["value"]["problem"]
        followed(client, thread, command={"resume": {"decision": "accept"}})

        values = client.threads.get_state(thread)["values"]
        assert isinstance(values, dict)
        assert values["verdict"]["outcome"] == read_report(run).verdict.outcome
        # The command line sees the same run, through the same saver.
        assert resume(run).verdict.outcome == values["verdict"]["outcome"]

        before = {path: path.read_bytes() for path in run.glob("report.*")}
        history = client.threads.get_history(thread, limit=50)
        planned = next(state for state in history if state["next"] == ["analysis"])
        changed = client.threads.update_state(
            thread, {"max_accuracy_drop": 0.2, "approve": "never"}, checkpoint=planned["checkpoint"]
        )
        followed(client, thread, input=None, checkpoint=changed["checkpoint"])

        (fork,) = (run / "forks").iterdir()
        assert read_report(fork).goal.max_accuracy_drop == 0.2
        assert (fork / "best").resolve().is_dir()
        assert {path: path.read_bytes() for path in run.glob("report.*")} == before
