"""A new runtime is a file and the names that CONTRIBUTING.md lists; saving, opening and checking are there for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from profiling_agent.lib.machine import LIBRARIES, RUNTIME_LIBRARIES
from profiling_agent.runtimes.registry import runtime
from profiling_agent.schemas import RUNTIMES

ROOT = Path(__file__).parents[2]
# What `## Add a runtime` touches besides the new file: where a name goes, and the line with it.
NAMES = (
    ("schemas/plan.py", '"onnxruntime", "openvino"]', '"onnxruntime", "openvino", "toy"]'),
    (
        "runtimes/__init__.py",
        "as torch_session\n",
        "as torch_session\nfrom profiling_agent.runtimes import toy as toy\n",
    ),
)
SCRIPT = """
import sys
from pathlib import Path
import deployments, zoo
from profiling_agent import load
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.torch_artifact import save_deployed
folder, images = Path(sys.argv[1]), noise_batch(zoo.SPEC, 3, seed=2)
source = deployments.source_of("vit", folder / "source")
recipe = save_deployed(source, deployments.deployment("toy float32"), folder / "model")
assert "model.onnx" in recipe.files and "onnx" in recipe.libraries
card = (folder / "model" / "README.md").read_text()
assert "toy opens them" in card and "from_pretrained" not in card
model = load(folder / "model", num_threads=1)
assert deployments.distance(model(images).logits.numpy(), deployments.float_logits(source, images)) < 1e-5
assert model.session.bound(images)() > 0
print(model.runtime)
"""


@pytest.mark.slow
def test_a_runtime_that_follows_the_words_is_saved_opened_and_checked(tmp_path: Path):
    package = shutil.copytree(ROOT / "profiling_agent", tmp_path / "profiling_agent")
    shutil.copyfile(Path(__file__).with_name("toy_runtime.py"), package / "runtimes" / "toy.py")
    for name, place, line in NAMES:
        text = (package / name).read_text()
        assert text.count(place) == 1, f"{name} has no longer one place for the name: CONTRIBUTING.md and this test"
        (package / name).write_text(text.replace(place, line))
    (tmp_path / "work").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")])}

    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "work")]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert ended.stdout == "toy\n", ended.stderr


def test_what_a_runtime_converts_and_runs_with_is_in_the_keys_of_jobs():
    packages = {package for name in RUNTIMES for package in runtime(name).requires}

    assert packages <= {*LIBRARIES, *RUNTIME_LIBRARIES}


def test_contributing_names_the_files_that_this_test_touches():
    words = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a runtime\n")[1].split("\n## ")[0]

    assert all(f"profiling_agent/{name}" in words for name, _, _ in NAMES)
