"""The base of every record, and the reference to a file of the run folder."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A value that is compared, stored and passed around, never changed.

    Validation is lax about containers (a list becomes a tuple) because checkpoints turn tuples into lists.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class ArtifactRef(Record):
    """A file or folder in the run folder; `sha256` is that of the file, or of a model folder's `recipe.json`; `size_bytes` of the file, or of what holds the model in the folder."""

    path: str
    sha256: str
    size_bytes: int
    kind: Literal["model", "profile", "trace", "predictions", "split", "onnx"]
