"""Safetensors checkpoints as files: headers, byte ranges, streaming writes, atomic output, lineage, fingerprints.

Nothing here builds a model, and importing this package imports neither torch nor numpy.
Reading order: header -> directory -> copying -> writer -> staging -> output; lineage, fingerprint and verification
stand beside them. The format rules and guarantees are told in docs/checkpoint.md.
"""
