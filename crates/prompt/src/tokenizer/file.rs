//! Reads `tokenizer.json` without building a tree of its vocabulary.
//!
//! A tree of a hundred thousand entries takes ten times the memory of its text. Vocabulary and
//! merges are read from the text directly into their final form.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// A `tokenizer.json`.
#[derive(Clone, Debug)]
pub(super) struct File<'a> {
    /// The whole file except `vocab` and `merges`.
    pub(super) rest: Value,
    /// `model.vocab` as unparsed text.
    pub(super) vocab: Option<&'a RawValue>,
    /// `model.merges` as unparsed text.
    pub(super) merges: Option<&'a RawValue>,
}

impl<'a> File<'a> {
    /// Parses a file.
    ///
    /// # Errors
    /// The text is not one JSON object.
    pub(super) fn read(text: &'a [u8]) -> serde_json::Result<Self> {
        let mut rest = Map::new();
        let (mut vocab, mut merges) = (None, None);
        for (name, value) in serde_json::from_slice::<BTreeMap<String, &'a RawValue>>(text)? {
            if name != "model" || !value.get().starts_with('{') {
                rest.insert(name, serde_json::from_str(value.get())?);
                continue;
            }
            let mut model = Map::new();
            for (name, value) in
                serde_json::from_str::<BTreeMap<String, &'a RawValue>>(value.get())?
            {
                match name.as_str() {
                    "vocab" => vocab = Some(value),
                    "merges" => merges = Some(value),
                    _ => {
                        model.insert(name, serde_json::from_str(value.get())?);
                    }
                }
            }
            rest.insert(name, Value::Object(model));
        }
        Ok(Self { rest: Value::Object(rest), vocab, merges })
    }

    /// Whether the vocabulary is an object, as it is for BPE.
    pub(super) fn has_object_of_tokens(&self) -> bool {
        self.vocab.is_some_and(|vocab| vocab.get().starts_with('{'))
    }

    /// The ids of the tokens.
    pub(super) fn tokens(&self) -> Option<HashMap<Text<'a>, u32>> {
        serde_json::from_str(self.vocab?.get()).ok()
    }

    /// The pairs of tokens in the order of their ranks, by the rules of the reference.
    pub(super) fn pairs(&self) -> Option<Vec<(Text<'a>, Text<'a>)>> {
        let text = self.merges?.get();
        if text.get(1..)?.trim_start().starts_with('[') {
            return serde_json::from_str(text).ok();
        }
        let lines: Vec<Text<'a>> = serde_json::from_str(text).ok()?;
        let pairs = lines.into_iter().filter(|line| !line.0.starts_with("#version"));
        pairs.map(Text::halves).collect()
    }
}

/// Writes the whole file.
impl Serialize for File<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Model<'a>(&'a Map<String, Value>, [(&'a str, Option<&'a RawValue>); 2]);

        impl Serialize for Model<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut map = serializer.serialize_map(None)?;
                for (name, value) in self.0 {
                    map.serialize_entry(name, value)?;
                }
                for (name, value) in &self.1 {
                    if let Some(value) = value {
                        map.serialize_entry(name, value)?;
                    }
                }
                map.end()
            }
        }

        let mut map = serializer.serialize_map(None)?;
        for (name, value) in self.rest.as_object().into_iter().flatten() {
            match value {
                Value::Object(model) if name == "model" => {
                    let large = [("vocab", self.vocab), ("merges", self.merges)];
                    map.serialize_entry(name, &Model(model, large))?;
                }
                _ => map.serialize_entry(name, value)?,
            }
        }
        map.end()
    }
}

/// A string of the file, which borrows from its text if it has no escapes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(transparent)]
pub(super) struct Text<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

impl<'a> From<&'a str> for Text<'a> {
    fn from(text: &'a str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl<'a> Text<'a> {
    /// The parts before and after the text's only space.
    fn halves(self) -> Option<(Self, Self)> {
        let space = self.0.find(' ').filter(|at| !self.0[at + 1..].contains(' '))?;
        Some(match self.0 {
            Cow::Borrowed(text) => {
                (Self(Cow::Borrowed(&text[..space])), Self(Cow::Borrowed(&text[space + 1..])))
            }
            Cow::Owned(text) => {
                let half = |half: &str| Self(Cow::Owned(half.to_owned()));
                (half(&text[..space]), half(&text[space + 1..]))
            }
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_is_read_completely() {
        let file = json!({
            "version": "1.0", "added_tokens": [{"id": 3, "content": "<x>"}], "normalizer": null,
            "model": {"type": "BPE", "vocab": {"a": 0, "\"": 1, "ab": 2}, "merges": ["a b"]},
        });
        let text = file.to_string();
        let read = File::read(text.as_bytes()).unwrap();
        assert_eq!(read.rest["model"], json!({"type": "BPE"}));
        assert_eq!(serde_json::to_value(&read).unwrap(), file);
        let tokens = read.tokens().unwrap();
        assert_eq!(tokens[&Text::from("\"")], 1);
        assert!(read.has_object_of_tokens());
        assert!(File::read(b"[]").is_err());
        assert!(File::read(b"{\"model\": null}").unwrap().tokens().is_none());
    }

    #[test]
    fn merges_are_read_in_both_notations() {
        let pairs = |merges: Value| {
            let text = json!({"model": {"merges": merges}}).to_string();
            let pairs = File::read(text.as_bytes()).unwrap().pairs();
            pairs.map(|all| all.into_iter().map(|(a, b)| format!("{}+{}", a.0, b.0)).collect())
        };
        let some = |all: &[&str]| Some(all.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(pairs(json!(["#version: 0.2", "a b", "\" c"])), some(&["a+b", "\"+c"]));
        assert_eq!(pairs(json!([["a", "b c"], ["d", ""]])), some(&["a+b c", "d+"]));
        assert_eq!(pairs(json!([])), some(&[]));
        for wrong in [json!(["a b c"]), json!(["a"]), json!([["a"]]), json!(["a b", ["c", "d"]])] {
            assert_eq!(pairs(wrong.clone()), None, "{wrong}");
        }
    }
}
