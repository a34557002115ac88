"""What earlier versions saved: models load in this one and say what they said, and a report is read or refused by its version."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import call
from fixture_models import FOLDERS, MODELS_OF_THIS_VERSION, REPORT_OF_THIS_VERSION, REPORTS, SAVED
from PIL import Image

from profiling_agent.runtimes.artifact import STEP_TOLERANCE, read_golden, tolerance
from profiling_agent.runtimes.registry import runtime
from profiling_agent.runtimes.torch_artifact import load, load_recipe
from profiling_agent.search.deployments import INT8
from profiling_agent.workspace import REPORT_VERSION

MODELS = sorted(path.parent for path in SAVED.glob("*/*/recipe.json"))


# Kept models are of whatever processor they were made on, which is what the warning says.
@pytest.mark.filterwarnings("ignore:.* was made on ")
@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: f"{folder.parent.name} {folder.name}")
def test_a_model_of_an_earlier_version_says_what_it_said_then(folder: Path):
    (images, expected), recipe = read_golden(folder), load_recipe(folder)
    executor = runtime(recipe.deployment.runtime)
    if recipe.deployment.scheme in INT8 and not executor.is_torch and executor.saturates():
        pytest.skip("was made with VNNI, and int8 saturates on this processor, which has none")

    model = load(folder)
    logits = model(images).logits.numpy()
    (answer,) = model.predict([Image.new("RGB", (32, 32), "teal")])

    assert folder.name == "-".join((folder.name.split("-")[0], *recipe.deployment.name.split()))
    assert np.linalg.norm(logits - expected) <= tolerance(recipe) * np.linalg.norm(expected)
    # The two images are told apart, so that one answer for any image would be seen.
    assert np.linalg.norm(expected[0] - expected[1]) > 2 * STEP_TOLERANCE * np.linalg.norm(expected)
    assert answer.label in recipe.config["id2label"].values()
    assert all(cut.keep < cut.unit.width for cut in recipe.cuts)
    assert recipe.cuts


def test_every_deployment_of_this_version_that_needs_no_compiler_is_kept_and_a_report():
    assert {folder.name for folder in MODELS_OF_THIS_VERSION.iterdir()} == {*FOLDERS}
    # Fixtures are cloned by everybody.
    assert all(sum(file.stat().st_size for file in folder.iterdir()) < 140_000 for folder in MODELS)
    assert REPORT_OF_THIS_VERSION.stat().st_size < 150_000


@pytest.mark.parametrize("file", sorted(REPORTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_report_of_an_earlier_version_is_shown_or_refused_by_its_version(file: Path, tmp_path: Path):
    (tmp_path / "report.json").write_bytes(file.read_bytes())
    written = json.loads(file.read_text())

    said = call("show", str(tmp_path))

    if written["schema_version"] == REPORT_VERSION:
        assert said.exit_code == 0
        assert said.stdout.startswith(written["verdict"]["outcome"])
        assert f"timed on {written['environment']['cpu']}" in said.stdout
    else:
        assert said.exit_code == 2
        assert f"was written with schema version {written['schema_version']}" in said.stderr
