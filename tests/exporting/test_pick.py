"""Another candidate of a finished run is taken as it was measured, by its number; nothing is measured again."""

import json
import shutil
from pathlib import Path

import pytest
from commands import call

from profiling_agent import pick
from profiling_agent.errors import ArtifactError, RunError
from profiling_agent.exporting.pick import candidates
from profiling_agent.reporting.report import read_report
from profiling_agent.runtimes.torch_artifact import load
from profiling_agent.schemas import Term


def test_a_contract_that_does_not_hold_is_listed_with_what_refused_it(finished: Path):
    found = candidates(read_report(finished))[1]
    slow = Term(name="speed", required=1.0, measured=0.5, holds=False)
    large = Term(name="size", required=0.5, measured=0.9, holds=False)
    cases = ({"is_refused": True}, "held-out images"), ({"terms": (slow, large)}, "speed, size")
    for refused, says in cases:
        assert found.model_copy(update=refused).holding == f"doesn't hold ({says})"


def test_every_candidate_of_a_run_can_be_taken_and_loads(finished: Path, tmp_path: Path):
    report, before = read_report(finished), (finished / "best").resolve()

    found = candidates(read_report(finished))
    for one in found:
        folder = tmp_path / str(one.number)
        assert pick(finished, folder, candidate=one.number) == one
        assert load(folder).recipe.deployment.runtime == one.evaluation.deployment.runtime
        written = b"".join(path.read_bytes() for path in folder.iterdir())
        assert str(Path(report.request.model).parent).encode() not in written
    assert (finished / "best").resolve() == before
    # What the run returned keeps its verdict and its card.
    (best,) = [one for one in found if one.is_judged]
    assert best.terms == report.verdict.terms
    assert (tmp_path / str(best.number) / "README.md").read_text() == (finished / "best" / "README.md").read_text()


def test_what_was_never_judged_says_so_in_its_card_and_on_the_terminal(finished: Path, tmp_path: Path):
    other = next(one for one in candidates(read_report(finished)) if not one.is_judged and one.number)

    ended = call("pick", finished, "--candidate", other.number, "--output", tmp_path / "other")

    card = (tmp_path / "other" / "README.md").read_text()
    assert f"{other.evaluation.predictions.num_images:,} search images" in card
    assert "never judged on held-out images" in card
    assert "Only what the run returned was judged on held-out images" in ended.stdout
    assert f"wrote {tmp_path / 'other'}" in ended.stdout.replace("\n", "")
    assert {"accuracy", "size"} <= {term.name for term in other.terms}


def test_the_list_has_all_that_was_measured_and_a_front(finished: Path):
    found, shown = candidates(read_report(finished)), call("pick", finished).stdout
    listed = json.loads(call("pick", finished, "--json").stdout)

    assert [one["number"] for one in listed] == list(range(len(found)))
    # A narrow terminal breaks names into lines, even within words.
    assert all(f"\n {one.number} " in shown for one in found)
    least = min(one.evaluation.footprint.size_bytes for one in found)
    assert any(one.is_on_front for one in found if one.evaluation.footprint.size_bytes == least)


def test_a_bad_pick_is_one_line_and_writes_nothing(finished: Path, tmp_path: Path):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(finished / "request.json", unfinished)
    (tmp_path / "mine").mkdir()
    out = tmp_path / "out"

    for arguments, says in (
        ((finished, "--candidate", 1), "give both a number of the list and a folder"),
        ((finished, "--candidate", 99, "--output", out), "the run has no candidate 99: choose a number from 0 to "),
        ((finished, "--candidate", 1, "--output", tmp_path / "mine"), "exists already"),
        ((unfinished, "--candidate", 1, "--output", out), "has no report yet"),
        ((tmp_path / "nowhere",), "is no run folder: there is no such folder"),
    ):
        ended = call("pick", *arguments)
        assert ended.exit_code == 2, arguments
        assert says in ended.stderr
    assert not out.exists()
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_candidate_that_is_damaged_or_gone_is_named(finished: Path, tmp_path: Path):
    run = Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
    first, second = (run / row.evaluation.model.path for row in read_report(finished).variants[:2])
    (first / "preprocessor_config.json").write_text("{}")
    shutil.rmtree(second)

    with pytest.raises(ArtifactError, match=r"preprocessor_config\.json' isn't the file that was saved"):
        pick(run, tmp_path / "out", candidate=0)
    with pytest.raises(RunError, match="is missing"):
        pick(run, tmp_path / "out", candidate=1)
    assert not (tmp_path / "out").exists()
