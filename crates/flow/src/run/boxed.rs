//! Boxes futures at the place where they are created, so that large ones are not moved.

use std::pin::Pin;

/// Makes a future directly in a box. `Box::pin` makes it on the stack first and then copies all of
/// it: several kilobytes, of which little is in use at the beginning.
pub fn boxed_future<F>(make: impl FnOnce() -> F) -> Pin<Box<F>> {
    let place = Box::new_uninit();
    Box::into_pin(Box::write(place, make()))
}
