//! Short texts that are cloned often: ids, and names of workers and models.

use std::fmt;
use std::ops::Deref;

use serde::{Serialize, Serializer};

/// Maximum length in bytes of a name that is stored inline.
const SHORT_MAX_BYTES: usize = 46;

/// A text that is cheap to clone if it is short: nothing is allocated, and threads share no
/// reference counter.
#[derive(Clone)]
pub struct Name(Text);

#[derive(Clone)]
enum Text {
    Short { bytes: [u8; SHORT_MAX_BYTES], length: u8 },
    Long(Box<str>),
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        match &self.0 {
            // The bytes were copied from a `str`.
            Text::Short { bytes, length } => {
                std::str::from_utf8(&bytes[..usize::from(*length)]).unwrap_or_default()
            }
            Text::Long(text) => text,
        }
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        let mut bytes = [0; SHORT_MAX_BYTES];
        match bytes.get_mut(..text.len()) {
            Some(place) => {
                place.copy_from_slice(text.as_bytes());
                Self(Text::Short { bytes, length: text.len() as u8 })
            }
            None => Self(Text::Long(text.into())),
        }
    }
}

impl Default for Name {
    fn default() -> Self {
        Self::from("")
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        (*name).to_owned()
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Name {}

impl PartialEq<&str> for Name {
    fn eq(&self, other: &&str) -> bool {
        **self == **other
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_name_says_what_it_was_made_of(text in ".{0,60}") {
            let name = Name::from(text.as_str());
            prop_assert_eq!(&*name, text.as_str());
            prop_assert_eq!(String::from(name.clone()), text);
            prop_assert_eq!(size_of_val(&name), 48);
        }
    }
}
