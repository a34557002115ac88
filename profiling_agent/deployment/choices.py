"""Recommendations of a scheme: what it makes of the layers. No torch here."""

from collections.abc import Mapping

from profiling_agent.records import EVERYTHING, Deployment, QuantizationRecommendation, Scheme

# What one recommendation for all layers makes of a model; float32 and tf32 need none.
RECOMMENDED: Mapping[Scheme, Mapping[str, str]] = {
    "bfloat16": {"quantization_type": "cast", "dtype": "bfloat16"},
    "float16": {"quantization_type": "dynamic", "dtype": "float16"},
    "dynamic": {"quantization_type": "dynamic", "dtype": "qint8"},
    "float8": {"quantization_type": "dynamic", "dtype": "float8"},
    "static": {"quantization_type": "static", "dtype": "qint8"},
    "static_nncf": {"quantization_type": "static", "dtype": "qint8"},
}


def recommend(scheme: Scheme, layers: str = EVERYTHING) -> tuple[QuantizationRecommendation, ...]:
    """Return what makes `scheme` of the layers that `layers` hits."""
    if scheme not in RECOMMENDED:
        return ()
    return (QuantizationRecommendation.model_validate({**RECOMMENDED[scheme], "layer": layers}),)


def recommended(deployment: Deployment) -> tuple[QuantizationRecommendation, ...]:
    """Return the deployment's recommendations; where there are none, its scheme for every layer."""
    return deployment.recommendations or recommend(deployment.scheme)
