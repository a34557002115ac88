"""One opened model that several threads ask at once gives each its own answers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deployed
import numpy as np
import pytest
import zoo

from profiling_agent import load
from profiling_agent.runtimes.open_vino import MAX_SIZES, MIN_SIZES, OpenVinoSession, num_kept
from profiling_agent.runtimes.registry import Source, noise_batch, open_session
from profiling_agent.runtimes.save import save_deployed

NUM_THREADS, NUM_CALLS = 4, 50
# Two of each size, as those share what is compiled for it: the other one's place is `number ^ 1`.
BATCHES = [noise_batch(zoo.SPEC, size, seed=10 * size + number) for size in (1, 2, 3) for number in (1, 2)]


@pytest.mark.parametrize("name", ["eager float32", "onnxruntime float32", "openvino float32", "openvino static"])
def test_each_thread_gets_the_answers_to_its_own_images(source: Source, tmp_path: Path, name: str):
    save_deployed(source, deployed.deployment(name), tmp_path / "model", num_threads=1)
    model, together = load(tmp_path / "model"), threading.Barrier(NUM_THREADS)
    alone = [model(batch).logits.numpy() for batch in BATCHES]

    def apart(number: int) -> float:
        """Return how far an answer is from that of one thread alone; another's is 1 from it."""
        found = model(BATCHES[number]).logits.numpy()
        return deployed.distance(found, alone[number]) / deployed.distance(alone[number ^ 1], alone[number])

    def ask(first: int) -> float:
        together.wait()
        return max(apart((first + turn) % len(BATCHES)) for turn in range(NUM_CALLS))

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert max(pool.map(ask, range(NUM_THREADS))) < 0.3


def test_of_the_sizes_that_a_graph_is_compiled_for_the_one_longest_unused_goes(source: Source, tmp_path: Path):
    save_deployed(source, deployed.deployment("openvino float32"), tmp_path / "model", num_threads=1)
    session = open_session(tmp_path / "model", num_threads=1)
    assert isinstance(session, OpenVinoSession)
    image = noise_batch(zoo.SPEC, 1)
    (expected,) = session.run(image)

    answers = [session.run(np.repeat(image, size, axis=0)) for size in (*range(1, MAX_SIZES + 1), 1, MAX_SIZES + 1)]

    assert [*session._requests] == [*range(3, MAX_SIZES + 1), 1, MAX_SIZES + 1]
    assert max(deployed.distance(row, expected) for answer in answers for row in answer) < 1e-5


def test_large_weights_are_laid_out_for_fewer_sizes():
    # A ResNet-18's, a ViT-B's and a ViT-L's, in float32.
    kept = [num_kept(weight_bytes) for weight_bytes in (0, 47_000_000, 346_000_000, 1_217_000_000)]

    assert kept == [MAX_SIZES, MAX_SIZES, 6, MIN_SIZES]
