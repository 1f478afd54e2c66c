//! Decides which bodies are prepared on the thread that serves the connection: those that take less than a millisecond.
//!
//! The whole body is examined and not only samples of it: what a client hides between samples would
//! block the reactor for milliseconds. Examining 64 KiB takes about ten microseconds.

use splitrail_engine::json::{self, Weight};

use super::Payload;
use super::cores::LONG_BYTES;
use splitrail_fleet::TokenizerSpeed;

/// Bodies up to this length are prepared on the reactor, unless there are templates and one may make
/// much more text of them. This takes less than a millisecond with the slowest exact tokenizer.
const INLINE_MAX_BYTES: usize = 4096;

/// The same limit for bodies of words if every tokenizer is fast or there is none.
const FAST_INLINE_MAX_BYTES: usize = 96 << 10;

/// Maximum number of bytes by which a short body grows if a template prints it with an indentation;
/// or as many as the body has, if these are more.
const INDENTATION_MAX_BYTES: usize = 32 << 10;

/// The width in bytes of an indentation of JSON in a template.
const INDENTATION_BYTES: usize = 4;

/// Length of a piece of text; in text of words every piece has a space and a letter.
const STRETCH_BYTES: usize = 160;

/// Minimum number of bytes per value or member of a body. Text costs almost nothing to parse, but a
/// list of small values of 90 KB took a millisecond or more.
const BYTES_PER_VALUE: usize = 8;

/// Whether a fast tokenizer processes a text in less than a millisecond: the text consists of
/// words, has no long stretch without a space, and does not have many small `parts` (messages of a
/// chat), each of which takes time in the template.
pub fn is_harmless(text: &[u8], parts: usize) -> bool {
    let words = |part: &[u8]| part.contains(&b' ') && part.iter().any(u8::is_ascii_alphabetic);
    text.len() <= FAST_INLINE_MAX_BYTES
        && parts.saturating_mul(STRETCH_BYTES) <= text.len()
        && text.chunks_exact(STRETCH_BYTES).all(words)
}

/// The number of bytes by which a JSON text grows if a template prints it with an indentation.
pub fn indentation_bytes(text: &[u8]) -> usize {
    of_levels(&json::weigh(text, usize::MAX))
}

/// The same for a text that has been weighed.
pub(super) fn of_levels(weight: &Weight) -> usize {
    weight.levels.saturating_mul(INDENTATION_BYTES)
}

/// The number of bytes by whose length a body counts as long: what a template may make of it. Bodies
/// that are long by themselves are not examined.
pub(super) fn prepared_bytes(payload: &Payload) -> usize {
    match payload {
        Payload::Json(text) if text.len() <= LONG_BYTES => text.len() + indentation_bytes(text),
        _ => payload.bytes(),
    }
}

/// Whether a body may be prepared on the thread that serves the connection.
pub(super) fn is_short(payload: &Payload, tokenizing: TokenizerSpeed) -> bool {
    let stays_short = |text: &[u8], added: usize| added <= INDENTATION_MAX_BYTES.max(text.len());
    match (payload, tokenizing) {
        // Without a tokenizer there is no template.
        (Payload::Json(text), TokenizerSpeed::None) if text.len() <= INLINE_MAX_BYTES => true,
        (Payload::Json(text), _) if text.len() <= INLINE_MAX_BYTES => {
            stays_short(text, indentation_bytes(text))
        }
        (Payload::Builder { bytes, .. }, _) if *bytes <= INLINE_MAX_BYTES => true,
        // Only boundaries are searched in it.
        (Payload::Form(form, _), _) => form.len() <= FAST_INLINE_MAX_BYTES,
        (_, TokenizerSpeed::Slow) => false,
        (Payload::Builder { is_harmless, .. }, _) => *is_harmless,
        (Payload::Json(text), _) if text.len() > FAST_INLINE_MAX_BYTES => false,
        (Payload::Json(text), tokenizing) => {
            let max = text.len() / BYTES_PER_VALUE;
            let weight = json::weigh(text, max);
            let is_sparse = weight.values + weight.members <= max;
            // Nearly every object in a body is a message or a part of one.
            let is_fast =
                || is_harmless(text, weight.objects) && stays_short(text, of_levels(&weight));
            is_sparse && (tokenizing == TokenizerSpeed::None || is_fast())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_short(body: String, tokenizing: TokenizerSpeed) -> bool {
        super::is_short(&Payload::Json(body.into()), tokenizing)
    }

    /// A body that repeats a part up to about `kilobytes` kilobytes.
    fn body(part: &str, kilobytes: usize) -> String {
        let parts = vec![part; (kilobytes << 10) / (part.len() + 1)];
        format!(r#"{{"model": "m", "messages": [{}]}}"#, parts.join(","))
    }

    #[test]
    fn long_prompts_are_not_prepared_on_the_reactor() {
        use TokenizerSpeed::{Fast, None, Slow};

        let prose = format!(r#"{{"role": "user", "content": "{}"}}"#, "some words ".repeat(300));
        for tokenizing in [None, Fast, Slow] {
            assert!(is_short(body("[]", 3), tokenizing), "whatever it is");
            assert!(!is_short(body(&prose, 104), tokenizing), "too long");
            for part in ["[]", r#"{"a":1}"#, "1e5", r#""\n""#] {
                assert!(!is_short(body(part, 64), tokenizing), "{part} {tokenizing:?}");
            }
        }
        let short = [None, Fast, Slow].map(|tokenizing| is_short(body(&prose, 64), tokenizing));
        assert_eq!(short, [true, true, false]);
        // Each message takes time in the template, but none without a template.
        let message = r#"{"role": "user", "content": "yes or no"}"#;
        let short = [None, Fast, Slow].map(|tokenizing| is_short(body(message, 64), tokenizing));
        assert_eq!(short, [true, false, false]);
    }

    /// A chat with a tool whose parameters are `depth` nested lists, of which the innermost has this
    /// number of zeros.
    fn nested(depth: usize, zeros: usize, content: &str) -> String {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        let zeros = vec!["0"; zeros].join(",");
        format!(
            r#"{{"model": "m", "messages": [{{"role": "user", "content": "{content}"}}],
            "tools": [{{"type": "function", "function": {{"name": "f", "parameters":
            {{"a": {open}{zeros}{close}}}}}}}]}}"#
        )
    }

    #[test]
    fn what_a_template_makes_much_longer_is_not_prepared_on_the_reactor() {
        for tokenizing in [TokenizerSpeed::Fast, TokenizerSpeed::Slow] {
            for (depth, zeros) in [(90, 1700), (20, 1700), (100, 100)] {
                let body = nested(depth, zeros, "");
                assert!(body.len() <= INLINE_MAX_BYTES);
                assert!(!is_short(body.clone(), tokenizing), "{depth} {zeros} {tokenizing:?}");
                assert!(is_short(body, TokenizerSpeed::None), "there is no template");
            }
            assert!(is_short(nested(4, 300, ""), tokenizing), "as tools are");
        }
        let words = "some words ".repeat(4000);
        assert!(is_short(nested(4, 30, &words), TokenizerSpeed::Fast));
        assert!(!is_short(nested(90, 1700, &words), TokenizerSpeed::Fast));
    }

    #[test]
    fn a_body_is_as_long_as_what_a_template_may_make_of_it() {
        let bytes = |body: String| prepared_bytes(&Payload::Json(body.into()));
        let deep = nested(90, 50_000, "");
        assert!(deep.len() < LONG_BYTES && bytes(deep) > 50_000 * 360);
        let prose = body(r#"{"role": "user", "content": "some words"}"#, 200);
        assert!(bytes(prose.clone()) < 2 * prose.len());
    }

    #[test]
    fn nothing_dense_hides_between_words() {
        let words = "some plain words ";
        // An implementation that samples the body would read only the first bytes of each kilobyte,
        // or of every four kilobytes.
        for (apart, sample) in [(1024, 160), (4096, 160)] {
            for part in ["[],", "1,", "{},", r#""\n","#] {
                let mut body = String::from(r#"{"model":"m","messages":["#);
                while body.len() < 90 << 10 {
                    let text = words.repeat(sample / words.len() + 2);
                    body += &format!(r#""{text}","#);
                    while !body.len().is_multiple_of(apart) {
                        body += if body.len() % apart + part.len() <= apart { part } else { " " };
                    }
                }
                body += "0]}";
                for tokenizing in [TokenizerSpeed::None, TokenizerSpeed::Fast] {
                    assert!(!is_short(body.clone(), tokenizing), "{part} {apart} {tokenizing:?}");
                }
            }
            // A long word is found as well.
            let stretch = words.repeat(20) + &"x".repeat(apart - 340);
            let text = format!(r#"{{"prompt":"{}"}}"#, stretch.repeat((64 << 10) / apart));
            assert!(!is_short(text, TokenizerSpeed::Fast), "{apart}");
        }
    }
}
