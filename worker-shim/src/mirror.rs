//! The exact picture of the engine's KV blocks, and the changes that lead to it.
