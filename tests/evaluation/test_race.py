"""Who is called slower, and how often that has to be shown. Runners here say their times from a script."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from profiling_agent.evaluation.race import MAX_ROUNDS, MAX_RUNS, Pace, race_until_clear
from profiling_agent.evaluation.scores import score

PACE = Pace(seconds_per_turn=0.1, min_rounds=8)


class Scripted:
    """A runner whose passes take what `times` says next."""

    def __init__(self, times: Iterator[float]) -> None:
        self.times = times
        self.is_ready = False
        self.turns: list[int] = []

    def wait_until_ready(self) -> None:
        self.is_ready = True

    def take_turn(self, runs: int) -> list[float]:
        assert self.is_ready
        self.turns.append(runs)
        return [next(self.times)] * runs


def steady(milliseconds: float) -> Scripted:
    noise = random.Random(0)
    return Scripted(milliseconds * noise.uniform(0.99, 1.01) for _ in itertools.count())


def per_race(choose: Callable[[int], float]) -> Scripted:
    """A runner with one time per race, which is a turn to warm up and eight rounds."""
    return Scripted(choose(turn // (PACE.min_rounds + 1)) for turn in itertools.count())


def lined_up(*runners: Scripted):
    return lambda: nullcontext(runners)


def test_a_model_raced_against_its_equal_is_no_slower():
    (_, equal), _, num_races = race_until_clear(lined_up(steady(10), steady(10)), pace=PACE)

    assert equal.low <= 1 <= equal.high or abs(equal.speedup - 1) < 0.02
    assert num_races <= 3


def test_a_faster_model_is_clear_after_one_race():
    (baseline, faster), _, num_races = race_until_clear(lined_up(steady(20), steady(10)), pace=PACE)

    assert faster.speedup == pytest.approx(2, rel=0.02)
    assert 1.9 < faster.low <= faster.high < 2.1
    assert (baseline.speedup, baseline.low, baseline.high) == (1, 1, 1)
    assert num_races == 1


def test_a_slower_model_is_shown_slower_three_times():
    (_, slower), num_rounds, num_races = race_until_clear(lined_up(steady(10), steady(15)), pace=PACE)

    assert slower.is_shown_slower
    assert num_races == 3
    assert num_rounds == 3 * PACE.min_rounds


def test_one_race_that_does_not_show_it_clears_a_model():
    unlucky = per_race(lambda number: 15 if number == 0 else 10)

    (_, cleared), _, num_races = race_until_clear(lined_up(per_race(lambda _: 10), unlucky), pace=PACE)

    assert num_races == 2
    assert not cleared.is_shown_slower


def test_a_model_that_was_cleared_stays_so_while_another_is_in_doubt():
    fair_at_first = per_race(lambda number: 10 if number == 0 else 15)
    always_slow = per_race(lambda _: 20)

    (_, cleared, slow), _, num_races = race_until_clear(
        lined_up(per_race(lambda _: 10), fair_at_first, always_slow), pace=PACE
    )

    assert num_races == 3
    assert not cleared.is_shown_slower
    assert slow.is_shown_slower


def test_drift_that_slows_everybody_changes_no_speedup():
    fast, slow = ([[base * (1 + round_number)] for round_number in range(20)] for base in (5.0, 10.0))

    _, faster = score([slow, fast], seed=0)

    assert (faster.speedup, faster.low, faster.high) == (2, 2, 2)


def test_noise_widens_the_interval():
    rng = random.Random(1)
    baseline = [[10 * rng.uniform(0.9, 1.1)] for _ in range(20)]

    _, calm = score([baseline, [[turn[0] / 2] for turn in baseline]], seed=0)
    _, noisy = score([baseline, [[5 * rng.uniform(0.7, 1.3)] for _ in range(20)]], seed=0)

    assert calm.width < noisy.width


def test_rounds_go_on_until_intervals_are_narrow_but_not_for_ever():
    rng = random.Random(2)
    runner = Scripted(10 * rng.uniform(0.2, 2) for _ in itertools.count())

    _, num_rounds, num_races = race_until_clear(lined_up(steady(10), runner), pace=PACE)

    assert PACE.min_rounds < num_rounds <= MAX_ROUNDS * num_races


def test_short_passes_are_repeated_within_a_turn_and_samples_are_kept():
    quick, long = steady(0.1), steady(60)

    scores, num_rounds, _ = race_until_clear(lined_up(long, quick), pace=PACE)

    assert set(quick.turns[1:]) == {MAX_RUNS}
    assert set(long.turns[1:]) == {1}
    assert [len(result.samples_ms) for result in scores] == [num_rounds, num_rounds * MAX_RUNS]


def test_every_race_lines_up_anew():
    pairs = []

    def line_up():
        pairs.append((steady(10), steady(15)))
        return nullcontext(pairs[-1])

    race_until_clear(line_up, pace=PACE)

    assert len(pairs) == 3
    assert all(runner.turns for pair in pairs for runner in pair)
