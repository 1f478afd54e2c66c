//! Proves that a reply is for the request that was sent, where the engine repeats the request's
//! id.
//!
//! The id has 128 random bits, made by the router for one attempt: a reply that contains them was
//! made for this attempt. They are searched as bytes, so that no reply is parsed for this purpose.

use http::HeaderValue;
use memchr::{memchr_iter, memmem};

use super::engine::Engine;
use crate::echoes::Foreign;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_engine::json;

/// Number of leading bytes in which the id is searched while it is not known whether the engine
/// repeats it; engines write the id first.
const FRONT_BYTES: usize = 256;

/// A kind of reply: an endpoint's complete replies, or its streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The path of the request.
    pub path: &'static str,
    /// A unique number below 64.
    pub(super) number: u8,
    /// The endpoint, if clients can ask for it.
    pub endpoint: Option<Endpoint>,
}

impl Shape {
    /// A chat rendered to tokens by the engine that would answer the chat.
    pub const RENDERED_CHAT: Self =
        Self { path: "/v1/chat/completions/render", number: 62, endpoint: None };
    /// A completion's prompt rendered to tokens.
    pub const RENDERED_COMPLETION: Self =
        Self { path: "/v1/completions/render", number: 63, endpoint: None };

    /// A complete reply of an endpoint.
    pub fn whole(endpoint: Endpoint) -> Self {
        Self { path: endpoint.path(), number: endpoint as u8 * 2, endpoint: Some(endpoint) }
    }

    /// A stream of an endpoint.
    pub fn streamed(endpoint: Endpoint) -> Self {
        Self { path: endpoint.path(), number: endpoint as u8 * 2 + 1, endpoint: Some(endpoint) }
    }
}

/// The check that a reply belongs to its request.
#[derive(Debug)]
pub struct Proof {
    pub(super) request_id: HeaderValue,
    pub(super) shape: Shape,
    /// Whether this reply may teach the router that the engine repeats ids; not if a shim may have
    /// answered in place of the engine.
    pub(super) teaches: bool,
}

impl Proof {
    /// Checks a reply, or its first event.
    ///
    /// # Errors
    /// The reply is for another request.
    pub fn check(&self, worker: &dyn Engine, reply: &[u8]) -> Result<(), Error> {
        let (id, kind) = (self.request_id.as_bytes(), self.shape.number);
        let front = &reply[..reply.len().min(FRONT_BYTES)];
        if contains(front, id) {
            if self.teaches {
                worker.echoes().came(kind);
            }
            return Ok(());
        }
        let expected = worker.echoes().are_expected(kind);
        if !expected || memmem::find(reply, id).is_some() || is_error(reply) {
            return Ok(());
        }
        worker.count_foreign_reply();
        if worker.echoes().missed() == Foreign::Unlearned {
            let path = self.shape.path;
            tracing::warn!(
                model = worker.model(),
                worker = worker.id(),
                path,
                "its replies no longer carry the request's id: the id is not expected from now on"
            );
        }
        let message = format!("worker {} sent a reply to another request", worker.id());
        Err(Error::new(ErrorKind::ForeignReply, message))
    }
}

/// Whether a short text contains an id. `memmem::find` takes some 1,200 instructions for it, most of
/// which prepare a search for this id.
fn contains(text: &[u8], id: &[u8]) -> bool {
    let begins = |first: &u8| memchr_iter(*first, text).any(|at| text[at..].starts_with(id));
    id.first().is_some_and(begins)
}

/// Error replies carry no id.
fn is_error(reply: &[u8]) -> bool {
    if memmem::find(reply, b"\"error\"").is_none() {
        return false;
    }
    matches!(json::pick_from_slice(reply, ["error"]), Ok([Some(_)]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fmt;

    use http::uri::Authority;

    use super::*;
    use crate::echoes::Echoes;

    const MINE: &str = "0123456789abcdef0123456789abcdef";

    /// An engine to which nothing is sent.
    #[derive(Default)]
    struct Silent(Echoes);

    impl Engine for Silent {
        fn id(&self) -> &str {
            "w"
        }

        fn model(&self) -> &str {
            "m"
        }

        fn authority(&self) -> &Authority {
            unreachable!("nothing is sent")
        }

        fn process(&self) -> u64 {
            0
        }

        fn uses_tls(&self) -> bool {
            false
        }

        fn is_guarded(&self) -> bool {
            false
        }

        fn has_shim(&self) -> bool {
            false
        }

        fn echoes(&self) -> &Echoes {
            &self.0
        }

        fn set_unreachable(&self, _: fmt::Arguments<'_>) {}

        fn count_resent(&self) {}

        fn count_foreign_reply(&self) {}

        fn count_unsolicited(&self) {}
    }

    fn worker() -> Silent {
        Silent::default()
    }

    fn proof(teaches: bool) -> Proof {
        let request_id = HeaderValue::from_static(MINE);
        Proof { request_id, shape: Shape::whole(Endpoint::Chat), teaches }
    }

    #[test]
    fn an_answer_must_carry_the_id_once_one_of_its_kind_did() {
        let (worker, proof) = (worker(), proof(true));
        let foreign = br#"{"id":"chatcmpl-fedcba9876543210fedcba9876543210","choices":[]}"#;
        assert!(proof.check(&worker, foreign).is_ok(), "nothing is known yet");
        let mine = format!(r#"{{"id":"chatcmpl-{MINE}","choices":[]}}"#);
        assert!(proof.check(&worker, mine.as_bytes()).is_ok());
        let refused = proof.check(&worker, foreign).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ForeignReply);
        let streamed = Proof { shape: Shape::streamed(Endpoint::Chat), ..proof };
        assert!(streamed.check(&worker, foreign).is_ok(), "of its streams nothing is known");
    }

    #[test]
    fn the_id_may_stand_anywhere_and_errors_need_none() {
        let (worker, proof) = (worker(), proof(true));
        worker.echoes().came(proof.shape.number);
        let far = format!(r#"{{"data":"{}","id":"{MINE}"}}"#, "x".repeat(FRONT_BYTES));
        assert!(proof.check(&worker, far.as_bytes()).is_ok());
        assert!(proof.check(&worker, br#"{"error":{"message":"no"}}"#).is_ok());
        for foreign in [r#"{"error":null}"#, r#"{"text":"\"error\""}"#, "", "\"error\""] {
            assert!(proof.check(&worker, foreign.as_bytes()).is_err(), "{foreign}");
        }
    }

    #[test]
    fn a_reply_that_a_shim_may_have_made_teaches_nothing() {
        let (worker, proof) = (worker(), proof(false));
        assert!(proof.check(&worker, MINE.as_bytes()).is_ok());
        assert!(proof.check(&worker, b"{}").is_ok());
    }

    #[test]
    fn each_shape_has_a_number_of_its_own() {
        let all = Endpoint::ALL.into_iter();
        let all = all.flat_map(|endpoint| [Shape::whole(endpoint), Shape::streamed(endpoint)]);
        let all = all.chain([Shape::RENDERED_CHAT, Shape::RENDERED_COMPLETION]);
        let numbers: std::collections::BTreeSet<u8> = all.map(|shape| shape.number).collect();
        assert_eq!(numbers.len(), 2 * Endpoint::ALL.len() + 2);
        assert!(numbers.iter().all(|number| *number < 64));
    }
}
