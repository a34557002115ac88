"""Ranking: the finalists by what was measured of them in one session: the contract's terms, its objective, accuracy, bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from profiling_agent.benchmarking.race import compare
from profiling_agent.iteration.selection import lost, preference, size_ratio
from profiling_agent.records import Candidate, Evaluation, Goal, Race, RaceResult

# Two processes of one model hold nearly the same at most; below this share, who holds less is not told.
MEMORY_NOISE = 0.02


@dataclass(frozen=True)
class Ranking:
    """What finalists are ranked by; `memory` is each one's as a fraction of the baseline's, by the model's hash."""

    goal: Goal
    baseline: Evaluation
    race: Race
    memory: Mapping[str, float | None]

    def order(self, finalists: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return those that finished the race, best first.

        Of those whose objective can't be told from the leader's, the more accurate comes first, then the smaller.
        """
        waiting = [one for one in finalists if self.race.reason(one.evaluation.model) is None]
        order: list[Candidate] = []
        while waiting:
            best = min(self._beside_the_leader(waiting), key=lambda one: (lost(one), self._size(one)))
            waiting.remove(best)
            order.append(best)
        return tuple(order)

    def keeps_terms(self, candidate: Candidate) -> bool:
        """Return whether the contract is content with all but the accuracy of one that finished the race."""
        return not any(self._key(candidate)[:3])

    def runner_up(self, order: Sequence[Candidate]) -> Candidate | None:
        """Return who else might be the fastest: of those that can't be told from the leader, the fastest but the first."""
        if self.goal.objective != "speed":
            return None
        others = [one for one in self._beside_the_leader(order) if one != order[0]]
        return max(others, key=lambda one: self._result(one).speedup, default=None)

    def _beside_the_leader(self, waiting: Sequence[Candidate]) -> list[Candidate]:
        leader = min(waiting, key=self._key)
        return [one for one in waiting if self._key(one)[:3] == self._key(leader)[:3] and self._is_near(one, leader)]

    def _is_near(self, candidate: Candidate, leader: Candidate) -> bool:
        if self.goal.objective == "speed":
            return not compare(self._result(candidate), self._result(leader)).is_shown_slower
        own, best = self._key(candidate)[3], self._key(leader)[3]
        return own == best or (self.goal.objective == "memory" and own <= best * (1 + MEMORY_NOISE))

    def _key(self, candidate: Candidate) -> tuple[bool, bool, bool, float]:
        return preference(
            self.goal,
            size=self._size(candidate),
            speedup=self._result(candidate).speedup,
            memory=self.memory.get(candidate.evaluation.model.sha256),
        )

    def _size(self, candidate: Candidate) -> float:
        return size_ratio(candidate.evaluation, self.baseline)

    def _result(self, candidate: Candidate) -> RaceResult:
        return self.race.result_of(candidate.evaluation.model)
