"""Negative log-likelihood of documents under a causal model, with a sliding window.

Each token is scored exactly once. Window k covers at most `window` tokens and moves on by `stride`; a token scored in
it sees at least `window - stride` tokens of context (all of them near the document's start). Shapes: ids [T] per
document, logits [B, W, V]. Sums are kept in float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from xmac_cli.cli.errors import UsageError, VerificationError


@dataclass(frozen=True)
class Window:
    """Tokens [start, end) go through the model; tokens [first_scored, end) are scored."""

    start: int
    end: int
    first_scored: int


def sliding_windows(length: int, window: int, stride: int) -> Iterator[Window]:
    """Windows that score tokens 1 ... length-1 of a document exactly once.

    Token 0 has no context and is never scored.

    Raises:
        UsageError: unless 1 <= stride < window.
    """
    if window < 2 or not 1 <= stride < window:
        raise UsageError(f"the stride ({stride}) must be at least 1 and smaller than the window ({window})")
    scored = 1
    start = 0
    while scored < length:
        end = min(start + window, length)
        yield Window(start, end, scored)
        scored = end
        start = end - (window - stride)


def token_nll(
    model: Any,
    documents: Sequence[Sequence[int]],
    *,
    window: int,
    stride: int,
    batch_size: int = 8,
    on_tokens: Callable[[int], None] | None = None,
) -> list[torch.Tensor]:
    """Negative log-likelihood, in nats, of every token but the first of each document.

    Args:
        model: transformers causal model in eval mode; routing must not depend on other rows of a batch.
        documents: token ids per document.
        window: most tokens per forward pass.
        stride: tokens a window moves on by; smaller gives more context and costs more.
        batch_size: windows per forward pass; windows of equal length share one.
        on_tokens: called with the number of tokens scored, for progress bars.

    Returns:
        per document a float64 tensor [T - 1] on the CPU.

    Raises:
        VerificationError: the model's logits are no numbers, as with broken weights.
    """
    results = [torch.zeros(max(0, len(ids) - 1), dtype=torch.float64) for ids in documents]
    jobs = [(index, part) for index, ids in enumerate(documents) for part in sliding_windows(len(ids), window, stride)]
    jobs.sort(key=lambda job: (job[1].end - job[1].start, job[0], job[1].start))
    keep_some = "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.inference_mode():
        for _, group in groupby(jobs, key=lambda job: job[1].end - job[1].start):
            same_length = list(group)
            for first in range(0, len(same_length), batch_size):
                batch = same_length[first : first + batch_size]
                ids = torch.tensor([documents[index][part.start : part.end] for index, part in batch])
                losses = _batch_nll(model, ids, max(part.end - part.first_scored for _, part in batch), keep_some)
                if bool(torch.isnan(losses).any()):
                    raise VerificationError(
                        "the model gives logits that are no numbers, so it has no perplexity",
                        "look for broken weights, or compute in --dtype float32",
                    )
                for row, (index, part) in enumerate(batch):
                    count = part.end - part.first_scored
                    results[index][part.first_scored - 1 : part.end - 1] = losses[row, losses.shape[1] - count :]
                if on_tokens is not None:
                    on_tokens(sum(part.end - part.first_scored for _, part in batch))
    return results


def _batch_nll(model: Any, ids: torch.Tensor, last: int, keep_some: bool) -> torch.Tensor:
    """float64 [B, last]: nll of the last `last` tokens of every row."""
    ids = ids.to(model.device)
    # Position t predicts token t + 1, so scoring the last n tokens needs n + 1 positions, the final one unused.
    kept = {"logits_to_keep": last + 1} if keep_some else {}
    logits = model(input_ids=ids, use_cache=False, **kept).logits[:, -(last + 1) : -1]
    targets = ids[:, -last:]
    losses = torch.empty(targets.shape, dtype=torch.float64)
    for row in range(len(ids)):
        # Row by row: a float32 copy of all logits of a large vocabulary would not fit.
        wide = logits[row].to(torch.promote_types(logits.dtype, torch.float32))
        losses[row] = (
            torch.nn.functional.cross_entropy(wide, targets[row].to(wide.device), reduction="none").double().cpu()
        )
    return losses
