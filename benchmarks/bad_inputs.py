"""Thousands of bad inputs, of which each ends with one clear line, or does no harm.

    python benchmarks/bad_inputs.py [--count N] [--seed N] [--kind KIND ...] [--case KIND:SEED] [--json FILE] [--quick]

Each case is made from a seed of its own: `--case "plans:17"` makes that one again, shows all that it said and keeps its
folder. A case fails where there is a traceback, also in the log of a job; an exit code that no page documents; a refusal that
isn't one line; text that moves a terminal's cursor or turns its direction; a file that was left, changed or read outside of
what was given to write to; a connection that nobody asked for; more than 2 GB resident; more than 60 s
(as many times more as others compute on this machine). `refused` ended with
code 2, `went on` with another that is documented. One case in forty is run by a process that is started anew, as a user
does; the rest by copies of a process that has imported everything (`zygote.py` says why that is the same).
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import stat
import sys
import tempfile
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import zygote
from bad_kinds import KINDS, SECRET, Case, Place, carry_out

# Cursor, colour, title; and what turns the direction of what follows.
DIRECTION = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
REFUSED = "profiling-agent: "
# These say on standard error how far they are.
PROGRESS = frozenset({"profile", "race", "measure"})
# The output folder itself may be made.
OUTPUT = ("out", "runs")
# torch keeps what it compiles there, whoever exports.
LIBRARIES = ("torchinductor_",)
REAL_EVERY = 40
RECORD = 64
QUICK = 60


@dataclass(frozen=True)
class Result:
    """One case: how it ended, and what was wrong with that."""

    kind: str
    seed: int
    what: str
    end: str
    seconds: float
    resident: int
    problems: tuple[str, ...]
    said: str


def environment(place: Place) -> dict[str, str]:
    """Return what a user's processes find; nothing of whoever runs the benchmark."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "HF_HOME", "OMP_NUM_THREADS")}
    return kept | {
        "HOME": str(place.home),
        "TMPDIR": str(place.root / "tmp"),
        "PROFILING_AGENT_CACHE": str(place.cache),
        "PROFILING_AGENT_DATA": str(place.root / "data"),
        "MPLCONFIGDIR": str(place.root / "tmp"),
        "COLUMNS": "200",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


def lay_out(place: Place) -> None:
    """Make the folders of a case, the canary tree among them."""
    for name in ("home", "cwd", "given", "out", "cache", "canary", "tmp"):
        (place.root / name).mkdir(parents=True)
    (place.home / ".bashrc").write_text(f"# {SECRET}\n")
    (place.canary / "secret.txt").write_text(f"{SECRET}\n" * 3)
    shutil.copy(place.fixtures / "private.png", place.canary / "private.png")
    # What this machine's kernels take was measured before: it takes a minute, and is nobody's input.
    for table in place.fixtures.glob("runs-cache/latency"):
        shutil.copytree(table, place.cache / "latency")


def snapshot(folder: Path) -> dict[str, str]:
    """Return what lies in a folder: kind, size and hash, links by where they lead."""
    return dict(_entries(folder, folder))


def _entries(folder: Path, root: Path) -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for entry in os.scandir(folder):
            path, mode = Path(entry.path), entry.stat(follow_symlinks=False).st_mode
            name = os.fsencode(path.relative_to(root)).decode("utf-8", "backslashreplace")
            if stat.S_ISLNK(mode):
                yield name, f"link {path.readlink()}"
            elif stat.S_ISDIR(mode):
                yield name, "folder"
                yield from _entries(path, root)
            elif stat.S_ISREG(mode):
                size = entry.stat().st_size
                held = b"" if size > 2**28 else path.read_bytes()
                yield name, f"{size} {hashlib.sha256(held).hexdigest()}"
            else:
                yield name, "special"


def snapshots(place: Place) -> dict[str, dict[str, str]]:
    """Return what lies in all folders of a case."""
    return {name: snapshot(place.root / name) for name in ("home", "cwd", "given", "out", "cache", "canary", "tmp")}


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names that came, went or changed."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def problems_of(
    case: Case, ended: zygote.Ended, before: dict[str, Any], after: dict[str, Any], place: Place
) -> list[str]:
    """Return all that is wrong with how a case ended."""
    found = [*ended.told]
    if ended.code not in case.ends and not ended.told:
        found.append(f"exit code {ended.code}")
    said = ended.stdout + ended.stderr
    if "Traceback (most recent call last)" in said:
        found.append("traceback")
    if ended.code == 2:
        found += _more_than_a_line(case, ended)
    if raw := {character for character in said if _moves(character)}:
        found.append(f"raw characters {sorted(raw)}")
    if SECRET in said:
        found.append("showed what it was not given")
    connections = [line for line in ended.connections if not (case.is_local_allowed and "127.0.0.1" in line)]
    found += [f"connection: {line}" for line in connections[:2]]
    touched = _touched(case, before, after, is_refused=ended.code == 2)
    # What was killed had no time to tidy up.
    return found + ([] if ended.told else touched) + _logged(place)


def _more_than_a_line(case: Case, ended: zygote.Ended) -> list[str]:
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    if case.arguments and case.arguments[0] in PROGRESS:
        lines = lines[-1:] if not any(line.startswith(REFUSED) for line in lines[:-1]) else lines
    is_said = len(lines) == 1 and lines[0].startswith(REFUSED)
    return [] if is_said else [f"refused in {len(lines)} lines"]


def _touched(case: Case, before: dict[str, Any], after: dict[str, Any], *, is_refused: bool) -> list[str]:
    """Return what was left or changed where nothing may be, and what is half-written."""
    lying = [path for path in after["tmp"] if not path.startswith(LIBRARIES)]
    found = [f"left {min(lying)} in the temporary folder"] if lying else []
    for name in before:
        changed = [path for path in changes(before[name], after[name]) if (name, path) != OUTPUT]
        if changed and (name not in case.may_change or (is_refused and name in case.kept)):
            found.append(f"touched {name}: {', '.join(changed)[:200]}")
        if left := [path for path in set(after[name]) - set(before[name]) if ".tmp-" in path]:
            found.append(f"left {left[0]}")
    return found


def _moves(character: str) -> bool:
    return character in DIRECTION or (character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs"))


def _logged(place: Place) -> list[str]:
    """Return what a job raised that isn't ours, from its log; and a secret that was taken into a run."""
    found = []
    for path in place.out.rglob("*"):
        with suppress(OSError):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > 2**26:
                continue
            held = path.read_bytes()
            if path.name == "worker.log" and b"Traceback (most recent call last)" in held:
                found.append(f"raw in a job: {held.decode(errors='replace').strip().splitlines()[-1][:200]}")
            if SECRET.encode() in held:
                found.append(f"took a secret into {path.name}")
    return found


def try_case(kind: str, seed: int, root: Path, fixtures: Path, server: Path) -> tuple[Result, zygote.Ended | None]:
    """Make a case of its seed, in one copy of this process, and carry it out in another."""
    place = Place(root, fixtures)
    lay_out(place)
    make, _ = KINDS[kind]

    def prepare() -> None:
        case = make(random.Random(f"{kind}:{seed}"), place)
        (root / "case.json").write_text(json.dumps(vars(case)))

    prepared = zygote.run_case(
        prepare, _traces(root, "making"), cwd=root, environment=environment(place), server=server
    )
    if prepared.code:
        return Result(kind, seed, "", "FAILED", 0, 0, ("it could not be made",), prepared.stderr[-1500:]), prepared
    before = snapshots(place)
    case = Case(**json.loads((root / "case.json").read_text()))
    asked = environment(place) | case.environment
    traces = _traces(root, "traces")
    if case.arguments is not None and seed % REAL_EVERY == 0 and _can_be_typed(case.arguments):
        command = [sys.executable, "-P", "-m", "profiling_agent.cli.main", *case.arguments]
        ended = zygote.run_command(command, traces, cwd=place.cwd, environment=asked)
    else:
        ended = zygote.run_case(
            _work(case, place), traces, cwd=place.cwd, environment=asked, server=server, encoding=case.encoding
        )
    problems = problems_of(case, ended, before, snapshots(place), place)
    end = "FAILED" if problems else "refused" if ended.code == 2 else "went on"
    said = f"{ended.stderr.strip()[-1200:]}"
    return Result(kind, seed, case.what, end, ended.seconds, ended.resident, tuple(problems), said), ended


def _traces(root: Path, name: str) -> Path:
    (root / name).mkdir()
    return root / name


def _remove(folder: Path) -> None:
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _can_be_typed(arguments: list[str]) -> bool:
    return all("\0" not in argument for argument in arguments) and sum(map(len, arguments)) < 100_000


def _work(case: Case, place: Place) -> Any:
    def call() -> None:
        carry_out(str(case.call), place, case.given)

    def command_line() -> None:
        from profiling_agent.cli.main import main

        sys.argv = ["profiling-agent", *(case.arguments or ())]
        main()

    return call if case.call else command_line


def make_world(root: Path) -> None:
    """Make a model and data."""
    import world
    import zoo
    from PIL import Image

    Image.new("RGB", (32, 32), (1, 2, 3)).save(root / "private.png")
    world.NUM_TEST = 200
    world.write_data(root / "world/data")
    # Untrained: what it is good for is nobody's question here.
    zoo.save(zoo.vit(num_hidden_layers=1), root / "world/model")


def make_runs(root: Path) -> None:
    """Make a finished run, and one that waits for an approval."""
    from profiling_agent.errors import ApprovalPendingError
    from profiling_agent.lifecycle import optimize
    from profiling_agent.request import Request

    os.environ["PROFILING_AGENT_CACHE"] = str(root / "runs-cache")
    os.environ["PROFILING_AGENT_DATA"] = str(root / "runs-data")
    asked: dict[str, Any] = {
        "model": str(root / "world/model"), "dataset": str(root / "world/data"), "output": str(root / "runs"), "batch_size": 8,
        "max_iterations": 1, "runtimes": "eager", "quantize_dtype": "qint8", "criterion": "l1", "num_samples": 50,
    }  # fmt: skip
    optimize(Request(**asked, run_id="done"))
    with suppress(ApprovalPendingError):
        optimize(Request(**asked, run_id="waiting", approve="plan"))


def make_artifacts(root: Path) -> None:
    """Make saved models: of torch, one of them quantized, of ONNX Runtime and of OpenVINO."""
    import deployed
    import zoo

    from profiling_agent.artifacts.load import load_module
    from profiling_agent.artifacts.save import save_derived
    from profiling_agent.deployment.save import save_deployed
    from profiling_agent.quantization.linear import DynamicLinear

    source = deployed.source_of("vit", root / "source")
    names = {"eager": "eager float32", "onnx": "onnxruntime float32", "openvino": "openvino float32"}
    for name, deployment in names.items():
        save_deployed(source, deployed.deployment(deployment), root / "artifacts" / name, num_threads=1)
    small = load_module(root / "source/model")
    small.set_submodule("classifier", DynamicLinear.from_linear(zoo.inside(small).classifier, "qint8"))
    save_derived(small, root / "source/model", root / "artifacts/quantized")


def make_cache(root: Path) -> None:
    """Make the cache of somebody who has used the embedded model and data."""
    from profiling_agent.acquisition.reference import reference_dataset, reference_model

    os.environ["PROFILING_AGENT_CACHE"] = str(root / "cache")
    reference_dataset()
    reference_model("reference:vit")


FIXTURES = {"world": make_world, "runs": make_runs, "artifacts": make_artifacts, "cache": make_cache}
# What a kind needs beside the world.
NEEDS = {
    "arguments": ("runs",),
    "plans": ("runs",),
    "run folders": ("runs",),
    "checkpoints": ("runs",),
    "words": ("runs",),
    "saved models": ("artifacts",),
    "handovers": ("runs", "artifacts"),
    "caches": ("cache",),
}


def pin(number: int) -> None:
    """Keep this process, and all that it starts, on one core: torch processes that share cores wait for each other's threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


class Workers:
    """Processes that take cases from one pipe and say how they ended in another."""

    def __init__(self, count: int, root: Path, fixtures: Path, server: Path, *, keep: bool) -> None:
        """Fork them; this process has no threads yet."""
        asked, self.ask = os.pipe()
        self.results, said = os.pipe()
        self.pids = []
        for number in range(count):
            if (pid := os.fork()) == 0:
                os.close(self.ask)
                pin(number)
                _serve(asked, said, root / f"worker{number}", fixtures, server, keep=keep)
            self.pids.append(pid)
        os.close(asked)
        os.close(said)

    def run(self, cases: list[tuple[str, int]]) -> Iterator[Result]:
        """Yield the result of each case, in the order in which they end."""

        def feed() -> None:
            with os.fdopen(self.ask, "wb", buffering=0) as stream, suppress(BrokenPipeError):
                for kind, seed in cases:
                    stream.write(f"{kind}:{seed}".encode().ljust(RECORD))

        threading.Thread(target=feed, daemon=True).start()
        with os.fdopen(self.results, encoding="utf-8") as stream:
            for line in stream:
                held = json.loads(line)
                yield Result(**(held | {"problems": tuple(held["problems"])}))
        for pid in self.pids:
            os.waitpid(pid, 0)


def _serve(asked: int, said: int, root: Path, fixtures: Path, server: Path, *, keep: bool) -> None:
    while record := os.read(asked, RECORD):
        kind, _, seed = record.decode().strip().rpartition(":")
        folder = root / f"{kind.replace(' ', '-')}-{seed}"
        folder.mkdir(parents=True)
        try:
            result, _ = try_case(kind, int(seed), folder, fixtures, server)
        except Exception as error:  # noqa: BLE001 (the benchmark's own fault, which must not end it)
            result = Result(
                kind, int(seed), "", "FAILED", 0, 0, (f"the benchmark: {type(error).__name__}: {error}",), ""
            )
        line = json.dumps(
            vars(result)
            | {
                "what": result.what[:300],
                "said": result.said[-600:],
                "problems": [one[:300] for one in result.problems[:4]],
            }
        )
        os.write(said, line.encode() + b"\n")
        if not (keep and result.problems):
            _remove(folder)
    os._exit(0)


def drawn(count: int, seed: int, kinds: list[str]) -> list[tuple[str, int]]:
    """Return the cases: as many of each kind as its share, in a shuffled order."""
    weights = {kind: KINDS[kind][1] for kind in kinds}
    cases = []
    for kind, weight in weights.items():
        share = max(1, round(count * weight / sum(weights.values())))
        cases += [(kind, seed * 1_000_000 + number) for number in range(share)]
    random.Random(seed).shuffle(cases)
    return cases


def show(results: list[Result]) -> None:
    """Print counts by kind."""
    print(f"{'kind':<15}{'tried':>7}{'refused':>9}{'went on':>9}{'FAILED':>8}{'seconds':>9}{'longest':>9}{'GB':>6}")
    for kind in [*KINDS, ""]:
        own = [result for result in results if kind in ("", result.kind)]
        if not own:
            continue
        ends = Counter(result.end for result in own)
        seconds = [result.seconds for result in own]
        print(
            f"{kind or 'all':<15}{len(own):>7}{ends['refused']:>9}{ends['went on']:>9}{ends['FAILED']:>8}"
            f"{sum(seconds):>9.0f}{max(seconds):>9.1f}{max(result.resident for result in own) / 2**30:>6.1f}"
        )


def show_one(kind: str, seed: int, root: Path, fixtures: Path, server: Path) -> int:
    """Carry out one case and print all of it; its folder stays."""
    folder = root / "case"
    folder.mkdir()
    result, ended = try_case(kind, seed, folder, fixtures, server)
    print(f"{kind}:{seed}: {result.what}\n{result.end}: {'; '.join(result.problems) or 'nothing wrong'}\n{folder}")
    if ended is not None:
        shown = f"exit code {ended.code}, {ended.seconds:.1f} s\n--- stdout\n{ended.stdout[-4000:]}\n--- stderr\n{ended.stderr[-8000:]}"
        print(shown.encode("ascii", "backslashreplace").decode().replace("\\x1b", "ESC"))
    return 1 if result.problems else 0


def arguments() -> argparse.Namespace:
    """Return what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="this kind alone; may be given again")
    parser.add_argument("--case", help="KIND:SEED, one case again")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fixtures", type=Path, help="folder that the fixtures are made in, or are in already")
    parser.add_argument("--keep", action="store_true", help="keep the folders of cases that fail")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} cases")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def prepared_fixtures(folder: Path, kinds: list[str]) -> Path:
    """Return the fixtures in a folder, made there in copies of this process where they aren't yet."""
    fixtures = folder / "fixtures"
    wanted = {"world", *(part for kind in kinds for part in NEEDS.get(kind, ()))}
    for part, make in FIXTURES.items():
        ready = fixtures / f"{part}.ready"
        if part not in wanted or ready.exists():
            continue
        fixtures.mkdir(parents=True, exist_ok=True)
        if (pid := os.fork()) == 0:
            pin(0)
            with (fixtures / f"{part}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            zygote.end_with(lambda make=make: make(fixtures))
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"the {part} could not be made: {(fixtures / f'{part}.log').read_text()[-3000:]}")
        for lock in fixtures.rglob("*.lock"):
            lock.unlink()
        ready.touch()
    return fixtures


def main() -> int:
    """Draw and try; return 1 where a case failed."""
    asked = arguments()
    started = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="bad-inputs-"))
    os.environ["HF_HOME"] = str(root / "hf")
    openai = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_ENDPOINT")
    for name in (*openai, "HF_TOKEN"):
        os.environ.pop(name, None)
    zygote.warm_up()
    kinds = [asked.case.rpartition(":")[0]] if asked.case else asked.kind or [*KINDS]
    fixtures = prepared_fixtures((asked.fixtures or root).resolve(), kinds)
    print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
    server = zygote.JobServer(root / "server")
    results: list[Result] = []
    try:
        if asked.case:
            kind, _, seed = asked.case.rpartition(":")
            pin(0)
            return show_one(kind, int(seed), root, fixtures, server.path)
        workers = Workers(asked.workers, root, fixtures, server.path, keep=asked.keep)
        for result in workers.run(drawn(QUICK if asked.quick else asked.count, asked.seed, kinds)):
            results.append(result)
            if result.problems:
                shown = f"FAILED {result.kind}:{result.seed}: {'; '.join(result.problems)} [{result.what}] {result.said[-300:]}"
                print(shown.encode("ascii", "backslashreplace").decode().replace("\n", " | "), flush=True)
    finally:
        server.end()
        if not (asked.case or asked.keep):
            _remove(root)
    show(results)
    print(f"{len(results)} cases in {time.monotonic() - started:.0f} s")
    return report(results, asked.json)


def report(results: list[Result], json_path: Path | None) -> int:
    """Print the checks, and write the results where that is asked."""
    from checks import Check, finish

    failed = [result for result in results if result.problems]
    rows = [
        {"kind": kind, "end": end, "cases": count}
        for (kind, end), count in sorted(Counter((result.kind, result.end) for result in results).items())
    ]
    checks = [Check.at_least("bad inputs tried", len(results), 1), Check.at_most("failures", len(failed), 0)]
    return finish(
        checks,
        [*rows, *({"case": f"{one.kind}:{one.seed}", "problems": list(one.problems)} for one in failed)],
        json_path,
    )


if __name__ == "__main__":
    raise SystemExit(main())
