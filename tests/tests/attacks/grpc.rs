//! The gRPC listener: streams that stay open, malformed messages, deadlines.
