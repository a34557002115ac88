"""Saved models and a report of this version, kept as small fixtures that later versions have to read.

    python tests/fixture_models.py

writes `tests/fixtures/saved/VERSION-sN` and `tests/fixtures/reports/VERSION-sN.json`, N being the schema version of each, beside
what earlier versions wrote; the report is of a run, which takes minutes. What is there is never written again: it is what users of
that version have on their disks.
"""

import sys
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
import zoo
from deployments import all_deployments, deployment, pruned, saved_source
from world import write_data

from profiling_agent import Request, optimize
from profiling_agent.lib.io import make_folders, write_text
from profiling_agent.runtimes.artifact import SCHEMA_VERSION
from profiling_agent.runtimes.registry import Source
from profiling_agent.runtimes.torch_artifact import save_deployed, save_model
from profiling_agent.workspace import REPORT_VERSION

SAVED, REPORTS = (Path(__file__).with_name("fixtures") / name for name in ("saved", "reports"))
VERSION = metadata.version("profiling-agent")
MODELS_OF_THIS_VERSION, REPORT_OF_THIS_VERSION = (
    SAVED / f"{VERSION}-s{SCHEMA_VERSION}",
    REPORTS / f"{VERSION}-s{REPORT_VERSION}.json",
)
# Attention and an MLP, and convolutions with batch norms, both cut; as small as all that goes.
MODELS = {
    "vit": lambda: zoo.vit(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64),
    "resnet": lambda: zoo.resnet("basic", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
}
# What inductor runs is compiled when it is opened, for minutes: none of it is kept.
KEPT = {
    "vit": tuple(each.name for each in all_deployments() if each.runtime != "inductor"),
    "resnet": ("eager static", "onnxruntime static", "openvino static"),
}
# The folder of each, with its family and deployment.
FOLDERS = {"-".join((family, *name.split())): (family, name) for family, names in KEPT.items() for name in names}


def kept_source(family: str, folder: Path) -> Source:
    """Return a tiny model, half of every unit of it cut."""
    whole = MODELS[family]()
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                # So narrow a model hardly looks at its image unless its weights are large.
                parameter.mul_(4)
    model, cuts = pruned(whole, 0.5)
    folder.mkdir()
    save_model(
        model, folder / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model=f"kept-{family}", cuts=cuts
    )
    return saved_source(folder, batch_size=2)


def write_kept_report(folder: Path) -> None:
    """Run the tiny model to its verdict, and write what `report.json` holds then, without the spaces."""
    request = Request(
        model=str(zoo.save(MODELS["vit"](), folder / "model")),
        dataset=str(write_data(folder / "data")),
        output=str(folder / "runs"),
        run_id="kept",
        runtimes="eager",
        batch_size=4,
        num_samples=60,
        num_sessions=2,
        max_iterations=1,
    )
    make_folders(REPORTS)
    write_text(REPORT_OF_THIS_VERSION, optimize(request).model_dump_json() + "\n")


def main() -> int:
    """Write what isn't kept of this version yet; return 1 where all of it is."""
    missing = {name: told for name, told in FOLDERS.items() if not (MODELS_OF_THIS_VERSION / name).exists()}
    if not missing and REPORT_OF_THIS_VERSION.exists():
        sys.stderr.write(f"all of {VERSION} is there, and what a version wrote is never replaced: raise it first\n")
        return 1
    make_folders(MODELS_OF_THIS_VERSION)
    with tempfile.TemporaryDirectory() as scratch:
        source = cache(lambda family: kept_source(family, Path(scratch) / family))
        for name, (family, form) in missing.items():
            save_deployed(source(family), deployment(form), MODELS_OF_THIS_VERSION / name, num_threads=1)
        if not REPORT_OF_THIS_VERSION.exists():
            write_kept_report(Path(scratch))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
