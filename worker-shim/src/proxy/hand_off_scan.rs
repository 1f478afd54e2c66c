//! Detects hand-offs in replies while they are forwarded.
//!
//! vLLM with NIXL describes a hand-off in `"kv_transfer_params": {...}` of a reply that is not
//! streamed. In all other replies the value is null. Inside a JSON string the quotes of the key
//! would be escaped, so generated text cannot imitate the key.

use std::sync::LazyLock;

use memchr::memmem::Finder;

/// Maximum number of bytes that are scanned per reply. The reply of a prefill leg has one token
/// and a few bytes per block.
const SCANNED_MAX_BYTES: usize = 256 << 10;

const KEY: &[u8] = b"\"kv_transfer_params\"";
static KEY_FINDER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(KEY));

/// Searches a reply that arrives in chunks for a hand-off.
#[derive(Debug, Default)]
pub(super) struct HandOffScanner {
    seen_bytes: usize,
    state: ScanState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ScanState {
    /// Outside of the key.
    #[default]
    Outside,
    /// After this number of bytes of the key.
    Key(usize),
    /// After the key and optional white space.
    Colon,
    /// After the colon and optional white space.
    Value,
    /// The search has ended.
    Done,
}

impl HandOffScanner {
    /// Scans the next chunk. Returns `true` once, when a hand-off begins in the chunk.
    pub(super) fn scan(&mut self, chunk: &[u8]) -> bool {
        let left = SCANNED_MAX_BYTES - self.seen_bytes;
        let mut rest = &chunk[..chunk.len().min(left)];
        self.seen_bytes += rest.len();
        while self.state != ScanState::Done {
            if self.state == ScanState::Outside && rest.len() >= KEY.len() {
                // Most bytes are skipped here.
                rest = match KEY_FINDER.find(rest) {
                    Some(at) => {
                        self.state = ScanState::Colon;
                        &rest[at + KEY.len()..]
                    }
                    // The key may begin in the last bytes.
                    None => &rest[rest.len() + 1 - KEY.len()..],
                };
            }
            let Some((byte, behind)) = rest.split_first() else { break };
            rest = behind;
            if self.step(*byte) {
                self.state = ScanState::Done;
                return true;
            }
        }
        false
    }

    fn step(&mut self, byte: u8) -> bool {
        // A quote can begin the key in any state, because the key has quotes only at its ends.
        let restart = if byte == KEY[0] { ScanState::Key(1) } else { ScanState::Outside };
        self.state = match self.state {
            ScanState::Key(len) if byte == KEY[len] => match len + 1 == KEY.len() {
                true => ScanState::Colon,
                false => ScanState::Key(len + 1),
            },
            state @ (ScanState::Colon | ScanState::Value) if byte.is_ascii_whitespace() => state,
            ScanState::Colon if byte == b':' => ScanState::Value,
            ScanState::Value if byte == b'{' => return true,
            ScanState::Done => ScanState::Done,
            _ => restart,
        };
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(reply: &str) -> bool {
        HandOffScanner::default().scan(reply.as_bytes())
    }

    #[test]
    fn only_an_object_under_the_key_is_a_hand_off() {
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
    fn bytes_beyond_the_limit_are_not_scanned() {
        let far = " ".repeat(SCANNED_MAX_BYTES) + r#"{"kv_transfer_params":{}}"#;
        assert!(!whole(&far));
        let mut scan = HandOffScanner::default();
        assert!(!scan.scan(&far.as_bytes()[..10]) && !scan.scan(&far.as_bytes()[10..]));
        assert!(!scan.scan(b"{\"kv_transfer_params\":{}}"));
    }

    proptest! {
        #[test]
        fn chunks_give_the_same_result_as_the_whole_reply(
            filling in proptest::collection::vec(
                proptest::sample::select(vec![
                    "\"kv_transfer_params\"", "\"kv_", "\"", ":", "{", " ", "null", "\\\"", "x",
                ]),
                0..30,
            ),
            chunk in 1usize..12,
        ) {
            let reply = filling.concat();
            let mut scan = HandOffScanner::default();
            let found = reply.as_bytes().chunks(chunk).filter(|chunk| scan.scan(chunk)).count();
            prop_assert_eq!(found, usize::from(whole(&reply)));
        }
    }
}
