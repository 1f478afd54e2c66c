//! What a worker has to do and how long that takes, as one router knows it: the work that is booked
//! on it, its learned costs, the pace of its queue, whether it fails again and again or much more than others,
//! and what it keeps pinned for others; and which prefixes a model's prompts have in common. Nothing here knows what a
//! worker is.

pub mod booking;
pub mod breaker;
pub mod costs;
pub mod ejection;
pub mod fetches;
pub mod hot;
pub mod pace;
pub mod pins;

pub use booking::{Booked, Booking};
