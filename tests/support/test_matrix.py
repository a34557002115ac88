"""Every family in every deployment that needs no compiler, pruned, and typical ones whole too: made, near, and opened elsewhere.

`benchmarks/support.py` makes docs/support.md of the same steps, whole and pruned.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pruning.families import FAMILIES, TYPICAL, marked, processor_of, spec_of

from profiling_agent.deployment.registry import runtime
from profiling_agent.records import Deployability, Deployment, RuntimeName
from profiling_agent.support import steps

RUNTIMES: tuple[RuntimeName, ...] = ("eager", "onnxruntime", "openvino")
# Of random weights, on two images of noise: ranges are of 16 images, and rounding is fed through all layers.
BOUNDS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 0.12, "dynamic": 0.15, "static": 0.25, "static_nncf": 0.8}
# Half of its layers are depthwise: it is 0.41 away, all others here 0.17 at most.
FURTHER = {("mobilenet_v1", "whole", "static"): 0.5}
# What OpenVINO makes of these isn't what their graphs say (docs/support.md).
MISCOMPILED = {("swiftformer", "openvino static"), ("levit", "openvino static")}
# Their classifier is a convolution, and these schemes are linear layers' alone.
WITHOUT_LINEAR = {"timm_resnetv2"}
OF_LINEAR = {"eager float16", "eager dynamic", "onnxruntime dynamic"}
REFUSALS = ("conversion: OpenVINO computes something else", "conversion: the model has no nn.Linear,")
# To a deployment they are what timm's ViT, RegNet-Y and MobileNetV3 are, and half a minute each.
ALIKE = {"timm_deit3", "timm_deit_distilled", "timm_seresnet", "timm_mobilenetv4"}
REOPEN = """
import sys
from pathlib import Path
from profiling_agent.records import Deployability
from profiling_agent.support import steps
for line in sys.stdin:
    folder, _, told = line.partition(" ")
    print(steps.reopen(Path(folder), Deployability.model_validate_json(told), num_threads=1).model_dump_json(), flush=True)
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


@pytest.mark.slow
@pytest.mark.parametrize("family", marked(name for name in FAMILIES if name not in ALIKE))
def test_a_family_is_made_in_every_deployment_stays_near_and_is_opened_elsewhere(
    tmp_path: Path, family: str, reopen: Reopen
):
    model, folder = FAMILIES[family](), tmp_path
    spec = spec_of(model)

    told = steps.lay_out(model, folder, spec=spec, processor=processor_of(spec), name=family)
    rows = list[Deployability]()
    # `benchmarks/support.py` takes both forms of all of them through, which takes a quarter of an hour.
    for form in steps.forms(folder) if family in TYPICAL else steps.forms(folder)[-1:]:
        assert steps.write_onnx(folder, form) is None
        for name in RUNTIMES:
            for scheme in runtime(name).schemes("cpu"):
                rows.append(steps.make(folder, form, Deployment(runtime=name, scheme=scheme), num_threads=1))

    assert bool(told.units) == ("pruned" in steps.forms(folder))
    assert told.units or told.refused
    refused = {row.deployment.name for row in rows if row.refused}
    expected = {name for of, name in MISCOMPILED if of == family} | (OF_LINEAR if family in WITHOUT_LINEAR else set())
    assert refused == expected, [row.refused for row in rows if row.refused]
    assert all(row.refused.startswith(REFUSALS) for row in rows if row.refused)
    far = [row for row in rows if not row.refused and not row.distance < bound(family, row)]
    assert far == []
    kept = [row for row in rows if not row.refused]
    assert [reopen(folder, row) for row in kept] == kept
