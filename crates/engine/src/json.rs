//! Reads JSON from untrusted sources without building values that are not needed.
//!
//! Each reader makes one quick pass over a text (`scan`), which gives up on whatever is rare, and leaves such a text
//! to serde_json (`thorough`). Where both read a text, both find the same in it, so callers do not know which did.

mod error;
mod members;
mod read;
mod scan;
#[cfg(test)]
mod tests;
mod thorough;

pub use error::{Fault, ShapeError};
pub use members::{Member, Members, mark, place_of, string};
pub(crate) use read::object;
pub use read::{pick, pick_from_slice, value};
pub use scan::{Specials, Weight, string_around, weigh};
pub use thorough::Key;
