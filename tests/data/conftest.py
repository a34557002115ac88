"""Small data sets on disk in the shapes that data sets come in."""

import datasets
import pytest
from data.image_sets import png

from profiling_agent.data.dataset import DataQuery
from profiling_agent.data.splits import draw_splits
from profiling_agent.errors import AcquisitionError


@pytest.fixture
def parquet(tmp_path):
    """Return a function that writes splits as a local parquet data set and returns its folder."""

    def write(name="set", config="data", **splits):
        (tmp_path / name / config).mkdir(parents=True)
        for split, rows in splits.items():
            rows.to_parquet(tmp_path / name / config / f"{split}-00000-of-00001.parquet")
        return tmp_path / name

    return write


@pytest.fixture
def photographs(tmp_path):
    """Return a function that writes files, by their paths, into a folder and returns it."""

    def write(pictures):
        for path, held in pictures.items():
            place = tmp_path / "photographs" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(held)
        return tmp_path / "photographs"

    return write


@pytest.fixture
def cats_and_dogs():
    """Return 80 pictures of a train split and 80 of a test split, by their paths, in folders of their classes."""
    return {
        f"{split}/{name}/{row}.png": png(1000 * first + 100 * index + row)
        for first, split in enumerate(("train", "test"))
        for index, name in enumerate(("cat", "dog"))
        for row in range(40)
    }


@pytest.fixture
def draw(tmp_path_factory):
    """Return a function that draws from a folder into an empty one, for a model with these class names."""

    def call(folder, names=("cat", "dog"), **query):
        out = tmp_path_factory.mktemp("drawn")
        return draw_splits(DataQuery(dataset=str(folder), **query), id2label=dict(enumerate(names)), folder=out)

    return call


@pytest.fixture
def refusal(draw):
    """Return a function that tries to draw, and returns the one line in which that is refused."""

    def call(folder, names=("cat", "dog"), **query):
        with pytest.raises(AcquisitionError) as refused:
            draw(folder, names, **query)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    return call


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
