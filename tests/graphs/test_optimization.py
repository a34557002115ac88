"""The whole run: what `finished` has, and how a graph treats requests that it can't carry out."""

import json
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
import zoo
from architecture import ROOT
from conftest import World
from interrupted import finished_jobs
from sample_records import with_attempt
from search.scripted import open_journal
from transformers import ViTForImageClassification
from world import write_data

from profiling_agent import Request, build_graph, load, optimize
from profiling_agent.data.images import PIXELS
from profiling_agent.errors import AcquisitionError, PlanError
from profiling_agent.graph.checkpoints import RunSaver, open_saver
from profiling_agent.graph.context import PLANNING
from profiling_agent.graph.nodes import deployment_search, with_evidence
from profiling_agent.graph.run import FORM, Run
from profiling_agent.graph.state import RunState
from profiling_agent.graphs.optimization import graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.lib.modules import random_batch
from profiling_agent.planning.rules import analyse
from profiling_agent.reporting.report import RunReport
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import Deployment, Outcome, Plan
from profiling_agent.search.attempt import measure_attempt, prune_attempt, quantize_attempt
from profiling_agent.search.planners import propose
from profiling_agent.workspace import Workspace


def report_of(run: Path) -> RunReport:
    return RunReport.model_validate_json((run / "report.json").read_text())


@contextmanager
def opened(folder: Path) -> Generator[tuple[RunState, Run]]:
    """Give a finished run's state before its deployments are searched, and the run."""
    with Run(Workspace(folder)) as run, open_saver(folder) as saver:
        history = build_graph(saver).get_state_history({"configurable": {"thread_id": folder.name}})
        resolved = next(snapshot for snapshot in history if snapshot.next == ("deployment_search",))
        yield RunState.model_validate(resolved.values), run


def test_a_run_ends_with_judged_attempts_and_a_verdict_on_images_that_no_decision_saw(finished: Path):
    report = report_of(finished)

    assert report.verdict.outcome in set(Outcome)
    assert {term.name for term in report.verdict.terms} == {"accuracy", "speed", "size"}
    assert report.heldout.predictions.split == "heldout"
    assert all(row.evaluation.predictions.split == "search" for row in report.variants)
    assert report.baseline.num_images + report.acquired.search.num_images == 400
    first, attempts = report.attempts[0], report.attempts
    assert [attempt.number for attempt in attempts] == list(range(1, len(attempts) + 1))
    assert all(attempt.reason for attempt in attempts)
    assert first.dry_run is not None
    assert first.deployed is not None
    assert first.deployed.footprint.params == first.dry_run.params
    assert first.deployed.footprint.macs == first.dry_run.macs
    # Nothing was trained, as none was asked for.
    assert report.acquired.recovery is None
    assert all(attempt.recovery is None for attempt in attempts)
    assert "distillation" not in (finished / "report.md").read_text()


def test_the_returned_model_loads_is_no_larger_than_the_baseline_and_has_a_card(finished: Path):
    report, card = report_of(finished), (finished / "best" / "README.md").read_text()

    assert load(finished / "best")(pixel_values=random_batch(zoo.SPEC, 2)).logits.shape == (2, 5)
    assert report.best.size_bytes <= report.baseline.size_bytes
    assert report.best.params <= report.baseline.params
    assert f"{report.best.num_images:,} held-out images" in card
    assert report.verdict.explanation in card
    assert "from profiling_agent import load" in card


def test_the_graph_and_a_plain_loop_yield_the_same_journal(finished: Path):
    report, before = report_of(finished), finished_jobs(finished)

    with opened(finished) as (state, run):
        evaluator = run.evaluator(state.model_copy(update={"profiled": with_evidence(state, run)}))
        plan, journal = analyse(evaluator.profile, evaluator.goal), None
        while isinstance(plan, Plan):
            candidate = prune_attempt(evaluator, plan)
            journal = journal or open_journal(evaluator)
            candidate = quantize_attempt(evaluator, candidate, journal.deployment)
            journal = with_attempt(journal, measure_attempt(evaluator, candidate, journal))
            plan = propose(evaluator.goal, evaluator.profile, journal, max_iterations=state.request.max_iterations)

    assert journal is not None
    assert journal.attempts == report.attempts
    assert plan is report.stopped
    assert finished_jobs(finished) == before


def test_a_scheme_that_takes_none_of_the_layers_asked_for_costs_itself_alone(finished: Path, tmp_path: Path):
    folder = shutil.copytree(finished, tmp_path / "quick", symlinks=True)
    dynamic = Deployment(runtime="eager", scheme="dynamic", recommendations=recommend("dynamic", "projection"))
    unknown = dynamic.model_copy(update={"recommendations": recommend("dynamic", "no_such_layer")})

    with opened(folder) as (state, run):
        evaluator = run.evaluator(state)
        option = evaluator.deployer.make(evaluator.baseline, dynamic)
        with pytest.raises(PlanError, match=r"'no_such_layer' hits no nn\.Linear to quantize; near names: "):
            evaluator.deployer.make(evaluator.baseline, unknown)
        # Whoever asks for it alone is told, and gets no float32 in its place.
        asks = state.model_copy(update={"proposal": Plan(quantization=dynamic.recommendations)})
        with pytest.raises(PlanError, match=r"can't be made of this model: .*'projection' hits no nn\.Linear, which"):
            deployment_search(asks, run)

    assert option.deployed is None
    assert option.reason.startswith("the layer pattern 'projection' hits no nn.Linear, which alone this quantizes")


@pytest.mark.slow
def test_labels_taken_by_their_places_against_what_the_model_answers_are_refused(world: World, tmp_path: Path):
    """Trained with the folders in another order than they are sorted in, and saved without their names."""
    model = shutil.copytree(world.model, tmp_path / "model")
    turned = zoo.inside(ViTForImageClassification.from_pretrained(model))
    with torch.no_grad():
        for held in turned.classifier.parameters():
            held.copy_(held.roll(1, 0))
    turned.config.id2label = {index: f"LABEL_{index}" for index in range(5)}
    turned.save_pretrained(model)
    data = write_data(tmp_path / "data", 600, ["red", "green", "blue", "yellow", "cyan"])
    asked = World(model, data).request(tmp_path / "runs", num_samples=300)

    with pytest.raises(
        AcquisitionError, match=r"answers 0% of the images right .* and 100% with others, such as 'red' as 'LABEL_1'"
    ):
        optimize(asked)

    assert not list((tmp_path / "runs").iterdir())


def test_invoking_the_same_request_again_repeats_no_job(world: World, finished: Path):
    """As a notebook has it: another graph, which knows nothing of the first."""
    done, first = finished_jobs(finished), report_of(finished)

    again = build_graph().invoke(world.request(finished.parent))

    assert set(again) == {"verdict", "report", "run_dir", "results_dir"}
    assert again["run_dir"] == str(finished)
    assert again["report"] == first
    assert finished_jobs(finished) == done


def test_each_image_is_decoded_once_and_answered_once_by_a_model_and_no_array_is_left(finished: Path):
    script = ROOT / "benchmarks" / "images_evaluated.py"
    ended = subprocess.run([sys.executable, script, finished], check=True, capture_output=True, text=True)

    counted, report = json.loads(ended.stdout), report_of(finished)
    acquired, best = report.acquired, report.heldout.model.path
    baseline = report.variants[0].evaluation.model.path
    # Fewer than 512 of each: everything is one shard.
    splits = {split.name: split.num_images for split in (acquired.calibration, acquired.search, acquired.heldout)}
    assert max(splits.values()) <= 512
    assert counted["decoded"] == splits
    assert counted["evaluated_twice"] == 0
    for split in ("search", "heldout"):
        assert counted["evaluated"][f"{baseline} {split}"] == counted["evaluated"][f"{best} {split}"] == splits[split]
    assert list(finished.glob(f"jobs/*/{PIXELS}")) == []


def test_a_request_that_can_not_be_carried_out_leaves_nothing_behind_and_takes_nothing_of_anyone(tmp_path: Path):
    mine = tmp_path / "there" / "mine"
    mine.parent.mkdir()
    mine.touch()
    for run_id in ("new", "there"):
        with pytest.raises(AcquisitionError):
            build_graph().invoke(Request(model=str(tmp_path / "nowhere"), output=str(tmp_path), run_id=run_id))

    assert sorted(tmp_path.rglob("*")) == [mine.parent, mine]


def test_the_graph_is_as_langgraph_json_the_form_of_studio_and_the_guide_have_it():
    config = json.loads((ROOT / "langgraph.json").read_text())
    file, name = config["checkpointer"]["path"].split(":")
    schema = graph.get_input_jsonschema()

    assert config["graphs"]["profiling_agent"]["path"] == "./graphs/optimization.py:graph"
    assert getattr(import_module(file.removeprefix("./").removesuffix(".py").replace("/", ".")), name) is RunSaver
    assert graph.checkpointer is None
    assert set(schema["properties"]) == set(Request.model_fields) - set(PLANNING)
    assert [*schema["properties"]][:9] == [*FORM][:9]
    assert schema["properties"]["max_accuracy_drop"]["default"] == 0.01
    assert graph.get_graph().draw_mermaid().strip() in (ROOT / "docs" / "guide.md").read_text()
