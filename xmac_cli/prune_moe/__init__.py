"""Expert pruning of mixture-of-experts checkpoints (Shapley-MoE, Huang et al., NeurIPS 2025): score, plan, apply."""
