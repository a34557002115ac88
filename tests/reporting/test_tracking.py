"""A finished run in a real local MLflow store."""

from pathlib import Path

import pytest
from conftest import World

from profiling_agent.reporting.results import metrics, parameters, read_report, track, without_password
from profiling_agent.request import Request


def test_nothing_is_tracked_unless_asked_for(finished: Path):
    assert track(read_report(finished), finished) is None


def test_metrics_are_the_reports(finished: Path):
    report = read_report(finished)
    found = metrics(report)

    assert found["best.size_bytes"] == report.best.size_bytes
    assert found["drop"] == (report.heldout.drop.drop if report.heldout.drop else 0.0)
    assert parameters(Request())["max_accuracy_drop"] == 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_logged_once_with_its_report_and_its_model(
    world: World, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.db'}")
    monkeypatch.chdir(tmp_path)
    asked = read_report(finished)
    report = asked.model_copy(update={"request": asked.request.model_copy(update={"tracker": "mlflow"})})

    assert "logged to mlflow" in (track(report, finished) or "")
    assert "has it already" in (track(report, finished) or "")

    (run,) = mlflow.search_runs(experiment_names=["profiling-agent"], output_format="list")
    assert run.data.metrics["best.params"] == report.best.params
    assert run.data.params["batch_size"] == str(asked.request.batch_size)
    artifacts = {item.path for item in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert artifacts == {"report.html", "report.md", "report.json", "model"}


def test_a_trackers_password_is_not_told():
    for address, told in (
        ("https://me:p%40ss@tracker.example/a", "https://tracker.example/a"),
        ("failed: postgresql://me:p@ss@db:5432/runs (refused)", "failed: postgresql://db:5432/runs (refused)"),
        ("sqlite:///runs/me@home.db", "sqlite:///runs/me@home.db"),
        ("https://tracker.example/a@b", "https://tracker.example/a@b"),
    ):
        assert without_password(address) == told
