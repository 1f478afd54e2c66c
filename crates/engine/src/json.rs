//! Reads JSON from untrusted sources without building values that are not needed.
//!
//! Each reader makes one quick pass over a text (`scan`). That pass gives up on rare constructs and
//! leaves such a text to serde_json (`thorough`). If both can read a text, both return the same
//! result, so callers need not know which one did.

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
