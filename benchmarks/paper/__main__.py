"""The paper's tables on its models and data or on yours: `python -m benchmarks.paper table1 ... table5 figure5 | all`.

    python -m benchmarks.paper table1 --models microsoft/resnet-101 --data frgfm/imagenette --config 320px
    python -m benchmarks.paper table2 --models ./my-vit --data CIFAR-10=./my-data --split test

Each table is printed, and written as JSON and Markdown into OUTPUT/tables. A model stands for the paper's model of its
architecture, and a data set for the table's, unless named as in ResNet-101=FOLDER or CIFAR-100=FOLDER.
`python -m benchmarks.paper page` writes the tables in benchmarks/results/paper into docs/paper.md.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from benchmarks.paper.numbers import (
    DATA,
    FAMILIES,
    HUB,
    TABLES,
    DataSet,
    Family,
    Images,
    Study,
    TableName,
    family_of,
)
from benchmarks.paper.tables import KINDS, Runs, Subject, make_table, markdown
from profiling_agent.cli.terminal import Display, errors
from profiling_agent.data import is_local
from profiling_agent.data.models import fetch_model, local_folder
from profiling_agent.errors import AcquisitionError, ProfilingAgentError, RequestError
from profiling_agent.jobs.runner import scratch_jobs
from profiling_agent.jobs.tasks import MatchLabelsTask
from profiling_agent.lib.logs import keep_stdout
from profiling_agent.request import Request

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "paper.md", ROOT / "benchmarks" / "results" / "paper"
# Options that are fields of every request.
OPTIONS = ("num_samples", "batch_size", "device", "time_budget", "num_sessions")
# Options of data, and the fields of a request that they are.
FIELDS = {
    "config": "dataset_config",
    "revision": "dataset_revision",
    "split": "split",
    "image_column": "image_column",
    "label_column": "label_column",
}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    usage = "python -m benchmarks.paper TABLE ... [options]"
    found = argparse.ArgumentParser("benchmarks.paper", usage=usage, description=(__doc__ or "").partition(":")[0])
    add, per_data = found.add_argument, "once for all data sets, or once for each"
    add("tables", nargs="+", choices=(*TABLES, "all", "page"), help=f"tables to make; page writes {PAGE.name} anew")
    add(
        "--models",
        action="append",
        default=[],
        help="FOLDER or ResNet-101=FOLDER; by default the paper's, from the Hub",
    )
    add("--data", action="append", default=[], help="FOLDER or CIFAR-100=FOLDER; by default the paper's of each table")
    for name in FIELDS:
        add(f"--{name.replace('_', '-')}", action="append", default=[], help=f"of the data; {per_data}")
    add("--num-samples", type=int, help="images to search on")
    add("--batch-size", type=int, default=1, help="images in a batch; the paper times one")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--llm", action="append", default=[], help="language model that plans; table5 compares as many as are named")
    add("--base-url", help="address of its server")
    add("--time-budget", help="time that each run may take, such as 30m")
    add("--num-sessions", type=int, default=5, help="sessions that times are taken in")
    add("--output", default="runs/paper", help="folder of the runs; complete runs in it are used again")
    add("--json", action="store_true", help="print JSON instead of Markdown")
    return found


def data_sets(names: Sequence[str], fields: Mapping[str, Sequence[str]], table: TableName) -> tuple[DataSet, ...]:
    """Return the named data sets, or the paper's own of a table; `fields` has one value for all of them or one for each.

    Raises:
        RequestError: there are more or fewer values, or a name is empty.
    """
    found = [_named_data(name, table) for name in names] or [DATA[images] for images in TABLES[table][1]]
    for field, values in fields.items():
        if not values:
            continue
        if len(values) not in (1, len(found)):
            raise RequestError(
                f"{field} is given {len(values)} times for {len(found)} data sets: give it once, or once for each"
            )
        each = [*values] * len(found) if len(values) == 1 else values
        # An empty value is none.
        found = [one.model_copy(update={field: value or None}) for one, value in zip(found, each, strict=True)]
    return tuple(found)


def _named_data(name: str, table: TableName) -> DataSet:
    prefix, _, rest = name.partition("=")
    known: Images | None = next((images for images in DATA if images.lower() == prefix.lower()), None)
    dataset = rest if known else name
    if not dataset:
        raise RequestError(f"data names {name!r}: give a Hub id or a folder, or NAME=FOLDER with {', '.join(DATA)}")
    for images, printed in DATA.items():
        if dataset == printed.dataset:
            return printed.model_copy(update={"stands_for": known or images})
    own = TABLES[table][1]
    is_hundred = "CIFAR-100" in own and re.search(r"cifar[-_ ]?100", dataset, re.IGNORECASE)
    return DataSet(stands_for=known or ("CIFAR-100" if is_hundred else own[0]), dataset=dataset)


def choose(models: Sequence[str], data: Sequence[DataSet]) -> tuple[list[Subject], list[str]]:
    """Return each model with each data set whose labels are its classes, and a line for each that can't be had.

    Raises:
        RequestError: a named model is none of the paper's architectures.
        AcquisitionError: no model can be had, or no pair is left.
    """
    named = [_named_model(model) for model in models]
    missing: list[str] = []
    if not named and all(one.stands_for.startswith("CIFAR") for one in data):
        tuned = " and ".join(one.stands_for for one in data)
        missing = [f"{family}: the paper fine-tuned its own on {tuned}, and published none" for family in FAMILIES]
    elif not named:
        for family in FAMILIES:
            try:
                architecture_of(HUB[family])
                named.append((HUB[family], family))
            except ProfilingAgentError as error:
                missing.append(f"{family} ({HUB[family]}): {error}")
    if not named:
        raise AcquisitionError(f"{missing[0]}; name models of yours with --models")
    found: list[Subject] = []
    refused: list[str] = []
    with scratch_jobs() as jobs:
        for (model, family), one in itertools.product(named, data):
            try:
                fields = {"model": model, **one.model_dump(exclude={"stands_for"})}
                labels = jobs.run(MatchLabelsTask.model_validate(fields)).labels
                if unknown := [label.dataset_label for label in labels if label.model_id is None]:
                    raise AcquisitionError(f"{len(unknown)} labels are no class of the model: {unknown[:5]}")
                found.append(Subject(model=model, family=family, data=one))
            except ProfilingAgentError as error:
                refused.append(f"{family} ({model}) on {one.title}: {error}")
    if not found:
        raise AcquisitionError(refused[0])
    return found, [*missing, *refused]


def architecture_of(model: str) -> str:
    """Return the architecture in a model's configuration; AcquisitionError if there is none."""
    if model.startswith("reference:"):
        return model
    folder = local_folder(model, "model") if is_local(model) else fetch_model(model, None)
    try:
        return str(json.loads((folder / "config.json").read_text())["architectures"][0])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise AcquisitionError(
            f"model {model!r} has no config.json that names its architecture: give a Hugging Face model"
        ) from error


def _named_model(name: str) -> tuple[str, Family]:
    prefix, _, rest = name.partition("=")
    known: Family | None = next((family for family in FAMILIES if family.lower() == prefix.lower()), None)
    model = rest if known else name
    architecture = architecture_of(model)
    family = known or family_of(model, architecture)
    if family is None:
        raise RequestError(
            f"model {model!r} is a {architecture}, and the paper has {', '.join(FAMILIES)}: name one of those, or the one "
            f"that it stands for, as in {FAMILIES[-1]}={model}"
        )
    return model, family


def make_tables(given: argparse.Namespace) -> list[Study]:
    """Make the tables of a command line; models, data and options are all checked before the first run."""
    names: tuple[TableName, ...] = tuple(TABLES) if "all" in given.tables else tuple(dict.fromkeys(given.tables))
    if len(given.llm) > 1 and "table5" not in names:
        raise RequestError("table5 compares language models: name one with --llm for the others")
    options = {name: getattr(given, name) for name in OPTIONS}
    output = Request(output=given.output).output_dir
    with Display(errors) as display:
        runs = Runs(output, options, given.llm, given.base_url, display.show)
        for llm, kind in itertools.product((None, *given.llm), KINDS):
            runs.request(Subject(model="checked", family=FAMILIES[0], data=DATA["Imagenette"]), kind, llm)
        fields = {field: getattr(given, name) for name, field in FIELDS.items()}
        data = {name: data_sets(given.data, fields, name) for name in names}
        chosen = {own: choose(given.models, own) for own in set(data.values())}
        folder = output / "tables"
        folder.mkdir(parents=True, exist_ok=True)
        studies: list[Study] = []
        for name in names:
            studies.append(make_table(name, runs, *chosen[data[name]]))
            (folder / f"{name}.json").write_text(f"{studies[-1].model_dump_json(indent=1)}\n", encoding="utf-8")
            (folder / f"{name}.md").write_text(markdown(studies[-1]), encoding="utf-8")
    return studies


def read(folder: Path) -> dict[TableName, Study]:
    """Return the tables in a folder, by name."""
    paths: dict[TableName, Path] = {name: folder / f"{name}.json" for name in TABLES}
    return {name: Study.model_validate_json(path.read_bytes()) for name, path in paths.items() if path.exists()}


def filled(page: str, studies: Mapping[TableName, Study]) -> str:
    """Return a page with each table between its marks."""
    for name in TABLES:
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise RequestError(f"the page has no place for {name}: {begin.strip()} and {end}")
        text = markdown(studies[name]) if name in studies else "Not made yet.\n"
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Make tables and print them; 0 if each has a row, 1 if not, 2 for a bad request."""
    given = parser().parse_args(arguments)
    if given.tables == ["page"]:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), read(RESULTS)), encoding="utf-8")
        return 0
    if given.json:
        keep_stdout()
    try:
        studies = make_tables(given)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ProfilingAgentError, OSError) as error:
        message = str(error)
    else:
        if given.json:
            print(json.dumps([study.model_dump(mode="json") for study in studies], indent=1))
        else:
            print("\n".join(f"{study.name}: {study.title}\n\n{markdown(study)}" for study in studies))
        return 0 if all(study.rows for study in studies) else 1
    print(f"benchmarks.paper: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
