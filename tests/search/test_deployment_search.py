"""The deployment search on scripted jobs: each deployment's conversion, answers and times are made up; the decisions are real."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_records
from search.scripted import Jobs, deployed, deployment, evaluator, name_of, open_journal

from profiling_agent.errors import JobError, QuantizationError
from profiling_agent.jobs import tasks
from profiling_agent.schemas import DeploymentSearch, LayerCost, Race, Status, Tuned
from profiling_agent.search.deployments import ASKED_SCHEMES, DeploymentChoices, is_promising
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.selection import rejudged

NUM_IMAGES = 2000


@dataclass
class Made:
    """What a deployment is made to do."""

    speedup: float = 2.0
    lost: int = 0
    size_bytes: int = 1000
    distance: float = 0.0
    kl: float = 0.0
    fails: Exception | None = None
    crashes: bool = False


@dataclass
class Script(Jobs):
    """Conversions, answers and times as each deployment is made to have them."""

    deployments: dict[str, Made] = field(default_factory=dict[str, Made])
    kept: tuple[str, ...] = ()

    @property
    def converted(self) -> list[str]:
        return [task.deployment.name for task in self.of(tasks.DeployTask)]

    def shards_of(self, runtime: str) -> set[int]:
        return {task.shard for task in self.of(tasks.EvaluateTask) if runtime in task.model.path}

    def TuneTask(self, _task):  # noqa: N802
        rows = [LayerCost(layer=name, kl=1.0, macs_share=0.01, latency_share=0.01, kept=True) for name in self.kept]
        return Tuned(layers=tuple(rows), kl=0.1, num_images=32)

    def DeployTask(self, task):  # noqa: N802
        does = self.deployments[task.deployment.name]
        if does.fails:
            raise does.fails
        return deployed(task, task.deployment.name, does.size_bytes, distance=does.distance, kl=does.kl)

    def EvaluateTask(self, task):  # noqa: N802
        does = self.deployments.get(name_of(task.model), Made())
        num_images = len(task.split.rows(task.shard))
        is_wrong = np.arange(num_images) < does.lost * num_images // NUM_IMAGES
        return self.evaluated(task, is_wrong, size_bytes=does.size_bytes)

    def RaceTask(self, task):  # noqa: N802
        results, dropped = [], {}
        for ref in task.models:
            does = self.deployments.get(name_of(ref), Made(speedup=1.0))
            if does.crashes:
                dropped[ref.path] = "died of SIGFPE"
                continue
            fast = does.speedup
            results.append(sample_records.race_result(name_of(ref), fast, fast * 0.97, fast * 1.03))
        return Race(results=tuple(results), num_sessions=1, dropped=dropped)


def evaluator_of(
    root: Path,
    deployments: dict[str, Made],
    *,
    kept: tuple[str, ...] = (),
    scripted: type[Script] = Script,
    pass_s: float = 0.0005,
    choices: DeploymentChoices | None = None,
    **asked,
) -> tuple[Evaluator, Script]:
    script = scripted(root, {"m0": Made(speedup=1.0, size_bytes=4000)} | deployments, kept)
    found = evaluator(
        script,
        num_images=NUM_IMAGES,
        baseline=sample_records.ref("m0", size_bytes=4000),
        profile=sample_records.profile(pass_s=pass_s),
        choices=choices,
        **asked,
    )
    return found, script


def deployment_search(
    root: Path, deployments: dict[str, Made], *, is_named: bool = False, **asked: Any
) -> tuple[DeploymentSearch, Script]:
    supported: dict[Any, Any] = defaultdict(list)
    for runtime, scheme in (name.split() for name in deployments):
        supported[runtime].append(scheme)
    choices = DeploymentChoices(supported, ASKED_SCHEMES["auto"], is_named=is_named)
    held, script = evaluator_of(root, deployments, choices=choices, **asked)
    search = open_journal(held).deployment_search
    assert search is not None
    return search, script


def chosen(search: DeploymentSearch) -> str | None:
    return search.chosen and search.chosen.name


class Timed(Script):
    """Jobs of which each conversion takes a minute."""

    def DeployTask(self, task):  # noqa: N802
        self.timesheet.note(f"deploy-{len(self.asked)}", 60.0)
        return super().DeployTask(task)


def reasons(held: DeploymentSearch) -> dict[str, str]:
    return {option.deployment.name: option.reason for option in held.options}


UNLIKE = {
    "eager dynamic": Made(speedup=5.0, size_bytes=1200),
    "openvino static": Made(speedup=2.0, size_bytes=1000),
    "onnxruntime dynamic": Made(speedup=3.0, size_bytes=1100),
}


@pytest.mark.parametrize(
    ("tried", "goal", "expected"),
    [
        ({"eager dynamic": Made(), "openvino static": Made(speedup=4.0)}, {}, "openvino static"),
        ({"openvino bfloat16": Made(speedup=6.0, size_bytes=2100), "eager dynamic": Made()}, {}, "eager dynamic"),
        (UNLIKE, {"objective": "speed"}, "eager dynamic"),
        (UNLIKE, {"objective": "size"}, "openvino static"),
        # Nothing that is shown slower than the baseline.
        ({"eager dynamic": Made(speedup=0.9), "eager bfloat16": Made(speedup=0.8)}, {}, None),
        ({"eager dynamic": Made(speedup=0.9)}, {}, None),
    ],
)
def test_what_keeps_the_contract_is_chosen_and_of_it_the_best_by_its_objective(
    tmp_path: Path, tried: dict[str, Made], goal: dict[str, Any], expected: str | None
):
    held, _ = deployment_search(tmp_path, tried, **goal)

    assert chosen(held) == expected
    assert held.chosen is None or held.of(held.chosen).status is Status.ACCEPTED


def float_and_int8(size_bytes: int, lost: int) -> dict[str, Made]:
    return {
        "onnxruntime float32": Made(speedup=5.0, size_bytes=size_bytes),
        "openvino static_nncf": Made(speedup=10.0, lost=lost),
    }


def two_in_doubt(lost: int, other_lost: int) -> dict[str, Made]:
    return {"onnxruntime static": Made(speedup=12.0, lost=lost, size_bytes=900), **float_and_int8(4000, other_lost)}


@pytest.mark.parametrize(
    ("tried", "uncertain", "expected"),
    [
        # Of two thousand 20 may be lost: 16 are neither shown to be no more, nor 60.
        (float_and_int8(4000, 18), {"openvino static_nncf"}, "openvino static_nncf"),
        # What is shown to keep the accuracy comes first where it keeps the other terms too.
        (float_and_int8(1900, 18), {"openvino static_nncf"}, "onnxruntime float32"),
        (float_and_int8(2450, 18), {"openvino static_nncf"}, "openvino static_nncf"),
        # What rather loses more is no choice.
        (float_and_int8(4000, 24), set(), "onnxruntime float32"),
        (float_and_int8(4000, 60), set(), "onnxruntime float32"),
        (two_in_doubt(24, 17), {"openvino static_nncf"}, "openvino static_nncf"),
        # Of two with the same status the faster.
        (two_in_doubt(18, 17), {"onnxruntime static", "openvino static_nncf"}, "onnxruntime static"),
    ],
)
def test_the_best_by_status_is_chosen_of_those_that_keep_the_other_terms(
    tmp_path: Path, tried: dict[str, Made], uncertain: set[str], expected: str
):
    held, _ = deployment_search(tmp_path, tried)

    assert chosen(held) == expected
    assert {option.deployment.name for option in held.options if option.status is Status.UNCERTAIN} == uncertain


def test_whoever_fails_is_out_with_its_reason_and_the_others_go_on(tmp_path: Path):
    held, _ = deployment_search(
        tmp_path,
        {
            "inductor static": Made(fails=JobError("the child process died of SIGSEGV")),
            "openvino static": Made(fails=QuantizationError("no operator for aten::roll")),
            "openvino float32": Made(distance=0.1),
            "onnxruntime static": Made(kl=3.0),
            "onnxruntime dynamic": Made(crashes=True),
            "openvino static_nncf": Made(speedup=5.0, lost=200),
            "eager bfloat16": Made(speedup=0.9),
            "eager dynamic": Made(speedup=1.5),
        },
        settings={"effort": "thorough"},
    )

    said = reasons(held)
    assert chosen(held) == "eager dynamic"
    assert "SIGSEGV" in said["inductor static"]
    assert "aten::roll" in said["openvino static"]
    assert "0.1 from torch's" in said["openvino float32"]
    assert "3 nats" in said["onnxruntime static"]
    assert "dropped out of the race: died of SIGFPE" in said["onnxruntime dynamic"]
    assert "51 images lost, 0 gained, of 512 that were enough" in said["openvino static_nncf"]
    assert "shown slower than the baseline (0.90x)" in said["eager bfloat16"]


@pytest.mark.parametrize(
    ("lost", "pass_s", "budget_s", "num_shards"),
    [
        # Twelve of 2,000 images are six in a thousand: neither inside nor outside by the first shard.
        (12, 0.0005, None, 4),
        # Five minutes of passes are three shards.
        (12, 0.2, None, 3),
        (4, 0.2, 7200.0, 3),
        # The other two take 205 s, and a quarter of what is free is 200.
        (12, 0.2, 1500.0, 1),
        (200, 0.0005, None, 1),
    ],
)
def test_as_many_shards_are_looked_at_as_decide_and_fit_the_time(
    tmp_path: Path, lost: int, pass_s: float, budget_s: float | None, num_shards: int
):
    made = {"openvino static": Made(lost=lost)}
    _, script = deployment_search(tmp_path, made, pass_s=pass_s, time_budget_s=budget_s)

    assert script.shards_of("openvino") == set(range(num_shards))


def test_layers_that_cost_much_for_little_are_left_in_float_in_int8_deployments_alone(tmp_path: Path):
    held, _ = deployment_search(
        tmp_path, {"openvino static": Made(), "eager bfloat16": Made()}, kept=("vit.layers.1.mlp.fc2",)
    )

    told = {option.deployment.name: option.deployment.recommendations for option in held.options}
    assert [rec.dtype for rec in told["openvino static"]] == ["qint8", "float32"]
    assert [rec.dtype for rec in told["eager bfloat16"]] == ["bfloat16"]


BY_PROMISE = ("openvino static", "onnxruntime dynamic", "openvino float32", "eager bfloat16", "inductor static")
ALL = {name: Made() for name in sorted(BY_PROMISE)}


def test_a_contract_that_has_changed_chooses_again_and_keeps_the_attempts(tmp_path: Path):
    choices = DeploymentChoices({"eager": ("dynamic",), "openvino": ("static",)}, ASKED_SCHEMES["auto"])
    deployments = {"openvino static": Made(speedup=4.0, lost=30), "eager dynamic": Made(speedup=2.0)}
    loose, script = evaluator_of(tmp_path, deployments, choices=choices, max_accuracy_drop=0.03)
    opened = sample_records.with_attempt(open_journal(loose), sample_records.attempt(1, 0.25, accepted=True))
    assert getattr(opened.deployment, "name", None) == "openvino static"
    assert rejudged(opened, loose.goal) == opened
    num_jobs = len(script.asked)

    again = rejudged(opened, loose.goal.model_copy(update={"max_accuracy_drop": 0.01}))

    assert getattr(again.deployment, "name", None) == "eager dynamic"
    assert again.attempts == opened.attempts
    assert len(script.asked) == num_jobs


INT8 = {"openvino static": Made(), "inductor static": Made()}


@pytest.mark.parametrize(
    ("tried", "time_budget_s", "converted"),
    [
        # What promises most comes first, what compiles for minutes last.
        (ALL, 7200.0, [*BY_PROMISE]),
        # Of 400 s 82 are for the end, and 159 for the search: a third minute is more than that.
        (ALL, 400.0, ["openvino static", "onnxruntime dynamic"]),
        # A conversion that compiles is expected to take 90 s.
        (INT8, 370.0, ["openvino static"]),
        (INT8, 400.0, ["openvino static", "inductor static"]),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_time_budget_ends_the_search_once_it_has_had_its_share(
    tmp_path: Path, tried: dict[str, Made], time_budget_s: float, converted: list[str], is_named: bool
):
    settings = {"effort": "thorough"}
    held, script = deployment_search(
        tmp_path, tried, scripted=Timed, is_named=is_named, time_budget_s=time_budget_s, settings=settings
    )

    assert script.converted == converted
    assert chosen(held)
    for option in held.options:
        assert option.wants_time is (option.deployment.name not in converted)
        assert option.wants_time is ("not tried: no time left" in option.reason)


@pytest.mark.parametrize(
    ("others", "is_named", "effort", "pass_s", "is_made"),
    [
        (Made(), False, "default", 0.05, True),
        (Made(), False, "default", 0.005, False),
        (Made(), False, "thorough", 0.005, True),
        (Made(), False, "quick", 0.05, False),
        (Made(), True, "quick", 0.005, True),
        # Nothing else could be made.
        (Made(fails=JobError("died")), False, "quick", 0.005, True),
    ],
)
def test_a_conversion_of_minutes_is_left_out_for_a_fast_model_unless_it_is_named_or_nothing_else_can_be_made(
    tmp_path: Path, others: Made, is_named: bool, effort: str, pass_s: float, is_made: bool
):
    tried = {name: Made() if name.startswith("inductor") else others for name in ALL}
    held, script = deployment_search(tmp_path, tried, is_named=is_named, pass_s=pass_s, settings={"effort": effort})

    assert ("inductor static" in script.converted) == is_made
    assert ("--effort thorough" in reasons(held)["inductor static"]) != is_made
    assert ("its compilation, of about 90 s, is more than" in reasons(held)["inductor static"]) != is_made


STAGED = {
    "openvino static": Made(speedup=8.0),
    "onnxruntime static": Made(speedup=6.0),
    "onnxruntime dynamic": Made(speedup=5.0),
    "openvino float32": Made(speedup=3.0, size_bytes=4000),
    "openvino bfloat16": Made(speedup=4.0, size_bytes=1900),
}
FIRST, ALL_STAGED = ["openvino static", "onnxruntime dynamic", "onnxruntime static"], {*STAGED}


@pytest.mark.parametrize(
    ("changes", "settings", "first_only", "expected"),
    [
        ({}, {}, True, "openvino static"),
        # Nothing with 8 bits is shown to keep the accuracy, or the speed or size of the contract.
        ({"lost": 18}, {}, False, "openvino bfloat16"),
        ({"lost": 200}, {}, False, "openvino bfloat16"),
        ({"size_bytes": 2100}, {}, False, "openvino bfloat16"),
        ({"crashes": True}, {}, False, "openvino bfloat16"),
        ({"fails": QuantizationError("no layer")}, {}, False, "openvino bfloat16"),
        ({}, {"effort": "thorough"}, False, "openvino static"),
    ],
)
def test_deployments_without_8_bits_are_tried_only_if_none_with_8_bits_keeps_the_contract(
    changes: dict[str, Any], settings: dict[str, str], first_only: bool, expected: str, tmp_path: Path
):
    made = {name: replace(does, **changes) if name in FIRST else does for name, does in STAGED.items()}
    held, script = deployment_search(tmp_path, made, settings=settings)

    assert {*script.converted} == ({*FIRST} if first_only else ALL_STAGED)
    assert chosen(held) == expected
    left_out = {name for name, reason in reasons(held).items() if "openvino static keeps the contract" in reason}
    assert left_out == (ALL_STAGED - {*FIRST} if first_only else set())
    # What is compared was timed in one race.
    last = script.of(tasks.RaceTask)[-1].models
    results = [option for option in held.options if option.status is not Status.REJECTED]
    assert {option.deployment.name for option in results} <= {name_of(ref) for ref in last}


def test_dynamic_int8_is_not_among_the_first_where_convolutions_do_most_of_the_work(tmp_path: Path):
    profile = sample_records.profile()
    rows = [row.model_copy(update={"kind": "Conv2dSame"}) if row.macs else row for row in profile.layers]
    convolutional = profile.model_copy(update={"layers": tuple(rows)})
    dynamic, static = deployment("onnxruntime", "dynamic"), deployment("onnxruntime", "static")
    assert [is_promising(dynamic, each) for each in (profile, convolutional)] == [True, False]
    assert [is_promising(static, each) for each in (profile, convolutional)] == [True, True]
    assert not is_promising(static, profile.model_copy(update={"device": "cuda"}))


@pytest.mark.parametrize(("effort", "num_measured"), [("quick", 1), ("default", 3), ("thorough", 4)])
def test_more_effort_measures_more_deployments(effort: str, num_measured: int, tmp_path: Path):
    names = ("openvino static", "openvino static_nncf", "onnxruntime static", "onnxruntime dynamic")
    tried = {name: Made(speedup=5 - place / 4) for place, name in enumerate(names)}
    _, script = deployment_search(tmp_path, tried, settings={"effort": effort})

    assert len({name_of(task.model) for task in script.of(tasks.EvaluateTask)} - {"m0"}) == num_measured


def test_a_time_budget_measures_the_fastest_and_no_more_than_there_is_room_for(tmp_path: Path):
    class Slow(Script):
        def EvaluateTask(self, task):  # noqa: N802
            self.timesheet.note(f"evaluate-{len(self.asked)}", 100.0)
            return super().EvaluateTask(task)

    names = ("onnxruntime dynamic", "eager dynamic", "openvino static")
    deployments = {name: Made(speedup=5 - place) for place, name in enumerate(names)}
    held, script = deployment_search(tmp_path, deployments, scripted=Slow, time_budget_s=480.0)

    # The baseline took 400 s and the fastest 100: another one would leave 80, and the end of a run takes 82.
    measured = {name_of(task.model) for task in script.of(tasks.EvaluateTask)} - {"m0"}
    assert measured == {"onnxruntime dynamic"}
    assert reasons(held)["openvino static"].startswith("not measured: no time left for it")
