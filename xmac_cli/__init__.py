"""xmac: model surgery from the shell. Importing this package imports nothing heavy."""

__version__ = "0.1.0"
