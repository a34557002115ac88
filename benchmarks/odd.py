"""Odd things: values that no field expects, JSON that is edited in one place, files that aren't what they were."""

import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

Random = random.Random

TEXTS = (
    "",
    " ",
    "\n",
    "a\nb",
    "a\r\x08b",
    "no\x00pe",
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31mred",
    "\u202egnp.exe",
    "\u2066a\u2069\u200f",
    "\udcff\udc80",
    "x" * 300,
    "x" * 5000,
    "é" * 130,
    "名前",
    "\U0001f986",
    "~nosuchuser",
    "~nosuchuser/model",
    "~",
    "..",
    "../../../../etc/passwd",
    "/dev/zero",
    "/dev/null",
    "/proc/self/mem",
    "/etc/passwd",
    "/",
    ".",
    "-",
    "--help",
    "%s%n%x",
    "$(id)",
    "nan",
    "None",
    "{}",
    "[[1;31m",
    "[red]x[/red]",
    "[/]",
    "![](http://example.com/x.png)",
    "<script>alert(1)</script>",
    "file:///etc/passwd",
    "http://example.com/x",
    "C:\\x\\y",
    "con",
    "a/b",
    "a/b/c",
    "a//b",
    "a@b:c",
)
INTEGERS = (
    "0", "-1", "1", "2", "4097", "65536", str(2**31), str(2**32), str(2**63), str(2**64), str(10**30), "9" * 400,
    "9" * 5000, "1.5", "1e3", "nan", "inf", "", " 7 ", "0x10", "1_000", "+3", "٣", "１２", "\x1b[31m3", "--1", "many",
)  # fmt: skip
FLOATS = (
    "0", "-0.0", "1", "-1", "0.5", "2", "1e308", "1e309", "-1e309", "5e-324", "1e-400", "nan", "-nan", "inf", "-inf",
    "infinity", "", "0,5", "1/2", "½", "50%", "1e", "0x1p3", "9" * 400, "\x1b[31m1",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 1.5, -0.0, 1e308, 5e-324, 10**6, 65537)


def text(rng: Random) -> str:
    """Return an odd text, as a rule a known one."""
    if rng.random() < 0.8:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(1, 256), rng.randrange(0xD7FF)))) for _ in range(rng.randrange(1, 40)))


def document(rng: Random, depth: int = 3) -> Any:
    """Return an odd JSON value."""
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind in (2, 3):
        # As JSON has it: half of a surrogate pair can be written there.
        return text(rng)
    if kind == 4:
        return rng.randrange(-10, 10_000)
    inner = [document(rng, depth - 1) for _ in range(rng.randrange(4))]
    return inner if kind < 7 else {text(rng)[:20]: value for value in inner}


def places(held: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of every value of a document, the document's own first."""
    found: list[tuple[Any, ...]] = [path]
    items: list[tuple[Any, Any]] = []
    if isinstance(held, dict):
        items = [*cast("dict[str, Any]", held).items()]
    elif isinstance(held, list):
        # Of a long list the first entries stand for all.
        items = [*enumerate(cast("list[Any]", held)[:5])]
    for key, value in items:
        found += places(value, (*path, key))
    return found


def edit(held: Any, rng: Random) -> tuple[Any, str]:
    """Change one value of a document: an odd one in its place, gone, twice, or beside one that nobody knows."""
    found = places(held)[1:]
    if not found:
        return document(rng), "replace all"
    path = rng.choice(found)
    owner = held
    for key in path[:-1]:
        owner = owner[key]
    way = rng.choice(("replace", "replace", "replace", "like", "remove", "add"))
    if way == "remove":
        del owner[path[-1]]
    elif way == "add" and isinstance(owner, dict):
        owner[text(rng)[:50]] = document(rng)
    elif way == "like":
        owner[path[-1]] = _like(owner[path[-1]], rng)
    else:
        owner[path[-1]] = document(rng)
    return held, f"{way} {'.'.join(map(str, path))[:80]}"


def _like(value: Any, rng: Random) -> Any:
    """Return an odd value of the same kind, which a type alone doesn't refuse."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((0, -1, value + 1, value * 2, 10**6, 10**12, 2**63 - 1, -value))
    if isinstance(value, float):
        return rng.choice((0.0, -value, value * 1e300, 1e308, 5e-324, value + 1))
    if isinstance(value, str):
        return rng.choice((text(rng), f"{value}{text(rng)[:300]}", f"../{value}", f"/{value}"))
    if isinstance(value, list):
        return rng.choice(([], value * 2, [value], value * 1000 if len(value) < 50 else value[:1]))
    return document(rng)


def edited_json(path: Path, rng: Random) -> str:
    """Change one value in a JSON file, or the whole of its text; return what was done."""
    if rng.random() < 0.8:
        held, what = edit(json.loads(path.read_text(encoding="utf-8")), rng)
        path.write_text(json.dumps(held), encoding="utf-8")
        return what
    way, content = rng.choice(
        (
            ("deep lists", "[" * 200_000 + "]" * 200_000),
            ("deep objects", '{"a":' * 50_000 + "1" + "}" * 50_000),
            ("deep but legal", "[" * 900 + "]" * 900),
            ("a number of a megabyte", "9" * 10**6),
            ("a string of 10 MB", '"' + "x" * 10**7 + '"'),
            ("a list of 5 MB", "[" + "0," * 2_500_000 + "0]"),
            ("NaN", '{"schema_version": NaN}'),
            ("Infinity", '{"schema_version": 1e999}'),
            ("twice the same key", '{"schema_version": 2, "schema_version": 99}'),
            ("nothing", ""),
            ("null", "null"),
            ("an empty object", "{}"),
            ("prose", "not JSON at all: \x1b[31m"),
        )
    )
    path.write_text(content)
    return way


def damaged(path: Path, rng: Random, *, secret: Path, other: Path | None = None) -> str:
    """Make of a file something else; return what."""
    way = rng.choice(
        ("cut", "empty", "flip", "flip", "fill", "link out", "link device", "link loop", "fifo", "folder", "gone", "swap",
         "encode", "unreadable", "sparse", "json", "json", "json")
    )  # fmt: skip
    held = path.read_bytes() if path.is_file() else b""
    if way == "json" and path.suffix == ".json":
        return f"{edited_json(path, rng)} in {path.name}"
    if way in ("json", "flip", "cut", "fill", "encode", "unreadable"):
        _rewrite(path, held, way, rng)
    elif way == "empty":
        path.write_bytes(b"")
    elif way == "swap" and other is not None and other.is_file():
        path.write_bytes(other.read_bytes())
    elif way == "sparse":
        with path.open("r+b") as stream:
            stream.truncate(2**40)
    else:
        path.unlink()
        _replace(path, way, secret)
    return f"{way} {path.name}"


def _rewrite(path: Path, held: bytes, way: str, rng: Random) -> None:
    at = rng.randrange(len(held) + 1)
    if way == "cut":
        path.write_bytes(held[:at])
    elif way == "fill":
        path.write_bytes(held[:at] + rng.randbytes(64) + held[at + 64 :])
    elif way == "encode":
        path.write_bytes(rng.choice((b"\xff\xfe", b"\xef\xbb\xbf", b"\xff")) + held)
    elif way == "unreadable":
        path.chmod(0)
    elif held:
        changed = bytearray(held)
        for _ in range(rng.choice((1, 1, 8))):
            changed[rng.randrange(len(held))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))


def _replace(path: Path, way: str, secret: Path) -> None:
    if way == "link out":
        path.symlink_to(secret)
    elif way == "link device":
        path.symlink_to("/dev/zero")
    elif way == "link loop":
        path.symlink_to(path.name)
    elif way == "fifo":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()


def header_lies(path: Path, rng: Random) -> str:
    """Make the header of a safetensors file say something untrue; return what."""
    held = path.read_bytes()
    size = int.from_bytes(held[:8], "little")
    header, body = json.loads(held[8 : 8 + size]), held[8 + size :]
    name = rng.choice([key for key in header if key != "__metadata__"])
    way = rng.choice(
        ("length", "offsets", "overlap", "dtype", "shape", "deep", "name", "drop", "extra", "metadata", "huge")
    )
    said: dict[str, Any] = header[name]
    if way == "length":
        lie = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**62, 2**64 - 1))
        path.write_bytes(lie.to_bytes(8, "little") + held[8:])
        return f"header of {lie} bytes"
    if way == "offsets":
        said["data_offsets"] = rng.choice(([0, 2**62], [-1, 4], [4, 0], ["a", "b"], [0], [1e3, 2e3], None))
    elif way == "overlap":
        said["data_offsets"] = next(iter(v for k, v in header.items() if k != "__metadata__"))["data_offsets"]
    elif way == "dtype":
        said["dtype"] = rng.choice(("F64", "I64", "BOOL", "F8_E4M3", "F4", "U128", "", None, "C64", "BF16"))
    elif way == "shape":
        said["shape"] = rng.choice(([], [0], [2**40, 2**40], [-1], [1] * 200, ["3"], said["shape"][::-1], None))
    elif way == "name":
        header[text(rng)[:200]] = header.pop(name)
    elif way == "drop":
        del header[name]
    elif way == "extra":
        header[text(rng)[:200] or "x"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(body), len(body)]}
    elif way == "metadata":
        header["__metadata__"] = rng.choice(({"format": "tf"}, {"format": 1}, [], {"format": "\x1b[31m"}, {}))
    packed = json.dumps(header).encode()
    if way == "deep":
        packed = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    elif way == "huge":
        packed = b'{"' + b"x" * (20 * 2**20) + b'": 1}'
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + body)
    return f"{way} of {name}"


def png(width: int, height: int, *, body: bytes | None = None, colour: int = 2) -> bytes:
    """Return a PNG that says it has this size, whatever it holds."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, 8, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", body or zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


def mutated(held: bytes, rng: Random) -> bytes:
    """Return bytes of which a few are others, missing or twice."""
    changed = bytearray(held)
    for _ in range(rng.choice((1, 3, 20))):
        at = rng.randrange(len(changed) or 1)
        way = rng.randrange(4)
        if way == 0 and changed:
            changed[at] = rng.randrange(256)
        elif way == 1:
            del changed[at : at + rng.randrange(1, 20)]
        elif way == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 20))
        else:
            changed[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
    return bytes(changed)


Make = Callable[[], Any]
