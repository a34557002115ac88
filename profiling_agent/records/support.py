"""Support: what can be cut of a model, and in what forms it was made, opened and compared."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from profiling_agent.records.data import InputSpec
from profiling_agent.records.deployment import Deployment
from profiling_agent.records.record import Record

Form = Literal["whole", "pruned"]


class Prunable(Record):
    """What can be cut of a model: units by kind, the layers in none by the code of the reason, and an example of each."""

    architecture: str
    input: InputSpec
    params: int
    units: Mapping[str, int]
    refused: Mapping[str, int]
    absent: Mapping[str, str] = Field(description="kinds that it has layers and no unit of, each with the reason")
    examples: Mapping[str, str] = Field(description='by the code: "layer: reason"')
    cut_share: float = Field(description="of the params, that a quarter off every unit takes")


class Deployability(Record):
    """One deployment of one form of a model: made, opened in a process of its own and compared, or refused."""

    form: Form
    deployment: Deployment
    num_layers: int = Field(default=0, description="layers that aren't float32 any more")
    size_ratio: float = Field(default=0.0, description="of the float32 folder's bytes")
    distance: float = Field(default=0.0, description="||logits - float32 logits|| / ||float32 logits|| on noise")
    refused: str = Field(default="", description='"code: layer and cause"; empty where it works')
