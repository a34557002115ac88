"""Cost of a profile: seconds for a full-size ViT-B/16 with random weights."""

import tempfile
import time
from pathlib import Path
from typing import Any

from checks import Check, finish, parser_of
from full_size import SPEC, build

from profiling_agent.lib.modules import pin_threads
from profiling_agent.measure.worker import measure_headline
from profiling_agent.profiling.profile import profile_model
from profiling_agent.runtimes.torch_session import TorchSession

MAX_SECONDS = 90.0


def measure(batch_size: int) -> dict[str, Any]:
    """Profile the model, headline included, and return the table's row."""
    model = build("ViT-B/16")
    started = time.perf_counter()
    headline = measure_headline(TorchSession(model, device="cpu"), SPEC, batch_size=batch_size)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        known: dict[str, Any] = {"headline": headline, "size_bytes": 0, "architecture": "vit"}
        profile = profile_model(model, SPEC, batch_size=batch_size, trace_path=trace, **known)
        trace_bytes = trace.stat().st_size
    return {
        "batch_size": batch_size,
        "seconds": time.perf_counter() - started,
        "latency_ms": headline.latency.median_ms,
        "num_layers": len(profile.layers),
        "num_operators": len(profile.operators),
        "trace_bytes": trace_bytes,
        "profile_bytes": len(profile.model_dump_json()),
    }


def main() -> int:
    """Print the table and its checks; batch 1 alone with --quick."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="batch 1 alone")
    arguments = parser.parse_args()
    pin_threads()
    rows = [measure(batch_size) for batch_size in ((1,) if arguments.quick else (1, 32))]
    for row in rows:
        print("  ".join(f"{name} {value:.6g}" for name, value in row.items()))
    checks = [Check.at_most(f"seconds, batch {row['batch_size']}", row["seconds"], MAX_SECONDS) for row in rows]
    return finish(checks, rows, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
