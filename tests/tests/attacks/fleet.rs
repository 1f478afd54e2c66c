//! Shims and brokers: who may speak for which worker, and what hostile events cost.
