"""Ours and its peers on the same models and images: time to the artifact, lines, accuracy, bytes, speed, and what went wrong.

    make peers                         # an environment for each peer that needs one of its own
    python benchmarks/head_to_head.py [--subjects NAME ...] [--peers NAME ...] [--json FILE] [--work DIR]

Every tool gets the same float32 model, calibration images, batch size and threads. Ours is what `profiling-agent run` returns with its
default request, and with `--effort quick`. Accuracy is paired with float32 on the test images of both halves that a run draws. Then all take
turns in shuffled rounds, a process each, new ones for each session. FILE is written after each subject, and another call goes on from
there: a subject with rows of this code isn't measured again, nor is a model in DIR made again. Ours is made again when the package changes.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from checks import ROOT, SHARED, Check, Estimate, finish, parser_of, rows_in, stamped
from full_size import MODELS, fitted
from peers.recipes import RECIPES, num_lines
from sessions import pool

from profiling_agent.lib.machine import available_threads
from profiling_agent.measure.intervals import VARIABLE, answers_of, paired_drop
from profiling_agent.reporting.report import read_report
from profiling_agent.runtimes.artifact import model_bytes

Row = dict[str, Any]
HERE, RESULTS, PREFIX = ROOT / "benchmarks" / "peers", ROOT / "benchmarks" / "results" / "peers.json", Path(sys.prefix)
START, END = "<!-- head_to_head.py -->", "<!-- end -->"
FLOAT, OURS, QUICK = "float32", "ours", "ours, --effort quick"
# Environments of their own; the others are among this project's extras.
OWN = {"Olive": "olive", "Intel Neural Compressor": "inc"}
KINDS = {"NNCF": "openvino", "torchao PT2E": "program", "Intel Neural Compressor": "program"}
MAX_MAKE_S, NUM_ROUNDS, TURN_S = 3600, 4, 0.6
# Longer than this at every start is noted.
SLOW_OPEN_S = 20
MAX_POINTS, MAX_SIZE = 1.0, 0.5
# Aims: of the fastest peer that keeps the contract, its speed at the interval's lower end and its bytes; minutes to a verdict on a compact net.
MIN_OVER_PEER, MAX_MORE_BYTES, MAX_MINUTES = 0.95, 0.02, {OURS: 3.0, QUICK: 1.0}


@dataclass(frozen=True)
class Subject:
    """A model, its images, and the batch size that it is deployed at."""

    model: str
    data: str = "cifar10"
    batch_size: int = 32
    is_transformer: bool = False

    def sources(self, shared: Path) -> list[str]:
        """Return the folders of model and data; a full-size model is made."""
        data = shared / "data" / self.data
        if self.model in MODELS:
            return [str(fitted(self.model, data=data)), str(data)]
        return [str(shared / "models" / self.model), str(data)]


SUBJECTS: Mapping[str, Subject] = {
    "MobileNetV1": Subject("mobilenetv1-imagenet", "imagenet-sample", 8),
    "EfficientNet-Lite0": Subject("efficientnet-lite0-imagenet", "imagenet-sample", 8),
    "LCNet": Subject("lcnet-orientation", "pages-orientation", 8),
    "small ViT": Subject("vit-cifar10", is_transformer=True),
    "small DeiT": Subject("deit-cifar10", is_transformer=True),
    "small Swin": Subject("swin-cifar10", is_transformer=True),
    "small ResNet": Subject("resnet-cifar10"),
    "ViT-B/16": Subject("ViT-B/16", batch_size=8, is_transformer=True),
}


class PeerError(RuntimeError):
    """The last line that a tool printed."""


@cache
def package_commit() -> str:
    """Return the last commit that changed what is measured; a model of ours is made again for another one."""
    command = ["git", "log", "-1", "--format=%h", "--", "profiling_agent", "graphs", "prompts"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def python_of(tool: str) -> str:
    """Return the Python of the tool's environment."""
    return str(PREFIX / "peers" / OWN[tool] / "bin" / "python") if tool in OWN else sys.executable


def environ(folder: Path) -> dict[str, str]:
    """Return the variables of a tool's processes: timm is on the path, and caches and ledgers are in its folder."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "PROFILING_AGENT_CACHE": "cache", VARIABLE: "ledgers"}
    found = {name: str(folder / place) for name, place in caches.items()}
    return {**os.environ, **found, "PYTHONPATH": f"{PREFIX / 'timm'}:{ROOT / 'tests'}"}


def last_line(log: Path) -> str:
    """Return the last line of a log that isn't empty, short enough for a table."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:160].replace("|", "/") if lines else "it ended and printed nothing"


def run(command: Sequence[str], folder: Path, max_status: int = 0) -> None:
    """Run a command; raise PeerError if it fails or takes too long."""
    with (folder / "log.txt").open("w") as log:
        options: Any = {"cwd": folder, "env": environ(folder), "stdout": log, "stderr": log, "timeout": MAX_MAKE_S}
        try:
            status = subprocess.run(command, check=False, **options).returncode
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"it did not end in {MAX_MAKE_S // 60} minutes") from error
    if not 0 <= status <= max_status:
        raise PeerError(last_line(folder / "log.txt"))


def prepare(name: str, sources: Sequence[str], work: Path) -> Path:
    """Return the folder with a subject's model and pixels, made unless it is complete."""
    subject, folder = SUBJECTS[name], work / re.sub(r"\W+", "-", name)
    if not (folder / "subject.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # A run by default searches on 2,000 of CIFAR-10's test images.
        num_search = ["5000"] if subject.data == "cifar10" else []
        run([sys.executable, f"{HERE}/subject.py", ".", *sources, str(subject.batch_size), *num_search], folder)
    return folder


def make(tool: str, subject: Subject, sources: Sequence[str], folder: Path) -> Row:
    """Return the row of a tool with its model's folder, made unless there is a record of it."""
    is_ours = tool in (OURS, QUICK)
    place = folder / re.sub(r"\W+", "-", f"{tool} {package_commit()}" if is_ours else tool)
    record, kind, num_tool = (
        place / "made.json",
        "ours" if is_ours else KINDS.get(tool, "onnx"),
        str(subject.batch_size),
    )
    if not record.exists():
        shutil.rmtree(place, ignore_errors=True)
        (place / "model").mkdir(parents=True)
        if is_ours:
            model, data = sources
            command = [
                f"{PREFIX}/bin/profiling-agent",
                "run",
                "--model",
                model,
                "--dataset",
                data,
                "--batch-size",
                num_tool,
            ]
            command += ["--output", ".", "--run-id", "run", *(["--effort", "quick"] if tool == QUICK else [])]
        else:
            command = [python_of(tool), f"{HERE}/recipes.py", tool, str(folder), "model", num_tool]
            command += ["transformer"] if subject.is_transformer else []
        started, used, wrong = time.monotonic(), sum(os.times()[2:4]), ""
        try:
            run(command, place, max_status=int(is_ours))
        except PeerError as error:
            wrong = str(error)
        seconds = time.monotonic() - started + json.loads((folder / "subject.json").read_text()).get(kind, 0)
        found = {"seconds": seconds, "cpu_seconds": sum(os.times()[2:4]) - used, "wrong": wrong}
        record.write_text(json.dumps(found))
    path = place / "run" / "best" if is_ours else place / "model"
    row = {"tool": tool, "kind": kind, "path": str(path), **json.loads(record.read_text())}
    if is_ours and not row["wrong"] and (outcome := read_report(place / "run").verdict.outcome) != "MET":
        row["wrong"] = outcome
    return row | {"lines": num_lines(RECIPES[tool]) if tool in RECIPES else 1}


@contextmanager
def served(row: Row, shape: Sequence[int], num_threads: int | None = None) -> Iterator[Callable[..., Any]]:
    """Yield a function that asks a process of a deployed model; without words it waits until the model is open.

    Raises PeerError if the process ends.
    """
    folder = Path(row["path"]).parent
    command = [python_of(row["tool"]), f"{HERE}/serve.py", row["kind"], row["path"]]
    command += map(str, (num_threads or available_threads(), *shape))
    options: Any = {"env": environ(folder), "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (folder / "served.txt").open("w") as log, subprocess.Popen(command, stderr=log, **options) as process:

        def ask(*words: Any) -> Any:
            if words:
                print(json.dumps(words), file=process.stdin, flush=True)
            if not (line := cast("Any", process.stdout).readline()):
                raise PeerError(last_line(folder / "served.txt"))
            return json.loads(line)

        try:
            yield ask
        finally:
            process.kill()


def evaluate(row: Row, folder: Path, shape: Sequence[int]) -> Any:
    """Return the answers of a row's model on all test images, or None if it can't be run, which the row notes."""
    path = Path(row["path"]).parent / f"{folder.name}.logits.npy"
    if not path.exists() and any(Path(row["path"]).glob("*")):
        try:
            # One thread suffers least from other programs.
            with served(row, shape, num_threads=1) as ask:
                if (seconds := ask()) > SLOW_OPEN_S:
                    row["wrong"] = f"{row['wrong']} takes {seconds:.0f} s to open".strip()
                ask("logits", str(folder / "test.npy"), str(path))
        except PeerError as error:
            row["wrong"] = str(error)
    return answers_of(np.load(path), np.load(folder / "test_labels.npy")) if path.exists() else None


def time_turns(rows: Sequence[Row], shape: Sequence[int], num_sessions: int) -> None:
    """Add to each row the times of a pass, ms, and the speedup over the first row, by sessions."""
    times: list[Any] = []
    for session in range(num_sessions):
        with ExitStack() as stack:
            asks = [stack.enter_context(served(row, shape)) for row in rows]
            for ask in asks:
                ask()
            rounds = np.empty((NUM_ROUNDS, len(rows)))
            for number in range(NUM_ROUNDS):
                order = random.Random(f"{session} {number}").sample(range(len(rows)), len(rows))
                for place in order:
                    rounds[number, place] = np.median(asks[place]("time", TURN_S))
        times.append(rounds)
        print(f"  session {session + 1}: {np.median(rounds, axis=0).round(2).tolist()} ms", flush=True)
    for place, row in enumerate(rows):
        row["ms"] = float(np.median([rounds[:, place] for rounds in times]))
        row["logs"] = [float(np.median(np.log(rounds[:, 0] / rounds[:, place]))) for rounds in times]
        row["speedup"] = list(astuple(pool(row["logs"])))


def measure(name: str, tools: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
    """Return a subject's rows, float32 first."""
    subject, sources = SUBJECTS[name], SUBJECTS[name].sources(arguments.shared.resolve())
    folder = prepare(name, sources, arguments.work.resolve())
    images: Any = np.load(folder / "test.npy", mmap_mode="r")
    shape = (subject.batch_size, *images.shape[1:])
    base: Row = {"tool": FLOAT, "kind": "ours", "path": str(folder / FLOAT), "seconds": 0.0, "lines": 0, "wrong": ""}
    before, rows, timed = evaluate(base, folder, shape), [base], [base]
    base |= {"top1": float(before.right.mean()), "num_test": len(images), "batch_size": subject.batch_size}
    for tool in tools:
        row = make(tool, subject, sources, folder)
        rows.append(row)
        if (after := evaluate(row, folder, shape)) is not None:
            drop, files = paired_drop(before.right, after.right), Path(row["path"]).glob("*")
            row["change"] = [0.0 - 100 * drop.drop, 0.0 - 100 * drop.high, 0.0 - 100 * drop.low]
            num_bytes = (
                model_bytes(Path(row["path"])) if row["kind"] == "ours" else sum(file.stat().st_size for file in files)
            )
            row["bytes"] = num_bytes / model_bytes(folder / FLOAT)
            timed.append(row)
        print(f"{name}: {tool}: {row['seconds']:.0f} s {row['wrong']}", flush=True)
    base["load"] = os.getloadavg()[0]
    time_turns(timed, shape, arguments.sessions)
    for row in timed[1:]:
        row["meets"] = row["change"][0] >= -MAX_POINTS and row["bytes"] <= MAX_SIZE and row["speedup"][0] >= 1
    if peer := fastest_peer(rows):
        for row in (row for row in timed if row["tool"] in (OURS, QUICK)):
            row["over_peer"] = list(astuple(pool(np.subtract(row["logs"], peer["logs"]).tolist())))
    return [
        stamped({"commit": package_commit(), "subject": name, **row, "path": Path(row["path"]).parent.name})
        for row in rows
    ]


def fastest_peer(rows: Sequence[Row]) -> Row | None:
    """Return the row of a subject's fastest peer that keeps the contract, if one does."""
    peers = [row for row in rows if row["tool"] in RECIPES and row.get("meets")]
    return max(peers, key=lambda row: row["speedup"][0], default=None)


def checks_of(rows: Sequence[Row]) -> list[Check]:
    """Return the aims of one subject, for ours and a quick run."""
    checks, peer = list[Check](), fastest_peer(rows)
    for row in (row for row in rows if row["tool"] in (OURS, QUICK)):
        name = f"{row['subject']}: {row['tool']}"
        if rows[0]["batch_size"] == 8 and not SUBJECTS[row["subject"]].is_transformer:
            checks.append(Check.at_most(f"{name}: minutes", row["seconds"] / 60, MAX_MINUTES[row["tool"]]))
        if peer and "over_peer" in row:
            checks.append(Check.at_least(f"{name}: keeps the contract", float(row["meets"]), 1.0))
            over, more = Estimate(*row["over_peer"]), row["bytes"] - peer["bytes"]
            checks.append(Check.at_least(f"{name}: speed over {peer['tool']}", over, MIN_OVER_PEER))
            checks.append(Check.at_most(f"{name}: more bytes than {peer['tool']}", more, MAX_MORE_BYTES))
    return checks


def by_subject(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each subject, in the order of the subjects."""
    return [own for name in SUBJECTS if (own := [row for row in rows if row["subject"] == name])]


def _triple(values: Sequence[float] | None, sign: str = "") -> str:
    return f"{values[0]:{sign}.2f} [{values[1]:.2f}, {values[2]:.2f}]" if values else ""


def _duration(row: Row) -> str:
    return f"{row['seconds']:.0f} s" if row["seconds"] < 100 else f"{row['seconds'] / 60:.1f} min"


def _summary(row: Row | None) -> str:
    return f"{row['speedup'][0]:.1f}x, {row['bytes']:.0%}, {_duration(row)}" if row and "speedup" in row else "none"


def _provenance(rows: Sequence[Row]) -> str:
    load, days = max(row.get("load", 0) for row in rows), sorted({row["measured_at"][:10] for row in rows})
    busy = f", other programs on the machine (load up to {load:.0f})" if load > 1 else ""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return f"`benchmarks/results/peers.json`, {commits}, {' to '.join(dict.fromkeys((days[0], days[-1])))}{busy}."


def full_tables(rows: Sequence[Row]) -> str:
    """Return a table for each subject, as Markdown."""
    lines: list[str] = []
    for base, *own in by_subject(rows):
        lines += [
            f"**{base['subject']}**, batch {base['batch_size']}, float32 {base['top1']:.1%} of {base['num_test']:,}:",
            "",
        ]
        lines += ["| tool | time to artifact | lines | accuracy, points | size | speedup | what went wrong |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in own:
            missed = "misses the contract" if row.get("meets") is False else ""
            cells = [row["tool"], _duration(row), str(row["lines"]), _triple(row.get("change"), "+")]
            cells += [f"{row['bytes']:.0%}" if "bytes" in row else "", _triple(row.get("speedup"))]
            lines.append(f"| {' | '.join([*cells, '; '.join(filter(None, [missed, row['wrong']]))])} |")
        lines.append("")
    return "\n".join([*lines, _provenance(rows)]) if rows else ""


def short_table(rows: Sequence[Row]) -> str:
    """Return a line for each subject, as Markdown: ours, and the fastest peer that keeps the contract."""
    lines = [
        "| model | ours: speedup, size, time | fastest peer within the contract | its speedup, size, time | ours over it |"
    ]
    lines += ["|---|---|---|---|---|"]
    for own in by_subject(rows):
        peer, ours = fastest_peer(own), next(row for row in own if row["tool"] == OURS)
        cells = [own[0]["subject"], _summary(ours), peer["tool"] if peer else "none", _summary(peer)]
        lines.append(f"| {' | '.join([*cells, _triple(ours.get('over_peer'))])} |")
    return "\n".join([*lines, "", _provenance(rows)]) if rows else ""


def with_table(page: str, table: str) -> str:
    """Return a page with the table between its two marks."""
    before, _, rest = page.partition(START)
    table = table or "Not measured yet."
    return f"{before}{START}\n{table}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Measure, print the tables, write those of RESULTS into the pages, and return 1 if a check doesn't hold."""
    parser = parser_of(__doc__)
    parser.set_defaults(json=RESULTS)
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS), metavar="NAME")
    parser.add_argument("--peers", nargs="*", choices=list(RECIPES), default=list(RECIPES), metavar="NAME")
    parser.add_argument("--sessions", type=int, default=5, help="of new processes, two or more (default: 5)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "peers", help="keeps models and pixels")
    parser.add_argument(
        "--shared", type=Path, default=SHARED, help="has the folders models and data (default: ../shared)"
    )
    arguments = parser.parse_args()
    tools = [OURS, QUICK, *(name for name in arguments.peers if Path(python_of(name)).exists())]
    for name in sorted(set(arguments.peers) - set(tools)):
        print(f"{name} is left out: `make peers` has not installed it", flush=True)
    rows, status = rows_in(arguments.json), 0
    for name in arguments.subjects:
        if not {row["tool"] for row in rows if row["subject"] == name and row["commit"] == package_commit()} >= set(
            tools
        ):
            own = measure(name, tools, arguments)
            rows = [row for row in rows if row["subject"] != name] + own
        status = finish([check for own in by_subject(rows) for check in checks_of(own)], rows, arguments.json)
    print(full_tables(rows))
    pages = {"docs/peers.md": full_tables, "README.md": short_table} if arguments.json == RESULTS else {}
    for page, table in pages.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        (ROOT / page).write_text(with_table(text, table(rows)), encoding="utf-8")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
