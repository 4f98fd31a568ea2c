"""Calibration: documents become a batch of token ids [B, S] with a mask that excludes padding.

Two packings. `pack` joins the documents, each closed by the end-of-text token, and cuts blocks of exactly S tokens
(as in NAEE, whose code uses 2048-token blocks of C4). `document` takes one document per row, cut at S and padded on the
right. The batch carries the sha256 of what was read and of the token ids, so that a score says what it was made from.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.data.documents import Document, Documents, read_documents

if TYPE_CHECKING:
    import torch

Packing = Literal["pack", "document"]

# Blocks are drawn from this many times the tokens that are needed, so that they come from many documents.
_OVERSAMPLING = 8


@dataclass(frozen=True)
class CalibrationOptions:
    """How a calibration batch is made.

    Args:
        samples: rows B.
        seqlen: tokens per row S.
        packing: "pack" or "document".
        chat_template: pass rows through the tokenizer's chat template; a `text` row becomes one user message.
        weights: share of the rows per file; None gives every file the same.
        seed: of the choice of documents and blocks.
    """

    samples: int = 128
    seqlen: int = 2048
    packing: Packing = "pack"
    chat_template: bool = False
    weights: tuple[float, ...] | None = None
    seed: int = 0

    def load(self, paths: Sequence[str | Path], tokenizer: Any) -> TokenBatch:
        """`load_calibration` with these options."""
        return load_calibration(
            paths,
            tokenizer,
            self.samples,
            self.seqlen,
            packing=self.packing,
            chat_template=self.chat_template,
            weights=self.weights,
            seed=self.seed,
        )


@dataclass(frozen=True)
class TokenSource:
    """What one file gave: its hash, rows and real tokens."""

    name: str
    sha256: str
    samples: int
    tokens: int


@dataclass(frozen=True)
class TokenBatch:
    """Token ids to run a model on.

    Args:
        input_ids: int64 [B, S]; padding on the right.
        attention_mask: bool [B, S]; False where padded.
        token_sha256: of shape, ids and mask.
        sources: one per file, in the order given; rows are in the same order.
        warnings: sentences about files that held less than asked.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    token_sha256: str
    sources: tuple[TokenSource, ...]
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Real tokens, padding excluded."""
        return int(self.attention_mask.sum())

    def describe(self) -> dict[str, Any]:
        """JSON-able account of the batch."""
        return {
            "shape": list(self.input_ids.shape),
            "tokens": self.tokens,
            "token_sha256": self.token_sha256,
            "files": [vars(source) for source in self.sources],
        }


def load_calibration(
    paths: Sequence[str | Path],
    tokenizer: Any,
    samples: int,
    seqlen: int,
    packing: Packing = "pack",
    chat_template: bool = False,
    weights: Sequence[float] | None = None,
    seed: int = 0,
) -> TokenBatch:
    """Read files, tokenise as much as is needed, and draw a batch.

    Args:
        paths: files that `read_documents` understands.
        tokenizer: a transformers tokenizer.
        samples, seqlen, packing, chat_template, weights, seed: see `CalibrationOptions`.

    Raises:
        InputError: a file is bad, or holds not a single row's worth of tokens.
        UsageError: options that make no sense.
    """
    files = [Path(path) for path in paths]
    shares = apportion(samples, _checked_weights(files, samples, seqlen, packing, weights))
    rows: list[list[int]] = []
    sources: list[TokenSource] = []
    warnings: list[str] = []
    for index, (path, share) in enumerate(zip(files, shares)):
        documents = read_documents(path)
        draw = random.Random(f"{seed}:{index}")
        chosen = list(_rows(documents, tokenizer, share, seqlen, packing, chat_template, draw))
        if not chosen and share > 0:
            raise InputError(
                f"{path} holds less than one row of {seqlen} tokens",
                "ask for shorter rows, or take one document per row",
            )
        if len(chosen) < share:
            warnings.append(f"{path} gave {len(chosen)} rows of {seqlen} tokens; {share} were asked for")
        rows += chosen
        sources.append(TokenSource(documents.name, documents.sha256, len(chosen), sum(map(len, chosen))))
    return _batch(rows, seqlen, _padding_id(tokenizer), tuple(sources), tuple(warnings))


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split a whole number by weights with the largest-remainder method; ties go to the earlier weight."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(value) for value in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def tokenize(document: Document, tokenizer: Any, *, chat_template: bool = False, close: bool = False) -> list[int]:
    """Token ids of one document.

    Args:
        document: text, messages or token ids.
        tokenizer: a transformers tokenizer; its own special tokens (such as a leading BOS) are added.
        chat_template: render through the chat template.
        close: append the end-of-text token if it is not there already.

    Raises:
        InputError: messages without the chat template, no template, or token ids outside the vocabulary.
    """
    if document.token_ids is not None:
        if max(document.token_ids) >= len(tokenizer):
            raise InputError(f"{document.location} holds token id {max(document.token_ids)}, beyond the vocabulary")
        return list(document.token_ids)
    if chat_template:
        ids = _render(document, tokenizer)
    elif document.text is None:
        raise InputError(f"{document.location} holds messages", "switch the chat template on")
    else:
        ids = list(tokenizer(document.text, add_special_tokens=True, verbose=False)["input_ids"])
    if close and tokenizer.eos_token_id is not None and (not ids or ids[-1] != tokenizer.eos_token_id):
        ids.append(tokenizer.eos_token_id)
    return ids


def token_sha256(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> str:
    """sha256 over the shape, the ids as little-endian int64 and the mask as bytes."""
    digest = hashlib.sha256(repr(tuple(input_ids.shape)).encode())
    digest.update(input_ids.numpy().astype("<i8").tobytes())
    digest.update(attention_mask.numpy().astype("u1").tobytes())
    return digest.hexdigest()


def _checked_weights(
    paths: Sequence[Path], samples: int, seqlen: int, packing: str, weights: Sequence[float] | None
) -> Sequence[float]:
    if not paths:
        raise UsageError("calibration needs at least one data file")
    if samples < 1 or seqlen < 2:
        raise UsageError(f"calibration needs at least 1 row of 2 tokens, got {samples} of {seqlen}")
    if packing not in ("pack", "document"):
        raise UsageError(f"packing is 'pack' or 'document', not '{packing}'")
    if weights is None:
        return [1.0] * len(paths)
    if len(weights) != len(paths):
        raise UsageError(f"{len(weights)} weights for {len(paths)} data files")
    if not all(0 <= weight < float("inf") for weight in weights) or sum(weights) == 0:
        raise UsageError("weights of data files must be zero or positive, and not all zero")
    return weights


def _rows(
    documents: Documents,
    tokenizer: Any,
    share: int,
    seqlen: int,
    packing: Packing,
    chat_template: bool,
    draw: random.Random,
) -> Iterator[list[int]]:
    """Up to `share` rows of one file, in a seeded order."""
    order = list(documents.documents)
    draw.shuffle(order)
    if packing == "document":
        taken = 0
        for document in order:
            if taken == share:
                return
            ids = tokenize(document, tokenizer, chat_template=chat_template)[:seqlen]
            # One token predicts nothing, so such a row would count for nothing.
            if len(ids) >= 2:
                taken += 1
                yield ids
        return
    stream: list[int] = []
    for document in order:
        if len(stream) >= share * seqlen * _OVERSAMPLING:
            break
        stream += tokenize(document, tokenizer, chat_template=chat_template, close=True)
    starts = list(range(0, len(stream) - seqlen + 1, seqlen))
    for start in sorted(draw.sample(starts, min(share, len(starts)))):
        yield stream[start : start + seqlen]


def _render(document: Document, tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the tokenizer has no chat template", "switch the chat template off, or give plain text")
    messages = document.messages or ({"role": "user", "content": document.text or ""},)
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
    except Exception as error:
        # A template is a program of the checkpoint; whatever goes wrong inside it is bad input.
        raise InputError(f"{document.location}: the chat template refuses these messages: {error}") from error
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _padding_id(tokenizer: Any) -> int:
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


def _batch(
    rows: list[list[int]], seqlen: int, padding: int, sources: tuple[TokenSource, ...], warnings: tuple[str, ...]
) -> TokenBatch:
    import torch

    width = min(seqlen, max(map(len, rows)))
    input_ids = torch.full((len(rows), width), padding, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        attention_mask[index, : len(row)] = True
    return TokenBatch(input_ids, attention_mask, token_sha256(input_ids, attention_mask), sources, warnings)
