"""The paper's models as large as they are, on torch's meta device: real names, units and groups, and made-up measurements of them."""

import torch
from full_size import MODELS, SPEC
from sample_records import evidence, profile

from profiling_agent.lib.costs import count_complexity
from profiling_agent.pruning.units import find_units
from profiling_agent.schemas import LayerProfile, ModelProfile, OperatorProfile

# So many layers of a model take so long each, and operators are as torch names them.
LAYER_MS, PASS_MS = 0.123, 456.7
OPERATORS = ("aten::addmm", "aten::mkldnn_convolution", "aten::_scaled_dot_product_flash_attention_for_cpu")


def judged_deep(name: str) -> ModelProfile:
    """Return a profile whose evidence is unlike for every unit: the longest that a prompt can get."""
    with torch.device("meta"):
        model = MODELS[name]().eval()
    rows = count_complexity(model, SPEC)
    layers = tuple(
        LayerProfile(
            name=n, kind=r.kind, params=r.params, macs=r.macs, latency_ms=LAYER_MS, activation_bytes=4 * 196 * 768
        )
        for n, r in rows.items()
    )
    operators = tuple(
        OperatorProfile(
            name=OPERATORS[index % 3],
            calls=12,
            cpu_time_ms=LAYER_MS * (20 - index),
            memory_bytes=123_456_789,
            input_shapes="[[768], [6304, 3072], [3072, 768], [], []]",
        )
        for index in range(20)
    )
    units = find_units(model, SPEC, {row.name: row.macs for row in layers}).units
    kls = {
        unit.name: tuple(1.23e-5 * 3 ** (index % 9) * 2**step for step in range(6)) for index, unit in enumerate(units)
    }
    made = profile()
    params = sum(row.params for row in layers)
    # Of a unit's ten milliseconds more go the more is cut, but for the widest of each, which brings nothing.
    widest = {unit.width: max(keep for keep in range(unit.step, unit.width, unit.step)) for unit in units}
    found = evidence(units, kls, latency=lambda keep: 0.0 if keep in widest.values() else 9.87 / (1 + keep))
    return made.model_copy(
        update={
            "architecture": type(model).__name__,
            "input": SPEC,
            "layers": layers,
            "operators": operators,
            "params": params,
            "macs": sum(row.macs for row in layers),
            "parameter_bytes": 4 * params,
            "size_bytes": 4 * params + 10_000,
            "headline": made.headline.model_copy(
                update={"latency": made.headline.latency.model_copy(update={"median_ms": PASS_MS})}
            ),
            "units": units,
            "evidence": found,
        }
    )
