"""A small mixture-of-experts model, trained from scratch in minutes on text that every Python carries.

Qwen3-MoE architecture (RMSNorm on queries and keys, softmax router, top-2 of the renormalised probabilities). Several
clearly different domains and a load-balancing loss make experts specialise, so that which of them is pruned matters.
A step budget, not a clock, ends training: the same seed, torch build and thread count give the same bytes.
Shapes: batches [B, S + 1]; router logits per layer [B * S, E].
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmac_cli.cli.errors import InputError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.data.stdlib_corpus import Corpus
from xmac_cli.models.demo_recipe import DEMO_VERSION, DemoMoeRecipe
from xmac_cli.models.demo_tokenizer import train_tokenizer
from xmac_cli.models.loading import choose_experts, quiet_transformers
from xmac_cli.models.ngram import BigramModel
from xmac_cli.models.perplexity import token_nll
from xmac_cli.models.router_loss import load_balancing_loss
from xmac_cli.training.loop import StepLoss, seed_everything, train
from xmac_cli.training.options import TrainingOptions

TOKENIZER_BYTES_PER_DOMAIN = 400_000
SAVE_EVERY = 200


@dataclass(frozen=True)
class MixtureBatches:
    """Batch i of a fixed mixture of token streams; a pure function of i.

    Args:
        streams: int64 token stream per domain.
        mixture: share of rows per domain.
        rows: rows per batch.
        seqlen: tokens per row that are predicted.
        seed: of the places rows are cut from.
    """

    streams: Sequence[np.ndarray]
    mixture: Sequence[float]
    rows: int
    seqlen: int
    seed: int

    def __call__(self, index: int) -> torch.Tensor:
        """int64 [rows, seqlen + 1]."""
        draw = np.random.default_rng([self.seed, index])
        cumulative = np.cumsum(self.mixture) / np.sum(self.mixture)
        # Multiples of the golden ratio modulo 1 hit every domain in its exact share, without runs of one domain.
        position = (np.arange(index * self.rows, (index + 1) * self.rows) * 0.6180339887498949) % 1.0
        batch = []
        for domain in np.minimum(np.searchsorted(cumulative, position, side="right"), len(self.streams) - 1):
            stream = self.streams[domain]
            start = draw.integers(0, len(stream) - self.seqlen)
            batch.append(stream[start : start + self.seqlen + 1])
        return torch.from_numpy(np.stack(batch))


def build_demo_moe(
    directory: Path, corpus: Corpus, recipe: DemoMoeRecipe, seed: int, progress: Progress, work: Path | None = None
) -> dict[str, Any]:
    """Train tokenizer and model, judge them on held-out text, and write a checkpoint directory.

    Args:
        directory: where the checkpoint is written; created.
        corpus: text to train on and to judge with.
        recipe: sizes and training.
        seed: of everything random.
        progress: bars and metrics.
        work: folder for the training metrics and resumable states; None keeps none.

    Returns:
        the report that is also written as `demo_report.json`.
    """
    progress = progress or NullProgress()
    progress.note("training the tokenizer")
    tokenizer = train_tokenizer(corpus.train, recipe.vocabulary, TOKENIZER_BYTES_PER_DOMAIN, recipe.seqlen)
    streams = {domain: _stream(tokenizer, texts) for domain, texts in corpus.train.items()}
    heldout = {domain: _documents(tokenizer, texts) for domain, texts in corpus.heldout.items()}
    _check_streams(streams, recipe)
    shares = [recipe.mixture[domain] for domain in streams]
    batches = MixtureBatches(list(streams.values()), shares, recipe.rows, recipe.seqlen, seed)
    with _deterministic():
        seed_everything(seed)
        model = demo_model(recipe, tokenizer)
        options = _training_options(recipe, seed, save=work is not None)
        key = recipe.key(seed, corpus.fingerprint)
        train(model, batches, demo_loss(recipe), options, progress, work, job_key=key)
        model.eval()
        progress.note("judging the model on held-out text")
        report = judge(model, heldout, batches, recipe)
    report = {"demo_version": DEMO_VERSION, "seed": seed, "corpus_fingerprint": corpus.fingerprint, **report}
    _write(directory, model, tokenizer, corpus, recipe, report)
    return report


def demo_model(recipe: DemoMoeRecipe, tokenizer: Any) -> Any:
    """A randomly initialised model of the recipe's shape."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.expert_width * recipe.top_k,
        moe_intermediate_size=recipe.expert_width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        norm_topk_prob=True,
        initializer_range=recipe.initializer_range,
        router_aux_loss_coef=recipe.balance,
        tie_word_embeddings=True,
        max_position_embeddings=recipe.seqlen,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    choose_experts(model)
    return model


def demo_loss(recipe: DemoMoeRecipe) -> Any:
    """Next-token cross entropy plus the weighted balance term."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> StepLoss:
        output = model(input_ids=batch[:, :-1], output_router_logits=True, use_cache=False)
        logits = output.logits.reshape(-1, output.logits.shape[-1])
        nll = torch.nn.functional.cross_entropy(logits.float(), batch[:, 1:].reshape(-1))
        balance = load_balancing_loss(output.router_logits, recipe.top_k)
        return StepLoss(nll + recipe.balance * balance, {"nll": nll.detach(), "balance": balance.detach()})

    return loss


def judge(
    model: Any, heldout: Mapping[str, Sequence[Sequence[int]]], batches: MixtureBatches, recipe: DemoMoeRecipe
) -> dict[str, Any]:
    """Held-out perplexity of the model and of n-gram models of the very tokens it was trained on.

    Returns:
        parameters, perplexity per domain and overall (`model`, `unigram`, `bigram`), and `specialisation`: per layer
        the mutual information, in bits, between a token's domain and the experts it is routed to.
    """
    seen = np.concatenate([batches(index).numpy() for index in range(recipe.steps)])
    bigram = BigramModel(seen, recipe.vocabulary)
    losses: dict[str, dict[str, np.ndarray]] = {}
    for domain, documents in heldout.items():
        rows = max(8, 2048 // recipe.seqlen)
        nll = token_nll(model, documents, window=recipe.seqlen, stride=recipe.seqlen // 2, batch_size=rows)
        arrays = [np.asarray(ids) for ids in documents]
        losses[domain] = {
            "model": np.concatenate([values.numpy() for values in nll]),
            "bigram": np.concatenate([bigram.bigram_nll(ids) for ids in arrays]),
            "unigram": np.concatenate([bigram.unigram_nll(ids) for ids in arrays]),
        }
    domains = {
        domain: {"tokens": len(kinds["model"]), **{kind: _perplexity(values) for kind, values in kinds.items()}}
        for domain, kinds in losses.items()
    }
    overall = {
        kind: _perplexity(np.concatenate([kinds[kind] for kinds in losses.values()]))
        for kind in ("model", "bigram", "unigram")
    }
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training_tokens": recipe.steps * recipe.rows * recipe.seqlen,
        "heldout_tokens": sum(int(row["tokens"]) for row in domains.values()),
        "perplexity": overall,
        "domains": domains,
        "specialisation": specialisation(model, heldout, recipe),
    }


def specialisation(
    model: Any, documents: Mapping[str, Sequence[Sequence[int]]], recipe: DemoMoeRecipe
) -> list[dict[str, float]]:
    """Per layer: bits of information an expert id carries about the domain, and the most and least used expert's share.

    Shares are relative to even use (1.0), with every domain weighing the same.
    """
    usage = torch.zeros(recipe.layers, len(documents), recipe.experts, dtype=torch.float64)
    for row, texts in enumerate(documents.values()):
        for ids in texts:
            window = torch.tensor([ids[: recipe.seqlen]], device=model.device)
            with torch.inference_mode():
                router_logits = model(input_ids=window, output_router_logits=True, use_cache=False).router_logits
            for layer, logits in enumerate(router_logits):
                chosen = logits.topk(recipe.top_k, dim=-1).indices.reshape(-1).cpu()
                usage[layer, row] += torch.bincount(chosen, minlength=recipe.experts)
    conditional = usage / usage.sum(dim=-1, keepdim=True)
    marginal = conditional.mean(dim=1, keepdim=True)
    terms = torch.where(conditional > 0, conditional * (conditional / marginal).log2(), 0.0)
    information = terms.sum(dim=-1).mean(dim=-1)
    relative = marginal.squeeze(1) * recipe.experts
    return [
        {
            "domain_information_bits": round(float(information[layer]), 6),
            "most_used": round(float(relative[layer].max()), 6),
            "least_used": round(float(relative[layer].min()), 6),
        }
        for layer in range(recipe.layers)
    ]


def _training_options(recipe: DemoMoeRecipe, seed: int, *, save: bool) -> TrainingOptions:
    return TrainingOptions(
        steps=recipe.steps,
        lr=recipe.lr,
        schedule="wsd",
        warmup_steps=min(recipe.warmup_steps, recipe.steps),
        decay_share=0.5,
        final_lr_share=0.05,
        weight_decay=recipe.weight_decay,
        save_every=SAVE_EVERY if save else None,
        seed=seed,
        device="cpu",
    )


def _check_streams(streams: Mapping[str, np.ndarray], recipe: DemoMoeRecipe) -> None:
    for domain, stream in streams.items():
        if len(stream) <= recipe.seqlen + 1:
            raise InputError(f"the corpus domain '{domain}' has only {len(stream)} tokens in this Python installation")


def _documents(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids per text, each opened by the end-of-text token as in training."""
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [[tokenizer.bos_token_id, *ids] for ids in encoded]


def _stream(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.array(ids, dtype=np.int64) for ids in _documents(tokenizer, texts)])


def _perplexity(nll: np.ndarray) -> float:
    return round(math.exp(float(nll.mean())), 6)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Only deterministic torch kernels inside; global generators are put back afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _write(
    directory: Path, model: Any, tokenizer: Any, corpus: Corpus, recipe: DemoMoeRecipe, report: Mapping[str, Any]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    quiet_transformers()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # Published checkpoints of this family, and readers other than transformers 5, use these names.
    _edit_json(directory / "config.json", {"num_local_experts": "num_experts"}, {})
    _edit_json(directory / "tokenizer_config.json", {}, {"tokenizer_class": "PreTrainedTokenizerFast"})
    (directory / "model.safetensors").chmod(0o644)
    for name, document in (
        ("demo_report.json", {**report, "recipe": asdict(recipe)}),
        ("demo_sources.json", corpus.describe()),
    ):
        (directory / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (directory / "README.md").write_text(_MODEL_CARD, encoding="utf-8")


def _edit_json(path: Path, renames: Mapping[str, str], changes: Mapping[str, Any]) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    edited = {renames.get(key, key): changes.get(key, value) for key, value in document.items()}
    path.write_text(json.dumps(edited, indent=2) + "\n", encoding="utf-8")


_MODEL_CARD = """# Demo mixture of experts

Trained from scratch by `xmac demo-model moe` on texts of a Python installation (`demo_sources.json` lists every file
with its sha256; those texts are under the PSF licence and the Unicode licence). Held-out perplexity and the recipe are
in `demo_report.json`. It exists to try surgery on; it is of no other use.
"""
