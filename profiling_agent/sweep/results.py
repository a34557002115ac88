"""Result of one run of many: what its report says, on one line, or why there is none."""

from profiling_agent.records import AccuracyDrop, Outcome, RaceResult, Record
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request


class RunResult(Record):
    """What a run came to; of one that failed, the request and the `failure` alone. Ratios are to the baseline, times of one image."""

    request: Request
    failure: str = ""
    outcome: Outcome | None = None
    certified: bool = False
    binding: str | None = None
    drop: AccuracyDrop | None = None
    race_result: RaceResult | None = None
    top1: float = 0.0
    top1_before: float = 0.0
    ms: float = 0.0
    ms_before: float = 0.0
    size_ratio: float = 0.0
    params_ratio: float = 0.0
    deployment: str = ""
    machine: str = ""
    seconds: float = 0.0

    @property
    def run_id(self) -> str:
        """Return the run's name, which is its folder's."""
        return self.request.run_id or ""

    @property
    def data(self) -> str:
        """Return which images it was measured on, as far as they were named."""
        named = (self.request.dataset_config, self.request.dataset_revision, self.request.split)
        told = ", ".join(filter(None, named))
        return f"{self.request.dataset} ({told})" if told else self.request.dataset

    @property
    def is_met(self) -> bool:
        """Return whether the contract is met."""
        return self.outcome is Outcome.MET


def result_of(request: Request, report: RunReport) -> RunResult:
    """Return what a run's report says."""
    base, best, batch_size = report.baseline, report.best, report.request.batch_size
    return RunResult(
        request=request,
        outcome=report.verdict.outcome,
        certified=report.verdict.certified,
        binding=report.verdict.binding,
        drop=report.heldout.drop,
        race_result=report.race_result,
        top1=best.top1,
        top1_before=base.top1,
        ms=best.latency_ms / batch_size,
        ms_before=base.latency_ms / batch_size,
        size_ratio=best.size_bytes / base.size_bytes,
        params_ratio=best.params / base.params,
        deployment=best.deployment.name,
        machine=report.environment.machine,
        seconds=sum(row.seconds for row in report.times),
    )


def failed(request: Request, why: str) -> RunResult:
    """Return the result of a run that came to none."""
    return RunResult(request=request, failure=why)
