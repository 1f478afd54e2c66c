//! Futures, made where they are to stay.

use std::pin::Pin;

/// A future in a box, without having been elsewhere before: `Box::pin` makes it on the stack and
/// copies all of it, several kilobytes of which little is in use at the beginning.
pub fn pinned<F>(make: impl FnOnce() -> F) -> Pin<Box<F>> {
    let place = Box::new_uninit();
    Box::into_pin(Box::write(place, make()))
}
