"""Which layers a form means."""

from profiling_agent.records import Form, QuantizationRecommendation, Scheme

EVERY_LAYER: dict[Scheme, tuple[QuantizationRecommendation, ...]] = {
    "float32": (),
    "bfloat16": (QuantizationRecommendation(layer="all", quantization_type="cast", dtype="bfloat16"),),
    "float16": (QuantizationRecommendation(layer="all", quantization_type="dynamic", dtype="float16"),),
    "dynamic": (QuantizationRecommendation(layer="all", quantization_type="dynamic", dtype="qint8"),),
    "static": (QuantizationRecommendation(layer="all", quantization_type="static", dtype="qint8"),),
    "static_nncf": (QuantizationRecommendation(layer="all", quantization_type="static", dtype="qint8"),),
}


def recommended(form: Form) -> tuple[QuantizationRecommendation, ...]:
    """Return the form's recommendations; where there are none, its scheme for every layer."""
    return form.recommendations or EVERY_LAYER[form.scheme]
