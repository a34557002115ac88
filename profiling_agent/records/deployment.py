"""Deployment: the runtime that executes a model, and what its layers become there."""

from typing import Literal

from pydantic import Field

from profiling_agent.records.plan import QuantizationRecommendation
from profiling_agent.records.record import ArtifactRef, Record

RuntimeName = Literal["eager", "graphed", "inductor", "onnxruntime", "openvino"]
RUNTIMES: tuple[RuntimeName, ...] = ("eager", "graphed", "inductor", "onnxruntime", "openvino")
# `static_nncf` is static int8 by NNCF, which quantizes attention products and residual adds as well.
# `tf32` and `float8` are CUDA's; `dynamic` there has a scale per row.
Scheme = Literal["float32", "tf32", "bfloat16", "float16", "dynamic", "float8", "static", "static_nncf"]


class Deployment(Record):
    """One way to deploy a float32 model; of several recommendations the last one that hits a layer counts."""

    runtime: RuntimeName = "eager"
    scheme: Scheme = "float32"
    recommendations: tuple[QuantizationRecommendation, ...] = ()

    @property
    def name(self) -> str:
        """Return the deployment as a reader sees it."""
        return f"{self.runtime} {self.scheme}"


class DeployedModel(Record):
    """A model in a deployment, ready to be loaded; distances are to its float32 parent."""

    model: ArtifactRef
    deployment: Deployment
    layers: tuple[str, ...] = Field(description="the layers that aren't float32 any more")
    distance: float = Field(description="||logits - float32 logits|| / ||float32 logits|| on calibration images")
    kl: float = Field(description="KL divergence to the float32 parent on calibration images, nats")
    seconds: float = Field(description="what the conversion took")


class LayerCost(Record):
    """What quantizing one layer alone costs, and how much of the time and the params it stands for."""

    layer: str
    kl: float = Field(description="KL divergence to the float32 model with this layer alone quantized, nats")
    macs_share: float
    params_share: float = 0.0
    latency_share: float | None = Field(default=None, description="of the layers' time in the profiling pass")
    kept: bool = Field(
        default=False, description="left in float by the rules: it costs most for least time and fewest bytes"
    )


class FoldedSite(Record):
    """A LayerNorm whose scales were evened out into the linear layers that read it; KL with these alone quantized."""

    norm: str
    readers: tuple[str, ...]
    alpha: float
    kl_before: float
    kl_after: float


class Tuned(Record):
    """A float32 model made ready for int8: the same function, gentler activations; and what each layer costs.

    `model` is the given one where no site was folded.
    """

    model: ArtifactRef
    sites: tuple[FoldedSite, ...] = ()
    layers: tuple[LayerCost, ...] = ()
    kl: float = Field(description="all layers quantized, folded sites included, nats")
    kl_unfolded: float
    num_images: int
    seconds: float

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the layers that the rules leave in float."""
        return tuple(row.layer for row in self.layers if row.kept)
