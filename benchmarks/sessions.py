"""Sessions of a race, a number of them that is fixed beforehand, and what they say together.

Each session starts all processes anew, and what two sessions differ by is most of what a speed-up is uncertain by: with
one session a 95% interval covered 43 to 92% of what is so, with three and a normal quantile still too little. So a
headline pools five, by Student's t over them.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from checks import Estimate, stamped

from profiling_agent.errors import JobError
from profiling_agent.lib.machine import available_bytes
from profiling_agent.measure.session import FREE_FRACTION, RaceSession, SessionLimits, TimedProcess, run_session
from profiling_agent.measure.statistics import log_ratios, score_over_sessions
from profiling_agent.measure.worker import WorkerSetup
from profiling_agent.schemas import NUM_SESSIONS


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--sessions`, at least two."""
    parser.add_argument(
        "--sessions",
        type=_at_least_two,
        default=NUM_SESSIONS,
        help=f"sessions that are pooled, all of them (default: {NUM_SESSIONS})",
    )


def _at_least_two(text: str) -> int:
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number} has no spread; ask for at least 2")
    return number


def pool(log_of_sessions: Sequence[float]) -> Estimate:
    """Return the geometric mean of the ratios whose logarithms are given, and its interval by Student's t over them.

    Raises:
        ValueError: there are fewer than two.
    """
    if len(log_of_sessions) < 2:
        raise ValueError(f"{len(log_of_sessions)} sessions have no spread; at least 2 are needed")
    score = score_over_sessions(log_of_sessions)
    return Estimate(score.speedup, score.low, score.high)


@dataclass
class Sessions:
    """One field of models, by their places; what each session measured of them."""

    commands: Sequence[Sequence[str]]
    start: WorkerSetup
    limits: SessionLimits
    held: list[RaceSession] = field(default_factory=list[RaceSession])
    stamps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def hold(self, *, chooses: bool = False) -> None:
        """Hold one more session, all processes anew, each as it would run deployed.

        One that `chooses` goes on without who fails or is far behind; another is all of them from beginning to end.

        Raises:
            JobError: the first model crashed or hung, or any did where the session doesn't choose; or memory doesn't hold them all.
        """
        with ExitStack() as stack:
            processes = {
                place: stack.enter_context(TimedProcess(command, self.start))
                for place, command in enumerate(self.commands)
            }
            # The product would have them take turns in parts; here all that memory holds are of one session, and a table without some isn't one.
            limits = replace(self.limits, memory_bytes=int(FREE_FRACTION * available_bytes()))
            session = run_session(processes, limits=limits, seed=len(self.held), chooses=chooses)
        if session.waiting:
            raise JobError(f"there is no memory for {len(session.waiting)} of {len(self.commands)} models at once")
        self.held.append(session)
        self.stamps.append(stamped({}, session=len(self.held)))

    @property
    def dropped(self) -> dict[int, str]:
        """Return who dropped out of any session, with why."""
        return {place: reason for session in self.held for place, reason in session.lost.items()}

    @property
    def lasting(self) -> list[int]:
        """Return the places of those that lasted through all sessions."""
        places = range(len(self.commands))
        return [
            place for place in places if all(place in session.samples.keys() - session.lost for session in self.held)
        ]

    def median_ms(self, place: int) -> float:
        """Return the median time of a pass over all sessions."""
        return float(np.median([ms for session in self.held for sample in session.samples[place] for ms in sample]))

    def logs(self, place: int, other: int = 0) -> list[float]:
        """Return the logarithm of how many times as fast as `other` a model was, the median over each session's repeats."""
        ratios = (log_ratios(session.samples[place], session.samples[other]) for session in self.held)
        return [float(np.median(of_session)) for of_session in ratios]

    def told(self, place: int) -> dict[str, Any]:
        """Return what a row says of its sessions: their numbers, and of each its stamp and the logarithm over the first."""
        logs = zip(self.stamps, self.logs(place), strict=True)
        return {
            "session": [stamp["session"] for stamp in self.stamps],
            "sessions": [stamp | {"log_over_first": log} for stamp, log in logs],
        }

    def over(self, place: int, other: int = 0) -> Estimate:
        """Return how many times as fast as `other` a model is, over all sessions; both lasted."""
        return Estimate(1.0, 1.0, 1.0) if place == other else pool(self.logs(place, other))
