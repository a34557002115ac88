"""Subjects: the models and the data that a table is made on, and what of the paper's can't be had; looked at before anything is run."""

import itertools
import re
from collections.abc import Mapping, Sequence

from profiling_agent.acquisition.hub import fetch_model, files_root, is_local, local_folder
from profiling_agent.documents import read_json
from profiling_agent.errors import AcquisitionError, ProfilingAgentError, RequestError
from profiling_agent.jobs.match import check_match
from profiling_agent.jobs.runner import scratch_jobs
from profiling_agent.progress import Progress, silent
from profiling_agent.records import Record
from profiling_agent.reproduce.paper import (
    EMBEDDED,
    EMBEDDED_DATA,
    FAMILIES,
    HUB,
    IMAGES,
    MADE_ON,
    PAPERS_DATA,
    DataSet,
    Family,
    Images,
    TableName,
    family_of,
)
from profiling_agent.reproduce.study import Subject

PREFIX = "reference:"
MAX_CONFIG = 2**20
# A name of data that stands for CIFAR-100 without being told so.
HUNDRED = re.compile(r"cifar[-_ ]?100", re.IGNORECASE)


class Chosen(Record):
    """What a table is made on; `missing` has a line for each of the paper's, or of the user's, that can't be had."""

    subjects: tuple[Subject, ...]
    missing: tuple[str, ...] = ()


def datasets_of(names: Sequence[str], fields: Mapping[str, Sequence[str]], table: TableName) -> tuple[DataSet, ...]:
    """Return the data sets that are named, or the paper's own of a table.

    A name may say which of the paper's it stands for, as in CIFAR-100=./mine. `fields` are those of a `DataSet`, such as dataset_config; of each
    there is one value for all data sets, or one for each, and an empty one is none.

    Raises:
        RequestError: there are fewer or more of them, or a data set isn't named.
    """
    papers = [PAPERS_DATA[images] for images in MADE_ON[table]]
    found = [_named_data(name, table) for name in names] if names else papers
    for field, values in fields.items():
        if not values:
            continue
        if len(values) not in (1, len(found)):
            raise RequestError(
                f"{field} is given {len(values)} times for {len(found)} data sets: give it once, or once for each"
            )
        every = values if len(values) > 1 else [*values] * len(found)
        found = [one.model_copy(update={field: value or None}) for one, value in zip(found, every, strict=True)]
    return tuple(found)


def _named_data(name: str, table: TableName) -> DataSet:
    stands_for, _, rest = name.partition("=")
    known: Images | None = next((images for images in IMAGES if images.lower() == stands_for.lower()), None)
    dataset = rest if known else name
    if not dataset:
        raise RequestError(f"data names {name!r}: give a Hub id or a folder, or NAME=FOLDER with {', '.join(IMAGES)}")
    for images, papers in PAPERS_DATA.items():
        if dataset == papers.dataset:
            return papers.model_copy(update={"stands_for": known or images})
    if known is None:
        own = MADE_ON[table]
        known = "CIFAR-100" if "CIFAR-100" in own and HUNDRED.search(dataset) else own[0]
    return DataSet(stands_for=known, dataset=dataset)


def choose(models: Sequence[str], data: Sequence[DataSet], *, named_data: bool, progress: Progress = silent) -> Chosen:
    """Return each model with each data set that goes with it; where no models are named, the paper's.

    Without a network the embedded models and their digits stand in, unless data was named.

    Raises:
        RequestError: a model that was named is none of the paper's, or can't be had; or nothing is left.
    """
    if models:
        return _fitting([_named(model) for model in models], data, (), progress)
    found, missing = _papers(data)
    if found:
        return _fitting(found, data, missing, progress)
    if named_data:
        raise AcquisitionError(f"{missing[0]}; name models of yours with --models")
    digits = DataSet(stands_for=data[0].stands_for, dataset=EMBEDDED_DATA)
    stand_ins = (Subject(model=EMBEDDED[family], family=family, data=digits) for family in FAMILIES)
    return Chosen(subjects=tuple(stand_ins), missing=tuple(missing))


def _papers(data: Sequence[DataSet]) -> tuple[list[tuple[str, Family]], list[str]]:
    """Return the paper's models, as far as they are published and can be had, and a line for each that can't."""
    found: list[tuple[str, Family]] = []
    missing: list[str] = []
    is_tuned = all(one.stands_for.startswith("CIFAR") for one in data)
    for family in FAMILIES:
        if is_tuned:
            named = " and ".join(one.stands_for for one in data)
            missing.append(f"{family}: the paper fine-tuned its own on {named}, and published none")
            continue
        try:
            architecture_of(HUB[family])
            found.append((HUB[family], family))
        except ProfilingAgentError as error:
            missing.append(f"{family} ({HUB[family]}): {error}")
    return found, missing


def _fitting(
    models: Sequence[tuple[str, Family]], data: Sequence[DataSet], missing: Sequence[str], progress: Progress
) -> Chosen:
    """Return the pairs whose labels are classes of the model, each looked at; RequestError where there is none."""
    found: list[Subject] = []
    reasons: list[str] = []
    with scratch_jobs(progress) as jobs:
        for (model, family), one in itertools.product(models, data):
            try:
                check_match(jobs, {"model": model, **one.asked})
            except ProfilingAgentError as error:
                reasons.append(f"{family} ({model}) on {one.title}: {error}")
            else:
                found.append(Subject(model=model, family=family, data=one))
    if not found:
        more = f" (and {len(reasons) - 1} more that can't be made)" if len(reasons) > 1 else ""
        raise AcquisitionError(f"{reasons[0]}{more}")
    return Chosen(subjects=tuple(found), missing=(*missing, *reasons))


def architecture_of(model: str) -> str:
    """Return what a model's configuration says that it is; AcquisitionError where it can't be had."""
    if model.startswith(PREFIX):
        return model
    folder = local_folder(model, "model") if is_local(model) else fetch_model(model, None)
    try:
        config = read_json(folder / "config.json", under=files_root(folder), max_bytes=MAX_CONFIG)
        return str(config["architectures"][0])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise AcquisitionError(
            f"model {model!r} has no config.json that names its architecture: give a Hugging Face model"
        ) from error


def _named(name: str) -> tuple[str, Family]:
    """Return a model and which of the paper's it stands for: as it says, as in ResNet-101=./mine, or as its architecture does."""
    said, _, rest = name.partition("=")
    known: Family | None = next((family for family in FAMILIES if family.lower() == said.lower()), None)
    model = rest if known else name
    architecture = architecture_of(model)
    family = known or family_of(model, architecture)
    if family is None:
        raise RequestError(
            f"model {model!r} is a {architecture}, and the paper has {', '.join(FAMILIES)}: name one of those, or say which "
            f"of them it is to stand beside, as in {FAMILIES[-1]}={model}"
        )
    return model, family
