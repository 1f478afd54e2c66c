"""The artefacts that are published, each from the same two programs."""
