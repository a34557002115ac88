from pathlib import Path

import pytest
from sample_records import ref

from profiling_agent.errors import RunError
from profiling_agent.request import Request
from profiling_agent.workspace import open_workspace, read_manifest


def request(folder: Path, **asked) -> Request:
    return Request(output=str(folder), **asked)


def test_the_same_request_opens_its_run_again_and_another_one_is_refused_and_says_what_differs(tmp_path: Path):
    first = open_workspace(request(tmp_path), "a")

    assert open_workspace(request(tmp_path), "a") == first
    assert read_manifest(first.root).request.run_id == "a"
    with pytest.raises(RunError, match="max_iterations was 5, is now 3"):
        open_workspace(request(tmp_path, max_iterations=3), "a")
    with pytest.raises(RunError, match="no run folder"):
        read_manifest(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 9, "request": 3}', '{"schema_version": 99}'])
def test_a_damaged_manifest_or_one_of_another_version_is_refused(tmp_path: Path, text: str):
    (tmp_path / "request.json").write_text(text)

    with pytest.raises(RunError, match="schema version 99" if "99" in text else "damaged or can't be read"):
        read_manifest(tmp_path)


def test_best_is_replaced_and_never_missing(tmp_path: Path):
    workspace = open_workspace(request(tmp_path), "a")
    for name in ("one", "two"):
        (workspace.jobs / name).mkdir()
        workspace.point_best(ref(name), workspace.root)

        assert (workspace.root / "best").resolve() == (workspace.jobs / name).resolve()
