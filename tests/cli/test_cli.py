"""The command line: usage, one line for each mistake, damaged and old runs, saved models."""

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import call
from conftest import World

from profiling_agent.exporting.pick import model_folder
from profiling_agent.lib.io import write_text
from profiling_agent.reporting.render import render_html, render_text
from profiling_agent.reporting.report import RunReport, models_of_all, read_report
from profiling_agent.schemas import ModelProfile, Race
from profiling_agent.workspace import Workspace

# What takes long to import, and is for runs alone.
HEAVY = {"torch", "transformers", "langgraph", "langchain_core", "datasets", "numpy", "scipy"}


def test_a_runtime_that_is_not_installed_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # What Python's import system takes for "not there". A number with a unit gets past its flag.
    monkeypatch.setitem(sys.modules, "openvino", None)
    contract = ("--max-accuracy-drop", "1%", "--max-size-ratio", "50%", "--min-speedup", "2x")

    said = call("run", *contract, "--runtimes", "torch,openvino", "--output", tmp_path / "runs", "--quiet")

    assert is_refused(said, "runtimes asks for openvino", "pip install profiling-agent[openvino]")
    assert not list((tmp_path / "runs").iterdir())


def test_show_prints_the_verdict_for_people_and_one_json_document_and_why_layers_were_changed(finished: Path):
    for_people, shown = call("show", finished), json.loads(call("show", finished, "--json").output)
    plan = call("show", finished, "--plan").output

    assert for_people.exit_code == 0
    assert shown["verdict"]["outcome"] in for_people.output
    assert RunReport.model_validate(shown) == read_report(finished)
    assert all(row["unit"] in plan for row in shown["sensitivity"])
    assert all(words in plan for words in ("by rules", "layers quantized", "predicted"))


def test_what_was_noted_of_the_images_stands_in_the_report_and_on_the_terminal(run: Path):
    report, note = read_report(run), "'3' is taken for 'car', by their places alone"
    noted = report.model_copy(update={"notes": (note,)})
    write_text(run / "report.json", noted.model_dump_json())

    assert note in call("show", run).output
    assert note in render_text("report", r=noted)
    assert note in html.unescape(render_html(noted))


def test_a_run_in_the_default_place_can_be_named_by_its_id(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "runs").symlink_to(finished.parent)
    monkeypatch.chdir(tmp_path)

    assert call("show", finished.name).exit_code == 0
    assert call("show", "another").exit_code == 2


@pytest.mark.slow
def test_profile_prints_one_json_document(world: World):
    shown = call("profile", "--model", str(world.model), "--batch-size", "2", "--json")

    assert shown.exit_code == 0
    document = json.loads(shown.stdout)
    assert document["params"] == sum(row["params"] for row in document["layers"])
    text = render_text("profile", p=ModelProfile.model_validate(document))
    rows = re.findall(r"^\| (.*) \| (\d+) \| (\S+): .* \|$", text.partition("what stays as it is")[2], re.MULTILINE)
    assert sum(int(number) for _, number, _ in rows) == len(document["refusals"]) > 0
    assert all(document["refusals"][layer].startswith(cause) for cause, _, layer in rows)


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command line in a process that prints at its end which heavy libraries it has imported."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('imported:', *sorted({HEAVY!r} & sys.modules.keys())))\n"
        f"sys.argv = {['profiling-agent', *arguments]!r}\n"
        "from profiling_agent.cli.main import main\n"
        "main()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--seed", "\x1b[31mx"), "--seed"),
        (("run", "--max-size-ratio", "50"), "--max-size-ratio: give a fraction above 0, up to 2: 0.5 is half, or 50%"),
    ],
)
def test_what_is_refused_is_one_line_that_names_the_flag(arguments: tuple[str, ...], message: str):
    said = program(*arguments)

    assert said.returncode == 2
    assert said.stderr.startswith("profiling-agent: ")
    assert said.stderr.count("\n") == 1
    assert said.stderr.strip().isprintable()
    assert message in said.stderr


@pytest.mark.parametrize(("arguments", "word"), [((), "approve"), (("run", "--help"), "--max-accuracy-drop")])
def test_help_is_shown_without_importing_what_only_a_run_needs(arguments: tuple[str, ...], word: str):
    said = program(*arguments).stdout

    assert word in said
    assert said.splitlines()[-1] == "imported:"


def is_refused(said, *words: str) -> bool:
    return (
        said.exit_code == 2
        and len(said.stderr.strip().splitlines()) == 1
        and said.stderr.startswith("profiling-agent: ")
        and all(word in said.stderr for word in words)
    )


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "quick", symlinks=True))


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("file", "damage", "verb", "words"),
    [
        ("checkpoints.sqlite", lambda content: b"no database" * 9 + content[99:], "approve", "delete the file"),
        ("report.json", cut_short, "show", "damaged or of another version"),
        ("report.json", lambda _: b"{}", "compare", "damaged or of another version"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_and_not_gone_on_with(
    run: Path, file: str, damage: Callable[[bytes], bytes], verb: str, words: str
):
    (run / file).write_bytes(damage((run / file).read_bytes()))

    assert is_refused(call(verb, run), file, words)


def test_a_run_that_is_in_use_is_refused_and_goes_on_when_it_is_free(run: Path, finished: Path):
    report = read_report(finished)
    for flags in ((), ("--quiet",), ("--json",)):
        lock = Workspace(run).lock()
        try:
            said = call("resume", run, *flags)
        finally:
            lock.release()
        assert is_refused(said, "run 'quick' is in use by another process: wait for it, or end it")
        assert said.stdout == ""

        assert call("resume", run, *flags).exit_code == (0 if report.verdict.outcome == "MET" else 1)
        assert read_report(run) == report


@pytest.mark.slow
def test_a_finished_run_is_benchmarked_without_what_can_not_be_run(finished: Path, tmp_path: Path):
    broken = shutil.copytree(finished / "best", tmp_path / "broken")
    (broken / "weights.safetensors").write_bytes(b"no weights")
    sources, options = (str(finished), str(broken)), ("--batch-size", "2", "--num-sessions", "2")
    document = json.loads(call("benchmark", *sources, *options, "--json").stdout)

    race = Race.model_validate(document["race"])
    assert race.num_sessions == 2
    assert len(race.results) == len(document["models"]) == len(read_report(finished).variants)
    assert all(race_result.latency.batch_size == 2 for race_result in race.results)
    assert race.results[0].speedup == 1
    assert list(race.dropped) == [str(broken.resolve())]
    assert {(1, 8, 32)} == {tuple(row["batch_size"] for row in each["throughput"]) for each in document["models"]}
    # A narrow terminal breaks the cell into lines.
    table = call("benchmark", finished / "best", *options).stdout
    assert all(part in table for part in ("1.00", "[1.00,", "1.00]"))


def test_models_of_a_run_are_known_by_the_numbers_of_pick_and_by_their_run(finished: Path, tmp_path: Path):
    names = list(models_of_all([finished]))
    # As `scp -r` and `aws s3 sync` copy a run: `best` is no link there.
    copy = shutil.copytree(finished, tmp_path / "copy")

    assert names[0].startswith("0 baseline ")
    assert len(set(names)) == len(names)
    assert list(models_of_all([finished, copy])) == [f"{run}: {name}" for run in (finished, copy) for name in names]
    assert models_of_all([copy])[names[0]] == (copy / read_report(finished).variants[0].evaluation.model.path).resolve()


def test_a_fork_is_handed_over_as_its_run_is(run: Path):
    fork = run / "forks" / "c0ffee"
    fork.mkdir(parents=True)
    shutil.copy(run / "report.json", fork)
    (fork / "best").symlink_to((run / "best").resolve())

    # A long path is wrapped where the terminal ends.
    shown = call("show", str(fork)).stdout.replace("\n", "")

    assert model_folder(fork) == (run / "best").resolve()
    assert f"best model: {fork / 'best'}" in shown
    assert (
        next(iter(models_of_all([fork]).values()))
        == (run / read_report(run).variants[0].evaluation.model.path).resolve()
    )


def test_runs_are_compared_side_by_side_or_in_one_json_document(finished: Path, tmp_path: Path):
    # A folder may be called what rich takes for markup.
    other = shutil.copytree(finished, tmp_path / "[bold]", symlinks=True)
    report = read_report(finished)
    best = report.best.model_copy(update={"params": report.baseline.params // 2})
    environment = report.environment.model_copy(update={"cpu": "Another 9000"})
    better = report.model_copy(update={"best": best, "environment": environment})
    write_text(Path(other) / "report.json", better.model_dump_json())
    document = json.loads(call("compare", finished, other, "--json").stdout)
    text = render_text("compare", reports={"mild": report, "[bold]": better})
    rows = {name: cells for name, *cells in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)}

    read = {name: RunReport.model_validate(one) for name, one in document.items()}
    assert read == {str(finished): report, str(other): better}
    said = call("compare", finished, other).stdout
    assert "[bold]" in said
    assert "The times aren't comparable" in said
    assert rows["verdict"][0].startswith(report.verdict.outcome)
    assert rows["params saved"] == [f"{1 - report.best.params / report.baseline.params:.2%}", "50.00%"]
