"""What to draw images from. No torch here: jobs pass it between processes."""

from pydantic import Field

from profiling_agent.records import Record

# Recovery's settings were chosen with 1,000 images an epoch. Five times as many leave room for a thousand classes, and
# bound what a stream has to fetch, since those are downloaded one by one.
MAX_RECOVERY = 5000


class DataQuery(Record):
    """A labelled image data set, the split and columns to use where they were named, and how much to draw."""

    dataset: str = Field(min_length=1, description="Hub id, local folder, or reference:digits")
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = Field(default=None, description="split to evaluate on")
    image_column: str | None = None
    label_column: str | None = None
    num_samples: int | None = Field(
        default=None, ge=1, description="images to search on; by default half, at most 2000"
    )
    num_recovery: int = Field(
        default=0, ge=0, description="most images of the train split to recover with; 0 draws none"
    )
    seed: int = Field(default=0, ge=0, lt=2**32)
