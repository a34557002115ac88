"""Power loss, simulated: what a disk may hold after one, worked out from a recording of all that was done to it.

`disk_recorder.c`, preloaded into a run's processes, writes down what they do below one folder; `Disk` does it again, event
by event, and `Disk.after_loss` says what is there if the power fails then. A disk owes nobody more than this: the bytes
that a file held when it was last synced, and the names that a folder held when that was. Of everything later any part may
be there: some of the blocks, or none; the names up to some moment.
"""

import enum
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SOURCE = Path(__file__).with_name("disk_recorder.c")
# What a disk writes at once, at most; file systems and SQLite's pages have the same.
BLOCK = 4096

Event = tuple[str, ...]
# By path: the bytes of a file, the target of a link, None for a folder.
Contents = dict[str, bytes | str | None]


class Loss(enum.Enum):
    """How unkind the disk is."""

    FORGETFUL = "nothing is there that wasn't synced, names neither"
    EMPTY = "every name is there, of the files only what was synced"
    TORN = "names up to some moment; of each file nothing, zeros, some blocks or all of what wasn't synced"


@dataclass(eq=False)
class Node:
    """A file, a folder or a link."""

    is_folder: bool = False
    target: str | None = None
    names: "dict[str, Node]" = field(default_factory=dict)
    live: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None
    # What was done since: bytes at a place, or None and a size.
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    unsafe: "list[Step]" = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes into the file."""
        self.pending.append((offset, data))
        _put(self.live, offset, data)

    def truncate(self, size: int) -> None:
        """Cut the file, or fill it with zeros."""
        self.pending.append((size, None))
        _resize(self.live, size)

    def sync(self) -> None:
        """Make safe what the file holds."""
        self.synced = bytes(self.live)
        self.pending.clear()


@dataclass(eq=False)
class Step:
    """Names that change together, each in its folder; None where one goes."""

    changes: tuple[tuple[Node, str, Node | None], ...]
    is_safe: bool = False


def _put(content: bytearray, offset: int, data: bytes) -> None:
    _resize(content, max(len(content), offset))
    content[offset : offset + len(data)] = data


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


class Disk:
    """A folder as its users see it, and what of it is safe."""

    def __init__(self, data: bytes = b"") -> None:
        """Begin with an empty folder; `data` is what the events' numbers point into."""
        self.root = Node(is_folder=True)
        self._data = data
        self._steps: list[Step] = []
        self._verbs: dict[str, Callable[..., None]] = {
            "process": lambda *_: None,
            "mkdir": lambda path: self._made(path, Node(is_folder=True)),
            "create": lambda path: self._made(path, Node()),
            "symlink": lambda path, target: self._made(path, Node(target=target)),
            "link": lambda old, path: self._made(path, self._file(old)),
            "rename": self._rename,
            "remove": self._remove,
            "write": self._write,
            "truncate": self._truncate,
            "seen": self._seen,
            "names": lambda path, *names: self._only(self._found(path), names),
            "sync": self._sync,
        }

    def do(self, event: Event) -> None:
        """Let one recorded event happen."""
        verb, *fields = event
        if verb not in self._verbs:
            raise ValueError(f"an event of no known kind: {event!r}")
        self._verbs[verb](*fields)

    def _write(self, path: str, offset: str, start: str, length: str) -> None:
        self._file(path).write(int(offset), self._bytes(start, length))

    def _truncate(self, path: str, size: str) -> None:
        self._file(path).truncate(int(size))

    def _remove(self, path: str) -> None:
        folder, name = self._place(path)
        self._step((folder, name, None))

    def _bytes(self, start: str, length: str) -> bytes:
        return self._data[int(start) : int(start) + int(length)]

    def _folder(self, path: PurePosixPath) -> Node:
        node = self.root
        for name in path.parts:
            if name not in node.names:
                self._step((node, name, Node(is_folder=True)))
            node = node.names[name]
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        where = PurePosixPath(path)
        return self._folder(where.parent), where.name

    def _file(self, path: str) -> Node:
        self._made(path, Node())
        folder, name = self._place(path)
        return folder.names[name]

    def _made(self, path: str, node: Node) -> None:
        """Let a name be there; what has it already stays, unless it is another link."""
        folder, name = self._place(path)
        known = folder.names.get(name)
        if known is None or known.target != node.target:
            self._step((folder, name, node))

    def _rename(self, old: str, path: str) -> None:
        (source, was), (folder, name) = self._place(old), self._place(path)
        node = source.names[was]
        self._step((source, was, None), (folder, name, node))

    def _seen(self, path: str, start: str, length: str) -> None:
        node, data = self._file(path), self._bytes(start, length)
        if bytes(node.live) != data:
            node.write(0, data)
            if len(node.live) != len(data):
                node.truncate(len(data))

    def _sync(self, path: str) -> None:
        node = self._found(path)
        if node.is_folder:
            for step in node.unsafe:
                step.is_safe = True
            node.unsafe.clear()
        else:
            node.sync()

    def _found(self, path: str) -> Node:
        where = PurePosixPath(path)
        return self._folder(where.parent).names[where.name] if where.name else self.root

    def _only(self, folder: Node, names: Sequence[str]) -> None:
        """Take away what went unseen: Rust's libraries rename without asking libc."""
        for name in folder.names.keys() - set(names):
            self._step((folder, name, None))

    def _step(self, *changes: tuple[Node, str, Node | None]) -> None:
        step = Step(changes)
        self._steps.append(step)
        for folder, _, _ in changes:
            folder.unsafe.append(step)
        _change(step, {folder: folder.names for folder, _, _ in changes})

    def live(self) -> Contents:
        """Return what is there while the power is on."""
        return dict(_walk(self.root, lambda node: node.names, lambda node: bytes(node.live)))

    def after_loss(self, loss: Loss, dice: random.Random) -> Contents:
        """Return what may be there when the power comes back."""
        num_unsafe = sum(not step.is_safe for step in self._steps)
        allowed = {Loss.FORGETFUL: 0, Loss.EMPTY: num_unsafe, Loss.TORN: dice.randint(0, num_unsafe)}[loss]
        names: dict[Node, dict[str, Node]] = {}
        for step in self._steps:
            if not step.is_safe and allowed == 0:
                continue
            allowed -= not step.is_safe
            _change(step, {folder: names.setdefault(folder, {}) for folder, _, _ in step.changes})
        held: dict[Node, bytes] = {}

        def content(node: Node) -> bytes:
            return held.setdefault(node, _torn(node, dice) if loss is Loss.TORN else node.synced or b"")

        return dict(_walk(self.root, lambda node: names.get(node, {}), content))


def _change(step: Step, names: dict[Node, dict[str, Node]]) -> None:
    for folder, name, node in step.changes:
        if node is None:
            names[folder].pop(name, None)
        else:
            names[folder][name] = node


def _walk(
    folder: Node, names: Callable[[Node], Mapping[str, Node]], content: Callable[[Node], bytes], path: str = ""
) -> Iterator[tuple[str, bytes | str | None]]:
    for name, node in sorted(names(folder).items()):
        where = f"{path}{name}"
        if node.is_folder:
            yield where, None
            yield from _walk(node, names, content, f"{where}/")
        else:
            yield where, content(node) if node.target is None else node.target


def _torn(node: Node, dice: random.Random) -> bytes:
    fate = dice.choice(("lost", "zeros", "blocks", "kept"))
    if fate == "kept" or not node.pending:
        return bytes(node.live)
    if fate == "zeros" and node.synced is None:
        return bytes(len(node.live))
    if fate == "lost":
        return node.synced or b""
    return _in_part(node, dice)


def _in_part(node: Node, dice: random.Random) -> bytes:
    content = bytearray(node.synced or b"")
    for offset, data in node.pending:
        if data is None:
            _resize(content, dice.choice((offset, len(content))))
            continue
        for start, end in _blocks(offset, len(data)):
            if dice.random() < 0.5:
                _put(content, start, data[start - offset : end - offset])
    return bytes(content)


def _blocks(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Return where the blocks of the disk begin and end that a write touches."""
    start, end = offset, offset + length
    while start < end:
        next_start = min(end, (start // BLOCK + 1) * BLOCK)
        yield start, next_start
        start = next_start


@dataclass(frozen=True)
class Recording:
    """What was done below a folder, in order."""

    events: Sequence[Event]
    data: bytes = b""

    @classmethod
    def read(cls, log: Path) -> "Recording":
        """Read what the recorder wrote; a last line that was cut off didn't happen."""
        lines = (log / "events").read_text(encoding="utf-8").split("\n")[:-1]
        return cls([tuple(line.split("\t")) for line in lines], (log / "data").read_bytes())

    def disk(self, num_events: int | None = None) -> Disk:
        """Return the disk after so many events, all without a number."""
        disk = Disk(self.data)
        for event in self.events[:num_events]:
            disk.do(event)
        return disk

    def commands(self) -> list[str]:
        """Return the command lines of the processes that were recorded."""
        return [event[2] for event in self.events if event[0] == "process"]


def put_back(contents: Contents, root: Path) -> None:
    """Make a folder hold this and nothing else."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path, held in contents.items():
        if held is None:
            (root / path).mkdir()
        elif isinstance(held, str):
            (root / path).symlink_to(held)
        else:
            (root / path).write_bytes(held)


def on_disk(root: Path) -> Contents:
    """Return what a folder holds."""
    found: Contents = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


def has_compiler() -> bool:
    """Return whether the recorder can be built here."""
    return os.uname().sysname == "Linux" and shutil.which("gcc") is not None


def build_recorder(folder: Path) -> Path:
    """Compile the recorder, and return the library."""
    library = folder / "disk_recorder.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wno-format-truncation", "-Werror")
    subprocess.run(["gcc", *flags, "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    return library


def recorded(library: Path, root: Path, log: Path) -> dict[str, str]:
    """Return the environment in which a process and its children are recorded; `root` is made, and has to be empty.

    Both settings and LD_PRELOAD are among what the product's children may see.
    """
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise ValueError(f"{root} isn't empty: what lies there was never seen being written")
    log.mkdir(parents=True)
    settings = {"PROFILING_AGENT_RECORD_ROOT": str(root), "PROFILING_AGENT_RECORD_LOG": str(log)}
    return os.environ | settings | {"LD_PRELOAD": str(library)}
