//! What is known of the engine: whether it lives, what it can do, how busy it is.
