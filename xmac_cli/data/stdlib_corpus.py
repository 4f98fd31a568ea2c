"""Real text that every Python installation carries, in clearly different domains, split by file.

The demo models are trained and judged on it, so nothing has to be downloaded. Domains: `code` (standard library
sources), `docs` (the language reference in `pydoc_data.topics`), `json` (one JSON line per function and class, parsed
from the sources), `names` (the Unicode character database in UnicodeData.txt's style), `tables` (character maps in
`encodings`) and, where the installation has them, `changelog` (news files and the licence).

A whole file is either training or held-out text; the choice depends on its name only. Texts differ between Python
versions, so everything made from them records `Corpus.fingerprint`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from xmac_cli.cli.errors import InputError, UsageError

DOMAINS = ("code", "docs", "json", "names", "tables", "changelog")
OPTIONAL_DOMAINS = ("changelog",)
HELDOUT_SHARE = 1 / 8

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_TABLE_FOLDER, _DOCS_FOLDER = "encodings", "pydoc_data"
_ALGORITHMIC_NAMES = ("CJK UNIFIED", "CJK COMPAT", "HANGUL SYLLABLE", "TANGUT IDEO", "EGYPTIAN", "KHITAN", "NUSHU")
_CHANGELOG_FILES = ("LICENSE.txt", "idlelib/*.txt", "idlelib/ChangeLog", "lib2to3/*.txt", "email/*.rst")


@dataclass(frozen=True)
class CorpusSize:
    """How much text to take.

    Args:
        train_bytes: limit per domain for training text, bytes of UTF-8.
        heldout_bytes: limit per domain for held-out text.
        train_piece: longest training document, bytes.
        heldout_piece: longest held-out document; short, so that a domain has several to bootstrap over.
    """

    train_bytes: int
    heldout_bytes: int
    train_piece: int = 16_384
    heldout_piece: int = 4_096


SIZES: Mapping[str, CorpusSize] = {
    "demo": CorpusSize(train_bytes=3_000_000, heldout_bytes=49_152),
    "tiny": CorpusSize(train_bytes=60_000, heldout_bytes=4_096, heldout_piece=1_024),
}


@dataclass(frozen=True)
class SourceFile:
    """One file (or block of the character database) that text was taken from.

    `name` is relative to the standard library folder; `sha256` and `bytes` describe the text as it was read.
    """

    domain: str
    name: str
    split: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """Documents per domain and split, and where they came from."""

    python: str
    unicode: str
    train: Mapping[str, tuple[str, ...]]
    heldout: Mapping[str, tuple[str, ...]]
    sources: tuple[SourceFile, ...]
    absent: tuple[str, ...]

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self.train)

    @property
    def fingerprint(self) -> str:
        """sha256 over every document, split and domain: equal text gives an equal fingerprint."""
        digest = hashlib.sha256()
        for split, domains in (("train", self.train), ("heldout", self.heldout)):
            for domain, documents in domains.items():
                for document in documents:
                    for part in (split, domain, document):
                        data = part.encode()
                        digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """JSON-able list of everything that was read."""
        return {
            "python": self.python,
            "unicode": self.unicode,
            "fingerprint": self.fingerprint,
            "absent_domains": list(self.absent),
            "files": [asdict(source) for source in self.sources],
        }


@dataclass(frozen=True)
class _Unit:
    """Something that is split as a whole; `read` is only called when its text is needed."""

    name: str
    read: Callable[[], str]


def load_stdlib_corpus(size: str | CorpusSize = "demo", *, library: Path | None = None) -> Corpus:
    """Collect the corpus from this Python installation.

    Args:
        size: a key of `SIZES`, or limits of your own.
        library: the standard library's folder; the running interpreter's when None.

    Raises:
        InputError: the installation carries no readable standard library sources or documentation.
    """
    if isinstance(size, str):
        if size not in SIZES:
            raise UsageError(f"unknown corpus size '{size}'", f"choose one of {', '.join(SIZES)}")
        size = SIZES[size]
    root = library or Path(sysconfig.get_paths()["stdlib"])
    modules = _module_paths(root)
    units = {
        "code": [_Unit(name, _reader(path)) for name, path in modules],
        "docs": _topic_units(root),
        "json": [_Unit(name, _index_reader(name, path)) for name, path in modules],
        "names": _character_units(),
        "tables": [_Unit(f"{_TABLE_FOLDER}/{p.name}", _reader(p)) for p in sorted((root / _TABLE_FOLDER).glob("*.py"))],
        "changelog": _changelog_units(root),
    }
    absent = tuple(domain for domain in DOMAINS if len(units[domain]) < 2)
    missing = [domain for domain in absent if domain not in OPTIONAL_DOMAINS]
    if missing:
        raise InputError(
            f"this Python installation carries no text for the domain(s) {', '.join(missing)} (looked in {root})",
            "use a Python whose standard library is installed as .py files, not as a zip or compiled files only",
        )
    train: dict[str, tuple[str, ...]] = {}
    heldout: dict[str, tuple[str, ...]] = {}
    sources: list[SourceFile] = []
    for domain in (d for d in DOMAINS if d not in absent):
        held_units, train_units = split_by_name(units[domain])
        train[domain] = _collect(domain, "train", train_units, size.train_bytes, size.train_piece, sources)
        heldout[domain] = _collect(domain, "heldout", held_units, size.heldout_bytes, size.heldout_piece, sources)
    return Corpus(platform.python_version(), unicodedata.unidata_version, train, heldout, tuple(sources), absent)


def split_by_name(units: Sequence[_Unit]) -> tuple[list[_Unit], list[_Unit]]:
    """Order units by the hash of their name; the first eighth (at least one) is held out."""
    ordered = sorted(units, key=lambda unit: hashlib.sha256(unit.name.encode()).digest())
    held = max(1, round(len(ordered) * HELDOUT_SHARE))
    return ordered[:held], ordered[held:]


def cut(text: str, limit: int) -> Iterator[str]:
    """Cut text at line ends into pieces of at most `limit` bytes; one longer line stays whole."""
    piece: list[str] = []
    used = 0
    for line in text.splitlines(keepends=True):
        length = len(line.encode())
        if piece and used + length > limit:
            yield "".join(piece)
            piece, used = [], 0
        piece.append(line)
        used += length
    if piece:
        yield "".join(piece)


def write_corpus_files(documents: Mapping[str, Iterable[str]], directory: Path) -> dict[str, Path]:
    """Write one `<domain>.jsonl` per domain, a `{"text": ...}` object per line.

    Returns:
        the path of each domain's file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = {}
    for domain, texts in documents.items():
        path = directory / f"{domain}.jsonl"
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
        written[domain] = path
    return written


def _collect(
    domain: str, split: str, units: Iterable[_Unit], limit: int, piece: int, sources: list[SourceFile]
) -> tuple[str, ...]:
    """Take documents until `limit` bytes: the first piece of every unit first, then the second pieces, and so on."""
    texts: list[tuple[_Unit, str]] = []
    available = 0
    for unit in units:
        text = unit.read()
        if not text.strip():
            continue
        texts.append((unit, text))
        available += min(len(text.encode()), piece) if split == "heldout" else len(text.encode())
        if available >= limit:
            break
    pieces = [list(cut(text, piece)) for _, text in texts]
    if split == "heldout":
        ordered = [part for rank in zip_longest(*pieces) for part in rank if part is not None]
    else:
        ordered = [part for parts in pieces for part in parts]
    chosen: list[str] = []
    used = 0
    for part in ordered:
        if used >= limit:
            break
        chosen.append(part)
        used += len(part.encode())
    for unit, text in texts:
        data = text.encode()
        sources.append(SourceFile(domain, unit.name, split, len(data), hashlib.sha256(data).hexdigest()))
    return tuple(chosen)


def _reader(path: Path) -> Callable[[], str]:
    def read() -> str:
        # A few sources are not UTF-8; none of their text is worth an error.
        return path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")

    return read


def _module_paths(root: Path) -> list[tuple[str, Path]]:
    """Python sources below the standard library folder, without tests, tables and generated build settings."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        folders = set(parts[:-1])
        if folders & _SKIPPED_FOLDERS or parts[0] in (_TABLE_FOLDER, _DOCS_FOLDER):
            continue
        if path.name.startswith("_sysconfigdata") or any(folder.startswith("config-") for folder in folders):
            continue
        found.append(("/".join(parts), path))
    return sorted(found)


def _topic_units(root: Path) -> list[_Unit]:
    """The topics of `help()`: chapters of the language reference as plain text, one unit each."""
    path = root / _DOCS_FOLDER / "topics.py"
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "topics":
            topics: dict[str, str] = ast.literal_eval(node.value)
            return [_Unit(f"{_DOCS_FOLDER}/topics.py#{name}", partial(str, text)) for name, text in topics.items()]
    return []


def _character_units() -> list[_Unit]:
    """Rows of 256 characters; names made by rule (ideographs, syllables) are left out."""
    rows: dict[int, list[str]] = {}
    for code in range(0x110000):
        character = chr(code)
        name = unicodedata.name(character, "")
        if name and not name.startswith(_ALGORITHMIC_NAMES):
            fields = (
                f"{code:04X}",
                name,
                unicodedata.category(character),
                str(unicodedata.combining(character)),
                unicodedata.bidirectional(character),
                unicodedata.decomposition(character),
            )
            rows.setdefault(code >> 8, []).append(";".join(fields))
    return [_Unit(f"unicodedata/{row:04X}00", partial(_joined, lines)) for row, lines in rows.items()]


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


def _changelog_units(root: Path) -> list[_Unit]:
    paths = sorted(path for pattern in _CHANGELOG_FILES for path in root.glob(pattern))
    return [_Unit(path.relative_to(root).as_posix(), _reader(path)) for path in paths]


def _index_reader(name: str, path: Path) -> Callable[[], str]:
    def read() -> str:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            # Standard libraries carry deliberately broken files (lib2to3 fixtures); they have no symbols to index.
            return ""
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return "".join(json.dumps(record) + "\n" for record in _symbols(module, tree, ""))

    return read


def _symbols(module: str, scope: ast.AST, prefix: str) -> Iterator[dict[str, Any]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            yield {"module": module, "kind": "class", "name": prefix + node.name, "line": node.lineno, "bases": bases}
            yield from _symbols(module, node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            yield {
                "module": module,
                "kind": "method" if prefix else "function",
                "name": prefix + node.name,
                "line": node.lineno,
                "args": [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)],
                "defaults": [ast.unparse(default) for default in arguments.defaults],
                "returns": ast.unparse(node.returns) if node.returns else None,
                "lines": (node.end_lineno or node.lineno) - node.lineno + 1,
            }
