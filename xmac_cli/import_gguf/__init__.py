"""import-gguf: a GGUF file as a safetensors checkpoint directory."""
