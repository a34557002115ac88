"""Probes: measurements that the LLM may ask for before a plan is submitted, as jobs of the run, paid from its time."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from profiling_agent.errors import PlanError, PruningError
from profiling_agent.jobs.runner import job_key
from profiling_agent.jobs.worker import RESULT
from profiling_agent.planning.allocation import apply_demands, dry_run
from profiling_agent.planning.llm_planner import Lab, Probe
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import Attempt, Deployment, Journal, Plan, RaceResult, RuntimeName, Variant
from profiling_agent.search.attempt import deployment_of, prune_attempt, prune_task, quantize_attempt
from profiling_agent.search.deployments import INT8, REFUSALS
from profiling_agent.search.evaluator import PRUNE_PASSES, RACE_PASSES, RACE_S, Deadline, Evaluator

# Share of the free time that the probes for one plan may take; the attempts need the rest.
PROBE_SHARE = 0.5
# Seconds of a probe that any model takes, and its passes for each calibration image next to those of pruning.
PROBE_S, ANSWER_PASSES, DEPLOY_PASSES = 3.0, 1.5, 3.0


def lab_of(evaluator: Evaluator, journal: Journal) -> Lab:
    """Return the measurements that an LLM may ask for, with their prices; together they take half of the free time."""
    each_s = evaluator.pass_s * evaluator.acquired.calibration.num_images
    prune_s, deploy_s = PROBE_S + PRUNE_PASSES * each_s, PROBE_S + DEPLOY_PASSES * each_s
    prices = {
        "probe": prune_s + ANSWER_PASSES * each_s,
        "probe_layers": deploy_s,
        "time_plan": prune_s + deploy_s + RACE_S + RACE_PASSES * evaluator.pass_s,
    }
    # Training would take longer than a probe is worth.
    settings = evaluator.settings.model_copy(update={"recover_epochs": 0})
    bare, deadline = replace(evaluator, settings=settings), evaluator.deadline.part(PROBE_SHARE)
    probes = _Probes(bare, journal, deadline, prices)
    return Lab(
        prices=prices,
        probe=probes.probe,
        probe_layers=probes.probe_layers,
        time_plan=probes.time_plan,
        known_kl=probes.known_kl,
    )


@dataclass(frozen=True)
class _Probes:
    evaluator: Evaluator
    journal: Journal
    deadline: Deadline
    prices: Mapping[str, float]

    @contextmanager
    def _paid(self, tool: str) -> Generator[None]:
        """Raise PlanError if the tool's price doesn't fit the time, or if a job refuses the plan."""
        if not self.deadline.allows(self.prices[tool]):
            left_s = max(self.deadline.free_s, 0.0)
            raise PlanError(f"it takes about {self.prices[tool]:.0f} s, and {left_s:.0f} s are left for this plan")
        try:
            yield
        except (*REFUSALS, PruningError) as error:
            raise PlanError(str(error)) from error

    def _prune(self, plan: Plan) -> Attempt:
        attempt = prune_attempt(self.evaluator, apply_demands(plan, self.evaluator.goal))
        if attempt.pruned_model is None:
            raise PlanError(attempt.reason or "it cuts nothing")
        return attempt

    def known_kl(self, plan: Plan) -> float | None:
        dry = dry_run(apply_demands(plan, self.evaluator.goal), self.evaluator.profile)
        task, jobs = prune_task(self.evaluator, dry), self.evaluator.jobs
        is_done = dry.cuts and (jobs.workspace.jobs / job_key(task) / RESULT).exists()
        return jobs.run(task).kl if is_done else None

    def probe(self, plan: Plan) -> Probe:
        evaluator, images = self.evaluator, self.evaluator.acquired.calibration
        with self._paid("probe"):
            attempt = self._prune(plan)
            assert attempt.pruned_model is not None, "it was pruned"
            before = evaluator.evaluate_baseline(images)
            after = evaluator.evaluate(Variant.PRUNED, attempt.pruned_model, images, before)
        assert after.drop is not None, "it was compared with the baseline"
        old, new = (evaluator.answers(each).predicted for each in (before, after))
        return Probe(
            kl=attempt.calibration_kl,
            num_images=after.drop.num_images,
            num_changed=int((old != new).sum()),
            num_lost=after.drop.num_lost,
            num_gained=after.drop.num_gained,
        )

    def probe_layers(self, scheme: Any, layers: str) -> float:
        evaluator, supported = self.evaluator, self.evaluator.choices.supported
        runtime: RuntimeName | None = next(
            (name for name, schemes in supported.items() if scheme in INT8.intersection(schemes)), None
        )
        if runtime is None:
            raise PlanError(f"no runtime here has {scheme} int8")
        deployment = Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme, layers))
        with self._paid("probe_layers"):
            option = evaluator.deployer.make(evaluator.baseline, deployment)
        if option.deployed is None:
            raise PlanError(option.reason)
        return option.deployed.kl

    def time_plan(self, plan: Plan) -> RaceResult:
        evaluator = self.evaluator
        deployment = deployment_of(plan, self.journal, evaluator.choices, evaluator.goal)
        with self._paid("time_plan"):
            attempt = quantize_attempt(evaluator, self._prune(plan), deployment)
            if attempt.reason or attempt.pruned_model is None:
                raise PlanError(attempt.reason)
            model = attempt.pruned_model
            if deployment is not None:
                model = evaluator.jobs.run(evaluator.deployer.deploy_task(model, deployment)).model
            race = evaluator.race([model])
        return race.result_of(model)
