"""Cost of a profile: forward passes and seconds for a full-size ViT-B/16 with random weights."""

import tempfile
import time
from pathlib import Path
from typing import Any

from checks import Check, finish, parser_of
from transformers import ViTConfig, ViTForImageClassification

from profiling_agent.lib.modules import pin_threads
from profiling_agent.measure.worker import measure_headline
from profiling_agent.profiling.profile import profile_model
from profiling_agent.runtimes.torch_session import TorchSession
from profiling_agent.schemas import InputSpec

MAX_FORWARD_PASSES = 60
MAX_SECONDS = 90.0
OF_IMAGENET: dict[str, Any] = {"num_labels": 1000}
SPEC = InputSpec(channels=3, height=224, width=224, source="ViT-B/16")


def measure(batch_size: int) -> dict[str, Any]:
    """Profile the model, headline included, and return the table's row."""
    model = ViTForImageClassification(ViTConfig(**OF_IMAGENET)).eval()
    started = time.perf_counter()
    headline = measure_headline(TorchSession(model, device="cpu"), SPEC, batch_size=batch_size)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        profile = profile_model(
            model,
            SPEC,
            batch_size=batch_size,
            headline=headline,
            size_bytes=0,
            architecture="vit",
            trace_path=trace,
        )
        trace_bytes = trace.stat().st_size
    return {
        "batch_size": batch_size,
        "forward_passes": profile.forward_passes,
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
    checks = [
        check
        for row in rows
        for check in (
            Check.at_most(f"forward passes, batch {row['batch_size']}", row["forward_passes"], MAX_FORWARD_PASSES),
            Check.at_most(f"seconds, batch {row['batch_size']}", row["seconds"], MAX_SECONDS),
        )
    ]
    return finish(checks, rows, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
