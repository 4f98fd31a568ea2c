"""A trained 12-expert mixture of experts whose 4,096 coalitions are all evaluated.

Mixtral architecture: vocabulary 48, hidden 48, experts of width 32, 2 layers x 6 experts, top-2, trained 700 steps on
five sparse Markov chains with frequencies .45/.25/.15/.10/.05; the first token of a sequence names its chain. Value of
a coalition = 1 / perplexity of 16 calibration sequences of 33 tokens, on tokens 2 to 32 (the step from the chain's name
to the first state is noise). Coalition c keeps expert e of layer l iff bit 6 l + e of c is set.
Source: the fully enumerated game of docs/prune-moe-method.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

VOCABULARY, LENGTH, CHAINS = 48, 33, 5
LAYERS, EXPERTS = 2, 6
PLAYERS = LAYERS * EXPERTS
FREQUENCIES = (0.45, 0.25, 0.15, 0.10, 0.05)
STEPS, BATCH, LEARNING_RATE = 700, 24, 3e-3
CALIBRATION_SEQUENCES = 16


@dataclass(frozen=True)
class Fixture:
    """The trained model, its data, and the value of every coalition.

    Args:
        model: Mixtral in eval mode.
        calibration: int64 [16, 33].
        held_out: int64 [64, 33], other sequences of the same chains.
        table: float64 [4096], 1 / perplexity on `calibration`.
        frequency: float64 [12], share of calibration tokens that use the expert.
    """

    model: Any
    calibration: Tensor
    held_out: Tensor
    table: np.ndarray
    frequency: np.ndarray

    def perplexity(self, kept: np.ndarray) -> float:
        """Calibration perplexity with the kept experts, bool [12]."""
        return 1.0 / float(self.table[int(kept @ (1 << np.arange(PLAYERS)))])

    def values(self, masks: np.ndarray) -> np.ndarray:
        """Values of coalitions bool [B, 12], float64 [B]."""
        return self.table[masks @ (1 << np.arange(PLAYERS))]


def markov_chains(rng: np.random.Generator) -> np.ndarray:
    """Five transition matrices [5, V, V]; every state has four successors."""
    chains = np.zeros((CHAINS, VOCABULARY, VOCABULARY))
    for chain in chains:
        for state in range(VOCABULARY):
            successors = rng.choice(np.arange(CHAINS, VOCABULARY), size=4, replace=False)
            chain[state, successors] = rng.dirichlet(np.ones(4))
    return chains


def sample_sequences(chains: np.ndarray, count: int, rng: np.random.Generator) -> Tensor:
    """Sequences int64 [count, 33]."""
    domain = rng.choice(CHAINS, size=count, p=FREQUENCIES)
    tokens = np.empty((count, LENGTH), dtype=np.int64)
    tokens[:, 0] = domain
    cumulative = chains.cumsum(axis=2)
    for position in range(1, LENGTH):
        rows = cumulative[domain, tokens[:, position - 1]]
        tokens[:, position] = np.minimum((rng.random(count)[:, None] > rows).sum(axis=1), VOCABULARY - 1)
    return torch.from_numpy(tokens)


def train(seed: int = 0) -> tuple[Any, np.ndarray]:
    """Train the model; also returns the chains."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
    )
    rng = np.random.default_rng(seed)
    chains = markov_chains(rng)
    torch.manual_seed(seed)
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    data = sample_sequences(chains, STEPS * BATCH, rng)
    for step in range(STEPS):
        batch = data[step * BATCH : (step + 1) * BATCH]
        logits = model(input_ids=batch, use_cache=False).logits
        loss = F.cross_entropy(logits[:, 1:-1].flatten(0, 1), batch[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), chains


@torch.inference_mode()
def enumerate_perplexities(model: Any, tokens: Tensor) -> np.ndarray:
    """1 / perplexity of every coalition, float64 [4096].

    Layer 0 is evaluated for each of its 64 coalitions, layer 1 for 64 behind each of them; coalitions are combined from
    expert outputs by the textbook formula: softmax over surviving logits, two best, renormalised.
    """
    first, second = model.model.layers
    subsets = (torch.arange(2**EXPERTS)[:, None] >> torch.arange(EXPERTS)) & 1 == 1
    entering = _layer_input(model, tokens)
    residual, hidden = _attend(model, first, entering)
    after_first = _all_coalitions(first.mlp, residual, hidden, subsets)  # [64, B, S, d]
    table = np.empty((2**EXPERTS, 2**EXPERTS))
    for low, states in enumerate(after_first):
        residual, hidden = _attend(model, second, states)
        outputs = model.lm_head(model.model.norm(_all_coalitions(second.mlp, residual, hidden, subsets)))
        targets = tokens[:, 2:].expand(len(subsets), -1, -1)
        losses = F.cross_entropy(outputs[:, :, 1:-1].flatten(0, 2), targets.flatten(), reduction="none")
        table[:, low] = torch.exp(-losses.view(len(subsets), -1).double().mean(dim=1)).numpy()
    return table.reshape(-1)


def _layer_input(model: Any, tokens: Tensor) -> Tensor:
    return model.model.embed_tokens(tokens)


def _attend(model: Any, layer: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """(residual stream after attention, input of the MoE block)."""
    positions = torch.arange(states.shape[1])[None]
    attended, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(states),
        position_embeddings=model.model.rotary_emb(states, positions),
        attention_mask=None,
    )
    residual = states + attended
    return residual, layer.post_attention_layernorm(residual)


def _all_coalitions(block: Any, residual: Tensor, hidden: Tensor, subsets: Tensor) -> Tensor:
    """Output of the layer under every subset of its experts, [64, B, S, d]."""
    experts = block.experts
    gate, up = torch.einsum("bsd,efd->bsef", hidden, experts.gate_up_proj).chunk(2, dim=-1)
    outputs = torch.einsum("bsef,edf->bsed", F.silu(gate) * up, experts.down_proj)
    logits = hidden @ block.gate.weight.T
    result = []
    for subset in subsets:
        masked = logits.masked_fill(~subset, -torch.inf)
        best = masked.topk(2, dim=-1)
        weights = torch.softmax(best.values, dim=-1).nan_to_num(0.0)
        gates = torch.zeros_like(logits).scatter_(2, best.indices, weights)
        result.append(residual + torch.einsum("bse,bsed->bsd", gates, outputs))
    return torch.stack(result)


@torch.inference_mode()
def _frequencies(model: Any, tokens: Tensor) -> np.ndarray:
    counts = []
    states = _layer_input(model, tokens)
    for layer in model.model.layers:
        residual, hidden = _attend(model, layer, states)
        chosen = (hidden @ layer.mlp.gate.weight.T).topk(2, dim=-1).indices
        counts.append(torch.bincount(chosen.flatten(), minlength=EXPERTS).double() / tokens.numel())
        states = residual + layer.mlp(hidden)
    return torch.cat(counts).numpy()


@lru_cache(maxsize=2)
def load_fixture(seed: int = 0) -> Fixture:
    """Train and enumerate once per process."""
    model, chains = train(seed)
    rng = np.random.default_rng([seed, 1])
    calibration = sample_sequences(chains, CALIBRATION_SEQUENCES, rng)
    held_out = sample_sequences(chains, 64, rng)
    return Fixture(
        model, calibration, held_out, enumerate_perplexities(model, calibration), _frequencies(model, calibration)
    )
