"""Families in every deployment that needs no compiler: made, near, and opened in another process.

One of each kind of architecture by default; `make test-matrix` takes all of them, and typical ones whole too.
"""

from collections.abc import Iterator
from pathlib import Path

import in_process
import pytest
from pruning.families import FAMILIES, TYPICAL, marked, processor_of, spec_of

from profiling_agent.jobs import check
from profiling_agent.jobs.check import CHECK_FOLDER, TryTask
from profiling_agent.jobs.runner import Jobs
from profiling_agent.runtimes.registry import runtime
from profiling_agent.schemas import Deployability, Deployment, Form, RuntimeName

RUNTIMES: tuple[RuntimeName, ...] = ("eager", "onnxruntime", "openvino")
# Of random weights, on two images of noise: ranges are of 16 images, and rounding is fed through all layers.
BOUNDS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 0.12, "dynamic": 0.15, "static": 0.25, "static_nncf": 0.8}
# Half of its layers are depthwise: it is 0.41 away, all others here 0.17 at most.
FURTHER = {("mobilenet_v1", "whole", "static"): 0.5}
# On some processors OpenVINO makes something else of these than their graphs say (docs/support.md): it is refused there.
MISCOMPILED = {("swiftformer", "openvino static"), ("levit", "openvino static")}
# Their classifier is a convolution, and these schemes are linear layers' alone.
WITHOUT_LINEAR = {"timm_resnetv2"}
OF_LINEAR = {"eager float16", "eager dynamic", "onnxruntime dynamic"}
REFUSALS = ("conversion: OpenVINO computes something else", "conversion: the model has no nn.Linear,")
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


def bound(family: str, row: Deployability) -> float:
    scheme = row.deployment.scheme
    return FURTHER.get((family, row.form, scheme), BOUNDS[scheme])


def case(family: str, form: str):
    mark = pytest.mark.slow if family in KINDS and form == "pruned" else pytest.mark.matrix
    (of_family,) = marked([family])
    return pytest.param(family, form, marks=[mark, *of_family.marks], id=f"{family} {form}")


@pytest.mark.parametrize(("family", "form"), [case(family, form) for family, form in CASES])
def test_a_family_is_made_in_every_deployment_stays_near_and_is_opened_elsewhere(jobs: Jobs, family: str, form: Form):
    model, folder = FAMILIES[family](), jobs.workspace.root / CHECK_FOLDER
    spec = spec_of(model)

    told = check.lay_out(model, folder, spec=spec, processor=processor_of(spec), name=family)
    assert check.write_onnx(folder, form) == ""
    rows = [
        check.make(folder, form, Deployment(runtime=name, scheme=scheme), num_threads=1)
        for name in RUNTIMES
        for scheme in runtime(name).schemes("cpu")
    ]

    assert told.units
    refused = {row.deployment.name for row in rows if row.refused}
    expected = OF_LINEAR if family in WITHOUT_LINEAR else set[str]()
    miscompiled = {name for of, name in MISCOMPILED if of == family}
    assert refused - miscompiled == expected, [row.refused for row in rows if row.refused]
    assert all(row.refused.startswith(REFUSALS) for row in rows if row.refused)
    far = [row for row in rows if not row.refused and not row.distance < bound(family, row)]
    assert far == []
    kept = [row for row in rows if not row.refused]
    # One process that has made none of them.
    assert jobs.run_each([TryTask(step="reopen", row=row, isolated=False) for row in kept]) == kept
