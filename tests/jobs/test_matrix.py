"""Families in every deployment that needs no compiler: made, near, and opened in another process.

One of each kind of architecture by default; `make test-matrix` takes all of them, and typical ones whole too.
"""

from collections.abc import Iterator
from pathlib import Path

import in_process
import pytest
from pruning.families import FAMILIES, TYPICAL, marked, processor_of, spec_of

from profiling_agent.errors import QuantizationError
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import DeployTask, EvaluateTask, ExportTask
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.registry import runtime
from profiling_agent.schemas import Cut, Deployment, RuntimeName

RUNTIMES: tuple[RuntimeName, ...] = ("eager", "onnxruntime", "openvino")
# Of random weights, on 16 images of noise, and rounding is fed through all layers.
BOUNDS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 0.12, "dynamic": 0.15, "static": 0.25, "static_nncf": 0.8}
# Half of its layers are depthwise: it is 0.41 away, all others here 0.17 at most.
FURTHER = {("mobilenet_v1", "whole", "static"): 0.5}
# On some processors OpenVINO makes something else of these than their graphs say (docs/support.md): it is refused there.
MISCOMPILED = {("swiftformer", "openvino static"), ("levit", "openvino static")}
# Their classifier is a convolution, and these schemes are linear layers' alone.
WITHOUT_LINEAR = {"timm_resnetv2"}
OF_LINEAR = {"eager float16", "eager dynamic", "onnxruntime dynamic"}
REFUSALS = ("OpenVINO computes something else", "the model has no nn.Linear,")
# One of each kind of architecture.
KINDS = [
    *("vit", "swin", "resnet_bottleneck", "mobilenet_v2", "levit", "mobilevitv2", "convnext", "segformer"),
    *("efficientnet", "timm_swin", "timm_resnetv2", "timm_mobilenetv3"),
]
CASES = [(name, "pruned") for name in FAMILIES] + [(name, "whole") for name in TYPICAL]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with in_process.opened(tmp_path) as jobs:
        yield jobs


def case(family: str, form: str):
    mark = pytest.mark.slow if family in KINDS and form == "pruned" else pytest.mark.matrix
    (of_family,) = marked([family])
    return pytest.param(family, form, marks=[mark, *of_family.marks], id=f"{family} {form}")


@pytest.mark.parametrize(("family", "form"), [case(family, form) for family, form in CASES])
def test_a_family_is_made_in_every_deployment_stays_near_and_is_opened_elsewhere(jobs: Jobs, family: str, form: str):
    model, root = FAMILIES[family](), jobs.workspace.root
    spec, cuts = spec_of(model), []
    if form == "pruned":
        units = find_units(model, spec, {}).units
        assert units
        cuts = [Cut(unit=unit, keep=snap(unit, 0.25), requested_ratio=0.25) for unit in units]
        cuts = [cut for cut in cuts if cut.keep < cut.unit.width]
        model = prune_model(model, cuts, spec=spec).model
    saved = in_process.saved(root, "model", model, spec=spec, processor=processor_of(spec), cuts=cuts)
    images = in_process.drawn(root, "calibration", 16, side=spec.height)
    onnx = in_process.run(ExportTask(model=saved), root, "export")

    made, refused = [], {}
    for deployment in [Deployment(runtime=name, scheme=s) for name in RUNTIMES for s in runtime(name).schemes("cpu")]:
        task = DeployTask(model=saved, deployment=deployment, calibration=images, onnx=onnx, batch_size=8)
        try:
            made.append(in_process.run(task, root, deployment.name))
        except QuantizationError as error:
            refused[deployment.name] = str(error)

    expected = OF_LINEAR if family in WITHOUT_LINEAR else set[str]()
    assert refused.keys() - {name for of, name in MISCOMPILED if of == family} == expected, refused
    assert all(reason.startswith(REFUSALS) for reason in refused.values())
    bounds = {each.deployment.scheme: BOUNDS[each.deployment.scheme] for each in made}
    bounds |= {scheme: far for (of, its, scheme), far in FURTHER.items() if (of, its) == (family, form)}
    far = {each.deployment.name: each.distance for each in made if not each.distance < bounds[each.deployment.scheme]}
    assert far == {}
    # One process that has made none of them.
    jobs.run_each([EvaluateTask(model=each.model, split=images, shard=0, batch_size=8, device="cpu") for each in made])
