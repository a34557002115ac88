"""Every command and code block of README and docs, as it stands there, in a folder that has what they name."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chat_server import chat_server
from conftest import World
from fake_hub import serve
from llm_personas import submits

from profiling_agent.planning.rules import read_plan
from profiling_agent.reporting.report import read_report
from profiling_agent.search.attempt import read_answer
from profiling_agent.sweep import read_sweep

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(console|python|json|yaml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
# A path of this repository, as prose and comments name it; a placeholder in capitals is none.
NAMED = re.compile(r"`((?:profiling_agent|graphs|prompts|tests|docs|benchmarks|notebooks)/[\w./]*)(?:::\w+)?`")
CITED = re.compile(r"\b(?:[\w/]*facts/\w+\.md|docs/[\w/-]+\.md|[A-Z]{4,}\.md)")
# What a run in these pages is asked for besides, so that it ends soon: its plan is asked about, and that is enough here.
QUICK = "--runtimes eager --max-iterations 1 --num-samples 60 --quantize-dtype none --num-sessions 2 --approve plan"
CARD = """---
configs:
- config_name: full_size
  data_files: [{split: train, path: test.parquet}, {split: test, path: train.parquet}]
- config_name: 320px
  data_files: [{split: train, path: train.parquet}, {split: test, path: test.parquet}]
---
"""
# Whole runs, races, sweeps and questions have tests of their own: here, that the command line is understood.
PARSE = """
import sys
from typer.main import get_command
from profiling_agent import Request
from profiling_agent.cli.main import app
name, *arguments = sys.argv[1:]
given = get_command(app).commands[name].make_context(name, arguments).params
Request.model_validate({key: given[key] for key in Request.model_fields if given.get(key) is not None})
""".strip()
# Blocks that run: of a model of the Hub, resumed, shown and compared; and one that waits for an answer.
REALLY_RUN = ("resume runs/my-run", "--approve plan")
COMMANDS = {
    # Not met and waiting are answers too: what is tested is that the command does what the page says.
    "profiling-agent": f"""
case "$1" in
  run) [ "$RUNS" ] || exec {sys.executable} -c '{PARSE}' "$@"; set -- "$@" {QUICK};;
  sweep | benchmark | ask) exec {sys.executable} -c '{PARSE}' "$@";;
esac
{sys.executable} -m profiling_agent.cli.main "$@" || {{ code=$?; [ $code = 1 ] || [ $code = 3 ] || exit $code; }}""",
    # The paper's tables take minutes, and have a test of their own: here, that the command line is understood.
    "python": f"""
[ "$1 $2" = "-m benchmarks.paper" ] || exec {sys.executable} "$@"
cd {ROOT}; exec {sys.executable} -c 'import sys; from benchmarks.paper.__main__ import parser; parser().parse_args(sys.argv[1:])' "${{@:3}}"
""",
    # Installing and serving have tests of their own (test_wheel.py, server/): here, that what is named exists.
    "make": f'exec {shutil.which("make")} --dry-run --silent -C {ROOT} "$@" > made.txt',
    "pip": f'cd {ROOT}; exec {sys.executable} -m pip --disable-pip-version-check "$1" --dry-run --no-deps --quiet "${{@:2}}"',
    ".ci/run": f"exec bash -n {ROOT / '.ci/run'}",
    "langgraph": f"exec {sys.executable} -m langgraph_cli validate --config {ROOT / 'langgraph.json'}",
}


def blocks(language: str) -> list[tuple[str, str]]:
    found = [(page, hit) for page in PAGES for hit in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    return [(f"{page.name}:{hit.start()}", hit[2]) for page, hit in found if hit[1] == language]


def commands() -> list[tuple[str, str]]:
    """Return the commands of each block, without those that an earlier one has: the paper's tables take minutes each time."""
    known, left = set[str](), list[tuple[str, str]]()
    for page, text in blocks("console"):
        lines = text.splitlines()
        left.append((page, "\n".join(line for line in lines if line not in known)))
        known.update(lines)
    return left


@pytest.fixture(scope="module")
def place(world: World, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all that the pages name: a model, data, runs, a plan, a Hub, and a language model's server."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(world.model, folder / "my-model")
    shutil.copytree(world.data, folder / "my-data")
    for name in ("my-run", "bold"):
        shutil.copytree(finished, folder / "runs" / name, symlinks=True)
    shutil.copytree(world.model, folder / "my-vit")
    baseline = read_report(finished).variants[0].evaluation.model
    shutil.copytree(finished / baseline.path, folder / "runs" / "float32")
    shutil.copytree(world.model, folder / "hub" / "models" / "microsoft" / "resnet-101")
    imagenette = shutil.copytree(world.data, folder / "hub" / "datasets" / "frgfm" / "imagenette")
    (imagenette / "README.md").write_text(CARD)
    plans = [text for page, text in blocks("json") if page.startswith("guide")]
    (folder / "plan.json").write_text(plans[0])
    ((_, sweep),) = blocks("yaml")
    (folder / "sweep.yaml").write_text(sweep)
    assert read_sweep(folder / "sweep.yaml", "runs")
    (folder / "edit.json").write_text(plans[1])
    for name, script in COMMANDS.items():
        (folder / "bin" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script.strip()}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / ".ci").symlink_to(folder / "bin" / ".ci")
    return folder


def test_every_link_of_the_pages_leads_somewhere():
    for page in PAGES:
        for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page.name, path)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, (page.name, anchor)


def test_what_pages_sources_and_records_name_lies_in_the_repository():
    # peers.md names files of the peers, and architecture.md is drawn, with a test of its own.
    for page in (page for page in PAGES if page.name not in ("peers.md", "architecture.md")):
        for path in NAMED.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), (page.name, path)
    folders = ("profiling_agent", "graphs", "prompts", "tests", "benchmarks")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for source in [*sources, *(ROOT / "docs" / "decisions").glob("*.md")]:
        for path in CITED.findall(source.read_text(encoding="utf-8")):
            places = (ROOT, ROOT / "docs", ROOT / "docs" / "decisions")
            assert any((place / path).exists() for place in places), (str(source.relative_to(ROOT)), path)


def test_the_json_blocks_are_a_plan_and_an_answer(tmp_path: Path):
    (_, plan), (_, edit) = blocks("json")
    (tmp_path / "plan.json").write_text(plan)

    assert read_plan(str(tmp_path / "plan.json")).target
    assert read_answer({"decision": "edit"} | json.loads(edit)).caps


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), blocks("python"), ids=lambda value: value if ".md:" in value else "")
def test_every_python_block_runs(page: str, text: str, place: Path):
    program = place / "block.py"
    program.write_text(text)

    ended = subprocess.run(
        [sys.executable, program.name], cwd=place, env=environment(place), capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), commands(), ids=lambda value: value if ".md:" in value else "")
def test_every_command_runs(page: str, text: str, place: Path):
    answer = submits({"target": {"metric": "params", "saving": 0.2}})
    with serve(place / "hub") as hub, chat_server(lambda payload, number: answer) as model:
        # The two servers stand where the pages say that OpenAI's, Ollama's and Hugging Face's are.
        script = text.replace("http://localhost:11434/v1", model.url)
        more = {"HF_ENDPOINT": hub.address} | ({"OPENAI_BASE_URL": model.url} if "gpt-5.5" in text else {})
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=place,
            env=environment(place) | more | {"RUNS": "1" if any(part in text for part in REALLY_RUN) else ""},
            capture_output=True,
            text=True,
            check=False,
        )

    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]


def environment(place: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HOME": str(place / "hf"),
        "PYTHONPATH": str(ROOT),
    }
