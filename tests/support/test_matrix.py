"""Every family in every deployment that needs no compiler, whole and pruned: made, near, and opened by a process that made none of them.

`benchmarks/support.py` makes docs/support.md of the same steps, torch.compile included.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pruning.families import FAMILIES, processor_of, spec_of

from profiling_agent.deployment.registry import runtime
from profiling_agent.records import Deployability, Deployment, RuntimeName
from profiling_agent.support import steps

RUNTIMES: tuple[RuntimeName, ...] = ("eager", "onnxruntime", "openvino")
# Of random weights and noise: NNCF's ranges are of 16 images, and rounding is fed through all layers.
BOUNDS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 0.12, "dynamic": 0.1, "static": 0.3, "static_nncf": 0.8}
# What OpenVINO makes of these isn't what their graphs say (docs/support.md).
MISCOMPILED = {("swiftformer", "openvino static"), ("levit", "openvino static")}
REOPEN = """
import sys
from pathlib import Path
from profiling_agent.records import Deployability
from profiling_agent.support import steps
for line in sys.stdin:
    folder, _, told = line.partition(" ")
    print(steps.reopen(Path(folder), Deployability.model_validate_json(told), num_threads=1).model_dump_json(), flush=True)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_made_in_every_deployment_and_stays_near(root: Path, family: str):
    model, folder = FAMILIES[family](), root / family
    spec = spec_of(model)

    told = steps.lay_out(model, folder, spec=spec, processor=processor_of(spec), name=family)
    rows = list[Deployability]()
    for form in steps.forms(folder):
        assert steps.write_onnx(folder, form) is None
        for name in RUNTIMES:
            for scheme in runtime(name).schemes("cpu"):
                rows.append(steps.make(folder, form, Deployment(runtime=name, scheme=scheme), num_threads=1))

    assert bool(told.units) == ("pruned" in steps.forms(folder))
    assert told.units or told.refused
    refused = {row.deployment.name for row in rows if row.refused}
    assert refused == {name for of, name in MISCOMPILED if of == family}, [row.refused for row in rows if row.refused]
    assert all(row.refused.startswith("conversion: OpenVINO computes something else") for row in rows if row.refused)
    far = [row for row in rows if not row.refused and not row.distance < BOUNDS[row.deployment.scheme]]
    assert far == []
    kept = [row.model_dump_json() for row in rows if not row.refused]
    (folder / "rows.json").write_text(json.dumps(kept))


@pytest.mark.slow
def test_a_process_that_made_none_of_them_opens_them_all(root: Path):
    lines = [
        f"{path.parent} {row}" for path in sorted(root.glob("*/rows.json")) for row in json.loads(path.read_text())
    ]
    assert len(lines) > len(FAMILIES), "the test before this one makes them"

    command = [sys.executable, "-c", REOPEN]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)

    found = [Deployability.model_validate_json(line) for line in done.stdout.splitlines()]
    assert len(found) == len(lines)
    assert [row.refused for row in found if row.refused] == []
