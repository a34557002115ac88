"""Sweep files: what they ask for, and what is wrong with those that can't be used."""

from pathlib import Path

import pytest

from profiling_agent.errors import RequestError
from profiling_agent.sweep.sheet import MAX_FILE, name_of, read_sweep

WHOLE = """
models: [./a-vit, {model: org/resnet, revision: main}]
datasets:
  - dataset: ./data
    split: test
contracts:
  - {max_accuracy_drop: 0.01}
  - {max_accuracy_drop: 0.02, max_size_ratio: 0.25, objective: size}
seeds: [0, 7]
request: {batch_size: 8, time_budget: 20m}
"""
LEAST = "models: [a]\ndatasets: [b]\n"


def read(folder: Path, text: str | bytes):
    file = folder / "sweep.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_sweep(file, "out")


def test_every_combination_is_a_run_in_the_order_of_the_file(tmp_path: Path):
    found = read(tmp_path, WHOLE)

    assert [(one.model, one.max_accuracy_drop, one.seed) for one in found] == [
        (model, lost, seed) for model in ("./a-vit", "org/resnet") for lost in (0.01, 0.02) for seed in (0, 7)
    ]
    assert {one.split for one in found} == {"test"}
    assert {one.batch_size for one in found} == {8}
    assert {(one.time_budget, one.output) for one in found} == {("20m", "out")}
    assert [one.objective for one in found[:4]] == ["speed", "speed", "size", "size"]
    assert [one.revision for one in found] == [None] * 4 + ["main"] * 4


def test_a_run_keeps_its_name_whatever_else_the_file_asks_for(tmp_path: Path):
    before = {one.run_id for one in read(tmp_path, WHOLE)}
    asks_for_more = WHOLE.replace("[0, 7]", "[3, 0, 7]").replace("contracts:\n", "contracts:\n  - {min_speedup: 2.0}\n")
    more = {one.run_id for one in read(tmp_path, asks_for_more)}

    assert len(before) == 8
    assert before < more
    assert all(run_id and run_id.startswith(("a-vit-data-s", "resnet-data-s")) for run_id in before)


def test_what_is_left_out_is_the_default_contract_and_seed(tmp_path: Path):
    (one,) = read(tmp_path, LEAST)

    assert (one.model, one.dataset, one.seed, one.max_accuracy_drop) == ("a", "b", 0, 0.01)
    assert one.run_id == name_of(one)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: [a]\n", "datasets: Field required"),
        ("[a, b]", "document: Input should be an object"),
        ("", "document: Input should be an object"),
        ("models: []\ndatasets: [b]\n", "models: Tuple should have at least 1 item"),
        (f"{LEAST}colour: red\n", "colour: Extra inputs are not permitted (got 'red')"),
        (
            f"{LEAST}contracts: [{{max_drop: 0.1}}]\n",
            "entry 1 of contracts names 'max_drop': use some of max_accuracy_drop",
        ),
        ("models: [{revision: main}]\ndatasets: [b]\n", "entry 1 of models names no model"),
        (f"{LEAST}request: {{output: elsewhere}}\n", "request names 'output': use some of"),
        (f"{LEAST}request: {{approve: each}}\n", "request names 'approve': use some of"),
        (
            f"{LEAST}contracts: [{{min_speedup: 0.5}}]\n",
            "the run of a on b, contract 1, seed 0 can't be asked for: min_speedup",
        ),
        (f"{LEAST}contracts: [{{max_size_ratio: 50}}]\n", "0.5 is half, or 50% (got 50)"),
        (f"{LEAST}seeds: [010]\n", "seeds.0: Input should be a valid integer"),
        (
            f"{LEAST}contracts: [{{max_accuracy_drop: .nan}}]\n",
            "max_accuracy_drop: Input should be a valid number (got '.nan')",
        ),
        (f"{LEAST}contracts: [{{}}, {{}}]\n", "the run of a on b, contract 2, seed 0 is asked for twice"),
        (f"{LEAST}contracts: [{{max_size_ratio: 1e999}}]\n", "it has Infinity, which is no JSON"),
        ("models: [a, a]\ndatasets: [b]\n", "the run of a on b, contract 1, seed 0 is asked for twice"),
        (f"{LEAST}seeds: [1, 1]\n", "seed 1 is asked for twice"),
        (f"{LEAST}seeds: [2020-01-01]\n", "seeds.0: Input should be a valid integer"),
        (f"{LEAST}seeds: [{'1' * 5000}]\n", "value has 5000 digits"),
        ("models: [a]\nmodels: [c]\ndatasets: [b]\n", "'models' stands there twice"),
        ("models: &x [a]\ndatasets: *x\n", "line 2, column 11: aliases aren't read"),
        (
            "models: !!python/object/apply:os.system [id]\n",
            "the tag 'tag:yaml.org,2002:python/object/apply:os.system' isn't read",
        ),
        (f"{LEAST}seeds: [!!int '']\n", "the tag 'tag:yaml.org,2002:int' isn't read"),
        (f"{LEAST}? [a]\n: b\n", "line 3"),
        (f"'': 1\n'': 2\n{LEAST}", "'' stands there twice"),
        ("models: [a\n", "line 2, column 1"),
        (b"models: [\xff]\n", "it is no YAML"),
        (b"models: [a\x00b]\n", "it is no YAML"),
        ("models: " + "[" * 3000 + "]" * 3000, "it is nested too deep"),
        (
            f"{LEAST}seeds: [{', '.join(map(str, range(999)))}]\ncontracts: [{', '.join(['{min_speedup: 2}'] * 11)}]",
            "has 10,989 runs",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_file_that_cannot_be_used_is_told_in_one_line(tmp_path: Path, text: str | bytes, says: str):
    with pytest.raises(RequestError) as told:
        read(tmp_path, text)

    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(RequestError, match="can't be read"):
        read_sweep(tmp_path / "nowhere.yaml", "out")


def test_a_file_that_is_too_large_is_told(tmp_path: Path):
    with pytest.raises(RequestError, match="larger than"):
        read(tmp_path, "# " + "x" * MAX_FILE)


def test_a_contract_is_read_in_the_notations_of_a_request(tmp_path: Path):
    contract = "{max_accuracy_drop: 1%, max_size_ratio: 50%, min_speedup: 2x}"

    (one,) = read(tmp_path, f"{LEAST}contracts: [{contract}]\nrequest: {{runtimes: onnx, quantize_dtype: int8}}\n")

    assert (one.max_accuracy_drop, one.max_size_ratio, one.min_speedup) == (0.01, 0.5, 2.0)
    assert (one.runtimes, one.quantize_dtype) == ("onnxruntime", "qint8")


def test_numbers_are_those_of_json(tmp_path: Path):
    (one,) = read(
        tmp_path,
        f"{LEAST}contracts: [{{max_accuracy_drop: 2e-2, min_speedup: 3, max_memory_ratio: ~}}]\nrequest: {{iterate: false}}\n",
    )

    assert (one.max_accuracy_drop, one.min_speedup, one.max_memory_ratio, one.iterate) == (0.02, 3.0, None, False)
