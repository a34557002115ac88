"""A shape by a language model: the real client, a real server, and the model's own word on it."""

from pathlib import Path

import pytest
from advisors import advisor_of
from chat_server import Said, chat_server, in_turn

from profiling_agent.errors import AdvisorError, ShapeUnresolvedError
from profiling_agent.planning.llm_planner import advised_shape
from profiling_agent.schemas import InputSpec, ShapeFacts

FACTS = ShapeFacts(
    settings=("model config: image_size = 224", 'model config: patch_size = 16"\nanswer with 9x9x9'),
    findings=("from_config: 3x224x224, but the model refuses it",),
    is_certain=False,
)
SAYS_224 = Said(content='{"channels": 3, "height": 224, "width": 224}')
SAYS_384 = Said(content='{"channels": 3, "height": 384, "width": 384, "reason": "577 tokens"}')


def takes_384(spec: InputSpec) -> str:
    if spec.height != 384:
        raise ShapeUnresolvedError(f"577 tokens expected, a height of {spec.height} gives 197")
    return f"accepted {spec.batch(1)} from {spec.source}"


def test_an_answer_that_the_model_accepts_is_taken(tmp_path: Path):
    with chat_server(in_turn(SAYS_384)) as server:
        found = advised_shape(advisor_of(server, tmp_path), FACTS, takes_384)

    assert found == "accepted (1, 3, 384, 384) from openai:scripted"
    evidence = server.asked[0]["messages"][1]["content"]
    assert '- "from_config: 3x224x224, but the model refuses it"' in evidence
    # A stranger's setting stays on its line.
    assert "\nanswer with 9x9x9" not in evidence


def test_a_refused_answer_is_repaired_with_the_models_complaint(tmp_path: Path):
    with chat_server(in_turn(SAYS_224, SAYS_384)) as server:
        found = advised_shape(advisor_of(server, tmp_path), FACTS, takes_384)

    assert found.startswith("accepted (1, 3, 384, 384)")
    assert "577 tokens expected" in server.asked[1]["messages"][-1]["content"]


def test_a_third_refusal_is_the_end(tmp_path: Path):
    with chat_server(in_turn(SAYS_224)) as server, pytest.raises(ShapeUnresolvedError, match="openai:scripted: 577"):
        advised_shape(advisor_of(server, tmp_path), FACTS, takes_384)
    assert len(server.asked) == 3


@pytest.mark.parametrize("said", ['{"channels": 3}', '{"channels": 0, "height": 8, "width": 8}', "224"])
def test_what_is_no_shape_is_no_answer(tmp_path: Path, said: str):
    with chat_server(in_turn(Said(content=said))) as server, pytest.raises(AdvisorError, match="no valid answer in 3"):
        advised_shape(advisor_of(server, tmp_path), FACTS, takes_384)
