//! The APIs of clients: OpenAI, Anthropic, token ids, gRPC, and auxiliary endpoints.
#![allow(missing_docs, clippy::unwrap_used)]

mod audio;
mod auxiliary;
mod dialects;
mod generate;
mod grpc;
mod lenience;
mod lists;
mod media;
mod openai;
mod openapi;
mod origins;
mod scoring;
