"""Models take turns on one machine, one process each: which is faster, and how sure is that? No torch here."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from profiling_agent.benchmarking.contender import Contender, racer_command
from profiling_agent.benchmarking.latency import latency_stats
from profiling_agent.benchmarking.session import MAX_ROUNDS as MAX_ROUNDS
from profiling_agent.benchmarking.session import MAX_RUNS as MAX_RUNS
from profiling_agent.benchmarking.session import Heat, Pace, Runner, hopeless, run_heat
from profiling_agent.benchmarking.statistics import PROCESS_LUCK, Ratios, Score, detectable, log_ratios, pool
from profiling_agent.benchmarking.turns import Start
from profiling_agent.progress import Progress, silent
from profiling_agent.records import ArtifactRef, Dropped, Lap, Race, Variant

# A model is called slower, or faster by less than `NEAR` or with an interval as wide as `WIDE`, only where every one of
# this many line-ups leaves it so.
MAX_RACES = 3
NEAR, WIDE = 1.25, 0.5
# Equal so far, but this far from it as a share of the interval's width (a bound of the interval lies at about a half):
# a model that is 10% slower often looks like that after one line-up.
UNDECIDED = 0.35
# A race that can't tell apart what differs by less than this is worth a warning.
TOO_NOISY = 0.05

LineUp = Callable[[Sequence[int]], AbstractContextManager[Mapping[int, Runner]]]


@dataclass(slots=True)
class Result:
    """How a race ended, by the contenders' places: scores of all but those that dropped out.

    `ratios` are log(first's time / its time) of every round, by line-up; not every contender is in each line-up.
    """

    scores: dict[int, Score] = field(default_factory=dict[int, Score])
    dropped: dict[int, str] = field(default_factory=dict[int, str])
    ratios: dict[int, dict[int, Ratios]] = field(default_factory=dict[int, dict[int, Ratios]])
    num_rounds: int = 0
    num_races: int = 0
    luck: float = PROCESS_LUCK

    @property
    def detectable(self) -> float:
        """Return the share by which two equal models would have to differ to be told apart."""
        return detectable([result for index, result in self.scores.items() if index])

    def against(self, index: int, other: int, *, seed: int = 0) -> Score:
        """Return the score of one contender against any other, over the line-ups that both were in."""
        if index == other:
            return Score(self.scores[index].samples_ms, 1.0, 1.0, 1.0)
        own, others = self.ratios[index], self.ratios[other]
        rounds = [_paired(own[line_up], others[line_up]) for line_up in sorted(own.keys() & others.keys())]
        return pool(rounds, self.scores[index].samples_ms, seed=seed, luck=self.luck)


def _paired(own: Ratios, others: Ratios) -> Ratios:
    both = min(len(own), len(others))
    return own[:both] - others[:both]


def race_until_clear(  # noqa: PLR0913 (how a race is run belongs to its result)
    line_up: LineUp,
    num_contenders: int,
    *,
    pace: Pace | None = None,
    seed: int = 0,
    progress: Progress = silent,
    luck: float = PROCESS_LUCK,
    min_races: int = 1,
) -> Result:
    """Return each contender's score against the first.

    After `min_races` of all, those in doubt race the first again, three races at most, each time in new processes, and
    are scored on all their races together: two processes of equal models can differ by several per cent for as long as
    they live, which no number of turns averages out. In doubt is who is shown slower so far, a little faster, or faster by
    nobody knows how much, or is neither by a hair, and is not hopeless.

    Raises:
        JobError: the first contender crashed or hung.
    """
    result, samples = Result(luck=luck), dict[int, list[float]]()
    entered = list(range(num_contenders))
    while result.num_races < min_races or (len(entered) > 1 and result.num_races < MAX_RACES):
        with line_up(entered) as runners:
            heat = run_heat(runners, pace=pace or Pace(), seed=seed + result.num_races, progress=progress)
        _take_down(heat, result, samples)
        result.scores = {
            index: _score(index, result, samples[index], seed=seed) for index in samples.keys() - result.dropped.keys()
        }
        lasting = [index for index in entered if index not in result.dropped]
        entered = lasting if result.num_races < min_races else [0, *_doubtful(result.scores, lasting)]
    return result


def _take_down(heat: Heat, result: Result, samples: dict[int, list[float]]) -> None:
    for index, turns in heat.turns.items():
        ratios = log_ratios(turns, heat.turns[0])
        result.ratios.setdefault(index, {})[result.num_races] = ratios
        samples.setdefault(index, []).extend(sample for turn in turns for sample in turn)
    result.dropped |= heat.lost
    result.num_rounds += heat.num_rounds
    result.num_races += 1


def _score(index: int, result: Result, samples_ms: list[float], *, seed: int) -> Score:
    if index == 0:
        return Score(samples_ms, 1.0, 1.0, 1.0)
    return pool(list(result.ratios[index].values()), samples_ms, seed=seed, luck=result.luck)


def _doubtful(scores: Mapping[int, Score], entered: Sequence[int]) -> list[int]:
    without_hope = hopeless({index: result for index, result in scores.items() if index})
    return [index for index in entered if index in scores.keys() - without_hope - {0} and _is_doubtful(scores[index])]


def _is_doubtful(score: Score) -> bool:
    if score.is_shown_faster:
        return score.low < NEAR or score.width > WIDE
    return score.is_shown_slower or abs(math.log(score.speedup)) > UNDECIDED * math.log(score.high / score.low)


def processes(commands: Sequence[Sequence[str]], start: Start) -> LineUp:
    """Return what lines up a process for each of the chosen `commands` and ends them all after the race."""

    @contextmanager
    def line_up(chosen: Sequence[int]) -> Generator[Mapping[int, Runner]]:
        with ExitStack() as stack:
            yield {index: stack.enter_context(Contender(commands[index], start)) for index in chosen}

    return line_up


def race(  # noqa: PLR0913 (how a race is run belongs to its result)
    entries: Sequence[tuple[Variant, ArtifactRef]],
    *,
    root: Path,
    batch_size: int,
    device: str = "cpu",
    num_threads: int | None = None,
    seed: int = 0,
    pace: Pace | None = None,
    progress: Progress = silent,
) -> Race:
    """Return one lap per entry that lasted, in their order; the first is the baseline. Paths are relative to `root`.

    Every model loads in a process of its own; then they take turns, one at a time, in a shuffled order each round. A
    speed-up is the median over rounds of baseline time over candidate time in the same round, its interval a
    bootstrap over rounds widened by what processes of equal models differ by. Whoever is in doubt races again.

    Raises:
        JobError: the baseline crashed or hung; says what it said last.
    """
    start = Start(batch_size=batch_size, device=device, num_threads=num_threads)
    line_up = processes([racer_command(root / ref.path) for _, ref in entries], start)
    result = race_until_clear(line_up, len(entries), pace=pace, seed=seed, progress=progress)
    return Race(
        laps=tuple(_lap(*entries[index], result.scores[index], batch_size) for index in sorted(result.scores)),
        num_rounds=result.num_rounds,
        num_races=result.num_races,
        dropped=tuple(
            Dropped(variant=entries[index][0], model=entries[index][1], reason=reason)
            for index, reason in sorted(result.dropped.items())
        ),
        detectable=result.detectable,
    )


def noise_warning(race: Race) -> str | None:
    """Return a line that says what difference the race could not have seen, None where it could tell 5% apart."""
    if race.detectable <= TOO_NOISY:
        return None
    return (
        f"too noisy to tell candidates apart that differ by less than {race.detectable:.0%}: "
        "measure again while nothing else runs on this machine"
    )


def _lap(variant: Variant, model: ArtifactRef, result: Score, batch_size: int) -> Lap:
    return Lap(
        variant=variant,
        model=model,
        latency=latency_stats(result.samples_ms, batch_size),
        speedup=result.speedup,
        speedup_low=result.low,
        speedup_high=result.high,
    )
