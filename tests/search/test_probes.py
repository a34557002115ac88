"""Probes: what they measure, on scripted jobs, and what they may take of the time."""

from pathlib import Path
from typing import Any

import pytest
from sample_records import judged, ref
from search import scripted

from profiling_agent.errors import JobError, PlanError, PruningError
from profiling_agent.jobs.runner import job_key
from profiling_agent.jobs.tasks import DeployTask, EvaluateTask, PruneTask
from profiling_agent.planning.allocation import dry_run
from profiling_agent.schemas import Journal, Plan, PrunedModel, Target
from profiling_agent.search.attempt import prune_task
from profiling_agent.search.deployments import DeploymentChoices
from profiling_agent.search.probes import lab_of

FOUND = judged()
PLAN = Plan(target=Target(saving=0.25))
CHOICES = DeploymentChoices(supported={"onnxruntime": ("dynamic", "static"), "openvino": ("static",)})


class Jobs(scripted.Jobs):
    """The pruned model answers 6 of 256 images differently, of which the baseline has 4 right."""

    error: Exception | None = None

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def PruneTask(self, task: PruneTask) -> PrunedModel:  # noqa: N802
        if self.error is not None:
            raise self.error
        return PrunedModel(model=ref("pruned"), cuts=task.cuts, kl=0.0061, kl_uncompensated=0.3)

    def EvaluateTask(self, task: EvaluateTask) -> Any:  # noqa: N802
        is_pruned = task.model == ref("pruned")
        images = range(256)
        return self.evaluated(task, [3 if is_pruned and image < 4 else image in (250, 251) for image in images])

    def DeployTask(self, task: DeployTask) -> Any:  # noqa: N802
        return scripted.deployed(task, "deployed", kl=0.017)


def lab(jobs: Any) -> Any:
    evaluator = scripted.evaluator(jobs, profile=FOUND, choices=CHOICES)
    return lab_of(evaluator, Journal.model_construct(deployment_search=None, requested_quantization=None)), evaluator


def test_a_probe_prunes_and_counts_what_changes_on_calibration_images(tmp_path: Path):
    jobs = Jobs(tmp_path)
    found = lab(jobs)[0].probe(PLAN)

    assert (found.kl, found.num_images, found.num_changed) == (0.0061, 256, 4)
    assert (found.num_lost, found.num_gained) == (4, 0)
    (pruned,) = jobs.of(PruneTask)
    assert pruned.cuts == dry_run(PLAN, FOUND).cuts
    assert {task.split.name for task in jobs.of(EvaluateTask)} == {"calibration"}


def test_what_a_job_has_measured_is_known_without_one(tmp_path: Path):
    jobs = Jobs(tmp_path)
    made, evaluator = lab(jobs)
    assert made.known_kl(PLAN) is None
    assert not jobs.asked

    folder = jobs.jobs / job_key(prune_task(evaluator, dry_run(PLAN, FOUND)))
    folder.mkdir(parents=True)
    (folder / "result.json").touch()
    assert made.known_kl(PLAN) == 0.0061


def test_layers_are_probed_in_the_first_runtime_that_has_the_scheme(tmp_path: Path):
    jobs = Jobs(tmp_path)
    assert lab(jobs)[0].probe_layers("static", "fc1") == 0.017
    (task,) = jobs.of(DeployTask)
    assert (task.deployment.name, task.deployment.recommendations[0].layer) == ("onnxruntime static", "fc1")
    with pytest.raises(PlanError, match="no runtime here has float8 int8"):
        lab(jobs)[0].probe_layers("float8", "fc1")


def test_prices_grow_with_the_model_and_probes_take_half_of_the_free_time(tmp_path: Path):
    jobs = Jobs(tmp_path)
    made = lab(jobs)[0]
    # 3 s, and 7 passes of half a millisecond for each of 256 images.
    assert made.prices["probe"] == pytest.approx(3 + 7.0 * 256 * 0.0005)

    # Of 600 s for optional steps 592 are used, and a probe may take half of the rest.
    jobs.timesheet.resume_at(592.0)
    late = lab(jobs)[0]
    late.probe(PLAN)
    jobs.timesheet.resume_at(594.0)
    with pytest.raises(PlanError, match="it takes about 4 s, and 2 s are left for this plan"):
        late.probe(PLAN)


@pytest.mark.parametrize("error", [PruningError("its gate failed"), JobError("it took too long")])
def test_a_job_that_fails_is_one_line(error: Exception, tmp_path: Path):
    jobs = Jobs(tmp_path)
    jobs.error = error
    with pytest.raises(PlanError, match=str(error)):
        lab(jobs)[0].probe(PLAN)
    with pytest.raises(PlanError, match="cuts nothing"):
        lab(jobs)[0].probe(Plan())
