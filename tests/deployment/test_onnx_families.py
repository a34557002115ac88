"""Every family that can be pruned says the same in ONNX Runtime after a quarter of each unit is gone."""

from pathlib import Path

import pytest
from pruning import families

from profiling_agent.deployment.onnx_export import export_onnx
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.records import Cut, InputSpec


def spec_of(model) -> InputSpec:
    # The convolutional families say the size that their weights were trained for, which is too large to be quick.
    stated = getattr(model.config, "image_size", 32)
    size = stated if isinstance(stated, int) and stated <= 64 else 32
    return InputSpec(channels=3, height=size, width=size, source="families")


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_pruned_family_says_the_same_in_onnx_runtime(tmp_path: Path, family: str):
    model = families.FAMILIES[family]()
    spec = spec_of(model)
    units = find_units(model, spec, {}).units
    cuts = [Cut(unit=unit, keep=snap(unit, 0.25), requested_ratio=0.25) for unit in units]

    distance = export_onnx(prune_model(model, cuts, spec=spec).model, tmp_path / "model.onnx", spec=spec)

    assert cuts
    assert 0 < distance < 1e-5
