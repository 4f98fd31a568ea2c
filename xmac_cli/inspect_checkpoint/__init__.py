"""`xmac inspect`: what is in a checkpoint, from headers only."""
