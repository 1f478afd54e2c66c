//! Seeded network faults under load for minutes: memory, descriptors and series stay flat.
