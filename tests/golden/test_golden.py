"""What users and saved work rely on is what it was: commands, public names and pruning units."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import snapshots
from pruning.families import FAMILIES, TIMM_FAMILIES

UPDATE = "if it was meant: python tests/golden/snapshots.py"


@pytest.mark.parametrize("kind", ["commands", "public_names"])
def test_the_interface_is_the_stored_one(kind: str):
    assert snapshots.taken(kind) == snapshots.stored(kind), UPDATE


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in TIMM_FAMILIES])
def test_a_family_has_the_stored_units_and_refusals(family: str):
    assert snapshots.units(family) == snapshots.stored("units")[family], UPDATE


@pytest.mark.matrix
@pytest.mark.parametrize("name", snapshots.RUNS)
def test_a_small_run_decides_as_stored(name: str, tmp_path: Path):
    assert snapshots.run(name, tmp_path) == snapshots.stored("runs")[name], UPDATE
