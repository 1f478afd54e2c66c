//! The reverse proxy before the engine, with its gate.
