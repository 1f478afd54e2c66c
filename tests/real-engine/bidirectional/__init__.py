"""Tests that share a pair of engines with `bidirectional_kv_xfer`: each hands over and takes."""
