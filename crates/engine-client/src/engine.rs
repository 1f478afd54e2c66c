//! An engine, as its client sees it.

use std::fmt;
use std::sync::Arc;

use http::uri::Authority;

use super::echoes::Echoes;

/// An engine that requests are sent to, and what is reported of it.
pub trait Engine: Send + Sync {
    /// Its name, for messages.
    fn id(&self) -> &str;

    /// Host and port of its HTTP address.
    fn authority(&self) -> &Authority;

    /// The process that it is: another number once a connection to it may lead to another one.
    fn process(&self) -> u64;

    /// Whether its name must be looked up within the allowed networks.
    fn is_guarded(&self) -> bool;

    /// Whether a shim stands before it.
    fn has_shim(&self) -> bool;

    /// Which of its answers carry the id of their request.
    fn echoes(&self) -> &Echoes;

    /// It cannot be reached, for this reason.
    fn set_unreachable(&self, why: fmt::Arguments<'_>);

    /// A request was sent to it again, since a kept connection had ended.
    fn count_resent(&self);

    /// It has sent an answer to another request.
    fn count_foreign_answer(&self);

    /// It, or a proxy before it, has sent bytes on a kept connection that answer no request.
    fn count_unsolicited(&self);
}

impl<E: Engine + ?Sized> Engine for Arc<E> {
    fn id(&self) -> &str {
        (**self).id()
    }

    fn authority(&self) -> &Authority {
        (**self).authority()
    }

    fn process(&self) -> u64 {
        (**self).process()
    }

    fn is_guarded(&self) -> bool {
        (**self).is_guarded()
    }

    fn has_shim(&self) -> bool {
        (**self).has_shim()
    }

    fn echoes(&self) -> &Echoes {
        (**self).echoes()
    }

    fn set_unreachable(&self, why: fmt::Arguments<'_>) {
        (**self).set_unreachable(why);
    }

    fn count_resent(&self) {
        (**self).count_resent();
    }

    fn count_foreign_answer(&self) {
        (**self).count_foreign_answer();
    }

    fn count_unsolicited(&self) {
        (**self).count_unsolicited();
    }
}
