"""Families in every deployment that needs no compiler: made, near, and opened in another process.

One of each kind of architecture by default; `make test-matrix` takes all of them, and typical ones whole too.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pruning.families import FAMILIES, TYPICAL, marked, processor_of, spec_of

from profiling_agent.jobs.handlers import model_check
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
REOPEN = """
import sys
from pathlib import Path
from profiling_agent.schemas import Deployability
from profiling_agent.jobs.handlers import model_check
for line in sys.stdin:
    folder, _, told = line.partition(" ")
    print(model_check.reopen(Path(folder), Deployability.model_validate_json(told), num_threads=1).model_dump_json(), flush=True)
"""


Reopen = Callable[[Path, Deployability], Deployability]


@pytest.fixture(scope="module")
def reopen() -> Iterator[Reopen]:
    """Open deployments in a process that has made none of them: one for all families, as its imports take longer than what it opens."""
    with subprocess.Popen(
        [sys.executable, "-c", REOPEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, answers = process.stdin, process.stdout

        def ask(folder: Path, row: Deployability) -> Deployability:
            told.write(f"{folder} {row.model_dump_json()}\n")
            told.flush()
            # What libraries print there is none.
            line = next((line for line in answers if line.startswith("{")), "")
            return Deployability.model_validate_json(line)

        yield ask
        told.close()


def bound(family: str, row: Deployability) -> float:
    scheme = row.deployment.scheme
    return FURTHER.get((family, row.form, scheme), BOUNDS[scheme])


def case(family: str, form: str):
    mark = pytest.mark.slow if family in KINDS and form == "pruned" else pytest.mark.matrix
    (of_family,) = marked([family])
    return pytest.param(family, form, marks=[mark, *of_family.marks], id=f"{family} {form}")


@pytest.mark.parametrize(("family", "form"), [case(family, form) for family, form in CASES])
def test_a_family_is_made_in_every_deployment_stays_near_and_is_opened_elsewhere(
    tmp_path: Path, family: str, form: Form, reopen: Reopen
):
    model, folder = FAMILIES[family](), tmp_path
    spec = spec_of(model)

    told = model_check.lay_out(model, folder, spec=spec, processor=processor_of(spec), name=family)
    assert model_check.write_onnx(folder, form) is None
    rows = [
        model_check.make(folder, form, Deployment(runtime=name, scheme=scheme), num_threads=1)
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
    assert [reopen(folder, row) for row in kept] == kept
