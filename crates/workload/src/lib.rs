//! What a worker has to do and how long that takes, as one router knows it: the work that is booked
//! on it, its learned costs, the pace of its queue, whether it makes progress, whether it fails repeatedly or much more than
//! others, which endpoints its engine lacks, and what it keeps pinned for others. Of a model: which
//! prefixes its prompts have in common, and the cache hit threshold that was learned. Nothing here
//! knows what a worker is.

pub mod booking;
pub mod breaker;
pub mod calibration;
pub mod clock;
pub mod costs;
pub mod ejection;
pub mod endpoint_support;
pub mod fetches;
pub mod hot;
pub mod pace;
pub mod pins;
pub mod progress;
pub mod rest;
pub mod suspects;

pub use booking::{BookedSums, Booking};
