"""Ours next to its peers: processes that take turns, aims, and the tables of the pages."""

import sys

import head_to_head
import numpy as np
import pytest
from checks import rows_in
from head_to_head import FLOAT, OURS, QUICK, RESULTS, ROOT, PeerError, by_subject, evaluate, fastest_peer, served
from peers import subject
from peers.recipes import Given, num_lines


def write_scaled(folder, factor: float) -> None:
    """Write an ONNX model whose logits are the two channels of an image of one pixel, times `factor`."""
    import onnx
    from onnx import TensorProto, helper

    shapes = {"pixel_values": [4, 2, 1, 1], "logits": [4, 2]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    constants = [helper.make_tensor("factor", TensorProto.FLOAT, [], [factor])]
    nodes = [
        helper.make_node("Flatten", ["pixel_values"], ["flat"]),
        helper.make_node("Mul", ["flat", "factor"], ["logits"]),
    ]
    graph = helper.make_graph(nodes, "scaled", [values["pixel_values"]], [values["logits"]], constants)
    folder.mkdir(parents=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )


def test_a_model_answers_all_images_in_a_process_of_its_own_and_is_timed_there(tmp_path):
    write_scaled(tmp_path / "tool" / "model", -1.0)
    # Six images in batches of four: the last batch is filled up.
    pixels = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [0, 1], [1, 0]], np.float32).reshape(6, 2, 1, 1)
    np.save(tmp_path / "test.npy", pixels)
    np.save(tmp_path / "test_labels.npy", np.array([1, 0, 1, 1, 1, 1]))
    row = {"tool": "ONNX Runtime static", "kind": "onnx", "path": str(tmp_path / "tool" / "model"), "wrong": ""}

    answers = evaluate(row, tmp_path, (4, 2, 1, 1))

    assert answers.predicted.tolist() == [1, 0, 1, 1, 0, 1]
    assert answers.right.tolist() == [True, True, True, True, False, True]
    with served(row, (4, 2, 1, 1)) as ask:
        assert ask() > 0
        assert len(ask("time", 0.01)) >= 3


def test_what_cannot_be_opened_is_noted_with_its_last_line(tmp_path):
    (tmp_path / "tool" / "model").mkdir(parents=True)
    (tmp_path / "tool" / "model" / "model.onnx").write_bytes(b"no model")
    row = {"tool": "ONNX Runtime static", "kind": "onnx", "path": str(tmp_path / "tool" / "model"), "wrong": ""}

    assert evaluate(row, tmp_path, (4, 2, 1, 1)) is None
    assert "InvalidProtobuf" in row["wrong"]


def test_a_command_that_fails_ends_in_its_last_line(tmp_path):
    head_to_head.run([sys.executable, "-c", "raise SystemExit(1)"], tmp_path, max_status=1)

    with pytest.raises(PeerError, match=r"^ValueError: seven / eight$"):
        head_to_head.run([sys.executable, "-c", "raise ValueError('seven | eight')"], tmp_path)


def test_lines_are_those_of_the_body_without_comments_and_docstrings():
    assert num_lines(recipe) == 3


def recipe(given: Given) -> None:
    """Make nothing.

    In two paragraphs.
    """
    # A comment.
    import shutil

    for label in given.labels:
        shutil.rmtree(label)


def row(tool: str, speedup: float, *, meets: bool = True, size: float = 0.3, **more) -> dict:
    fields = {"subject": "LCNet", "tool": tool, "seconds": 30.0, "lines": 4, "wrong": "", "bytes": size, "meets": meets}
    logs = [float(np.log(speedup))] * 2
    fields |= {"change": [-0.5, -1.0, 0.0], "logs": logs, "speedup": [speedup, speedup, speedup]}
    return fields | {"commit": "abc1234", "measured_at": "2026-11-29T12:00:00+00:00"} | more


BASE = row(FLOAT, 1.0, top1=0.9, num_test=700, batch_size=8, load=3.0)


def test_ours_is_held_against_the_fastest_peer_that_keeps_the_contract():
    rows = [BASE, row("NNCF", 4.0), row("Olive", 9.0, meets=False), row("ONNX Runtime static", 3.0)]
    ours = row(OURS, 5.0, size=0.35, seconds=240.0, over_peer=[1.25, 0.9, 1.5])

    assert fastest_peer(rows) == rows[1]
    assert fastest_peer([BASE]) is None
    assert {check.name: check.holds for check in head_to_head.checks_of([*rows, ours])} == {
        "LCNet: ours: minutes": False,
        "LCNet: ours: keeps the contract": True,
        "LCNet: ours: speed over NNCF": False,
        "LCNet: ours: more bytes than NNCF": False,
    }


def test_tables_have_a_line_for_each_tool_and_subject():
    rows = [BASE, row(OURS, 5.0, over_peer=[1.25, 1.1, 1.5]), row("NNCF", 4.0), row("Olive", 9.0, meets=False)]
    failed = row("torchao PT2E", 1.0, wrong="no compiler")
    rows += [{name: value for name, value in failed.items() if name not in ("speedup", "meets")}]

    assert "| NNCF | 30 s | 4 | -0.50 [-1.00, 0.00] | 30% | 4.00 [4.00, 4.00] |  |" in head_to_head.full_tables(rows)
    assert "9.00 [9.00, 9.00] | misses the contract |" in head_to_head.full_tables(rows)
    assert "no compiler |" in head_to_head.full_tables(rows)
    short = "| LCNet | 5.0x, 30%, 30 s | NNCF | 4.0x, 30%, 30 s | 1.25 [1.10, 1.50] |"
    assert short in head_to_head.short_table(rows)
    assert head_to_head.short_table(rows).endswith("2026-11-29, other programs on the machine (load up to 3).")


def test_a_table_replaces_the_one_between_the_marks():
    page = head_to_head.with_table(f"a\n{head_to_head.START}\nold\n{head_to_head.END}\nb\n", "new")

    assert page == f"a\n{head_to_head.START}\nnew\n{head_to_head.END}\nb\n"


@pytest.mark.parametrize(("page", "table"), [("docs/peers.md", "full_tables"), ("README.md", "short_table")])
def test_the_pages_have_the_tables_of_the_results(page, table):
    text, rows = (ROOT / page).read_text(encoding="utf-8"), rows_in(RESULTS)

    assert text == head_to_head.with_table(text, getattr(head_to_head, table)(rows))
    assert [[each["tool"] for each in own][:3] for own in by_subject(rows)] == [[FLOAT, OURS, QUICK]] * len(
        by_subject(rows)
    )


@pytest.mark.slow
def test_a_peer_quantizes_what_a_run_would_start_from_and_answers_its_test_images(tmp_path):
    subject.prepare(tmp_path, "reference:vit", "reference:digits", 8)
    command = [sys.executable, f"{head_to_head.HERE}/recipes.py", "ONNX Runtime dynamic", str(tmp_path), "model", "8"]
    base = {"tool": FLOAT, "kind": "ours", "path": str(tmp_path / FLOAT), "wrong": ""}
    peer = {"tool": "ONNX Runtime dynamic", "kind": "onnx", "path": str(tmp_path / "peer" / "model"), "wrong": ""}
    (tmp_path / "peer" / "model").mkdir(parents=True)

    head_to_head.run([*command, "transformer"], tmp_path / "peer")
    shape = (8, *np.load(tmp_path / "test.npy", mmap_mode="r").shape[1:])
    before, after = (evaluate(each, tmp_path, shape) for each in (base, peer))

    assert before.right.mean() > 0.8
    assert np.mean(before.predicted != after.predicted) < 0.05
    assert len(np.load(tmp_path / "calibration.npy", mmap_mode="r")) == 256
