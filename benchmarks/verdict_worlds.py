"""How often a verdict is wrong: the real final choice on thousands of drawn worlds whose truth is known.

    python benchmarks/verdict_worlds.py [--worlds N] [--json FILE]

Measurements are drawn, decisions are the package's own. One point may be lost, 4% of the answers change, and half of the images are
searched on. Each family of worlds has candidates of a known true drop, the fastest first.
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from checks import Check, finish

from profiling_agent.errors import JobError
from profiling_agent.evaluation.openings import share
from profiling_agent.evaluation.predictions import Answers, write_predictions
from profiling_agent.iteration.evaluator import Evaluator, Settings
from profiling_agent.iteration.finalize import FinalChoice, finalize
from profiling_agent.iteration.judge import judge
from profiling_agent.jobs.tasks import Evaluated
from profiling_agent.jobs.timesheet import Timesheet
from profiling_agent.records import (
    Acquired,
    ArtifactRef,
    Attempt,
    Deployment,
    Evaluation,
    Footprint,
    Goal,
    Headline,
    InputSpec,
    Journal,
    LatencyStats,
    LayerProfile,
    MemoryUse,
    ModelProfile,
    ModelSource,
    Opening,
    Outcome,
    Plan,
    Predictions,
    Race,
    RaceResult,
    SplitInfo,
    Variant,
)
from profiling_agent.reproducibility import environment

ALLOWED, DISCORDANT, NUM_TURNS = 0.01, 0.04, 5
GOAL = Goal(max_accuracy_drop=ALLOWED, min_speedup=1.0, max_size_ratio=1.0, selection="contract")
BAD, GOOD = 1.5 * ALLOWED, 0.25 * ALLOWED
# True drops of a world's candidates, the fastest first.
FAMILIES: dict[str, tuple[float, ...]] = {
    "one bad": (BAD,),
    "three bad": (BAD, BAD, BAD),
    "one good": (GOOD,),
    "bad and good": (BAD, GOOD),
    "bad, fair and good": (BAD, 0.75 * ALLOWED, GOOD),
    "bad, bad and good": (BAD, BAD, GOOD),
    "three good": (GOOD, GOOD, GOOD),
    "one at the bound": (ALLOWED,),
    "three at the bound": (ALLOWED, ALLOWED, ALLOWED),
}
# Images in all; at most so many worlds in a hundred where something bad is met, and where the baseline is returned although something is good.
SETS: dict[int, tuple[float | None, float]] = {2500: (0.15, 0.05), 1000: (None, 0.15)}
MAX_CERTIFIED = 0.05
BASELINE = "baseline"
HERE = environment()


@dataclass(frozen=True)
class Truth:
    """What is true of a candidate: its drop, the share of answers changed, times as fast, share of the memory."""

    drop: float = 0.0
    discordant: float = 0.0
    speedup: float = 1.0
    memory: float = 1.0


def ref(name: str, kind: Any = "model") -> ArtifactRef:
    """Return a reference to an artifact that exists in name only."""
    return ArtifactRef(path=f"jobs/{name}", sha256=name, size_bytes=1000, kind=kind)


@dataclass
class World:
    """Jobs that answer by the truth and by noise drawn from `noise`."""

    root: Path
    noise: np.random.Generator
    truths: dict[str, Truth]
    between_processes: float = 0.02
    between_sessions: float = 0.0
    num_opened: int = 0
    answers: dict[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])
    timesheet: Timesheet = field(default_factory=lambda: Timesheet(Path("nowhere")))

    def path(self, artifact: ArtifactRef) -> Path:
        """Return where an artifact lies."""
        return self.root / artifact.path.replace("/", "-")

    def run_each(self, tasks: Sequence[Any]) -> list[Any]:
        """Run tasks in their order."""
        return [self.run(task) for task in tasks]

    def run(self, task: Any) -> Any:
        """Run one task by the method of its name."""
        return getattr(self, type(task).__name__)(task)

    def truth(self, model: ArtifactRef) -> Truth:
        """Return what is true of a model; of the baseline nothing is changed."""
        return self.truths.get(model.path.removeprefix("jobs/"), Truth())

    def is_wrong(self, model: ArtifactRef, split: SplitInfo) -> Any:
        """Return which images of a split a model gets wrong; the baseline errs on every fifth."""
        if (key := (model.path, split.name)) not in self.answers:
            baseline = np.arange(split.num_images) % 5 == 0
            truth, drawn = self.truth(model), self.noise.random(split.num_images)
            lost, gained = (truth.discordant + truth.drop) / 2, (truth.discordant - truth.drop) / 2
            # Four fifths can be lost and one fifth can be gained.
            self.answers[key] = baseline ^ np.where(baseline, drawn < gained / 0.2, drawn < lost / 0.8)
        return self.answers[key]

    def OpenHeldoutTask(self, task: Any) -> Opening:  # noqa: N802
        self.num_opened += 1
        return Opening(number=self.num_opened, share=share(self.num_opened))

    def EvaluateTask(self, task: Any) -> Evaluated:  # noqa: N802
        if task.model.path.startswith("jobs/pruned"):
            raise JobError("float32 models of attempts are not measured here")
        rows, truth = task.split.rows(task.shard), self.truth(task.model)
        wrong = self.is_wrong(task.model, task.split)[rows.start : rows.stop].astype(np.int64)
        file = ref(f"{task.model.path.removeprefix('jobs/')}-{task.split.name}-{task.shard}", "predictions")
        answers = Answers(wrong, np.zeros_like(wrong), np.ones(len(wrong), np.float32))
        write_predictions(self.path(file), answers)
        return Evaluated(
            footprint=Footprint(params=500, macs=int(1000 / truth.speedup), parameter_bytes=1000, size_bytes=1000),
            predictions=Predictions(
                split=task.split.name, num_images=len(wrong), num_correct=int((wrong == 0).sum()), files=(file,)
            ),
        )

    def RaceTask(self, task: Any) -> Race:  # noqa: N802
        return self.session(task)

    def SessionTask(self, task: Any) -> Race:  # noqa: N802
        return self.session(task)

    def MemoryTask(self, task: Any) -> MemoryUse:  # noqa: N802
        return MemoryUse(model=task.model, batch_size=4, peak_bytes=10**9, size_bytes=1000, environment=HERE)

    def PruneTask(self, task: Any) -> NoReturn:  # noqa: N802
        raise JobError("what is infeasible isn't asked here")

    def session(self, task: Any) -> Race:
        """Return one session: a process's luck stays with it, and a turn varies by 3%."""
        luck = [self.noise.normal(0, self.between_processes) for _ in task.entries]
        results: list[RaceResult] = []
        for place, (variant, model) in enumerate(task.entries):
            truth = self.truth(model)
            centre = math.log(truth.speedup) + luck[0] - luck[place] + self.noise.normal(0, self.between_sessions)
            turns = np.exp(centre + self.noise.normal(0, 0.03, NUM_TURNS)) if place else np.ones(NUM_TURNS)
            fast = float(np.median(turns))
            peak = int(10**9 * truth.memory * math.exp(self.noise.normal(0, 0.01)))
            results.append(_result(variant, model, turns.tolist(), 100 * math.exp(luck[0]) / fast, peak))
        return Race(results=tuple(results), num_repeats=NUM_TURNS, num_sessions=1)


def _result(variant: Variant, model: ArtifactRef, turns: list[float], pass_ms: float, peak: int) -> RaceResult:
    fast = float(np.median(turns))
    return RaceResult(
        variant=variant,
        model=model,
        latency=latency(pass_ms),
        speedup=fast,
        speedup_low=fast * 0.96,
        speedup_high=fast * 1.04,
        turns=(tuple(turns),),
        peak_bytes=(peak,),
    )


def latency(pass_ms: float) -> LatencyStats:
    """Return the statistics of a batch of four that takes so long."""
    return LatencyStats(batch_size=4, median_ms=pass_ms, low_ms=pass_ms, high_ms=pass_ms, samples_ms=(pass_ms,))


def evaluator_in(world: World, num_search: int, num_heldout: int, goal: Goal = GOAL, **settings: Any) -> Evaluator:
    """Return what a run in this world measures with."""

    def split(name: Any, num_images: int) -> SplitInfo:
        return SplitInfo(name=name, source_split="test", num_images=num_images, file=ref(name, "split"))

    jobs: Any = world
    pass_s = settings.pop("pass_s", 0.0005)
    return Evaluator(
        jobs=jobs,
        acquired=Acquired(
            source=ModelSource(name="m", architecture="A", device="cpu"),
            calibration=split("calibration", 256),
            search=split("search", num_search),
            heldout=split("heldout", num_heldout),
            labels=(),
        ),
        baseline=ref(BASELINE),
        profile=ModelProfile(
            architecture="A",
            input=InputSpec(channels=3, height=32, width=32, source="made"),
            batch_size=4,
            device="cpu",
            params=1000,
            macs=1000,
            parameter_bytes=1000,
            size_bytes=1000,
            headline=Headline(latency=latency(pass_s * 4e3), peak_memory_bytes=10**9, forward_passes=10),
            layers=(LayerProfile(name="layer", kind="Linear", params=1000, macs=1000, latency_ms=1.0, activation_bytes=8),),
            operators=(),
            units=(),
            refusals={},
            forward_passes=30,
        ),
        goal=goal,
        settings=Settings(batch_size=4, seed=0, **settings),
    )


def searched(evaluator: Evaluator, number: int) -> Attempt:
    """Return attempt `number` as the search images judge it, on as many of them as the run looks at."""
    deployment = Deployment(runtime="onnxruntime", scheme="dynamic")
    seen: Evaluation = evaluator.search(Variant.BOTH, ref(f"both{number}"), deployment)
    accepted = judge(seen, evaluator.goal).accepted
    return Attempt(
        number=number,
        plan=Plan(),
        pruned_model=ref(f"pruned{number}"),
        deployed=seen,
        accepted=accepted,
        reason="made",
    )


def final_choice(root: Path, drops: Sequence[float], num_images: int, seed: int) -> FinalChoice:
    """Return what a run returns in a drawn world, whose candidates lose `drops` in truth, the fastest first."""
    noise = np.random.default_rng([seed, num_images, len(drops)])
    fastest = 2.0 + 0.5 * len(drops)
    truths = {
        f"both{number}": Truth(drop, DISCORDANT, fastest - 0.5 * number)
        for number, drop in enumerate(drops, start=1)
    }
    world = World(root, noise, truths)
    evaluator = evaluator_in(world, num_images // 2, num_images - num_images // 2)
    baseline = evaluator.evaluate_baseline(evaluator.acquired.search)
    attempts = tuple(searched(evaluator, number) for number in range(1, len(drops) + 1))
    return finalize(evaluator, Journal(baseline=baseline, attempts=attempts))


def rates(num_images: int, num_worlds: int) -> dict[str, dict[str, float]]:
    """Return for each family the shares of worlds with a bad candidate met, the baseline returned, and certified wrongly."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        for family, drops in FAMILIES.items():
            bad, baseline, certified, tests = 0, 0, 0, 0
            for seed in range(num_worlds):
                final = final_choice(Path(scratch), drops, num_images, seed)
                number, is_met = final.winner.attempt, final.verdict.outcome is Outcome.MET
                drop = 0.0 if number is None else drops[number - 1]
                bad += drop >= BAD and is_met
                baseline += number is None
                certified += drop >= ALLOWED and final.verdict.certified
            found[family] = {
                "bad_met": bad / num_worlds,
                "baseline": baseline / num_worlds,
                "certified_wrong": certified / num_worlds,
            }
    return found


def main() -> int:
    """Draw, print, and return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[Any] = []
    for num_images in SETS:
        for family, shares in rates(num_images, given.worlds).items():
            rows.append({"images": num_images, "family": family, "worlds": given.worlds, **shares})
            print(f"  {num_images} images, {family:20}", *(f"{name} {value:6.1%}" for name, value in shares.items()), flush=True)
    return finish(checks_of(rows), rows, given.json)


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Return the checks that the rates hold, of the worst family each."""
    checks: list[Check] = []
    for num_images, (most_bad, most_baseline) in SETS.items():
        own = [row for row in rows if row["images"] == num_images]
        with_bad = max(row["bad_met"] for row in own if BAD in FAMILIES[row["family"]])
        with_good = max(row["baseline"] for row in own if GOOD in FAMILIES[row["family"]])
        checks += [
            Check.at_most(f"{num_images} images: certified wrongly", max(row["certified_wrong"] for row in own), MAX_CERTIFIED),
            Check.at_most(f"{num_images} images: a bad candidate is met", with_bad, most_bad or 1.0),
            Check.at_most(f"{num_images} images: the baseline is returned", with_good, most_baseline),
        ]
    return checks


if __name__ == "__main__":
    raise SystemExit(main())
