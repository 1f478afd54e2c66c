//! Seeing that a reply hands KV over, as it passes.
//!
//! vLLM's NIXL names what it has staged in `"kv_transfer_params": {...}` of a reply that is
//! not streamed; all other replies say null there. Inside a JSON string the quotes of the
//! key would be escaped, so no text can pass for it.

use std::sync::LazyLock;

use memchr::memmem::Finder;

/// Replies are looked through up to here; a prefill's has one token, and a few bytes per
/// block.
const SCANNED_MAX_BYTES: usize = 256 << 10;

const KEY: &[u8] = b"\"kv_transfer_params\"";
static KEY_FINDER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(KEY));

/// Looks for a hand-off in a reply that comes in pieces.
#[derive(Debug, Default)]
pub(super) struct Scan {
    seen_bytes: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Nothing of the key yet.
    #[default]
    Outside,
    /// So many bytes of the key.
    Key(usize),
    /// The key, then white space.
    Colon,
    /// The colon, then white space.
    Value,
    /// Nothing is looked for any more.
    Done,
}

impl Scan {
    /// Takes the next piece; `true` once, when a hand-off begins in it.
    pub(super) fn finds(&mut self, piece: &[u8]) -> bool {
        let left = SCANNED_MAX_BYTES - self.seen_bytes;
        let mut rest = &piece[..piece.len().min(left)];
        self.seen_bytes += rest.len();
        while self.state != State::Done {
            if self.state == State::Outside && rest.len() >= KEY.len() {
                // Most bytes are passed over here.
                rest = match KEY_FINDER.find(rest) {
                    Some(at) => {
                        self.state = State::Colon;
                        &rest[at + KEY.len()..]
                    }
                    // The key may begin in what is too short for it.
                    None => &rest[rest.len() + 1 - KEY.len()..],
                };
            }
            let Some((byte, behind)) = rest.split_first() else { break };
            rest = behind;
            if self.step(*byte) {
                self.state = State::Done;
                return true;
            }
        }
        false
    }

    fn step(&mut self, byte: u8) -> bool {
        // A quote begins the key at any time: it stands in the key at its ends only.
        let anew = if byte == KEY[0] { State::Key(1) } else { State::Outside };
        self.state = match self.state {
            State::Key(len) if byte == KEY[len] => match len + 1 == KEY.len() {
                true => State::Colon,
                false => State::Key(len + 1),
            },
            state @ (State::Colon | State::Value) if byte.is_ascii_whitespace() => state,
            State::Colon if byte == b':' => State::Value,
            State::Value if byte == b'{' => return true,
            State::Done => State::Done,
            _ => anew,
        };
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(reply: &str) -> bool {
        Scan::default().finds(reply.as_bytes())
    }

    #[test]
    fn only_a_member_with_an_object_is_a_hand_off() {
        for reply in [
            r#"{"choices":[{"text":"a"}],"kv_transfer_params":{"do_remote_prefill":true}}"#,
            "{\"kv_transfer_params\" :\n {}}",
            r#"{"a":"","kv_transfer_params":{}}"#,
            r#"["kv_transfer_params",{"kv_transfer_params":{}}]"#,
        ] {
            assert!(whole(reply), "{reply}");
        }
        for reply in [
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":[]}"#,
            r#"{"text":"\"kv_transfer_params\":{}"}"#,
            r#"{"text":"kv_transfer_params","x":{}}"#,
            r#"{"ec_transfer_params":{}}"#,
            r#"{"kv_transfer_paramsx":{}}"#,
        ] {
            assert!(!whole(reply), "{reply}");
        }
    }

    #[test]
    fn what_lies_beyond_the_bound_is_not_looked_at() {
        let far = " ".repeat(SCANNED_MAX_BYTES) + r#"{"kv_transfer_params":{}}"#;
        assert!(!whole(&far));
        let mut scan = Scan::default();
        assert!(!scan.finds(&far.as_bytes()[..10]) && !scan.finds(&far.as_bytes()[10..]));
        assert!(!scan.finds(b"{\"kv_transfer_params\":{}}"));
    }

    proptest! {
        #[test]
        fn pieces_say_what_the_whole_says(
            filling in proptest::collection::vec(
                proptest::sample::select(vec![
                    "\"kv_transfer_params\"", "\"kv_", "\"", ":", "{", " ", "null", "\\\"", "x",
                ]),
                0..30,
            ),
            piece in 1usize..12,
        ) {
            let reply = filling.concat();
            let mut scan = Scan::default();
            let found = reply.as_bytes().chunks(piece).filter(|piece| scan.finds(piece)).count();
            prop_assert_eq!(found, usize::from(whole(&reply)));
        }
    }
}
