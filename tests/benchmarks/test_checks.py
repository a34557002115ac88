import json
import math

import pytest
from checks import Check, Estimate, commit, finish, stamped
from sessions import Sessions, pool

from profiling_agent.measure.session import RaceSession, SessionLimits
from profiling_agent.measure.worker import Start


def test_a_check_holds_at_the_worse_end():
    wide, narrow = Estimate(1.16, 1.05, 1.27), Estimate(1.16, 1.15, 1.17)

    assert not Check.at_least("over the peer", wide, 1.15).holds
    assert Check.at_least("over the peer", narrow, 1.15).holds
    assert not Check.at_most("points lost", Estimate(0.5, 0.1, 1.1), 1.0).holds
    assert Check.at_most("points lost", Estimate(0.5, 0.1, 0.9), 1.0).holds
    assert Check.at_most("bytes", 3, 3).holds
    assert str(Check.at_least("over the peer", wide, 1.15)) == "FAILS  over the peer: 1.16, at worst 1.05 (bound 1.15)"


def test_sessions_are_pooled_by_students_t():
    # Mean 0.2, standard deviation 0.1, of three: 4.303 * 0.1 / sqrt(3) = 0.2484.
    pooled = pool([0.1, 0.2, 0.3])

    assert pooled.value == pytest.approx(math.exp(0.2))
    assert (pooled.low, pooled.high) == pytest.approx((math.exp(0.2 - 0.24841), math.exp(0.2 + 0.24841)), rel=1e-4)
    with pytest.raises(ValueError, match="at least 2"):
        pool([0.1])


def test_models_are_compared_within_sessions_over_the_repeats_that_both_were_in():
    held = [
        RaceSession(samples={0: [[4.0], [4.0], [4.0]], 1: [[2.0], [2.0]], 2: [[1.0], [1.0], [9.0]]}),
        RaceSession(samples={0: [[8.0], [8.0]], 1: [[4.0], [4.0]], 2: [[2.0], [2.0]]}),
    ]
    sessions = Sessions([["a"], ["b"], ["c"]], Start(batch_size=1, device="cpu"), SessionLimits(), held=held)

    assert sessions.over(1) == Estimate(2.0, 2.0, 2.0)
    assert sessions.over(2, 1).value == pytest.approx(2.0)
    assert sessions.over(0) == Estimate(1.0, 1.0, 1.0)
    assert sessions.median_ms(1) == 3.0


def test_who_drops_out_of_one_session_has_not_lasted():
    held = [RaceSession(samples={0: [[1.0]]}, lost={1: "it crashed"}), RaceSession(samples={0: [[1.0]], 1: [[1.0]]})]
    sessions = Sessions([["a"], ["b"]], Start(batch_size=1, device="cpu"), SessionLimits(), held=held)

    assert sessions.lasting == [0]
    assert sessions.dropped == {1: "it crashed"}


def test_rows_say_what_they_were_measured_with(tmp_path):
    path = tmp_path / "rows.json"
    own = stamped({"speedup": 2.0}, session=4)

    assert finish([Check.at_most("one", 2, 1)], [own, {"a": 1, "commit": "abc1234"}], path) == 1

    first, second = json.loads(path.read_text())["rows"]
    assert first == own
    assert (first["session"], first["commit"]) == (4, commit())
    assert first["measured_at"].endswith("+00:00")
    assert (second["session"], second["commit"]) == (1, "abc1234")
