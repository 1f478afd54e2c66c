//! Lists as template values. A render that takes too long is stopped when it takes an item.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{Error, ErrorKind, Value};

use super::super::watch;

/// A list in a request.
#[derive(Debug)]
pub(super) struct WatchedList(pub(super) Vec<Value>);

impl Object for WatchedList {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let item = self.0.get(key.as_usize()?)?;
        if watch::render_is_over() {
            // An invalid value, which ends the render here.
            return Some(Value::from(Error::from(ErrorKind::OutOfFuel)));
        }
        Some(item.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}
