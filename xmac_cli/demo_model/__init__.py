"""demo-model: a small real model to try the other verbs on."""
