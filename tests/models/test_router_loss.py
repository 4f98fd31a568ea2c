"""The balance term of a layer equals transformers' for one layer, and is smallest when experts are used evenly."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from xmac_cli.models.router_loss import load_balancing_loss


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (16, 4)])
def test_one_layer_equals_transformers(experts: int, top_k: int) -> None:
    logits = torch.randn(200, experts, generator=torch.Generator().manual_seed(0)) * 2
    expected = load_balancing_loss_func((logits,), experts, top_k)
    torch.testing.assert_close(load_balancing_loss((logits,), top_k), expected)


def test_it_is_top_k_when_even_and_grows_to_the_number_of_experts() -> None:
    even = torch.eye(8).repeat(50, 1) * 1e-3
    assert float(load_balancing_loss((even,), 1)) == pytest.approx(1.0, rel=1e-4)
    one = torch.zeros(100, 8)
    one[:, 3] = 50.0
    assert float(load_balancing_loss((one,), 1)) == pytest.approx(8.0, rel=1e-4)


def test_opposite_imbalances_of_two_layers_do_not_cancel() -> None:
    first = torch.zeros(100, 2)
    first[:, 0] = 50.0
    layers = (first, first.flip(1))
    assert float(load_balancing_loss(layers, 1)) == pytest.approx(2.0, rel=1e-4)
    assert float(load_balancing_loss_func(layers, 2, 1)) == pytest.approx(1.0, rel=1e-4)


def test_its_gradient_moves_probability_away_from_the_overused_expert() -> None:
    logits = torch.zeros(100, 4)
    logits[:, 1] = 1.0
    logits.requires_grad_(True)
    load_balancing_loss((logits,), 2).backward()
    assert logits.grad is not None
    assert logits.grad[:, 1].sum() > 0
