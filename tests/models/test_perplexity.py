"""Sliding windows: every token once, with the context that was promised, equal to brute force in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models_small import small_llama

from xmac_cli.cli.errors import UsageError, VerificationError
from xmac_cli.models.perplexity import sliding_windows, token_nll


@st.composite
def window_cases(draw: st.DrawFn) -> tuple[int, int, int]:
    window = draw(st.integers(2, 40))
    return draw(st.integers(0, 150)), window, draw(st.integers(1, window - 1))


@given(window_cases())
def test_every_token_but_the_first_is_scored_once_with_enough_context(case: tuple[int, int, int]) -> None:
    length, window, stride = case
    scored: list[int] = []
    for part in sliding_windows(length, window, stride):
        assert 0 <= part.start < part.first_scored < part.end <= length
        assert part.end - part.start <= window
        assert part.first_scored - part.start >= min(part.first_scored, window - stride)
        scored += range(part.first_scored, part.end)
    assert scored == list(range(1, length))


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 0), (8, 8), (8, 9)])
def test_windows_that_cannot_work_are_usage_errors(window: int, stride: int) -> None:
    with pytest.raises(UsageError):
        list(sliding_windows(20, window, stride))


def brute_force(model: torch.nn.Module, ids: list[int], window: int, stride: int) -> torch.Tensor:
    """One forward pass per token on exactly the context its window holds; log-softmax written out."""
    losses = []
    for token in range(1, len(ids)):
        if token < window:
            start = 0
        else:
            start = stride * ((token - window) // stride + 1)
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:token]])).logits[0, -1].double()
        losses.append(torch.log(torch.exp(logits - logits.max()).sum()) + logits.max() - logits[ids[token]])
    return torch.stack(losses)


@pytest.mark.parametrize(("window", "stride"), [(8, 1), (8, 3), (8, 4), (8, 7), (64, 20)])
def test_losses_equal_brute_force(window: int, stride: int) -> None:
    model = small_llama(seed=1).double()
    documents = [
        torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (2, 9, 23, 30)
    ]
    ours = token_nll(model, documents, window=window, stride=stride, batch_size=3)
    for ids, losses in zip(documents, ours):
        torch.testing.assert_close(losses, brute_force(model, ids, window, stride), atol=1e-10, rtol=0)


def test_a_document_that_fits_one_window_does_not_depend_on_the_stride() -> None:
    model = small_llama(seed=1)
    ids = [list(range(20))]
    results = [token_nll(model, ids, window=20, stride=stride)[0] for stride in (1, 7, 19)]
    wider = token_nll(model, ids, window=33, stride=5)[0]
    for losses in (*results, wider):
        assert torch.equal(losses, results[0])


def test_batch_size_and_order_of_documents_do_not_matter() -> None:
    model = small_llama(seed=2).double()
    documents = [[(7 * i + n) % 50 for i in range(n)] for n in (5, 17, 17, 31, 2)]
    one = token_nll(model, documents, window=10, stride=4, batch_size=1)
    many = token_nll(model, documents[::-1], window=10, stride=4, batch_size=16)[::-1]
    for a, b in zip(one, many):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_documents_without_a_second_token_have_no_loss() -> None:
    model = small_llama(seed=2)
    assert [len(losses) for losses in token_nll(model, [[], [3], [3, 4]], window=8, stride=4)] == [0, 0, 1]


def test_progress_counts_every_scored_token() -> None:
    counted: list[int] = []
    documents = [list(range(30)), list(range(11))]
    token_nll(small_llama(seed=2), documents, window=8, stride=3, on_tokens=counted.append)
    assert sum(counted) == 29 + 10


def test_a_model_whose_logits_are_no_numbers_has_no_perplexity() -> None:
    model = small_llama(seed=1)
    with torch.no_grad():
        next(model.parameters())[:] = torch.nan
    with pytest.raises(VerificationError, match="no numbers"):
        token_nll(model, [[1, 2, 3, 4]], window=8, stride=4)
