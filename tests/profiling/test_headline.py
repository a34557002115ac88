import psutil
import zoo

from profiling_agent.profiling.headline import MAX_RUNS, measure_headline, peak_memory_bytes
from profiling_agent.runtimes.torch_session import TorchSession


def test_a_fast_model_is_timed_as_often_as_helps_and_every_pass_is_counted():
    model, passes = zoo.vit(), []
    model.register_forward_hook(lambda *_: passes.append(1))

    headline = measure_headline(TorchSession(model, device="cpu"), zoo.SPEC, batch_size=2)

    assert headline.forward_passes == len(passes) == 2 + MAX_RUNS
    assert len(headline.latency.samples_ms) == MAX_RUNS
    assert headline.latency.batch_size == 2


def test_the_peak_stays_when_the_memory_is_freed():
    extra = 64 * 2**20
    before = peak_memory_bytes()
    block = b"\1" * (before - psutil.Process().memory_info().rss + extra)
    del block

    assert before + extra // 2 < peak_memory_bytes() < before + 2 * extra
