"""A finished run's records as text: read-only lookups, which an LLM calls to answer questions about the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from profiling_agent.errors import FieldError, PlanError
from profiling_agent.lib.io import first_problem, inside, read_record
from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.digest import frontier_rows, predicted_text
from profiling_agent.planning.rules import analyse
from profiling_agent.pruning.widths import matching_names
from profiling_agent.reporting.report import VariantRow, final_attempt, read_report, run_of, unit_decisions
from profiling_agent.request import Request, unknown_field
from profiling_agent.schemas import Goal, ModelProfile

# Characters of one lookup, and units that it lists.
MAX_CHARACTERS, MAX_UNITS = 6000, 60


class Records:
    """Lookups in one finished run; the LLM is sent the methods' docstrings."""

    def __init__(self, run: Path) -> None:
        """Read the report of a run, or of a fork; RunError if it has none."""
        self._folder, self.report = run, read_report(run)

    @property
    def request(self) -> Request:
        """Return the run's request, with the folder that the run lies in now as its output."""
        return self.report.request.model_copy(update={"output": str(run_of(self._folder).resolve().parent)})

    @property
    def lookups(self) -> tuple[Callable[..., str], ...]:
        """Return the methods that an LLM may call."""
        return (
            *(self.overview, self.deployments, self.attempts, self.candidates),
            *(self.layers, self.what_if, self.read),
        )

    def _profile(self) -> ModelProfile:
        run = run_of(self._folder)
        return read_record(ModelProfile, inside(run / self.report.profiles["baseline"].profile.path, run))

    def overview(self) -> str:
        """Return the request's limits, the verdict with each limit's measurement, the model before and after, advice after a miss, and all warnings."""
        report = self.report
        result = report.race_result
        return _text(
            {
                "model": report.request.model,
                "dataset": report.request.dataset,
                "limits": report.goal.model_dump(mode="json", exclude_defaults=True),
                "verdict": report.verdict.model_dump(mode="json"),
                "before": report.baseline.model_dump(mode="json"),
                "after": report.best.model_dump(mode="json"),
                "share_of_bytes": report.best.size_bytes / report.baseline.size_bytes,
                "accuracy_lost": report.heldout.drop.model_dump(mode="json") if report.heldout.drop else None,
                "times_as_fast": result.speedup if result else None,
                "times_as_fast_interval": [result.speedup_low, result.speedup_high] if result else None,
                "why_it_stopped": report.stopped,
                "changed_limits_that_would_be_met": [each.model_dump(mode="json") for each in report.advice] or None,
                "warnings": report.notes,
            }
        )

    def deployments(self) -> str:
        """Return every runtime and scheme that the unpruned model was tried in: speedup, KL, share of bytes, status and the reason."""
        search = self.report.deployment_search
        rows = [
            {
                "deployment": option.deployment.name,
                "times_as_fast": option.race_result.speedup if option.race_result else None,
                "kl": option.deployed.kl if option.deployed else None,
                "share_of_bytes": self._share_of_bytes(option.evaluation.footprint.size_bytes)
                if option.evaluation
                else None,
                "accuracy_lost": option.evaluation.drop.drop if option.evaluation and option.evaluation.drop else None,
                "status": option.status,
                "reason": option.reason,
            }
            for option in (search.options if search else ())
        ]
        return _text({"chosen": search.chosen.name if search and search.chosen else None, "tried": rows})

    def attempts(self) -> str:
        """Return every plan that was measured: what it asked for, who proposed it, its predicted and measured effects, and the decision."""
        rows = [
            {
                "number": attempt.number,
                "proposed_by": attempt.origin.by,
                "plan": attempt.plan.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
                "units_cut": len(attempt.dry_run.cuts) if attempt.dry_run else 0,
                "predicted_kl": attempt.dry_run.kl if attempt.dry_run else None,
                "measured_kl": attempt.calibration_kl,
                "measured_kl_before_compensation": attempt.calibration_kl_uncompensated,
                "deployment": attempt.deployed.deployment.name if attempt.deployed else None,
                "accuracy_lost": attempt.deployed.drop.drop if attempt.deployed and attempt.deployed.drop else None,
                "params": attempt.deployed.footprint.params if attempt.deployed else None,
                "accepted": attempt.accepted,
                "reason": attempt.reason,
            }
            for attempt in self.report.attempts
        ]
        return _text(rows)

    def candidates(self) -> str:
        """Return every measured model with its number for `pick`: accuracy lost on search images, speedup, share of bytes."""
        return _text([self._candidate(number, row) for number, row in enumerate(self.report.variants)])

    def _share_of_bytes(self, size_bytes: int) -> float:
        return size_bytes / self.report.baseline.size_bytes

    def _candidate(self, number: int, row: VariantRow) -> dict[str, Any]:
        evaluation = row.evaluation
        return {
            "number": number,
            "model": f"{evaluation.variant} ({evaluation.deployment.name})",
            "top1": evaluation.top1,
            "accuracy_lost": evaluation.drop.drop if evaluation.drop else 0.0,
            "times_as_fast": row.race_result.speedup if row.race_result else None,
            "share_of_bytes": self._share_of_bytes(evaluation.footprint.size_bytes),
        }

    def layers(self, pattern: str) -> str:
        """Return what was cut of the units whose name the RE2 `pattern` hits ("." for all), with the reason, and why other layers weren't."""
        attempt = final_attempt(self.report)
        choices = unit_decisions(self.report, attempt) if attempt else ()
        try:
            names = matching_names(
                pattern, [*(choice.unit for choice in choices), *(group.name for group in self.report.layers)]
            )
        except PlanError as error:
            return str(error)
        hits = [choice for choice in choices if choice.unit in names]
        rows = [
            {"unit": choice.unit, "width": choice.width, "kept": choice.kept, "reason": choice.reason}
            for choice in hits[:MAX_UNITS]
        ]
        groups = [group.model_dump() for group in self.report.layers if group.name in names]
        return _text(
            {
                "units_hit": len(hits),
                "of_attempt": attempt.number if attempt else None,
                "units": rows,
                "layers": groups,
            }
        )

    def what_if(
        self,
        max_accuracy_drop: float | None = None,
        min_speedup: float | None = None,
        max_size_ratio: float | None = None,
    ) -> str:
        """Return what other limits would buy: measured candidates within them, and the plan that a new run would begin with.

        A limit that isn't given stays. `max_accuracy_drop` 0.02 is two points, `max_size_ratio` 0.25 a quarter of the bytes.
        """
        given = {"max_accuracy_drop": max_accuracy_drop, "min_speedup": min_speedup, "max_size_ratio": max_size_ratio}
        changed = {name: value for name, value in given.items() if value is not None}
        try:
            request = changed_request(self.request, changed)
        except FieldError as error:
            return f"no such limits: {error}"
        goal, profile = request.goal, self._profile()
        plan = analyse(profile, goal)
        rows = [self._candidate(number, row) for number, row in enumerate(self.report.variants)]
        return _text(
            {
                "limits": goal.model_dump(mode="json", exclude_defaults=True),
                "measured_candidates_within_them": [row for row in rows if _is_within(row, goal)],
                "first_plan": plan.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
                "predicted": predicted_text(dry_run(plan, profile), profile),
                "frontier (metric | % of params, MACs, time that go | predicted KL | kept widths)": frontier_rows(
                    profile, goal
                ),
            }
        )

    def read(self, path: str) -> str:
        """Return the part of report.json at a dotted path, such as `heldout.drop` or `attempts.0.reason`; "" lists the parts."""
        value: Any = self.report.model_dump(mode="json")
        for step in (step for step in path.split(".") if step):
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            else:
                return f"there is no {step!r}: there {_outline(value)}"
        text = _text(value)
        return text if path and len(text) <= MAX_CHARACTERS else f"there {_outline(value)}"


def _outline(value: Any) -> str:
    if isinstance(value, dict):
        return f"are {', '.join(value)}"
    if not isinstance(value, list) or not value:
        return "is nothing below it"
    # Items are found by what they are named after.
    keys = ("name", "unit", "kind", "number", "variant")
    names = [
        next((item[key] for key in keys if isinstance(item, dict) and key in item), "") for item in value[:MAX_UNITS]
    ]
    return f"are the items 0 to {len(value) - 1}: {', '.join(f'{n} {name}'.strip() for n, name in enumerate(names))}"


def _is_within(row: dict[str, Any], goal: Goal) -> bool:
    is_fast = row["times_as_fast"] is not None and row["times_as_fast"] >= goal.min_speedup
    return row["accuracy_lost"] <= goal.max_accuracy_drop and is_fast and goal.allows_size(row["share_of_bytes"])


def _text(value: Any) -> str:
    """Return records as compact JSON, floats with six digits."""

    def rounded(part: Any) -> Any:
        if isinstance(part, float):
            return float(f"{part:.6g}")
        if isinstance(part, dict):
            return {name: rounded(item) for name, item in part.items() if item is not None}
        return [rounded(item) for item in part] if isinstance(part, list | tuple) else part

    return json.dumps(rounded(value), ensure_ascii=False)


# What a proposed run may change.
CHANGEABLE = (
    *("max_accuracy_drop", "min_speedup", "max_size_ratio", "objective", "quantize_dtype", "runtimes", "batch_size"),
    *("num_samples", "max_iterations", "recover_epochs", "effort", "time_budget"),
)


def changed_request(request: Request, changes: dict[str, Any]) -> Request:
    """Return the request of a new run with changed limits, planned by the rules and next to the old run's folder.

    FieldError for a field that isn't in CHANGEABLE, or an impossible value. No address, plan or approval is taken over.
    """
    if problem := unknown_field(changes, CHANGEABLE):
        raise FieldError(problem)
    unchanged = request.model_dump(exclude={"run_id", "llm", "base_url", "planner", "plan", "approve", "goal_text"})
    try:
        return Request.model_validate(unchanged | changes)
    except ValidationError as error:
        raise FieldError(first_problem(error)) from error
