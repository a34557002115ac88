"""Input and images: the shape that a model takes, where it comes from, and the images it is measured on."""

from typing import Literal

from pydantic import Field

from profiling_agent.records.record import ArtifactRef, Record

# Images are prepared and evaluated so many at a time: a run that is cut off loses no more, and who looks at some of a
# split first and at the others later sees none of them twice.
SHARD = 512


class InputSpec(Record):
    """The shape of one image as the model takes it, and who said so."""

    channels: int = Field(gt=0, le=64)
    height: int = Field(gt=0, le=8192)
    width: int = Field(gt=0, le=8192)
    dtype: Literal["float32"] = "float32"
    source: str

    def batch(self, size: int) -> tuple[int, int, int, int]:
        """Return the shape of a batch of `size` images."""
        return (size, self.channels, self.height, self.width)


class ShapeFacts(Record):
    """What is known of a model's input shape before one is chosen; certain where all that state one agree."""

    settings: tuple[str, ...]
    findings: tuple[str, ...]
    is_certain: bool


# How all labels of a data set are matched: by names, or by one of the orders that both sides may have.
MatchKind = Literal["name", "number", "from-1", "place", "natural"]
MatchBy = Literal["auto", MatchKind]
MatchRule = Literal[MatchKind, "id", "normalised name", "wnid", "substring", "unmapped"]


class LabelMatch(Record):
    """How one label of the data set became a class of the model; `model_id` is None where it did not."""

    dataset_label: str
    model_id: int | None
    model_label: str | None
    rule: MatchRule


class SplitInfo(Record):
    """A fixed set of images on disk, drawn once with the run's seed."""

    name: Literal["calibration", "search", "heldout", "recovery"]
    source_split: str
    num_images: int
    num_skipped: int = Field(default=0, description="images that could not be decoded")
    file: ArtifactRef

    def shards(self, images: range | None = None) -> range:
        """Return the numbers of the shards that hold these images, by default all; there may be fewer images than asked for.

        Raises:
            ValueError: the images aren't whole shards.
        """
        asked = range(self.num_images) if images is None else images
        end = min(asked.stop, self.num_images)
        if asked.step != 1 or asked.start % SHARD or (end % SHARD and end != self.num_images):
            raise ValueError(f"{asked!r} of {self.num_images} images aren't whole shards of {SHARD}")
        return range(asked.start // SHARD, -(-end // SHARD))

    def rows(self, shard: int) -> range:
        """Return which images a shard holds: 512, the last one what is left; ValueError where there is no such shard."""
        if shard not in self.shards():
            raise ValueError(f"there is no shard {shard} of {self.num_images} images in shards of {SHARD}")
        return range(shard * SHARD, min((shard + 1) * SHARD, self.num_images))


class ModelSource(Record):
    """Where the model comes from; `revision` is the commit that was read, where there is one."""

    name: str
    revision: str | None = None
    architecture: str
    device: Literal["cpu", "cuda"]


class Acquired(Record):
    """What acquisition found: the model, disjoint sets of images, and how their labels became its classes."""

    source: ModelSource
    calibration: SplitInfo
    search: SplitInfo
    heldout: SplitInfo
    recovery: SplitInfo | None = Field(default=None, description="train images, where pruned models are trained again")
    labels: tuple[LabelMatch, ...]
    notes: tuple[str, ...] = ()
    doubt: str | None = Field(default=None, description="why the baseline's answers prove nothing about accuracy")
