"""Who is called slower, and how often that has to be shown. Processes here say their times from a script."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest

from profiling_agent.benchmarking.race import noise_warning, race_until_clear
from profiling_agent.benchmarking.session import MAX_REPEATS, MAX_RUNS, SessionLimits
from profiling_agent.benchmarking.statistics import detectable, log_ratios, pool
from profiling_agent.errors import JobError
from profiling_agent.records import Race

LIMITS = SessionLimits(seconds_per_sample=0.1, min_repeats=8)
SHORT = SessionLimits(seconds_per_sample=0.1, min_repeats=12, max_seconds=0)


class Scripted:
    """A process whose passes take what `times` says next; None is a crash."""

    def __init__(self, times: Iterator[float | None], *, loads: bool = True) -> None:
        self.times = times
        self.loads = loads
        self.is_ready = False
        self.samples: list[int] = []

    def start(self) -> None:
        self.is_ready = False

    def wait_until_ready(self) -> None:
        if not self.loads:
            raise JobError("there is no model")
        self.is_ready = True

    def take_sample(self, runs: int) -> list[float]:
        assert self.is_ready
        self.samples.append(runs)
        took = next(self.times)
        if took is None:
            raise JobError("it died of SIGFPE")
        return [took] * runs


def steady(milliseconds: float) -> Scripted:
    noise = random.Random(0)
    return Scripted(milliseconds * noise.uniform(0.99, 1.01) for _ in itertools.count())


def per_session(choose: Callable[[int], float]) -> Scripted:
    """A process with one time per session, which is a sample to warm up and eight repeats."""
    return Scripted(choose(sample // (LIMITS.min_repeats + 1)) for sample in itertools.count())


def run(*processes: Scripted, limits: SessionLimits = LIMITS):
    def start_session(chosen: Sequence[int]):
        return nullcontext({index: processes[index] for index in chosen})

    return race_until_clear(start_session, len(processes), limits=limits)


def test_a_model_raced_against_its_equal_is_neither_slower_nor_faster():
    result = run(steady(10), steady(10))

    assert result.scores[1].low <= 1 <= result.scores[1].high
    assert result.num_sessions == 1


def test_a_much_faster_model_is_clear_after_one_race():
    result = run(steady(20), steady(10))

    baseline, faster = result.scores[0], result.scores[1]
    assert faster.speedup == pytest.approx(2, rel=0.02)
    assert 1.8 < faster.low <= faster.high < 2.2
    assert (baseline.speedup, baseline.low, baseline.high) == (1, 1, 1)
    assert result.num_sessions == 1


def test_a_slower_model_is_shown_slower_three_times():
    result = run(steady(10), steady(11.1))

    assert result.scores[1].is_shown_slower
    assert (result.num_sessions, result.num_repeats) == (3, 3 * LIMITS.min_repeats)


def test_a_model_that_is_a_little_faster_has_to_show_it_three_times():
    result = run(steady(10), steady(9))

    assert result.scores[1].is_shown_faster
    assert result.num_sessions == 3


def test_a_session_that_flattered_is_made_up_for_by_the_next():
    flattered = per_session(lambda number: 9 if number == 0 else 10.2)

    result = run(per_session(lambda _: 10), flattered)

    assert result.num_sessions == 2
    assert result.scores[1].low <= 1 <= result.scores[1].high
    assert result.scores[1].speedup == pytest.approx(math.sqrt(10 / 9 * 10 / 10.2))


def test_only_those_in_doubt_race_again():
    fast, slow = steady(7), steady(11.5)

    result = run(steady(10), fast, slow)

    assert result.num_sessions == 3
    assert result.scores[2].is_shown_slower
    assert len(slow.samples) - 3 == 3 * (len(fast.samples) - 1) == 3 * LIMITS.min_repeats


def test_the_hopeless_stop_early_and_keep_their_score():
    noisy = random.Random(3)
    best = Scripted(2 * noisy.uniform(0.7, 1.3) for _ in itertools.count())
    hopeless = steady(9)

    result = run(steady(10), best, hopeless)

    assert len(hopeless.samples) - 1 == LIMITS.min_repeats < len(best.samples) - 1
    assert result.scores[2].speedup == pytest.approx(10 / 9, rel=0.05)
    assert result.num_sessions == 1


@pytest.mark.parametrize(
    ("loser", "reason"),
    [
        (Scripted(iter([]), loads=False), "there is no model"),
        (Scripted(iter([10.0, 10.0, None])), "it died of SIGFPE"),
        (Scripted(iter([None])), "it died of SIGFPE"),
    ],
    ids=["does not load", "crashes in a repeat", "crashes when warming up"],
)
def test_who_fails_drops_out_with_the_reason_and_the_others_go_on(loser: Scripted, reason: str):
    result = run(steady(10), loser, steady(5))

    assert result.dropped == {1: reason}
    assert sorted(result.scores) == [0, 2]
    assert result.scores[2].speedup == pytest.approx(2, rel=0.02)


def test_who_fails_in_a_later_race_has_no_score():
    ends = Scripted(itertools.chain([12.0] * (LIMITS.min_repeats + 3), itertools.repeat(None)))

    result = run(steady(10), ends)

    assert result.dropped == {1: "it died of SIGFPE"}
    assert sorted(result.scores) == [0]
    assert result.num_sessions == 2


def test_the_race_ends_with_its_baseline():
    with pytest.raises(JobError, match="SIGFPE"):
        run(Scripted(iter([10.0, 10.0, None])), steady(5))


def test_what_differs_by_less_than_the_noise_is_called_too_noisy_to_tell():
    calm = [
        pool([log_ratios([[10.0]] * 9, [[10.0]] * 9)], [], seed=0, process_spread=process_spread)
        for process_spread in (0.01, 0.1)
    ]

    halves = [detectable([score]) for score in calm]

    assert halves[0] == pytest.approx(1.96 * 0.01, rel=0.1)
    assert halves[1] == pytest.approx(1.96 * 0.1, rel=0.2)
    assert noise_warning(Race(results=(), num_repeats=9, num_sessions=1, detectable=halves[0])) is None
    warning = noise_warning(Race(results=(), num_repeats=9, num_sessions=1, detectable=0.213))
    assert warning is not None
    assert "differ by less than 21%" in warning


def test_three_sessions_tell_apart_what_one_can_not():
    ratios = log_ratios([[10.0]] * 9, [[10.0]] * 9)

    assert detectable([pool([ratios] * 3, [], seed=0)]) < 0.7 * detectable([pool([ratios], [], seed=0)])


def test_drift_that_slows_everybody_changes_no_speedup():
    fast, slow = ([[base * (1 + repeat)] for repeat in range(20)] for base in (5.0, 10.0))

    faster = pool([log_ratios(fast, slow)], [], seed=0, process_spread=0.0)

    assert (faster.speedup, faster.low, faster.high) == pytest.approx((2, 2, 2))


def test_noise_widens_the_interval():
    rng = random.Random(1)
    baseline = [[10 * rng.uniform(0.9, 1.1)] for _ in range(20)]

    calm = pool([log_ratios([[sample[0] / 2] for sample in baseline], baseline)], [], seed=0)
    noisy = pool([log_ratios([[5 * rng.uniform(0.7, 1.3)] for _ in range(20)], baseline)], [], seed=0)

    assert calm.width < noisy.width


def test_sessions_that_disagree_widen_the_interval():
    first, second = (log_ratios([[time]] * 9, [[10.0]] * 9) for time in (9.0, 11.0))

    assert pool([first, second], [], seed=0).width > 2 * pool([first, first], [], seed=0).width


def test_repeats_go_on_until_intervals_are_narrow_but_not_for_ever():
    rng = random.Random(2)
    timed = Scripted(10 * rng.uniform(0.2, 2) for _ in itertools.count())

    result = run(steady(10), timed)

    assert LIMITS.min_repeats < result.num_repeats <= MAX_REPEATS * result.num_sessions


def test_short_passes_are_repeated_within_a_sample_and_samples_are_kept():
    quick, long = steady(0.1), steady(60)

    result = run(long, quick)

    assert set(quick.samples[1:]) == {MAX_RUNS}
    assert set(long.samples[1:]) == {1}
    assert [len(score.samples_ms) for score in result.scores.values()] == [
        result.num_repeats,
        result.num_repeats * MAX_RUNS,
    ]


def test_every_session_starts_anew():
    pairs: list[dict[int, Scripted]] = []

    def start_session(chosen: Sequence[int]):
        pairs.append({index: steady((10, 11.5)[index]) for index in chosen})
        return nullcontext(pairs[-1])

    race_until_clear(start_session, 2, limits=LIMITS)

    assert len(pairs) == 3
    assert all(timed.samples for pair in pairs for timed in pair.values())


def test_any_two_models_can_be_compared():
    result = run(steady(10), steady(5), steady(2.5))

    assert result.against(2, 1).speedup == pytest.approx(2, rel=0.02)
    assert result.against(1, 2).speedup == pytest.approx(0.5, rel=0.02)


def test_all_race_as_often_as_is_asked():
    processes = (steady(10), steady(2))

    result = race_until_clear(
        lambda chosen: nullcontext({i: processes[i] for i in chosen}), 2, limits=LIMITS, min_sessions=2
    )

    assert result.num_sessions == 2
    assert sorted(result.ratios[1]) == [0, 1]


def drawn(milliseconds: float, noise: random.Random) -> Scripted:
    """A process with a speed of its own, 1.25% either way, whose passes vary by 3%, one in twenty by 15% more."""
    own = milliseconds * math.exp(noise.gauss(0, 0.0125))
    return Scripted(own * math.exp(noise.gauss(0, 0.03) + 0.15 * (noise.random() < 0.05)) for _ in itertools.count())


@pytest.mark.parametrize(("milliseconds", "said"), [(10, "equal"), (11, "slower")])
def test_what_is_so_is_said_in_95_of_100_races_of_processes_that_differ(milliseconds: float, said: str):
    found = {"equal": 0, "slower": 0, "faster": 0}
    for number in range(100):
        noise = random.Random(number)

        def start_session(chosen: Sequence[int], noise: random.Random = noise):
            return nullcontext({index: drawn((10, milliseconds)[index], noise) for index in chosen})

        score = race_until_clear(start_session, 2, limits=SHORT, seed=number).scores[1]
        found["slower" if score.is_shown_slower else "faster" if score.is_shown_faster else "equal"] += 1

    assert found[said] >= 95
