"""Who adds int8 products in 32 bits on which processor."""

import pytest

from profiling_agent.lib.machine import environment, has_vnni
from profiling_agent.quantization.layers import torch_has_vnni
from profiling_agent.schemas import RUNTIMES

TORCH, OTHERS = ["eager", "inductor"], ["onnxruntime", "openvino"]


@pytest.mark.parametrize(
    ("cpu_flags", "known_to"),
    [
        # Skylake-X has AVX-512 and no VNNI, Zen 3 AVX2 alone.
        (("avx2", "avx512f"), []),
        (("avx2",), []),
        # Alder Lake and what came after it: AVX-512 is off.
        (("avx2", "avx_vnni"), OTHERS),
        (("avx2", "avx512f", "avx512_vnni"), TORCH + OTHERS),
        (("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"), TORCH + OTHERS),
    ],
)
def test_torch_knows_vnni_of_avx512_alone_and_the_others_that_of_avx2(cpu_flags, known_to):
    assert [name for name in RUNTIMES if has_vnni(name, cpu_flags)] == known_to


def test_torch_says_of_this_cpu_what_its_flags_do():
    assert {has_vnni(name, environment().cpu_flags) for name in ("eager", "inductor")} == {torch_has_vnni()}
