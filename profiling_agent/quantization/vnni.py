"""VNNI: instructions that add int8 products in 32 bits, and which of them a runtime's kernels know. No torch here.

Without one, two products are added in 16 bits, where 8 bits on both sides saturate: one of them is given 7.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from profiling_agent.records import RuntimeName
from profiling_agent.reproducibility import environment

# Intel's hybrid processors, from the 12th generation on, have that of AVX2 alone. ONNX Runtime (MLAS) and OpenVINO (oneDNN) have kernels for it;
# torch (FBGEMM) asks for that of AVX-512 (docs/facts.md says where that was read).
INSTRUCTIONS: Mapping[RuntimeName, tuple[str, ...]] = {
    "eager": ("avx512_vnni",),
    "inductor": ("avx512_vnni",),
    "onnxruntime": ("avx512_vnni", "avx_vnni"),
    "openvino": ("avx512_vnni", "avx_vnni"),
}
# torch's layers of which no sum saturates on any CPU: dynamic ones take 7 bits where one would, and static ones compute in float32 unless inductor
# makes int8 products of them.
SAFE: Mapping[RuntimeName, tuple[str, ...]] = {
    "eager": ("dynamic", "static", "rowwise"),
    "inductor": ("dynamic", "rowwise"),
}


def has_vnni(runtime: RuntimeName, cpu_flags: Collection[str]) -> bool:
    """Return whether the int8 kernels of a runtime add products in 32 bits on a CPU of these flags, as Linux names them."""
    return not set(INSTRUCTIONS.get(runtime, ())).isdisjoint(cpu_flags)


def saturates(runtime: RuntimeName) -> bool:
    """Return whether 8 bits on both sides of a product are too many for a runtime's kernels on this CPU."""
    return not has_vnni(runtime, environment().cpu_flags)


def needed_instructions(runtime: RuntimeName, layers: Iterable[Any]) -> tuple[str, ...]:
    """Return the CPU flags of which one has to be there so that int8 sums of a recipe's layers don't saturate; none where they can't."""
    full = any(
        layer.dtype == "qint8" and not layer.reduce_range and layer.kind not in SAFE.get(runtime, ())
        for layer in layers
    )
    return INSTRUCTIONS.get(runtime, ()) if full else ()
