"""What an exported `load.py` returns may be shared by threads too, and doesn't grow with the sizes of batches that it is given."""

from pathlib import Path

import deployed
import fresh
import numpy as np
import pytest
import zoo

from profiling_agent.exporting.export import export
from profiling_agent.runtimes.registry import Source, noise_batch
from profiling_agent.runtimes.save import save_deployed

ASKED = """
import inspect, json, sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import numpy as np
from load import load

model, batches, together = load(), [np.load(path) for path in sys.argv[1:]], Barrier(4)
alone = [model(batch) for batch in batches]

# How far an answer is from that of one thread alone; another's is 1 from it.
def apart(batch, expected, other):
    return float(np.linalg.norm(model(batch) - expected) / np.linalg.norm(other - expected))

def ask(first):
    together.wait()
    numbers = [(first + turn) % len(batches) for turn in range(50)]
    return max(apart(batches[number], alone[number], alone[number ^ 1]) for number in numbers)

with ThreadPoolExecutor(4) as pool:
    shared = max(pool.map(ask, range(4)))
repeated = max(apart(*(np.repeat(held, size, 0) for held in (batches[0], *alone[:2]))) for size in range(1, 11))
kept = [shape[0] for shape in inspect.getclosurevars(model).nonlocals.get("compiled", {})]
print(json.dumps({"apart": max(shared, repeated), "kept": kept}))
"""


# By our own layers it is compiled once for all sizes.
@pytest.mark.parametrize(("name", "kept"), [("openvino float32", [*range(3, 11)]), ("openvino static", [])])
def test_threads_share_an_exported_model_that_keeps_eight_sizes(
    source: Source, tmp_path: Path, name: str, kept: list[int]
):
    saved, home = tmp_path / "saved", tmp_path / "home"
    save_deployed(source, deployed.deployment(name), saved, num_threads=1)
    # Two of each size, as those share what is compiled for it.
    paths = [tmp_path / f"{number}.npy" for number in range(4)]
    for number, path in enumerate(paths):
        np.save(path, noise_batch(zoo.SPEC, 1 + number // 2, seed=number))

    export(saved, "files", home)

    packages = fresh.packages(tmp_path / "packages", "numpy", "pillow", "openvino")
    found = fresh.said(packages, ASKED, *paths, beside=home)
    assert found["kept"] == kept
    assert found["apart"] < 0.3
