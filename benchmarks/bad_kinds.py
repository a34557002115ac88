"""Kinds of bad input: how each case is made of its seed, what is called with it, and with which codes that may end.

A case is prepared in one copy of the zygote and carried out in another, so that what it left can be told from what it was
given. `Place` is where it happens: a home, a working folder, what is given, what may be written, and a canary tree that
nothing may read into its answers or write to.
"""

import json
import os
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import odd

Random = random.Random
SECRET = "canary-7f3a-secret"
# Met; not met; refused; waits for an approval.
ENDS = (0, 1, 2, 3)
BASE = {
    "num_samples": "50",
    "batch_size": "8",
    "max_iterations": "1",
    "runtimes": "eager",
    "quantize_dtype": "qint8",
    "criterion": "l1",
    "approve": "plan",
}


@dataclass(frozen=True)
class Place:
    """The folders of one case."""

    root: Path
    fixtures: Path

    @property
    def home(self) -> Path:
        """Return the user's home."""
        return self.root / "home"

    @property
    def cwd(self) -> Path:
        """Return where the command is called."""
        return self.root / "cwd"

    @property
    def given(self) -> Path:
        """Return what is given."""
        return self.root / "given"

    @property
    def out(self) -> Path:
        """Return what may be written to."""
        return self.root / "out"

    @property
    def cache(self) -> Path:
        """Return the user's cache."""
        return self.root / "cache"

    @property
    def canary(self) -> Path:
        """Return what belongs to others."""
        return self.root / "canary"

    @property
    def secret(self) -> Path:
        """Return a file that nobody named."""
        return self.canary / "secret.txt"


@dataclass
class Case:
    """What is done, once everything is prepared."""

    what: str
    arguments: list[str] | None = None
    # Instead of the command line: the name of what a notebook calls, in `CALLS`, and what it is given.
    call: str | None = None
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    ends: tuple[int, ...] = ENDS
    # The folders that may change; of a refusal none of `kept`.
    may_change: tuple[str, ...] = ("out", "cache", "tmp")
    kept: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict[str, str])
    encoding: str = "utf-8"
    # The user named an address on this machine.
    is_local_allowed: bool = False


def carry_out(name: str, place: Place, given: dict[str, Any]) -> None:
    """Do what a notebook would; an error of ours ends as on the command line, in one line and code 2."""
    import typer

    from profiling_agent.cli.terminal import refuse
    from profiling_agent.errors import ProfilingAgentError

    try:
        CALLS[name](place, **given)
    except ProfilingAgentError as error:
        try:
            refuse(str(error))
        except typer.Exit as ending:
            sys.exit(ending.exit_code)


def _flags(**fields: str) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]


def _base(place: Place) -> dict[str, str]:
    world = place.fixtures / "world"
    return BASE | {
        "model": str(world / "model"),
        "dataset": str(world / "data"),
        "output": str(place.out / "runs"),
        "run_id": "case",
    }


ADDRESSES = (
    "http://127.0.0.1:1/v1", "http://127.0.0.1:99999", "http://[::1", "file:///etc/passwd", "ftp://127.0.0.1/x", "http://",
    "http://user:pass\x1b[31m@127.0.0.1:1", "javascript:alert(1)", "127.0.0.1:1", "http://127.0.0.1:1/\r\nx: y", "http://127.0.0.1:1/" + "a" * 450,
)  # fmt: skip


def request(rng: Random, place: Place) -> Case:
    """A valid request in which exactly one field is odd."""
    from profiling_agent.request import Request

    fields, name = _base(place), rng.choice(sorted(Request.model_fields))
    annotation = str(Request.model_fields[name].annotation)
    if "bool" in annotation:
        value = ""
        arguments = ["run", *_flags(**fields), f"--{rng.choice(('', 'no-'))}{name}={odd.text(rng)}"]
        return Case(f"{name} as a value", arguments, kept=("out",))
    if name == "base_url":
        value = rng.choice((*ADDRESSES, odd.text(rng)))
    elif "int" in annotation:
        value = rng.choice(odd.INTEGERS)
    elif "float" in annotation:
        value = rng.choice(odd.FLOATS)
    else:
        value = odd.text(rng)
    if name == "output":
        # Where it is written is what the user says; not into what belongs to others.
        value = rng.choice((value.lstrip("/"), f"{place.out}/{value}", "~nosuchuser/x", "/dev/null/x", "/proc/x"))
    fields[name] = value
    may = ("out", "cache", "tmp", "cwd", "home") if name == "output" else ("out", "cache", "tmp")
    return Case(
        f"{name}={value[:60]!r}",
        ["run", *_flags(**fields), *rng.choice(([], ["--quiet"], ["--json"]))],
        may_change=may,
        environment={"HF_HUB_OFFLINE": "1"},
        is_local_allowed=name == "base_url",
    )


def argument(rng: Random, place: Place) -> Case:
    """A command whose argument names something odd."""
    odd_path = rng.choice(
        (
            odd.text(rng),
            str(place.given / "fifo"),
            str(place.given / "empty"),
            str(place.given / "loop"),
            str(place.given / "link"),
            str(place.given / "file"),
            str(place.given / "\x1b[31mred"),
            f"{place.given}/{'../' * rng.randrange(30)}etc",
        )
    )
    place.given.mkdir(exist_ok=True)
    with suppress(OSError):
        os.mkfifo(place.given / "fifo")
        (place.given / "empty").mkdir()
        (place.given / "\x1b[31mred").mkdir()
        (place.given / "loop").symlink_to("loop")
        (place.given / "link").symlink_to(place.canary)
        (place.given / "file").write_bytes(rng.randbytes(100))
    done = str(place.fixtures / "runs" / "done")
    output = str(place.out / "model")
    commands = (
        ["show", odd_path],
        ["show", odd_path, "--json"],
        ["report", odd_path],
        ["resume", odd_path],
        ["approve", odd_path, "--accept"],
        ["compare", odd_path],
        ["compare", done, odd_path],
        ["race", odd_path],
        ["race", odd_path, odd_path],
        ["measure", odd_path],
        ["measure", done, "--against", odd_path],
        ["export", odd_path, "--format", rng.choice(("onnx", "hf", odd.text(rng))), "--output", output],
        ["profile", "--model", odd_path],
        ["profile", "--model", str(place.fixtures / "world/model"), "--batch-size", rng.choice(odd.INTEGERS[5:])],
        ["profile", "--model", str(place.fixtures / "world/model"), "--device", odd.text(rng)],
        ["run", *_flags(**_base(place)), "--plan", odd_path],
        ["race", done, "--device", odd.text(rng)],
        ["race", done, "--batch-size", rng.choice(odd.INTEGERS[:1] + odd.INTEGERS[4:])],
        [odd_path],
    )
    chosen = rng.choice(commands)
    return Case(" ".join(chosen)[:100], chosen, environment={"HF_HUB_OFFLINE": "1"}, kept=("out",))


def _model(place: Place) -> Path:
    return Path(shutil.copytree(place.fixtures / "world/model", place.given / "model"))


def model_folder(rng: Random, place: Place) -> Case:
    """A model's folder of which one thing is wrong."""
    folder = _model(place)
    way = rng.randrange(12)
    if way < 4:
        what = f"config: {odd.edited_json(folder / 'config.json', rng)}"
    elif way == 4:
        what = f"processor: {odd.edited_json(folder / 'preprocessor_config.json', rng)}"
    elif way < 7:
        what = f"header: {odd.header_lies(folder / 'model.safetensors', rng)}"
    elif way < 10:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        what = odd.damaged(rng.choice(files), rng, secret=place.secret, other=rng.choice(files))
    elif way == 10:
        what = _shards(folder, rng, place)
    else:
        what = _foreign(folder, rng)
    named = place.given / "model"
    if rng.random() < 0.1:
        return Case(f"profile, {what}", ["profile", "--model", str(named), "--batch-size", "1", "--json"])

    return Case(what, call="resolve", given={"model": str(named)})


def _resolve(place: Place, model: str) -> None:
    from profiling_agent.jobs.tasks import ResolveShapeTask

    _do(place, ResolveShapeTask(model=model))


def _acquire(place: Place, **named: str) -> None:
    from profiling_agent.jobs.tasks import AcquireTask

    _do(place, AcquireTask(num_samples=50, **named))  # pyright: ignore[reportArgumentType] - texts alone


def _do(place: Place, task: Any) -> None:
    """Have a job done as a run has it done, in a child."""
    from profiling_agent.jobs.runner import Jobs
    from profiling_agent.workspace import Workspace

    workspace = Workspace(place.out / "run")
    workspace.jobs.mkdir(parents=True)
    jobs = Jobs(workspace)
    try:
        jobs.run(task)
    finally:
        jobs.close()


def _shards(folder: Path, rng: Random, place: Place) -> str:
    target = rng.choice(
        (
            "../canary/secret.txt",
            str(place.secret),
            "model.safetensors",
            "none.safetensors",
            "/dev/zero",
            "\x1b[31m",
            "",
        )
    )
    held = {"metadata": {}, "weight_map": {"classifier.bias": target, "classifier.weight": "model.safetensors"}}
    if rng.random() < 0.4:
        held, _ = odd.edit(held, rng)
    (folder / "model.safetensors.index.json").write_text(json.dumps(held))
    if rng.random() < 0.8:
        (folder / "model.safetensors").unlink()
    return f"shards in {target}"


def _foreign(folder: Path, rng: Random) -> str:
    config = json.loads((folder / "config.json").read_text())
    way = rng.choice(("pickle", "code", "remote", "backbone", "quantized", "adapter", "timm"))
    if way == "pickle":
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    elif way == "code":
        (folder / "modeling.py").write_text("open('owned', 'w')")
        config |= {
            "auto_map": {"AutoModelForImageClassification": "modeling.Model"},
            "model_type": rng.choice(("vit", "own")),
        }
    elif way == "remote":
        config |= {
            "auto_map": {"AutoModelForImageClassification": "somebody/else--modeling.Model"},
            "model_type": "own",
        }
    elif way == "backbone":
        config |= {
            "backbone": "resnet18",
            "use_timm_backbone": True,
            "use_pretrained_backbone": True,
            "model_type": rng.choice(("vit", "dpt")),
        }
    elif way == "quantized":
        config |= {
            "quantization_config": rng.choice(
                ({"quant_method": "bitsandbytes"}, {"quant_method": "x"}, [], {"quant_method": "gptq", "bits": 4})
            )
        }
    elif way == "adapter":
        (folder / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": "somebody/else", "peft_type": "LORA"})
        )
    else:
        config |= {"model_type": "timm_wrapper", "architecture": "resnet18"}
    (folder / "config.json").write_text(json.dumps(config))
    return way


def _pictures(rng: Random, count: int, kind: str = "PNG") -> list[bytes]:
    import io

    from PIL import Image

    made = []
    for _ in range(count):
        stream = io.BytesIO()
        Image.frombytes("RGB", (32, 32), rng.randbytes(32 * 32 * 3)).save(stream, kind)
        made.append(stream.getvalue())
    return made


def _table(folder: Path, columns: dict[str, Any], features: Any = None) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    # As datasets would write it, which first puts in what the cells name.
    table = pa.table(columns, schema=features.arrow_schema if features is not None else None)
    for split in ("train", "test"):
        parquet.write_table(table, folder / f"{split}.parquet")


# Of a generator: a hundred and twenty labels.
LABELS: tuple[Callable[[Random], list[Any]], ...] = (
    lambda _: list(range(10**6, 10**6 + 120)),
    lambda _: [2**62] * 119 + [0],
    lambda _: [-1] * 120,
    lambda _: [0.5] * 120,
    lambda _: [float("nan")] * 120,
    lambda _: [None] * 120,
    lambda _: [True, False] * 60,
    lambda rng: [odd.text(rng).encode("utf-8", "replace").decode() for _ in range(120)],
    lambda _: [f"name {index}" for index in range(120)],
    lambda _: ["x" * 10_000] * 120,
    lambda _: [[0], [1, 2]] * 60,
    lambda _: [{"a": 1}] * 120,
    lambda _: [str(index % 5) for index in range(120)],
    lambda _: [f"class {index % 5}\x1b[31m" for index in range(120)],
    lambda _: [0] * 120,
    lambda _: [index % 5 for index in range(119)] + [10**12],
)


def data_set(rng: Random, place: Place) -> Case:
    """A data set that lies about its labels, its images or where its files are."""
    folder = place.given / "data"
    folder.mkdir(parents=True)
    way = rng.choice(
        (
            "labels",
            "labels",
            "cells",
            "cells",
            "images",
            "images",
            "images",
            "readme",
            "readme",
            "files",
            "schema",
            "folders",
            "text",
        )
    )
    what = {
        "labels": _labels,
        "cells": _cells,
        "images": _images,
        "readme": _readme,
        "files": _files,
        "schema": _schema,
        "folders": _folders,
        "text": _text_files,
    }[way](folder, rng, place)
    columns = (
        {}
        if rng.random() < 0.8
        else {
            rng.choice(("image_column", "label_column", "split", "dataset_config")): odd.text(rng)
            .encode("utf-8", "replace")
            .decode()
        }
    )
    if rng.random() < 0.04:
        fields = _base(place) | {"dataset": str(folder)}
        return Case(f"run, {way}: {what}", ["run", *_flags(**fields)])

    named = {"model": str(place.fixtures / "world/model"), "dataset": str(folder)} | columns
    return Case(f"{way}: {what} {[*columns] or ''}", call="acquire", given=named)


def _labels(folder: Path, rng: Random, place: Place) -> str:
    index = rng.randrange(len(LABELS))
    from datasets import Image

    columns = {"image": _pictures(rng, 1) * 120}
    import pyarrow as pa
    from datasets import Features, Value

    labels = pa.array(LABELS[index](rng), from_pandas=False)
    kinds = {"image": Image(), "label": Value("string")} if pa.types.is_string(labels.type) else None
    made = {"image": [{"bytes": held, "path": None} for held in columns["image"]], "label": labels}
    _table(folder, made, Features(kinds) if kinds else None)
    return f"labels {index}"


def _cells(folder: Path, rng: Random, place: Place) -> str:
    """Image cells that name a file or an address."""
    target = rng.choice(
        (str(place.canary / "private.png"), "../canary/private.png", "/dev/zero", "/dev/stdin", str(place.given / "fifo"), "http://127.0.0.1:9/x.png",
         "https://example.com/x.png", "ftp://example.com/x.png", "s3://bucket/x.png", "hf://datasets/a/b/x.png", "file:///etc/passwd", "zip://x.png::http://example.com/a.zip",
         "data:image/png;base64,AAAA", "github://a:b@/x.png", "memory://x", "~/.bashrc", "no\0pe.png", "x" * 5000, "link.png", "", "simplecache::http://example.com/x", "sftp://example.com/x", "reference://x", "local:///etc/passwd")
    )  # fmt: skip
    with suppress(OSError):
        os.mkfifo(place.given / "fifo")
    (folder / "link.png").symlink_to(place.canary / "private.png")
    many = rng.random() < 0.7
    cells = [
        {"bytes": None, "path": target} if many or index % 10 == 0 else {"bytes": _pictures(rng, 1)[0], "path": "x.png"}
        for index in range(120)
    ]
    from datasets import ClassLabel, Features, Image, Value

    image: Any = rng.choice((Image(), Image(), {"bytes": Value("binary"), "path": Value("string")}))
    _table(
        folder,
        {"image": cells, "label": [index % 5 for index in range(120)]},
        Features({"image": image, "label": ClassLabel(names=[f"class {i}" for i in range(5)])}),
    )
    return f"cell {target[:60]!r}"


FORMATS = (
    "PNG",
    "JPEG",
    "GIF",
    "BMP",
    "TIFF",
    "WEBP",
    "PPM",
    "ICO",
    "TGA",
    "SGI",
    "PCX",
    "DDS",
    "JPEG2000",
    "AVIF",
    "MPO",
    "IM",
    "QOI",
    "BLP",
)


def _images(folder: Path, rng: Random, place: Place) -> str:
    """Images that are none, or larger than they look."""
    way = rng.choice(("mutated", "mutated", "mutated", "header", "text", "empty", "mode", "size", "bomb"))
    kind = rng.choice(FORMATS)
    import io

    from PIL import Image as Pillow

    def make() -> bytes:
        if way == "mutated":
            try:
                return odd.mutated(_pictures(rng, 1, kind)[0], rng)
            except (OSError, KeyError, ValueError):
                return odd.mutated(_pictures(rng, 1)[0], rng)
        if way == "header":
            return odd.png(rng.choice((0, 1, 13_000, 60_000, 2**31 - 1)), rng.choice((0, 1, 13_000, 60_000)))
        if way == "text":
            return rng.choice(
                (
                    b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
                    b"%PDF-1.4",
                    b"%!PS\n(x) run",
                    b"GIF89a",
                    b"BM",
                    b"\x89PNG\r\n\x1a\n",
                    b"RIFF\0\0\0\0WEBP",
                )
            )
        if way == "empty":
            return b""
        stream = io.BytesIO()
        if way == "mode":
            Pillow.new(rng.choice(("1", "L", "P", "LA", "RGBA", "I;16")), (32, 32)).save(stream, "PNG")
        elif way == "bomb":
            Pillow.new("L", (13_000, 13_000)).save(stream, "PNG")
        else:
            Pillow.new("RGB", rng.choice(((1, 1), (1, 5000), (5000, 1), (3, 3)))).save(stream, "PNG")
        return stream.getvalue()

    share = rng.choice((0.05, 0.5, 1.0)) if way != "bomb" else 0.02
    whole, bad = _pictures(rng, 1)[0], [make() for _ in range(4 if way != "bomb" else 1)]
    from datasets import ClassLabel, Features, Image

    cells = [{"bytes": rng.choice(bad) if rng.random() < share else whole, "path": None} for _ in range(120)]
    _table(
        folder,
        {"image": cells, "label": [index % 5 for index in range(120)]},
        Features({"image": Image(decode=True), "label": ClassLabel(names=[f"class {i}" for i in range(5)])}),
    )
    return f"{way} {kind if way == 'mutated' else ''} {share}"


def _plain_data(folder: Path, place: Place) -> None:
    for path in (place.fixtures / "world/data").iterdir():
        shutil.copy(path, folder / path.name)


def _readme(folder: Path, rng: Random, place: Place) -> str:
    """A card that names the data's files."""
    _plain_data(folder, place)
    target = rng.choice(
        (str(place.canary / "*.parquet"), "../canary/*", "../../**", "/etc/passwd", "http://127.0.0.1:9/x.parquet", "https://example.com/x.parquet", "hf://datasets/a/b/*", "**/*", "/dev/zero", "*.parquet", "\x1b[31m", "[" * 500, "")
    )  # fmt: skip
    card = rng.choice(
        (
            f"---\nconfigs:\n- config_name: default\n  data_files: {json.dumps(target)}\n---\n",
            f"---\nconfigs:\n- config_name: {json.dumps(odd.text(rng))}\n  data_files:\n  - split: test\n    path: {json.dumps(target)}\n---\n",
            f"---\nconfigs:\n- config_name: default\n  data_dir: {json.dumps(target)}\n---\n",
            "---\nconfigs: " + "[" * 5000 + "]" * 5000 + "\n---\n",
            "---\na: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"b{i}: &b{i} [*{'a' if not i else f'b{i - 1}'}{f', *b{i - 1}' * 8 if i else ''}]\n" for i in range(9)
            )
            + "---\n",
            "---\ndataset_info:\n  features:\n  - name: image\n    dtype: \x1b[31m\n---\n",
            "---\ndataset_info:\n  features:\n  - name: label\n    dtype:\n      class_label:\n        names: 5\n---\n",
            "---\nconfigs: !!python/object/apply:os.system ['touch owned']\n---\n",
            "---\n" + "x: 1\n" * 200_000 + "---\n",
        )
    )
    (folder / "README.md").write_text(card)
    return f"card {card[:60]!r} {target[:30]!r}"


def _files(folder: Path, rng: Random, place: Place) -> str:
    _plain_data(folder, place)
    files = sorted(folder.iterdir())
    return odd.damaged(rng.choice(files), rng, secret=place.canary / "private.png", other=files[0])


def _schema(folder: Path, rng: Random, place: Place) -> str:
    """A parquet file whose notes say something else than its columns."""
    from pyarrow import parquet

    way = rng.choice(("features", "text", "deep", "none", "extra", "type"))
    for path in sorted((place.fixtures / "world/data").glob("*.parquet")):
        table = parquet.read_table(path)
        said = json.loads(table.schema.metadata[b"huggingface"])
        if way == "features":
            said, _ = odd.edit(said, rng)
        elif way == "extra":
            said["info"]["features"]["more"] = {"dtype": "int64", "_type": "Value"}
        elif way == "type":
            said["info"]["features"]["label"] = {
                "_type": rng.choice(("Audio", "Video", "Pdf", "os.system", "Sequence", "", "Translation")),
                "names": ["a"],
            }
        note = {"text": "\x1b[31m", "deep": "[" * 100_000, "none": ""}.get(way) or json.dumps(said)
        parquet.write_table(
            table.replace_schema_metadata({"huggingface": note.encode("utf-8", "replace")}), folder / path.name
        )
    return f"schema {way}"


def _folders(folder: Path, rng: Random, place: Place) -> str:
    """Folders named for classes, with pictures and what isn't."""
    names = [odd.text(rng).replace("/", "_").replace("\0", "")[:100] or "x" for _ in range(3)] + ["class 0", "class 1"]
    way = rng.choice(("names", "fifo", "links", "mixed", "metadata"))
    for index, name in enumerate(names if way == "names" else ["class 0", "class 1", "class 2"]):
        with suppress(OSError, UnicodeEncodeError):
            inner = folder / "test" / name
            inner.mkdir(parents=True, exist_ok=True)
            for number, held in enumerate(_pictures(rng, 40)):
                (inner / f"{number}.png").write_bytes(held)
            if way == "fifo":
                os.mkfifo(inner / "z.png")
            elif way == "links":
                (inner / "z.png").symlink_to(rng.choice(("/dev/zero", str(place.canary / "private.png"), "z.png")))
            elif way == "mixed":
                (inner / "z.png").write_bytes(rng.randbytes(100))
            elif way == "metadata" and not index:
                (folder / "test" / "metadata.jsonl").write_text(
                    json.dumps(
                        {
                            "file_name": rng.choice(("../../canary/private.png", "/etc/passwd", "class 0/0.png")),
                            "label": 0,
                        }
                    )
                    + "\n"
                )
    return way


def _text_files(folder: Path, rng: Random, place: Place) -> str:
    name = rng.choice(
        (
            "test.csv",
            "test.jsonl",
            "test.json",
            "data.py",
            "test.txt",
            "dataset_infos.json",
            "test.arrow",
            "test.zip",
            "test.tar",
            "loading.py",
            "test.parquet",
        )
    )
    (folder / name).write_bytes(
        rng.choice(
            (
                b"image,label\n/etc/passwd,0\n",
                b'{"image": "/etc/passwd", "label": 0}\n',
                b"open('owned','w')",
                b"[" * 100_000,
                rng.randbytes(500),
                b"PAR1" + rng.randbytes(60) + b"PAR1",
                b"",
            )
        )
    )
    return name


def cache(rng: Random, place: Place) -> Case:
    """What the user's cache holds, of which one file is damaged."""
    from profiling_agent.processes.machine_lock import LOCK

    shutil.copytree(place.fixtures / "cache", place.cache, dirs_exist_ok=True, symlinks=True)
    files = sorted(path for path in place.cache.rglob("*") if path.is_file() and path.suffix != ".lock")
    if rng.random() < 0.75 and files:
        what = odd.damaged(rng.choice(files), rng, secret=place.secret, other=rng.choice(files))
    else:
        folders = sorted(path for path in place.cache.iterdir() if path.is_dir())
        chosen = rng.choice(folders)
        way = rng.choice(("empty", "file", "link", "fifo", "lock folder", "lock fifo", "lock link", "temporary"))
        what = f"{way} {chosen.name}"
        if way in ("empty", "file", "link", "fifo"):
            shutil.rmtree(chosen)
        if way == "empty":
            chosen.mkdir()
        elif way == "file":
            chosen.write_text("x")
        elif way == "link":
            chosen.symlink_to(place.canary)
        elif way == "fifo":
            os.mkfifo(chosen)
        elif way == "temporary":
            (place.cache / f".{chosen.name}-old").symlink_to(place.canary)
        else:
            lock = place.cache / rng.choice((LOCK, f"{chosen.name}.lock"))
            lock.unlink(missing_ok=True)
            {
                "lock folder": lock.mkdir,
                "lock fifo": lambda: os.mkfifo(lock),
                "lock link": lambda: lock.symlink_to(place.canary / "new"),
            }[way]()

    return Case(what, call="acquire", given={"model": "reference:vit", "dataset": "reference:digits"})


PLAN: dict[str, Any] = {
    "pruning": [{"layer": "mlp", "pruning_type": "structured", "pruning_ratio": 0.25}],
    "quantization": [{"layer": "all", "quantization_type": "dynamic", "dtype": "qint8"}],
    "target": {"metric": "params", "saving": 0.2},
    "caps": [{"layer": "layers", "max_ratio": 0.5}],
}
PATTERNS = (
    "(" * 5000,
    "(a+)+$",
    "[",
    "*",
    "\\",
    "(?P<x>a)(?P=x)",
    "x{1000}{1000}",
    ".*" * 100,
    "\x1b[31m",
    "(?i)MLP",
    "\\d{1,1000}",
    "|" * 299,
    "",
)


def plan(rng: Random, place: Place) -> Case:
    """A plan in a file, or the edit of one."""
    place.given.mkdir(exist_ok=True)
    path = place.given / rng.choice(("plan.json", "plan\x1b[31m.json", "p"))
    held = json.loads(json.dumps(PLAN))
    if rng.random() < 0.3:
        held["pruning"][0]["layer"] = rng.choice(PATTERNS)
        what = f"pattern {held['pruning'][0]['layer'][:30]!r}"
    else:
        held, what = odd.edit(held, rng)
    path.write_text(json.dumps(held))
    if rng.random() < 0.3:
        what = odd.damaged(path, rng, secret=place.secret)
    way = rng.random()
    if way < 0.15:
        return Case(f"run, {what}", ["run", *_flags(**_base(place)), f"--plan={path}"])
    if way < 0.3:
        run = _run(place, "waiting")
        return Case(f"approve, {what}", ["approve", str(run), f"--edit={path}"])

    return Case(what, call="dry_run", given={"path": str(path)})


def _dry_run(place: Place, path: str) -> None:
    from profiling_agent.analysis.dry_run import dry_run
    from profiling_agent.analysis.plan_file import read_plan
    from profiling_agent.records import ModelProfile

    profile = next((place.fixtures / "runs/done/jobs").glob("profile-*/profile.json"))
    print(dry_run(read_plan(path), ModelProfile.model_validate_json(profile.read_bytes())).params)


def _rehash(folder: Path) -> None:
    from profiling_agent.files import file_sha256

    # A recipe that is a device or a FIFO now would be read for ever.
    if not (folder / "recipe.json").is_file():
        return
    with suppress(ValueError, OSError, TypeError, AttributeError, KeyError, RecursionError):
        recipe = json.loads((folder / "recipe.json").read_text())
        for path in folder.iterdir():
            # Of a file that says it has a terabyte nobody computes a hash.
            if path.is_file() and path.name in recipe["files"] and path.stat().st_size < 2**30:
                recipe["files"][path.name] = file_sha256(path)
        (folder / "recipe.json").write_text(json.dumps(recipe))


def artifact(rng: Random, place: Place) -> Case:
    """A saved model of which something was edited, and its hashes made to fit."""
    name = rng.choice(("eager", "eager", "quantized", "onnx", "openvino"))
    folder = Path(shutil.copytree(place.fixtures / "artifacts" / name, place.given / "model"))
    way = rng.choice(
        ("recipe", "recipe", "config", "config", "header", "tensor", "weights", "golden", "processor", "file")
    )
    weights = {"onnx": "model.onnx", "openvino": rng.choice(("model.xml", "model.xml", "model.bin"))}.get(
        name, "model.safetensors"
    )
    if way == "recipe":
        what = odd.edited_json(folder / "recipe.json", rng)
    elif way == "config":
        recipe = json.loads((folder / "recipe.json").read_text())
        recipe["config"], what = odd.edit(recipe["config"], rng)
        (folder / "recipe.json").write_text(json.dumps(recipe))
    elif way == "header":
        what = odd.header_lies(
            folder / rng.choice((weights if weights.endswith("rs") else "golden.safetensors", "golden.safetensors")),
            rng,
        )
    elif way == "weights":
        held = (folder / weights).read_bytes()
        (folder / weights).write_bytes(_xml(held, rng) if weights.endswith("xml") else odd.mutated(held, rng))
        what = weights
    elif way == "golden":
        what = _tensor(folder / "golden.safetensors", rng)
    elif way == "tensor":
        what = _tensor(folder / (weights if weights.endswith("rs") else "golden.safetensors"), rng)
    elif way == "processor":
        what = odd.edited_json(folder / "preprocessor_config.json", rng)
    else:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        what = odd.damaged(rng.choice(files), rng, secret=place.secret, other=rng.choice(files))
    _rehash(folder)
    said, chosen = f"{name} {way}: {what}", rng.random()
    output = str(place.out / "exported")
    if chosen < 0.1:
        return Case(
            f"export {said}",
            ["export", str(folder), "--format", rng.choice(("onnx", "hf")), "--output", output],
            kept=("out",),
        )
    if chosen < 0.13:
        sound = str(place.fixtures / "artifacts/eager")
        return Case(f"race {said}", ["race", sound, str(folder), "--batch-size", "2"], kept=("out",))
    if chosen < 0.16:
        return Case(f"measure {said}", ["measure", str(folder)], kept=("out",))

    return Case(said, call="load", given={"folder": str(folder)}, kept=("out",))


def _load(_place: Place, folder: str) -> None:
    import warnings

    from PIL import Image

    from profiling_agent import load

    warnings.simplefilter("ignore")
    print(load(folder).predict(Image.new("RGB", (40, 40))).label)


def _tensor(path: Path, rng: Random) -> str:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    held = load_file(path)
    name = rng.choice(sorted(held))
    tensor = held[name]
    ways: dict[str, Callable[[], Any]] = {
        "transposed": lambda: tensor.T,
        "flat": lambda: tensor.reshape(-1),
        "deep": lambda: tensor.reshape(*tensor.shape, *[1] * rng.randrange(1, 6)),
        "shorter": lambda: tensor[:-1] if tensor.ndim else tensor,
        "longer": lambda: np.concatenate([tensor, tensor]) if tensor.ndim else tensor,
        "empty": lambda: tensor[:0] if tensor.ndim else tensor,
        "nan": lambda: (tensor * np.nan).astype(tensor.dtype) if tensor.dtype.kind == "f" else tensor,
        "inf": lambda: (tensor + np.inf).astype(tensor.dtype) if tensor.dtype.kind == "f" else tensor,
        "huge": lambda: (tensor * 1e30).astype(tensor.dtype),
        "dtype": lambda: tensor.astype(
            rng.choice(("int8", "int64", "float64", "float16", "bool", "uint8", "complex64"))
        ),
        "wide": lambda: np.repeat(tensor, 100, axis=-1) if tensor.ndim else tensor,
    }
    way = rng.choice(sorted(ways))
    with np.errstate(all="ignore"):
        held[name] = np.ascontiguousarray(ways[way]())
    if rng.random() < 0.2:
        held[odd.text(rng)[:100].encode("utf-8", "replace").decode() or "x"] = held.pop(name)
    save_file(held, path)
    return f"{way} {name}"


def _xml(held: bytes, rng: Random) -> bytes:
    return rng.choice(
        (
            odd.mutated(held, rng),
            odd.mutated(held, rng),
            b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "'
            + b"a" * 1000
            + b'">'
            + b"".join(b'<!ENTITY b%d "%s">' % (i, (b"&a;" if not i else b"&b%d;" % (i - 1)) * 10) for i in range(9))
            + b"]><net>&b8;</net>",
            b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><net>&a;</net>',
            b"<net>" * 100_000,
            b"<net/>",
            held.replace(b"32", b"3200000000"),
            held.replace(b'offset="0"', b'offset="99999999999999"'),
            held.replace(b"MatMul", b"Nothing"),
        )
    )


def _run(place: Place, name: str) -> Path:
    folder = place.out / "runs" / name
    shutil.copytree(place.fixtures / "runs" / name, folder, symlinks=True)
    return folder


def run_folder(rng: Random, place: Place) -> Case:
    """A run, finished or waiting, of which one file is damaged."""
    name = rng.choice(("done", "waiting", "waiting"))
    folder = _run(place, name)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    chosen = rng.random()
    top = [path for path in files if path.parent == folder]
    if chosen < 0.5:
        pool = top
    elif chosen < 0.7:
        pool = [path for path in files if path.name in ("result.json", "profile.json", "recipe.json")]
    else:
        pool = files
    if rng.random() < 0.1:
        what = _odd_links(folder, rng, place)
    else:
        what = odd.damaged(rng.choice(pool or files), rng, secret=place.secret, other=rng.choice(files))
    if name == "done":
        commands = (
            ["show"],
            ["show", "--plan"],
            ["show", "--json"],
            ["report"],
            ["compare"],
            ["compare", "--json"],
            ["resume", "--quiet"],
            ["resume", "--json"],
        )
    else:
        commands = (
            ["resume", "--quiet"],
            ["resume", "--json"],
            ["approve"],
            ["approve", "--json"],
            ["show"],
            ["report"],
            ["approve"],
        )
    chosen_command = rng.choice(commands)
    if rng.random() < 0.03:
        chosen_command = (
            ["approve", "--accept"]
            if name == "waiting"
            else ["export", "--format", "hf", f"--output={place.out / 'exported'}"]
        )
    command, *flags = chosen_command
    return Case(f"{name} {command}, {what}", [command, str(folder), *flags])


def _odd_links(folder: Path, rng: Random, place: Place) -> str:
    way = rng.choice(
        (
            "best out",
            "best loop",
            "best device",
            "jobs out",
            "temporary out",
            "report out",
            "forks out",
            "lock out",
            "temporary many",
        )
    )
    if way.startswith("best"):
        (folder / "best").unlink(missing_ok=True)
        (folder / "best").symlink_to(
            {"out": place.canary, "loop": Path("best"), "device": Path("/dev/zero")}[way.split()[1]]
        )
    elif way == "jobs out":
        shutil.rmtree(folder / "jobs")
        (folder / "jobs").symlink_to(place.canary)
    elif way == "temporary out":
        (folder / ".tmp-x").symlink_to(place.canary, target_is_directory=True)
    elif way == "temporary many":
        for pid in range(1, 2000):
            (folder / f".tmp-report.md-{pid}").symlink_to(place.secret)
    else:
        name = {"report": "report.md", "forks": "forks", "lock": "run.lock"}[way.split()[0]]
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(place.canary / "new" if way == "lock out" else place.secret)
    return way


CRAFTED = (
    "DROP TABLE checkpoints",
    "DELETE FROM checkpoints",
    "DELETE FROM writes",
    "DROP TABLE writes; CREATE VIEW writes AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS thread_id, x AS checkpoint_ns, x AS checkpoint_id, x AS task_id, x AS idx, x AS channel, x AS type, x AS value FROM n",
    "ALTER TABLE checkpoints RENAME TO held; CREATE VIEW checkpoints AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT held.* FROM held, n",
    "ALTER TABLE checkpoints RENAME TO held; CREATE VIEW checkpoints AS SELECT * FROM held",
    "CREATE TRIGGER t AFTER INSERT ON writes BEGIN DELETE FROM checkpoints; END",
    "CREATE TRIGGER t AFTER INSERT ON checkpoints BEGIN SELECT RAISE(ABORT, 'no\x1b[31m'); END",
    "UPDATE checkpoints SET checkpoint = x''",
    "UPDATE checkpoints SET checkpoint = zeroblob(100000000)",
    "UPDATE checkpoints SET checkpoint = randomblob(1000)",
    "UPDATE checkpoints SET checkpoint = NULL",
    "UPDATE checkpoints SET checkpoint = 'text'",
    "UPDATE checkpoints SET checkpoint = 5",
    "UPDATE checkpoints SET type = 'pickle'",
    "UPDATE checkpoints SET type = 'json'",
    "UPDATE checkpoints SET type = NULL",
    "UPDATE checkpoints SET metadata = '{'",
    "UPDATE checkpoints SET metadata = x'80'",
    "UPDATE checkpoints SET thread_id = '\x1b[31m'",
    "UPDATE checkpoints SET parent_checkpoint_id = checkpoint_id",
    "UPDATE checkpoints SET checkpoint_ns = 'x'",
    "UPDATE writes SET value = x'c1'",
    "UPDATE writes SET channel = '__interrupt__'",
    "UPDATE writes SET type = 'pickle'",
    "ALTER TABLE checkpoints DROP COLUMN metadata",
    "CREATE TABLE more AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 100000) SELECT x FROM n",
    "PRAGMA journal_mode = DELETE",
)


def checkpoint(rng: Random, place: Place) -> Case:
    """Checkpoints that somebody crafted."""
    folder = _run(place, "waiting")
    path = folder / "checkpoints.sqlite"
    way = rng.choice(("sql", "sql", "strings", "strings", "blob", "pages", "file", "beside"))
    if way == "sql":
        what = rng.choice(CRAFTED)
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(what)
            connection.commit()
    elif way in ("strings", "blob"):
        what = _blobs(path, rng, place, way)
    elif way == "pages":
        with path.open("r+b") as stream:
            stream.seek(rng.randrange(path.stat().st_size))
            stream.write(rng.randbytes(rng.choice((1, 16, 4096))))
        what = "pages"
    elif way == "file":
        what = odd.damaged(path, rng, secret=place.secret)
    else:
        name = rng.choice(("checkpoints.sqlite-wal", "checkpoints.sqlite-journal", "checkpoints.sqlite-shm"))
        beside = folder / name
        beside.unlink(missing_ok=True)
        kind = rng.choice(("bytes", "link", "fifo", "folder"))
        what = f"{kind} {name}"
        if kind == "bytes":
            beside.write_bytes(rng.randbytes(5000))
        elif kind == "link":
            beside.symlink_to(place.secret)
        elif kind == "fifo":
            os.mkfifo(beside)
        else:
            beside.mkdir()
    command = rng.choice(
        (
            ["resume", str(folder), "--quiet"],
            ["approve", str(folder)],
            ["approve", str(folder), "--json"],
            ["resume", str(folder), "--json"],
        )
    )
    return Case(f"{command[0]}, {what[:80]}", command)


def _blobs(path: Path, rng: Random, place: Place, way: str) -> str:
    """Change what the blobs of checkpoints and writes hold."""
    with closing(sqlite3.connect(path)) as connection:
        table, column = rng.choice((("checkpoints", "checkpoint"), ("checkpoints", "checkpoint"), ("writes", "value")))
        rows = connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
        what = table
        for rowid, held in rows:
            if held is None:
                continue
            if way == "blob":
                made = odd.mutated(bytes(held), rng) if rng.random() < 0.9 else bytes(held)
            else:
                made, what = _other_words(bytes(held), rng, place)
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (made, rowid))
        connection.commit()
    return f"{way} {what}"


def _other_words(held: bytes, rng: Random, place: Place) -> tuple[bytes, str]:
    """Replace words by others of the same length, so that the packing still holds."""
    rng = Random(rng.random())
    words = rng.choice(
        (
            (b"profiling_agent.records", b"os.path_records_nowhere"),
            (b"langgraph", b"subproces"),
            (b"waiting", b"..\x1b[31m"),
            (b"pydantic", b"datetime"),
            (b"params", b"xarams"),
            (b"jobs/", b"/etc/"),
            (b"jobs/", b"../x/"),
            (b"sha256", b"sha\x1b[2"),
            (b"structured", b"structures"),
            (b"eager", b"\x1b[31m"),
        )
    )
    return held.replace(*words), repr(words)


def words(rng: Random, place: Place) -> Case:
    """Strings of a finished run's documents that a terminal, a page or Markdown would take for something else."""
    folder = _run(place, "done")
    name = rng.choice(("report.json", "report.json", "request.json"))
    held = json.loads((folder / name).read_text())
    word = rng.choice([found for found in odd.TEXTS if found.strip()])
    texts = [path for path in odd.places(held) if path and isinstance(_at(held, path), str)]
    for path in rng.sample(texts, min(len(texts), rng.choice((1, 1, 3, 1000)))):
        owner = _at(held, path[:-1])
        owner[path[-1]] = word if rng.random() < 0.5 else f"{owner[path[-1]]}{word}"
    (folder / name).write_text(json.dumps(held))
    encoding = rng.choice(("utf-8", "ascii", "latin-1"))
    command = rng.choice(
        (
            ["show"],
            ["show", "--plan"],
            ["show", "--json"],
            ["report"],
            ["compare"],
            ["compare", "--json"],
            ["resume", "--quiet"],
        )
    )
    return Case(
        f"{' '.join(command)} in {encoding}, {word[:30]!r} in {name}",
        [command[0], str(folder), *command[1:]],
        encoding=encoding,
        environment={"LC_ALL": "C", "PYTHONIOENCODING": encoding} if encoding != "utf-8" else {},
    )


def _at(held: Any, path: Sequence[Any]) -> Any:
    for key in path:
        held = held[key]
    return held


def label_map(rng: Random, place: Place) -> Case:
    """The labels of a data set and those of a model."""
    ours = [odd.text(rng)[:300] for _ in range(rng.randrange(8))]
    theirs = {rng.randrange(-2, 10): rng.choice((odd.text(rng)[:300], *ours[:1])) for _ in range(rng.randrange(8))}

    return Case(f"{str(ours)[:60]} {str(theirs)[:60]}", call="match", given={"ours": ours, "theirs": [*theirs.items()]})


def _match(_place: Place, ours: list[str], theirs: list[tuple[int, str]]) -> None:
    from profiling_agent.acquisition.labels import match_labels

    match_labels(ours, dict(theirs))


REPOSITORIES = (
    "me/x", "me/x", "x", "me/x/y", "", "me/", "/x", "me/x.git", "me/a--b", "me/../x", "https://huggingface.co/me/x",
    "me/\x1b[31m", "me/" + "x" * 200, "-me/x", "mé/x", "me/x\n", "me/x@main",
)  # fmt: skip
# Whatever is said, the token isn't.
TOKENS = ("", f"hf_{SECRET}", f"hf_{SECRET}\r\nX-More: y", f"hf_é{SECRET}")


def handover(rng: Random, place: Place) -> Case:
    """A model that is picked, exported or pushed, of which one thing or another is odd."""
    command = rng.choice(("pick", "export", "push"))
    run = place.fixtures / "runs" / rng.choice(("done", "done", "waiting"))
    saved = place.fixtures / "artifacts" / rng.choice(("eager", "quantized", "onnx", "openvino"))
    usual = run if command == "pick" else rng.choice((run, saved, saved))
    source = str(usual) if rng.random() < 0.8 else rng.choice((str(place.canary), str(saved), odd.text(rng)))
    taken = place.out / "taken"
    output = rng.choice((taken, taken, place.out, f"{place.out}/{odd.text(rng)}", "/proc/x", "/dev/null/x"))
    written = [f"--output={output}"] if rng.random() < 0.9 else []
    asked = {"pick": _picked, "export": _exported, "push": _pushed}[command](rng)
    arguments = [command, source, *asked, *(written if command != "push" else [])]
    return Case(
        " ".join(arguments)[:200],
        arguments,
        environment={"HF_HUB_OFFLINE": "1", "HF_TOKEN": rng.choice(TOKENS)},
        kept=("out",),
    )


def _picked(rng: Random) -> list[str]:
    objective = f"--objective={rng.choice(('speed', 'size', 'memory', 'accuracy', 'beauty', odd.text(rng)))}"
    candidate = f"--candidate={rng.choice((*odd.INTEGERS, 'eager float32', odd.text(rng)))}"
    return rng.choice(([objective], [objective], [candidate], [candidate], [objective, candidate], []))


def _exported(rng: Random) -> list[str]:
    format_ = f"--format={rng.choice(('files', 'onnx', 'hf', 'tflite', odd.text(rng)))}"
    return [format_] if rng.random() < 0.8 else [format_, f"--batch-size={rng.choice(odd.INTEGERS)}"]


def _pushed(rng: Random) -> list[str]:
    repository = rng.choice(REPOSITORIES) if rng.random() < 0.8 else odd.text(rng)
    return [*rng.choice(([], ["--private"], ["--update"])), repository]


CALLS: dict[str, Callable[..., None]] = {
    "resolve": _resolve,
    "acquire": _acquire,
    "dry_run": _dry_run,
    "load": _load,
    "match": _match,
}
Kind = Callable[[Random, Place], Case]
# What share of the cases each kind gets.
KINDS: dict[str, tuple[Kind, int]] = {
    "requests": (request, 14),
    "arguments": (argument, 8),
    "model folders": (model_folder, 11),
    "data sets": (data_set, 11),
    "caches": (cache, 3),
    "plans": (plan, 8),
    "saved models": (artifact, 13),
    "run folders": (run_folder, 8),
    "checkpoints": (checkpoint, 5),
    "words": (words, 3),
    "label maps": (label_map, 2),
    "handovers": (handover, 6),
}
