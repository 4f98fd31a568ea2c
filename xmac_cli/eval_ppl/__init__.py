"""eval-ppl: perplexity of a causal language model by document and by domain."""
