"""Images of a finished run: how many each model was evaluated on, and how many times images were decoded.

    python benchmarks/images_evaluated.py RUN

Read from the tasks of the run's finished jobs. An image that a split holds is decoded once for each
image processor that it is prepared with, and answered once by a model, whatever asked for it.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profiling_agent.jobs.worker import TASK
from profiling_agent.lib.io import read_json
from profiling_agent.schemas import SplitInfo


def tasks(run: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of the run's finished jobs of one kind, such as `evaluate`, with the number of their shard's images."""
    for path in sorted((run / "jobs").glob(f"{kind}-*/{TASK}")):
        fields = read_json(path)
        is_shard = {"split", "shard"} <= fields.keys()
        num_images = len(SplitInfo.model_validate(fields["split"]).rows(fields["shard"])) if is_shard else 0
        yield fields | {"num_images": num_images}


def counts(run: Path) -> dict[str, Any]:
    """Return, by split, the images decoded and their number by model, and those of them that were looked at twice."""
    evaluated, whole, decoded, twice = Counter[tuple[str, str]](), dict[tuple[str, str], int](), Counter[str](), 0
    seen = set[tuple[str, str, int]]()
    for fields in tasks(run, "evaluate"):
        model, split, number = fields["model"]["path"], fields["split"]["name"], fields["num_images"]
        evaluated[model, split] += number
        whole[model, split] = fields["split"]["num_images"]
        twice += number if (model, split, fields["shard"]) in seen else 0
        seen.add((model, split, fields["shard"]))
    for fields in tasks(run, "prepare"):
        decoded[fields["split"]["name"]] += fields["num_images"]
    return {
        "images": sum(evaluated.values()),
        "images_of_whole_splits": sum(whole.values()),
        "evaluated": {f"{model} {split}": number for (model, split), number in evaluated.items()},
        "evaluated_twice": twice,
        "decoded": dict(decoded),
    }


def main() -> int:
    """Print the counts; return 1 where a model was evaluated on an image twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    found = counts(parser.parse_args().run)
    print(json.dumps(found, indent=1))
    return 1 if found["evaluated_twice"] else 0


if __name__ == "__main__":
    sys.exit(main())
