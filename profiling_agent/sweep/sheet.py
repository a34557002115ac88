"""Sweep file: models, data sets, contracts and seeds, of which every combination is a run."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from profiling_agent.documents import DocumentError, clean, first_problem, parse_record
from profiling_agent.errors import RequestError
from profiling_agent.files import read_bytes
from profiling_agent.records import Record
from profiling_agent.request import Request
from profiling_agent.workspace import PLACES, name_run, slug

MAX_FILE, MAX_CELLS, MAX_LIST = 2**20, 10_000, 1_000
# What an entry of each list may say, in the names of a request.
MODEL = ("model", "revision")
DATASET = ("dataset", "dataset_config", "dataset_revision", "split", "image_column", "label_column")
CONTRACT = ("max_accuracy_drop", "min_speedup", "max_size_ratio", "max_memory_ratio", "objective")
# What a sweep says itself of each run, and what needs somebody at the terminal.
OWN = ("run_id", "output", "seed", "approve", "engine", "ray_address", "ray_store")
MAX_SLUG = 24


class SweepFile(Record):
    """What a sweep file says; a model or a data set may be a name alone. `request` holds for all runs."""

    models: tuple[str | dict[str, Any], ...] = Field(min_length=1, max_length=MAX_LIST)
    datasets: tuple[str | dict[str, Any], ...] = Field(min_length=1, max_length=MAX_LIST)
    contracts: tuple[dict[str, Any], ...] = Field(default=({},), min_length=1, max_length=MAX_LIST)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1, max_length=MAX_LIST)
    request: dict[str, Any] = Field(default_factory=dict)


class _Plain(yaml.SafeLoader):
    """YAML of mappings, lists and JSON's scalars (YAML 1.2's core): a key stands once, nothing is tagged, and nothing stands for something else, which could grow without end."""

    # Its parent's say what a scalar is by YAML 1.1; none of them is taken over.
    yaml_implicit_resolvers = {}  # noqa: RUF012 - the library's own

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.events.AliasEvent):
            raise ComposerError(None, None, "aliases aren't read: write it out", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise ComposerError(None, None, f"the tag {event.tag!r} isn't read", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - the library's signature
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ConstructorError(None, None, f"{key.value!r} stands there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


for tag, pattern, first in (
    ("null", r"(?:~|null)?", [*"~n", ""]),
    ("bool", r"true|false", [*"tf"]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", [*"-+0123456789"]),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
):
    _Plain.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"), first)


def read_sweep(path: Path, output: str) -> tuple[Request, ...]:
    """Return the runs that a sweep file asks for, each with its name, in the file's order; their folders are to lie in `output`.

    Raises:
        RequestError: the file can't be read, says something that isn't known or can't be, or asks for one run twice.
    """
    try:
        text = read_bytes(path, max_bytes=MAX_FILE)
    except OSError as error:
        raise RequestError(f"sweep file {str(path)!r} can't be read ({error.strerror}): name a YAML file") from error
    try:
        sheet = parse_record(SweepFile, json.dumps(_parsed(text)), strict=True, quotes=True)
    except (DocumentError, ValueError, TypeError) as error:
        raise RequestError(f"sweep file {str(path)!r} can't be used ({clean(str(error))})") from error
    return cells(sheet, output)


def _parsed(text: bytes) -> Any:
    try:
        return yaml.load(text, _Plain)
    except yaml.MarkedYAMLError as error:
        where = (
            f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: "
            if error.problem_mark
            else ""
        )
        raise DocumentError(f"it is no YAML that is read here: {where}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise DocumentError(f"it is no YAML that is read here: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise DocumentError("it is nested too deep") from None


def cells(sheet: SweepFile, output: str) -> tuple[Request, ...]:
    """Return the runs of a sweep, models outermost; RequestError as `read_sweep`."""
    lists = (
        ("models", [_named(entry, "model") for entry in sheet.models], MODEL),
        ("datasets", [_named(entry, "dataset") for entry in sheet.datasets], DATASET),
        ("contracts", list(sheet.contracts), CONTRACT),
    )
    for name, entries, known in lists:
        for number, entry in enumerate(entries, start=1):
            _check_names(f"entry {number} of {name}", entry, known)
    taken = (*MODEL, *DATASET, *CONTRACT, *OWN)
    _check_names("request", sheet.request, [name for name in Request.model_fields if name not in taken])
    number = len(sheet.models) * len(sheet.datasets) * len(sheet.contracts) * len(sheet.seeds)
    if number > MAX_CELLS:
        raise RequestError(f"the sweep has {number:,} runs, {MAX_CELLS:,} are made: leave some out")
    found: dict[str, Request] = {}
    models, datasets, contracts = (entries for _, entries, _ in lists)
    for model, data, (place, contract), seed in itertools.product(
        models, datasets, enumerate(contracts, start=1), sheet.seeds
    ):
        asked = {**sheet.request, **model, **data, **contract, "seed": seed, "output": output}
        told = f"{model['model']} on {data['dataset']}, contract {place}, seed {seed}"
        try:
            request = Request.model_validate(asked)
        except ValidationError as error:
            raise RequestError(f"the run of {clean(told)} can't be asked for: {first_problem(error)}") from error
        run_id = name_of(request)
        if run_id in found:
            raise RequestError(f"the run of {clean(told)} is asked for twice: leave one out")
        found[run_id] = request.model_copy(update={"run_id": run_id})
    return tuple(found.values())


def _named(entry: str | Mapping[str, Any], field: str) -> dict[str, Any]:
    return {field: entry} if isinstance(entry, str) else dict(entry)


def _check_names(where: str, entry: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise RequestError where an entry names what isn't its own, or lacks what it is of."""
    if unknown := [name for name in entry if name not in known]:
        raise RequestError(f"{where} names {clean(unknown[0])[:80]!r}: use some of {', '.join(known)}")
    if known in (MODEL, DATASET) and known[0] not in entry:
        raise RequestError(f"{where} names no {known[0]}: give a Hub id or a folder")


def name_of(request: Request) -> str:
    """Return the name of a run, the same for the same request on the same machine: times of two are never mixed."""
    told = request.model_dump(mode="json", exclude={"run_id", *PLACES})
    return name_run([_last_of(request.model), _last_of(request.dataset), f"s{request.seed}"], told, digits=10)


def _last_of(name: str) -> str:
    """Return the end of a path or a Hub id as a part of a folder's name."""
    return slug(slug(name.rstrip("/").rpartition("/")[2])[:MAX_SLUG]) or "x"
