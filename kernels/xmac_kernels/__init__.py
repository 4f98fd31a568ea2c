"""Kernels of xmac: tensors in, tensors out.

Each operation is a folder with one public function, a float64 reference, CPU paths and a Triton kernel. Nothing here
knows models, files or methods. Importing this package imports neither torch, nor numba, nor triton.
"""
