"""What to draw images from. No torch here: jobs pass it between processes."""

from pydantic import Field

from profiling_agent.records import Record


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
    seed: int = Field(default=0, ge=0, lt=2**32)
