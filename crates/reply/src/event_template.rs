//! Recognises events that differ from the previous event in the text of one string only.
//!
//! Most events of a stream are of this kind. Once an event has been parsed, an event that is equal before and
//! after this string needs no parsing: two comparisons suffice.

use splitrail_engine::json::string_around;

/// Maximum length of an event that is remembered, in bytes. Longer events are rare.
const MAX_BYTES: usize = 1 << 10;
/// After this many events in a row that differ in more than one string nothing is remembered any
/// more, because some streams have only such events.
const MISSES_MAX: u32 = 8;

/// The last parsed event of a stream whose events have no names, and the position of its text.
#[derive(Debug, Default)]
pub struct EventTemplate {
    event: Vec<u8>,
    /// Start and end of the text in the event, once they are known.
    text: Option<(usize, usize)>,
    misses: u32,
    /// The number of tokens in the event, and in each that it covers.
    pub tokens: u32,
}

impl EventTemplate {
    /// Whether an event equals the last one except for a text without escapes. The result of
    /// parsing the last event then applies to this event too.
    pub fn covers(&self, event: &[u8]) -> bool {
        match self.text {
            Some(_) => self.text_of(event).is_some(),
            None => !event.is_empty() && *event == self.event,
        }
    }

    /// The text of an event that [differs](Self::covers) from the last one in its text alone.
    pub fn text_of<'e>(&self, event: &'e [u8]) -> Option<&'e str> {
        let (from, to) = self.text?;
        let rest = event.strip_prefix(&self.event[..from])?;
        plain(rest.strip_suffix(&self.event[to..])?)
    }

    /// Remembers a parsed event that has neither an error nor usage nor the end of a choice, and its
    /// number of tokens.
    pub fn learn(&mut self, event: &[u8], tokens: u32) {
        if event.len() > MAX_BYTES || self.misses > MISSES_MAX {
            return;
        }
        let differ = self.event.iter().zip(event).position(|(before, now)| before != now);
        let text = differ.and_then(|at| string_around(event, at));
        // The differing string must not be a key, because keys decide what is read.
        let text = text.filter(|text| !event[text.end + 1..].trim_ascii_start().starts_with(b":"));
        self.misses = text.as_ref().map_or(self.misses + 1, |_| 0);
        self.text = text.map(|text| (text.start, text.end));
        self.event.clear();
        self.event.extend_from_slice(event);
        self.tokens = tokens;
    }
}

/// These bytes as a text, if they can be part of a JSON string without escapes.
fn plain(text: &[u8]) -> Option<&str> {
    let has_escapes = text.iter().any(|byte| *byte < b' ' || matches!(byte, b'"' | b'\\'));
    std::str::from_utf8(text).ok().filter(|_| !has_escapes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use splitrail_engine::dialect::Dialect;

    use super::super::dialect::Chunk;
    use super::*;

    fn chunk(text: &str) -> String {
        format!(r#"{{"id":"a","choices":[{{"index":0,"delta":{{"content":"{text}"}},"x":null}}]}}"#)
    }

    fn after(events: &[&str]) -> EventTemplate {
        let mut template = EventTemplate::default();
        events.iter().for_each(|event| template.learn(event.as_bytes(), 1));
        template
    }

    #[test]
    fn events_that_differ_in_their_text_are_covered() {
        let template = after(&[&chunk("a"), &chunk(" the")]);
        for text in ["", "x", " the", "日本", "a long stretch of text that goes on and on"] {
            assert!(template.covers(chunk(text).as_bytes()), "{text}");
        }
        let finish = chunk("").replace("null", "\"stop\"");
        let usage = r#"{"id":"a","choices":[],"usage":{"prompt_tokens":1}}"#;
        for event in [&*chunk("\\n"), &chunk("\u{1}"), &finish, usage, "", "{"] {
            assert!(!template.covers(event.as_bytes()), "{event}");
        }
        assert!(!template.covers(&[chunk("\u{e9}").as_bytes(), b"\xff"].concat()));
    }

    #[test]
    fn events_that_differ_in_more_than_their_text_make_no_template() {
        for events in [
            [r#"{"choices":[1]}"#, r#"{"choices":[2]}"#],
            // If keys were accepted as the differing text, events with usage and errors would be
            // covered.
            [r#"{"some":{}}"#, r#"{"other":{}}"#],
            [r#"{"some" : {}}"#, r#"{"other" : {}}"#],
            [r#"{"a":null}"#, r#"{"a":"x"}"#],
        ] {
            let template = after(&events);
            for event in [r#"{"error":{}}"#, r#"{"usage" : {}}"#, events[0], r#"{"a":"y"}"#, ""] {
                assert!(!template.covers(event.as_bytes()), "{events:?} {event}");
            }
            assert!(template.covers(events[1].as_bytes()), "but the same once more");
        }
    }

    #[test]
    fn a_stream_without_such_events_is_soon_left_alone() {
        let mut template = EventTemplate::default();
        for number in 0..100 {
            template.learn(format!(r#"{{"choices":[{number}]}}"#).as_bytes(), 1);
        }
        assert!(template.event.starts_with(br#"{"choices":[8]"#), "and is kept no longer");
        template.learn(&[b' '; MAX_BYTES + 1], 1);
        assert!(template.event.len() < MAX_BYTES);
    }

    /// Events that are valid JSON or nearly valid JSON.
    fn event() -> impl Strategy<Value = String> {
        let key = "choices|error|usage|a";
        let value = prop_oneof![
            r#""[a-z"\\ n:{]{0,3}""#.prop_map(|text| text),
            "null|1|2|\\{\\}|\\[\\]|\\{\"a\":\"[xy]\"\\}".prop_map(|text| text),
        ];
        proptest::collection::vec((key, value), 0..3).prop_map(|members| {
            let members = members.iter().map(|(key, value)| format!("\"{key}\":{value}"));
            format!("{{{}}}", members.collect::<Vec<_>>().join(","))
        })
    }

    proptest! {
        #[test]
        fn an_event_that_a_template_covers_has_neither_usage_nor_error(
            events in proptest::collection::vec(event(), 2..12),
        ) {
            let mut template = EventTemplate::default();
            for event in &events {
                let read = Chunk::read(Dialect::Chunks, event.as_bytes());
                let is_plain = read.is_some_and(|read| {
                    read.failure.is_none() && read.usage.is_none() && read.running_total.is_none()
                });
                if template.covers(event.as_bytes()) {
                    prop_assert!(is_plain, "{:?}", events);
                } else if is_plain {
                    template.learn(event.as_bytes(), 1);
                }
            }
        }
    }
}
