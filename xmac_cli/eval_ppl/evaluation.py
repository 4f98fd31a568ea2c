"""Perplexity of a model on files of documents: exp of the mean negative log-likelihood per token.

Documents are scored separately with a sliding window (`xmac_cli.models.perplexity`), sums are weighted by tokens.
Perplexity per token depends on the tokenizer; bits per byte, sum(nll) / ln 2 / bytes, does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.data.calibration import tokenize
from xmac_cli.data.documents import Document, Documents, read_documents
from xmac_cli.eval_ppl.bootstrap import bootstrap_interval

LARGEST_DEFAULT_WINDOW = 2048


@dataclass(frozen=True)
class PerplexityOptions:
    """How documents are scored.

    Args:
        window: most tokens in one forward pass; None is the model's longest input, at most 2048.
        stride: tokens the window moves on by; None is half the window.
        bos: whether a beginning-of-text token opens every document: "auto" leaves it to the tokenizer.
        chat_template: render rows through the tokenizer's chat template.
        max_documents: documents taken from each file, in file order; None takes all.
        batch_size: windows per forward pass.
        bootstrap: replicates for the intervals; 0 computes none.
        seed: of the bootstrap.
    """

    window: int | None = None
    stride: int | None = None
    bos: Literal["auto", "always", "never"] = "auto"
    chat_template: bool = False
    max_documents: int | None = None
    batch_size: int = 8
    bootstrap: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class DocumentScore:
    """One document: nll sum in nats over `tokens` scored tokens that spell `bytes` bytes (None when unknown)."""

    location: str
    nll: float
    tokens: int
    bytes: int | None


@dataclass(frozen=True)
class DomainScore:
    """All documents of one file."""

    name: str
    path: str
    sha256: str
    documents: tuple[DocumentScore, ...]


@dataclass(frozen=True)
class Encoded:
    """A tokenised document.

    Args:
        location: "file:line".
        ids: token ids [T]; the first is never scored.
        bytes: UTF-8 bytes that tokens 1 ... T-1 spell, or None when the text is unknown.
    """

    location: str
    ids: list[int]
    bytes: int | None


def evaluate_files(
    model: Any, tokenizer: Any, paths: Sequence[Path], options: PerplexityOptions, progress: Progress | None = None
) -> list[DomainScore]:
    """Score every document of every file.

    Args:
        model: transformers causal model in eval mode.
        tokenizer: its tokenizer.
        paths: data files; each is one domain.
        options: see `PerplexityOptions`.
        progress: bar and one metrics line per domain.

    Raises:
        InputError: a file is bad or has no document of two tokens.
    """
    from xmac_cli.models.perplexity import token_nll

    if not paths:
        raise UsageError("no data file is given", "name one with --data FILE")
    progress = progress or NullProgress()
    window, stride = window_and_stride(model, options)
    encoded = [(documents, encode_documents(documents, tokenizer, options)) for documents in map(read_documents, paths)]
    total = sum(len(item.ids) - 1 for _, items in encoded for item in items)
    scores = []
    with progress.task("scoring", total=total, unit="tokens") as task:
        for documents, items in encoded:
            losses = token_nll(
                model,
                [item.ids for item in items],
                window=window,
                stride=stride,
                batch_size=options.batch_size,
                on_tokens=task.advance,
            )
            rows = tuple(
                DocumentScore(item.location, float(loss.sum()), len(loss), item.bytes)
                for item, loss in zip(items, losses)
            )
            scores.append(DomainScore(documents.name, str(documents.path), documents.sha256, rows))
            progress.metric({"domain": documents.name, **summarize([scores[-1]], options)})
    return scores


def window_and_stride(model: Any, options: PerplexityOptions) -> tuple[int, int]:
    """The window and stride in force.

    Raises:
        UsageError: unless 1 <= stride < window.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LARGEST_DEFAULT_WINDOW
    window = options.window if options.window is not None else min(longest, LARGEST_DEFAULT_WINDOW)
    stride = options.stride if options.stride is not None else max(1, window // 2)
    if window < 2 or not 1 <= stride < window:
        raise UsageError(f"the stride ({stride}) must be at least 1 and smaller than the window ({window})")
    return window, stride


def encode_documents(documents: Documents, tokenizer: Any, options: PerplexityOptions) -> list[Encoded]:
    """Tokenise; documents with fewer than two tokens predict nothing and are left out.

    Raises:
        InputError: nothing is left.
    """
    chosen = documents.documents[: options.max_documents]
    encoded = [_encode(document, tokenizer, options) for document in chosen]
    usable = [item for item in encoded if len(item.ids) >= 2]
    if not usable:
        raise InputError(f"{documents.path} has no document of at least two tokens")
    return usable


def summarize(domains: Sequence[DomainScore], options: PerplexityOptions) -> dict[str, Any]:
    """Token-weighted numbers over all documents of the domains.

    Returns:
        documents, tokens, bytes, nll (nats per token), perplexity, perplexity_interval (95 %) and bits_per_byte.
    """
    strata = [
        (np.array([d.nll for d in domain.documents]), np.array([d.tokens for d in domain.documents], dtype=np.float64))
        for domain in domains
    ]
    nll = math.fsum(float(losses.sum()) for losses, _ in strata)
    tokens = sum(int(counts.sum()) for _, counts in strata)
    sizes = [document.bytes for domain in domains for document in domain.documents]
    size = None if None in sizes else sum(size for size in sizes if size is not None)
    interval = bootstrap_interval(strata, samples=options.bootstrap, seed=options.seed)
    return {
        "documents": len(sizes),
        "tokens": tokens,
        "bytes": size,
        "nll": nll / tokens,
        "perplexity": _exp(nll / tokens),
        "perplexity_interval": None if interval is None else [_exp(value) for value in interval],
        "bits_per_byte": nll / math.log(2) / size if size else None,
    }


def _encode(document: Document, tokenizer: Any, options: PerplexityOptions) -> Encoded:
    ids = tokenize(document, tokenizer, chat_template=options.chat_template)
    size: int | None = None
    plain = document.text is not None and not options.chat_template
    if plain:
        size = len((document.text or "").encode())
    opener = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if options.bos == "always" and (not ids or ids[0] != opener):
        if opener is None:
            raise UsageError("the tokenizer has no beginning-of-text or end-of-text token", "use --bos never")
        ids = [opener, *ids]
    elif options.bos == "never" and ids and ids[0] == tokenizer.bos_token_id:
        ids = ids[1:]
    if size is not None and ids and ids[0] not in tokenizer.all_special_ids:
        # The first token has no context and is not scored, so its bytes do not count either.
        size -= len(tokenizer.decode(ids[:1]).encode())
    return Encoded(document.location, ids, size)


def _exp(value: float) -> float:
    """exp that answers infinity instead of an overflow error: a broken model's perplexity is still a number."""
    return math.exp(value) if value < 700 else math.inf
