"""Which deployments a model could be deployed in here: the runtimes that are installed, the schemes that were asked for."""

from collections.abc import Iterable, Mapping, Sequence

from profiling_agent.deployment import registry
from profiling_agent.deployment.choices import RECOMMENDED, recommend
from profiling_agent.errors import RequestError
from profiling_agent.records import EVERYTHING, Deployment, Plan, QuantizationRecommendation, RuntimeName, Scheme
from profiling_agent.request import Request

INT8: frozenset[Scheme] = frozenset({"dynamic", "static", "static_nncf"})
# The schemes of one runtime that a hand-written mixture of types can be; of others no runtime knows more than one type.
MIXTURES: Mapping[RuntimeName, Scheme] = {"eager": "dynamic", "inductor": "static"}


def schemes_of(recommendations: Iterable[QuantizationRecommendation]) -> frozenset[Scheme]:
    """Return the schemes that hand-written recommendations ask for; layers left in float32 ask for none."""
    kinds = {(rec.quantization_type, rec.dtype) for rec in recommendations if rec.dtype != "float32"}
    return frozenset(
        scheme for scheme, fields in RECOMMENDED.items() if (fields["quantization_type"], fields["dtype"]) in kinds
    )


def possible_deployments(
    plan: Plan,
    supported: Mapping[RuntimeName, Sequence[Scheme]],
    *,
    schemes: frozenset[Scheme],
    layers: str = EVERYTHING,
) -> tuple[Deployment, ...]:
    """Return the deployments to try, in the order of `supported`; eager float32 is the baseline and no deployment.

    `supported` has the schemes of each runtime that is there. A plan that says how to quantize is taken at its word;
    otherwise every one of `schemes` is tried on `layers`. float32 is always one: another runtime alone may suffice.
    """
    found: list[Deployment] = []
    for runtime, known in supported.items():
        if plan.quantization is None:
            chosen = [
                Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme, layers))
                for scheme in known
                if scheme in schemes or scheme == "float32"
            ]
        else:
            chosen = [
                Deployment(runtime=runtime, scheme=scheme, recommendations=plan.quantization)
                for scheme in _planned(runtime, known, schemes_of(plan.quantization))
            ]
        found += [
            deployment for deployment in chosen if (deployment.runtime, deployment.scheme) != ("eager", "float32")
        ]
    return tuple(found)


def _planned(runtime: RuntimeName, known: Sequence[Scheme], wanted: frozenset[Scheme]) -> list[Scheme]:
    """Return the schemes by which this runtime can carry out recommendations of the `wanted` kinds."""
    if not wanted:
        return [scheme for scheme in known if scheme == "float32"]
    kinds = wanted - {"static_nncf"}
    if len(kinds) == 1:
        return [scheme for scheme in known if scheme in wanted]
    mixture = MIXTURES.get(runtime)
    allowed = {"eager": {"dynamic", "float16", "bfloat16"}, "inductor": {"static", "bfloat16"}}.get(runtime, set())
    return [mixture] if mixture is not None and mixture in known and kinds <= allowed else []


ASKED: Mapping[str, frozenset[Scheme]] = {
    "auto": frozenset({"bfloat16", "float16", "dynamic", "static", "static_nncf"}),
    "qint8": frozenset({"dynamic", "static", "static_nncf"}),
    "float16": frozenset({"float16"}),
    "bfloat16": frozenset({"bfloat16"}),
    "none": frozenset(),
}


def asked_schemes(dtype: str) -> frozenset[Scheme]:
    """Return the schemes that a request's `quantize_dtype` allows where no plan says."""
    return ASKED[dtype]


def supported_deployments(
    names: Sequence[RuntimeName], device: str
) -> tuple[dict[RuntimeName, tuple[Scheme, ...]], tuple[str, ...]]:
    """Return the schemes of each runtime of `names` that is installed, and a line for each one that isn't."""
    supported: dict[RuntimeName, tuple[Scheme, ...]] = {}
    notes: list[str] = []
    for name in names:
        if line := registry.missing(name):
            notes.append(f"{name} was not tried: {line}")
        else:
            supported[name] = registry.runtime(name).schemes(device)
    return supported, tuple(notes)


def check_runtimes(request: Request) -> None:
    """Raise RequestError where a runtime that was asked for by name isn't installed."""
    if request.runtimes.strip() == "auto":
        return
    for name in request.runtime_names:
        if line := registry.missing(name):
            raise RequestError(f"runtimes asks for {name}, but {line}")
