"""How often a verdict is wrong: the real final choice in thousands of drawn worlds whose truth is known.

    python benchmarks/verdict_worlds.py [--worlds N] [--json FILE]

Measurements are drawn, decisions are the package's own. One point may be lost, 4% of the answers change, half of the images are searched on.
Three tables: accuracy in families of worlds with candidates of known true drops; speed where another process runs during some sessions; and
how far runs with a time budget miss it, where work takes up to a quarter more or less than was planned.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checks import Check, finish, parser_of

from profiling_agent import schemas
from profiling_agent.errors import JobError
from profiling_agent.graph.steps import choose_final
from profiling_agent.jobs.tasks import Evaluated, EvaluateTask, OpenHeldoutTask, RaceTask, SessionTask
from profiling_agent.measure.intervals import Answers, share, write_predictions
from profiling_agent.request import Request
from profiling_agent.search.attempt import SEARCH_SHARE
from profiling_agent.search.evaluator import PRUNE_PASSES, Evaluator, evidence_passes
from profiling_agent.search.finalize import FinalChoice
from profiling_agent.search.selection import keeps_accuracy
from profiling_agent.workspace import Timesheet

ALLOWED, DISCORDANT, NUM_TURNS = 0.01, 0.04, 5
GOAL = schemas.Goal(max_accuracy_drop=ALLOWED, min_speedup=1.0, max_size_ratio=1.0, selection="contract")
BAD, GOOD = 1.5 * ALLOWED, 0.25 * ALLOWED
# True drops of a world's candidates, the fastest first.
FAMILIES: Mapping[str, tuple[float, ...]] = {
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
# For so many images in all, the largest shares of worlds where something bad is met, and where the baseline is returned although something is good.
SETS: Mapping[int, tuple[float, float]] = {2500: (0.15, 0.05), 1000: (1.0, 0.15)}
MAX_CERTIFIED = 0.05
# Another process runs during so many of the sessions, and makes the baseline two to six times as slow, the candidate up to a third.
BUSY = (0.0, 0.2, 0.5, 0.8, 1.0)
TRUE_SPEEDUP = 6.6
# Seconds that a pass takes, and minutes that a run is given.
BUDGETS = ((0.005, 10), (0.025, 10), (0.025, 20), (0.1, 20))
MAX_MISS, PLANNING_ERROR = 0.05, 0.25


@dataclass(frozen=True)
class Truth:
    """What is true of a model: its drop, the share of answers changed, times as fast."""

    drop: float = 0.0
    discordant: float = 0.0
    speedup: float = 1.0


def ref(name: str) -> schemas.ArtifactRef:
    """Return a reference to an artifact that exists in name only."""
    return schemas.ArtifactRef(path=f"jobs/{name}", sha256=name, size_bytes=1000)


def latency(batch_ms: float) -> schemas.LatencyStats:
    """Return the statistics of a batch of four that takes so long."""
    interval = {"median_ms": batch_ms, "low_ms": batch_ms, "high_ms": batch_ms}
    return schemas.LatencyStats(batch_size=4, samples_ms=(batch_ms,) * NUM_TURNS, **interval)


@dataclass
class World:
    """Jobs that answer by the truth and by `noise`; another process runs during a share `busy` of sessions.

    Jobs take `work` times what a run plans with, where that is given, and else no time.
    """

    root: Path
    noise: np.random.Generator
    truths: Mapping[str, Truth]
    between_processes: float = 0.02
    between_sessions: float = 0.0
    busy: float = 0.0
    pass_s: float = 0.0005
    work: float = 0.0
    num_opened: int = 0
    wrong: dict[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])
    timesheet: Timesheet = field(default_factory=lambda: Timesheet(Path("nowhere")))

    def path(self, artifact: schemas.ArtifactRef) -> Path:
        """Return where an artifact lies."""
        return self.root / artifact.path.replace("/", "-")

    def run_each(self, tasks: Sequence[Any]) -> list[Any]:
        """Run tasks in their order."""
        return [self.run(task) for task in tasks]

    def run(self, task: Any) -> Any:
        """Run a task; JobError for what doesn't exist here."""
        if isinstance(task, OpenHeldoutTask):
            self.num_opened += 1
            return schemas.Opening(number=self.num_opened, share=share(self.num_opened))
        if isinstance(task, EvaluateTask) and not task.model.path.startswith("jobs/pruned"):
            return self.evaluate(task)
        if isinstance(task, RaceTask):
            self.spend(3, 20) if isinstance(task, SessionTask) else self.spend(8, 60)
            return self.session(task)
        raise JobError("it doesn't exist here")

    def spend(self, seconds: float, passes: float) -> None:
        """Take the time of a job."""
        took_s = self.work * self.noise.uniform(0.9, 1.1) * (seconds + passes * self.pass_s)
        self.timesheet.resume_at(self.timesheet.spent_s + took_s)

    def truth(self, model: schemas.ArtifactRef) -> Truth:
        """Return what is true of a model; of the baseline nothing is changed."""
        return self.truths.get(model.path.removeprefix("jobs/"), Truth())

    def is_wrong(self, model: schemas.ArtifactRef, split: schemas.SplitInfo) -> Any:
        """Return which images of a split a model gets wrong; the baseline errs on every fifth."""
        if (key := (model.path, split.name)) not in self.wrong:
            baseline = np.arange(split.num_images) % 5 == 0
            truth, drawn = self.truth(model), self.noise.random(split.num_images)
            lost, gained = (truth.discordant + truth.drop) / 2, (truth.discordant - truth.drop) / 2
            # Four fifths can be lost and one fifth can be gained.
            self.wrong[key] = baseline ^ np.where(baseline, drawn < gained / 0.2, drawn < lost / 0.8)
        return self.wrong[key]

    def evaluate(self, task: EvaluateTask) -> Evaluated:
        """Return answers on a shard; what was answered is read back in no time."""
        rows, truth = task.split.rows(task.shard), self.truth(task.model)
        wrong = self.is_wrong(task.model, task.split)[rows.start : rows.stop].astype(np.int64)
        file = ref(f"{task.model.path.removeprefix('jobs/')}-{task.split.name}-{task.shard}")
        if not self.path(file).exists():
            self.spend(0, len(rows) * (1 if truth.speedup == 1 else 0.5))
        write_predictions(self.path(file), Answers(wrong, np.zeros_like(wrong)))
        return Evaluated(
            footprint=schemas.Footprint(
                params=500, macs=int(1000 / truth.speedup), parameter_bytes=1000, size_bytes=1000
            ),
            predictions=schemas.Predictions(
                split=task.split.name, num_images=len(wrong), num_correct=int((wrong == 0).sum()), files=(file,)
            ),
        )

    def session(self, task: RaceTask) -> schemas.Race:
        """Return one session: a process's luck stays with it, and a turn varies by 3%."""
        is_busy = self.noise.random() < self.busy
        slow = self.noise.uniform(2, 6) if is_busy else 1.0
        luck = [self.noise.normal(0, self.between_processes) for _ in task.models]
        results: list[schemas.RaceResult] = []
        for place, model in enumerate(task.models):
            truth, own_slow = self.truth(model), self.noise.uniform(1, 1.3) if is_busy else 1.0
            centre = math.log(truth.speedup * slow / own_slow) + luck[0] - luck[place]
            centre += self.noise.normal(0, self.between_sessions)
            turns = np.exp(centre + self.noise.normal(0, 0.03, NUM_TURNS)) if place else np.ones(NUM_TURNS)
            fast = float(np.median(turns))
            results.append(
                schemas.RaceResult(
                    model=model,
                    latency=latency(self.pass_s * 4e3 * math.exp(luck[0]) * slow / fast),
                    speedup=fast,
                    speedup_low=fast * 0.96,
                    speedup_high=fast * 1.04,
                    turns=(tuple(turns.tolist()),),
                )
            )
        return schemas.Race(results=tuple(results), num_sessions=1)


def evaluator_in(
    world: World, num_search: int, num_heldout: int, goal: schemas.Goal = GOAL, **settings: Any
) -> Evaluator:
    """Return what a run in this world measures with."""

    def split(name: Any, num_images: int) -> schemas.SplitInfo:
        return schemas.SplitInfo(name=name, source_split="test", num_images=num_images, file=ref(name))

    jobs: Any = world
    headline = schemas.Headline(latency=latency(world.pass_s * 4e3), peak_memory_bytes=10**9)
    layer = schemas.LayerProfile(
        name="layer", kind="Linear", params=1000, macs=1000, latency_ms=1.0, activation_bytes=8
    )
    return Evaluator(
        jobs=jobs,
        acquired=schemas.Acquired(
            source=schemas.ModelSource(name="m", architecture="A", device="cpu"),
            calibration=split("calibration", 256),
            search=split("search", num_search),
            heldout=split("heldout", num_heldout),
            labels=(),
        ),
        baseline=ref("baseline"),
        profile=schemas.ModelProfile(
            architecture="A",
            input=schemas.InputSpec(channels=3, height=32, width=32, source="made"),
            batch_size=4,
            device="cpu",
            params=1000,
            macs=1000,
            parameter_bytes=1000,
            size_bytes=1000,
            headline=headline,
            layers=(layer,),
            operators=(),
            units=(),
            refusals={},
        ),
        goal=goal,
        settings=Request(batch_size=4, **settings),
    )


def searched(evaluator: Evaluator, number: int) -> schemas.Attempt:
    """Return attempt `number` as the search images judge it, on as many of them as the run looks at."""
    deployment = schemas.Deployment(runtime="onnxruntime", scheme="dynamic")
    seen = evaluator.search(schemas.Variant.BOTH, ref(f"both{number}"), deployment)
    return schemas.Attempt(
        number=number,
        plan=schemas.Plan(),
        pruned_model=ref(f"pruned{number}"),
        deployed=seen,
        accepted=keeps_accuracy(seen, evaluator.goal),
        reason="made",
    )


def truths_of(drops: Sequence[float]) -> dict[str, Truth]:
    """Return candidates that lose `drops` in truth, the fastest first."""
    fastest = 2.0 + 0.5 * len(drops)
    return {f"both{place}": Truth(drop, DISCORDANT, fastest - 0.5 * place) for place, drop in enumerate(drops, start=1)}


def final_choice(evaluator: Evaluator, num_attempts: int) -> FinalChoice:
    """Return what a run returns that has made so many attempts."""
    attempts = tuple(searched(evaluator, number) for number in range(1, num_attempts + 1))
    baseline = evaluator.evaluate_baseline(evaluator.acquired.search, evaluator.searched)
    return choose_final(evaluator, schemas.Journal(baseline=baseline, attempts=attempts))


def accuracy_row(root: Path, family: str, num_images: int, num_worlds: int) -> dict[str, Any]:
    """Return the shares of a family's worlds with a bad candidate met, the baseline returned, and certified wrongly."""
    drops, counts = FAMILIES[family], dict.fromkeys(("bad_met", "baseline_returned", "certified_wrongly"), 0)
    for seed in range(num_worlds):
        world = World(root, np.random.default_rng([seed, num_images, len(drops)]), truths_of(drops))
        final = final_choice(evaluator_in(world, num_images // 2, num_images - num_images // 2), len(drops))
        number = final.winner.attempt
        drop = 0.0 if number is None else drops[number - 1]
        counts["bad_met"] += drop >= BAD and final.verdict.outcome is schemas.Outcome.MET
        counts["baseline_returned"] += number is None
        counts["certified_wrongly"] += drop >= ALLOWED and final.verdict.certified
    shares = {name: count / num_worlds for name, count in counts.items()}
    return {"table": "accuracy", "images": num_images, "family": family, "worlds": num_worlds, **shares}


def speed_row(root: Path, busy: float, num_worlds: int) -> dict[str, Any]:
    """Return how often a speed's lower bound is above the truth, how often none is told, and how far off the estimate is in the worst tenth."""
    wrong, unproven, off = 0, 0, list[float]()
    for seed in range(num_worlds):
        noise = np.random.default_rng([seed, int(100 * busy), 7])
        world = World(root, noise, {"both1": Truth(0.0, 0.01, TRUE_SPEEDUP)}, 0.05, 0.03, busy)
        final = final_choice(evaluator_in(world, 1000, 1000), 1)
        speed = next(term for term in final.verdict.terms if term.name == "speed")
        wrong += speed.bound is not None and speed.bound > TRUE_SPEEDUP
        unproven += speed.bound is None
        off.append(speed.measured / TRUE_SPEEDUP)
    shares = {"bound_wrong": wrong / num_worlds, "unproven": unproven / num_worlds}
    return {"table": "speed", "busy": busy, "worlds": num_worlds, **shares, "times_off": float(np.quantile(off, 0.9))}


def budget_row(root: Path, pass_s: float, minutes: int, num_worlds: int) -> dict[str, Any]:
    """Return by how much of their budget runs end late, at most, and the fewest held-out images that a candidate was tested on.

    The search spends all that it may; the fastest two of its candidates lose a little too much.
    """
    late, fewest, tests = list[float](), list[int](), list[int]()
    drops = (1.2 * ALLOWED, 1.2 * ALLOWED, GOOD, GOOD, GOOD)
    for seed in range(num_worlds):
        noise = np.random.default_rng([seed, minutes, int(1000 * pass_s)])
        work = noise.uniform(1 - PLANNING_ERROR, 1 + PLANNING_ERROR)
        own = root / f"{pass_s}-{minutes}-{seed}"
        own.mkdir()
        world = World(own, noise, truths_of(drops), pass_s=pass_s, work=work)
        evaluator = evaluator_in(world, 2000, 4000, time_budget=f"{minutes}m")
        deadline, timesheet = evaluator.deadline, world.timesheet
        world.spend(20, evidence_passes(128, 24))
        stage = deadline.part(SEARCH_SHARE)
        while stage.allows(15 + 150 * pass_s):
            world.spend(15, 150)
        attempts, longest_s = list[schemas.Attempt](), 0.0
        while len(attempts) < len(drops) and deadline.allows(longest_s):
            started_s = timesheet.spent_s
            world.spend(10, 150 + 128 * PRUNE_PASSES)
            attempts.append(searched(evaluator, len(attempts) + 1))
            longest_s = max(longest_s, timesheet.spent_s - started_s)
        # What the search would do with any time that is left.
        while deadline.allows(10):
            world.spend(10, 0)
        baseline = evaluator.evaluate_baseline(evaluator.acquired.search, range(512))
        final = choose_final(evaluator, schemas.Journal(baseline=baseline, attempts=tuple(attempts)))
        world.spend(8, 150)
        late.append(timesheet.spent_s / (60.0 * minutes) - 1)
        tests.append(world.num_opened)
        if world.num_opened and final.heldout_winner.predictions:
            fewest.append(final.heldout_winner.predictions.num_images if final.winner.attempt else 1024)
    return {
        "table": "budget",
        "pass_s": pass_s,
        "minutes": minutes,
        "worlds": num_worlds,
        "latest": max(late),
        "late_on_average": float(np.mean(late)),
        "fewest_heldout": min(fewest, default=0),
        "tests": float(np.mean(tests)),
    }


def checks_of(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Return the checks that the shares keep their bounds: on average over the families, which are worlds drawn alike."""
    checks: list[Check] = []

    def average(name: str, own: Sequence[Mapping[str, Any]]) -> float:
        return float(np.mean([row[name] for row in own]))

    for num_images, (most_bad, most_baseline) in SETS.items():
        own = [row for row in rows if row.get("images") == num_images]
        bad, good = ([row for row in own if drop in FAMILIES[row["family"]]] for drop in (BAD, GOOD))
        wrong = max(row["certified_wrongly"] for row in own)
        checks += [
            Check.at_most(f"{num_images} images: certified wrongly, worst family", wrong, MAX_CERTIFIED),
            Check.at_most(f"{num_images} images: a bad candidate is met", average("bad_met", bad), most_bad),
            Check.at_most(
                f"{num_images} images: baseline returned beside a good one",
                average("baseline_returned", good),
                most_baseline,
            ),
        ]
    wrong = max(row["bound_wrong"] for row in rows if row["table"] == "speed")
    latest = max(row["latest"] for row in rows if row["table"] == "budget")
    fewest = min(row["fewest_heldout"] for row in rows if row["table"] == "budget")
    return [
        *checks,
        Check.at_most("speed: lower bound above the truth, worst share of busy sessions", wrong, 0.05),
        Check.at_most("budget: the latest run, share of its budget", latest, MAX_MISS),
        Check.at_least("budget: held-out images of the returned", fewest, 1024),
    ]


def drawn_rows(num_worlds: int) -> list[dict[str, Any]]:
    """Draw worlds for all three tables, printing each row."""
    memory = Path("/dev/shm")
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(*(f"{n} {v:.3g}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items()), flush=True)

    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        root = Path(scratch)
        for busy in BUSY:
            add(speed_row(root, busy, num_worlds))
        for pass_s, minutes in BUDGETS:
            add(budget_row(root, pass_s, minutes, max(num_worlds // 8, 1)))
        for num_images in SETS:
            for family in FAMILIES:
                add(accuracy_row(root, family, num_images, num_worlds))
    return rows


def main() -> int:
    """Draw, print, and return 1 where a check does not hold."""
    parser = parser_of(__doc__)
    parser.add_argument("--worlds", type=int, default=400)
    given = parser.parse_args()
    rows = drawn_rows(given.worlds)
    return finish(checks_of(rows), rows, given.json)


if __name__ == "__main__":
    raise SystemExit(main())
