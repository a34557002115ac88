import gzip
import json

import pytest
import zoo

from profiling_agent.modules.inference import random_batch
from profiling_agent.profiling.profile import profile_operators


def without_times(rows):
    return {(row.name, row.input_shapes, row.calls, row.memory_bytes) for row in rows}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    trace = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    rows, kernel_ms = profile_operators(zoo.vit(), random_batch(zoo.SPEC, 2), passes=3, trace_path=trace)
    assert kernel_ms is None
    return rows, trace


def test_calls_are_those_of_one_pass(profiled):
    rows, _ = profiled
    calls = {(row.name, row.input_shapes): row.calls for row in rows}

    assert calls["aten::linear", "[[2, 17, 64], [64, 64], [64]]"] == 2 * 4
    assert calls["aten::linear", "[[2, 17, 64], [256, 64], [256]]"] == 2
    assert sum(row.calls for row in rows if row.name == "aten::scaled_dot_product_attention") == 2


def test_memory_is_what_one_pass_allocates(profiled):
    rows, _ = profiled

    (gelu,) = [row for row in rows if row.name == "aten::gelu"]
    assert gelu.memory_bytes == 2 * (2 * 17 * 256 * 4)


def test_rows_are_sorted_by_their_own_time(profiled):
    times_ms = [row.cpu_time_ms for row in profiled[0]]

    assert times_ms == sorted(times_ms, reverse=True)
    assert all(row.cuda_time_ms is None for row in profiled[0])


def test_the_trace_is_one_pass_that_a_browser_can_open(profiled):
    events = json.loads(gzip.decompress(profiled[1].read_bytes()))["traceEvents"]

    assert sum(event["name"] == "aten::gelu" for event in events) == 2
    assert profiled[1].stat().st_size < 200_000


def test_profiling_twice_differs_in_times_alone(profiled):
    again, _ = profile_operators(zoo.vit(), random_batch(zoo.SPEC, 2), passes=1)

    assert without_times(again) == without_times(profiled[0])


@pytest.mark.gpu
def test_a_cuda_batch_has_cuda_times():
    rows, kernel_ms = profile_operators(zoo.vit().cuda(), random_batch(zoo.SPEC, 2).cuda(), passes=2)

    print(f"kernels {kernel_ms} ms, operators {sum(row.cuda_time_ms or 0 for row in rows):.4f} ms")  # noqa: T201 - numbers for the log
    assert kernel_ms is not None
    assert kernel_ms > 0
    assert [row.time_ms for row in rows] == sorted((row.time_ms for row in rows), reverse=True)
    assert sum(row.cuda_time_ms or 0 for row in rows) > 0
    assert all("::" in row.name for row in rows)
