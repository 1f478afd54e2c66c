//! An object that the router writes itself: its members' places are known, so that nobody has
//! to look for them.

use std::sync::Arc;

use serde::Serialize;

use super::{JsonObject, Text, mark};
use crate::error::{Error, Kind};

/// Writes an object, member after member.
#[derive(Debug)]
pub struct Builder {
    text: Vec<u8>,
    members: Vec<(Text, Text)>,
    marks: u64,
}

impl Builder {
    /// An object of about so many bytes.
    pub fn with_capacity(bytes: usize) -> Self {
        let mut text = Vec::with_capacity(bytes);
        text.push(b'{');
        Self { text, members: Vec::with_capacity(12), marks: 0 }
    }

    /// Adds a member. No key may come twice.
    pub fn put(&mut self, key: &str, value: impl Serialize) {
        self.put_with(key, |text| write(text, value));
    }

    /// Adds a member, whose value `write` appends as JSON.
    pub fn put_with(&mut self, key: &str, write_value: impl FnOnce(&mut Vec<u8>)) {
        if self.text.len() > 1 {
            self.text.push(b',');
        }
        write(&mut self.text, key);
        self.text.push(b':');
        let start = self.text.len();
        write_value(&mut self.text);
        self.marks |= mark(key);
        self.members.push((Text::Edited(key.into()), Text::Original(start..self.text.len())));
    }

    /// The object.
    ///
    /// # Errors
    /// If what was appended is no text, which is a defect.
    pub fn build(mut self) -> Result<JsonObject, Error> {
        self.text.push(b'}');
        let defect = |_| Error::new(Kind::Internal, "a body could not be made");
        let text = String::from_utf8(self.text).map_err(defect)?;
        Ok(JsonObject { text: Arc::new(text), members: self.members, marks: self.marks })
    }
}

/// Appends a value as JSON. Into memory, texts, numbers and lists of them never fail.
pub fn write(text: &mut Vec<u8>, value: impl Serialize) {
    let _infallible = serde_json::to_writer(text, &value);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_built_is_what_would_be_read(
            members in proptest::collection::btree_map(".{0,8}", ".{0,20}", 0..6),
            ids in proptest::collection::vec(0u32.., 0..5),
        ) {
            let mut builder = Builder::with_capacity(16);
            for (key, value) in &members {
                builder.put(key, value);
            }
            builder.put("the ids", &ids);
            let built = builder.build().unwrap();
            let read = JsonObject::parse_str(&built.to_string()).unwrap();
            prop_assert_eq!(built.members().count(), members.len() + 1);
            prop_assert!(built.members().eq(read.members()));
            prop_assert_eq!(&*built.text, &built.to_string());
        }
    }
}
