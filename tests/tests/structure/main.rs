//! The rules of ARCHITECTURE.md about the structure of the code, and of documents about what they
//! name: this repository keeps them, and a violation of each is found and explained.
#![allow(clippy::unwrap_used)]

mod documents;
mod imports;
mod reach;
mod repository;
mod rules;
mod sources;
