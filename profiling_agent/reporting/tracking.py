"""Experiment tracking: a finished run in a tracker that the user keeps. Off by default."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profiling_agent.errors import RequestError
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request

EXPERIMENT, TAG = "profiling-agent", "profiling_agent.results"
# A user and a password in an address.
USER = re.compile(r"(?<=://)[^/\s]*@")
FILES = ("report.html", "report.md", "report.json")


def check_tracker(request: Request) -> None:
    """Raise RequestError where the tracker that was asked for isn't installed."""
    if request.tracker == "mlflow" and find_spec("mlflow") is None:
        raise RequestError("tracker is 'mlflow' and mlflow isn't installed: pip install profiling-agent[mlflow]")


def track(report: RunReport, folder: Path) -> str | None:
    """Log a finished run, once; return in a line where to, or why it could not be; None where no tracker was asked for.

    Where to is MLflow's own business: MLFLOW_TRACKING_URI, by default a store in the working folder.
    """
    if report.request.tracker != "mlflow":
        return None
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        mlflow.set_experiment(EXPERIMENT)
        # A run that was cut between here and its last checkpoint comes by again.
        if mlflow.search_runs(filter_string=f"tags.`{TAG}` = '{folder}'", output_format="list"):
            return f"mlflow has it already ({without_password(mlflow.get_tracking_uri())})"
        with mlflow.start_run(run_name=report.run_id, tags={TAG: str(folder)}):
            mlflow.log_params(parameters(report.request))
            mlflow.log_metrics(metrics(report))
            for name in FILES:
                mlflow.log_artifact(str(folder / name))
            mlflow.log_artifacts(str((folder / "best").resolve()), "model")
    except (MlflowException, OSError) as error:
        said = without_password(str(error).strip().partition("\n")[0])[:200]
        return f"mlflow could not be written to ({said}); the run folder has everything"
    return f"logged to mlflow ({without_password(mlflow.get_tracking_uri())})"


def without_password(text: str) -> str:
    """Return text in which addresses name no user and no password."""
    return USER.sub("", text)


def parameters(request: Request) -> dict[str, Any]:
    """Return all that was asked for."""
    return {name: value for name, value in request.model_dump().items() if value is not None}


def metrics(report: RunReport) -> dict[str, float]:
    """Return what the verdict rests on, before and after; fractions, milliseconds, counts and bytes."""
    found: dict[str, float] = {
        "met": float(report.verdict.outcome == "MET"),
        "certified": float(report.verdict.certified),
        "attempts": float(len(report.attempts)),
    }
    for side, summary in (("baseline", report.baseline), ("best", report.best)):
        for name in ("top1", "latency_ms", "params", "macs", "size_bytes", "peak_memory_bytes"):
            found[f"{side}.{name}"] = float(getattr(summary, name))
    if drop := report.heldout.drop:
        found |= {"drop": drop.drop, "drop.low": drop.low, "drop.high": drop.high}
    if race_result := report.race_result:
        found |= {
            "speedup": race_result.speedup,
            "speedup.low": race_result.speedup_low,
            "speedup.high": race_result.speedup_high,
        }
    return found
