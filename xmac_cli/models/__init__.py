"""Models through transformers: loading, perplexity, small demo models, GGUF import."""
