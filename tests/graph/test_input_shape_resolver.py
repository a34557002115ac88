"""Who settles a shape that the settings contradict: the jobs are real, and so is the server."""

from pathlib import Path

import pytest
import zoo
from advisors import advisor_of
from chat_server import Said, chat_server, in_turn
from transformers import ViTImageProcessorPil

from profiling_agent.graph.nodes import resolve_with
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import ResolveShapeTask
from profiling_agent.workspace import Workspace

RIGHT = Said(content='{"channels": 3, "height": 32, "width": 32}')
WRONG = Said(content='{"channels": 3, "height": 48, "width": 48}')


@pytest.fixture
def jobs(tmp_path: Path):
    root = tmp_path / "run"
    (root / "jobs").mkdir(parents=True)
    opened = Jobs(Workspace(root))
    yield opened
    opened.close()


def task_of(folder: Path, side: int) -> ResolveShapeTask:
    """Return the task for a model that takes 32x32, saved with a processor that makes images of `side`."""
    zoo.save(zoo.vit(), folder)
    ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    return ResolveShapeTask(model=str(folder), device="cpu")


def test_a_contradiction_is_settled_by_the_model_that_was_asked(jobs: Jobs, tmp_path: Path):
    with chat_server(in_turn(WRONG, RIGHT)) as server:
        resolved = resolve_with(advisor_of(server, tmp_path), task_of(tmp_path / "model", 48), jobs)

    assert resolved.input.batch(1) == (1, 3, 32, 32)
    assert resolved.input.source == "openai:scripted"
    assert "the model refuses an image of '3x48x48'" in server.asked[1]["messages"][-1]["content"]


@pytest.mark.slow
def test_the_rules_stand_where_the_model_is_wrong_three_times_or_not_needed(jobs: Jobs, tmp_path: Path):
    with chat_server(in_turn(WRONG)) as server:
        doubtful = resolve_with(advisor_of(server, tmp_path), task_of(tmp_path / "doubtful", 48), jobs)
        certain = resolve_with(advisor_of(server, tmp_path), task_of(tmp_path / "certain", 32), jobs)

    assert doubtful.input.batch(1) == certain.input.batch(1) == (1, 3, 32, 32)
    assert doubtful.input.source.startswith("model config; from_processor: ")
    assert "openai:scripted: the model refuses" in doubtful.input.source
    assert certain.input.source == "image processor"
    assert len(server.asked) == 3
