"""Files of documents: plain text, JSON lines, parquet, and token ids that were made earlier.

`.txt` is one document. `.jsonl` and `.parquet` hold one document a row, in a field `text` (a string) or `messages` (a
list of {"role", "content"}). `.safetensors` holds `input_ids` [B, S] of an integer dtype and optionally
`attention_mask` [B, S]; one row is one document. Nothing here unpickles, and a bad row is answered with its file and
line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.hashing import hash_file
from xmac_cli.cli.errors import InputError, MissingExtraError

Message = Mapping[str, str]


@dataclass(frozen=True)
class Document:
    """One document in exactly one of three forms.

    Args:
        location: "file:line" for error messages.
        text: plain text.
        messages: a conversation, for a chat template.
        token_ids: token ids made earlier.
    """

    location: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Documents:
    """All documents of one file.

    Args:
        name: file name without suffix; names the domain in reports.
        path: where it was read.
        sha256: of the file's bytes.
        documents: in file order.
    """

    name: str
    path: Path
    sha256: str
    documents: tuple[Document, ...]

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def texts(self) -> tuple[str, ...]:
        """Plain texts.

        Raises:
            InputError: a document has another form.
        """
        return tuple(_plain_text(document) for document in self.documents)


def read_documents(path: str | Path) -> Documents:
    """Read every document of a file; its suffix says what it is.

    Raises:
        InputError: no such file, an unknown suffix, no document in it, or a row that is not what it should be.
        MissingExtraError: parquet without pyarrow.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"data file {path} does not exist or is no regular file")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"{path} has the suffix '{path.suffix}', which no reader knows", f"use one of {', '.join(_READERS)}"
        )
    documents = tuple(reader(path))
    if not documents:
        raise InputError(f"{path} holds no document")
    return Documents(path.stem, path, hash_file(path), documents)


def _plain_text(document: Document) -> str:
    if document.text is None:
        raise InputError(f"{document.location} holds no plain text", "give a file whose rows have a field 'text'")
    return document.text


def _read_text(path: Path) -> list[Document]:
    text = "".join(line for _, line in _lines(path))
    return [Document(f"{path}:1", text=text)] if text.strip() else []


def _read_json_lines(path: Path) -> list[Document]:
    documents = []
    for number, line in _lines(path):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{location} is not valid JSON: {error}") from error
        documents.append(_document(row, location))
    return documents


def _read_parquet(path: Path) -> list[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("data", "read parquet files") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = [name for name in ("text", "messages") if name in file.schema_arrow.names]
        rows = file.read(columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a readable parquet file: {error}") from error
    return [_document(row, f"{path}:row {number}") for number, row in enumerate(rows, start=1)]


def _read_token_ids(path: Path) -> list[Document]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from error
    ids = tensors.get("input_ids")
    if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise InputError(f"{path} holds no integer tensor 'input_ids' with two dimensions")
    if ids.size and (ids.min() < 0 or int(ids.max()) >= 2**62):
        raise InputError(f"{path} holds token ids that are negative or absurdly large")
    mask = tensors.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise InputError(f"{path}: attention_mask has shape {mask.shape}, input_ids {ids.shape}")
    documents = []
    for number, row in enumerate(ids):
        kept = row if mask is None else row[mask[number].astype(bool)]
        if len(kept):
            documents.append(Document(f"{path}:row {number + 1}", token_ids=tuple(int(i) for i in kept)))
    return documents


_READERS: Mapping[str, Callable[[Path], Sequence[Document]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
    ".safetensors": _read_token_ids,
}


def _lines(path: Path) -> list[tuple[int, str]]:
    """Numbered lines with their ends; only newline characters end a line, as JSON lines demand."""
    lines = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{path}:{number} is not UTF-8: {error.reason} at byte {error.start}") from error
            lines.append((number, line.replace("\r\n", "\n")))
    return lines


def _document(row: Any, location: str) -> Document:
    if not isinstance(row, dict):
        raise InputError(f"{location} holds a {type(row).__name__}, an object with 'text' or 'messages' was expected")
    text, messages = row.get("text"), row.get("messages")
    if text is not None and messages is not None:
        raise InputError(f"{location} has both 'text' and 'messages'; one of them was expected")
    if messages is not None:
        return Document(location, messages=_messages(messages, location))
    if not isinstance(text, str):
        found = "has no field 'text' or 'messages'" if text is None else f"has a {type(text).__name__} as 'text'"
        raise InputError(f"{location} {found}")
    return Document(location, text=_encodable(text, location))


def _messages(messages: Any, location: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{location}: 'messages' must be a list of at least one message")
    checked = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError(f"{location}: every message needs 'role' and 'content' as strings")
        checked.append({"role": role, "content": _encodable(content, location)})
    return tuple(checked)


def _encodable(text: str, location: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character and stops tokenizers."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{location} holds half of a surrogate pair, which is not valid text") from error
    return text
