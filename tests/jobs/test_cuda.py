"""Jobs on a CUDA device: the models are there while they are worked on, memory is the device's, and the answers are the CPU's."""

import json
from pathlib import Path

import pytest
import torch
import zoo
from conftest import World

from profiling_agent import optimize
from profiling_agent.jobs.runner import job_key
from profiling_agent.jobs.tasks import HeadlineTask
from profiling_agent.lib.machine import environment
from profiling_agent.lib.modules import on_device, random_batch
from profiling_agent.measure.worker import measure_headline
from profiling_agent.pruning.compensation import compensate
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.reporting.report import RunReport
from profiling_agent.runtimes.artifact import open_session
from profiling_agent.schemas import Cut

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def report(world: World, output: Path) -> RunReport:
    """Return the report of a whole run on CUDA."""
    asked = {"device": "cuda", "runtimes": "eager,graphed", "quantize_dtype": "auto", "max_iterations": 1}
    return optimize(world.request(output, **asked))


def test_a_whole_run_is_measured_on_the_device(report: RunReport):
    assert report.acquired.source.device == "cuda"
    assert report.environment.device == "cuda"
    assert report.race is not None
    assert report.verdict.outcome


def test_the_gpu_is_named_in_report_card_and_job_keys(report: RunReport, output: Path):
    name = torch.cuda.get_device_name()
    folder = output / "quick"

    assert report.environment.gpu is not None
    assert report.environment.gpu.name == name
    assert name in (folder / "report.json").read_text()
    assert name in (folder / "report.md").read_text()
    assert name in (folder / "best" / "README.md").read_text()
    assert any("launch-bound" in line for line in report.on_gpu)
    written = json.loads(next((folder / "jobs").glob("headline-*/task.json")).read_text())
    task = HeadlineTask.model_validate(written)
    assert (folder / "jobs" / job_key(task)).exists()
    assert not (folder / "jobs" / job_key(task, lambda _: environment("cpu"))).exists()


def test_what_cuda_has_kernels_for_is_tried_in_both_runtimes(report: RunReport):
    assert report.deployment_search is not None
    options = report.deployment_search.options
    assert {option.deployment.runtime for option in options} == {"eager", "graphed"}
    assert any(option.race_result for option in options)
    schemes = {option.deployment.scheme for option in options}
    assert {"tf32", "dynamic"} <= schemes
    assert not schemes & {"static", "static_nncf"}


def test_float32_on_the_device_is_float32():
    image = random_batch(zoo.SPEC, 4)
    for model in (zoo.vit(), zoo.resnet()):
        with torch.inference_mode():
            expected = model.eval()(pixel_values=image).logits
            found = on_device(model, "cuda")(pixel_values=image.cuda()).logits.cpu()
        assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_a_model_is_cut_and_made_up_for_on_the_device_as_on_the_cpu():
    model = zoo.vit()
    units = find_units(model, zoo.SPEC, {}).units
    cuts = [Cut(unit=unit, keep=snap(unit, 0.4), requested_ratio=0.4) for unit in units]
    images = random_batch(zoo.SPEC, 256)
    kls = []
    for device in ("cpu", "cuda"):
        there = on_device(model, device)
        pruned = prune_model(there, cuts, spec=zoo.SPEC)
        assert next(pruned.model.parameters()).device.type == device
        batches = [(part, torch.zeros(len(part))) for part in images.split(32)]
        kls.append(compensate(there, pruned.model, cuts, pruned.keep, lambda batches=batches: batches).kl_after)
    assert kls[1] == pytest.approx(kls[0], rel=0.05)


def test_memory_is_the_devices(report: RunReport, tmp_path: Path):
    from profiling_agent.runtimes.torch_artifact import save_model

    save_model(zoo.vit(), tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    headline = measure_headline(open_session(tmp_path / "model", device="cuda"), zoo.SPEC, batch_size=2)

    assert headline.peak_memory_bytes == torch.cuda.max_memory_allocated()
    assert 0 < report.baseline.peak_memory_bytes < 10**9
