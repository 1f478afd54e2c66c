//! Special and added tokens by the rules of transformers 5: where the
//! configuration names them, and which of them are added to the tokenizer.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::rebuild::{Family, Finish};
use crate::template::SpecialTokens;

/// The names that every tokenizer has, in the order in which it adds them.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A token in the configuration. Bare text and a token with flags are different tokens to
/// transformers, even with the same content.
#[derive(Clone, Debug, PartialEq)]
enum ConfiguredToken {
    Text(String),
    Token(AddedToken),
}

impl ConfiguredToken {
    fn read(value: &Value) -> Option<Self> {
        value
            .as_str()
            .map(|text| Self::Text(text.to_owned()))
            .or_else(|| added_token(value).map(Self::Token))
    }

    fn content(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Token(token) => &token.content,
        }
    }

    /// The token to add: bare text becomes a special token.
    fn into_added(self) -> AddedToken {
        match self {
            Self::Text(text) => AddedToken::from(text, true),
            Self::Token(token) => token,
        }
    }
}

/// The files of a model folder that name tokens.
pub(super) struct Sources<'a> {
    /// `tokenizer_config.json`
    pub(super) config: &'a Map<String, Value>,
    /// `special_tokens_map.json`
    pub(super) special_map: &'a Map<String, Value>,
    /// `added_tokens.json`: ids by content
    pub(super) added: &'a Map<String, Value>,
    /// `tokenizer.json`
    pub(super) file: &'a Value,
}

/// All tokens that the configuration names.
#[derive(Debug)]
pub(super) struct Tokens {
    /// The named tokens, in the order in which transformers keeps them.
    named: Vec<(String, ConfiguredToken)>,
    extra: Vec<ConfiguredToken>,
    by_id: BTreeMap<u64, AddedToken>,
}

impl Tokens {
    /// Reads the tokens as a tokenizer class does when it loads a folder.
    pub(super) fn read(sources: &Sources<'_>, family: Option<Family>) -> Self {
        let mut init = sources.config.clone();
        if !is_given(init.get("extra_special_tokens"))
            && let Some(list) = init.shift_remove("additional_special_tokens")
        {
            init.insert("extra_special_tokens".to_owned(), list);
        }
        let is_own_name = |name: &str| name.ends_with("_token") && !NAMED.contains(&name);
        let mut explicit = Map::new();
        for (name, value) in sources.config {
            if is_own_name(name) && value.is_string() {
                init.shift_remove(name);
                explicit.insert(name.clone(), value.clone());
            }
        }
        move_names(&mut init, &mut explicit);
        let by_id = match init.get("added_tokens_decoder").and_then(Value::as_object) {
            Some(decoder) => decoder
                .iter()
                .filter_map(|(id, value)| Some((id.parse().ok()?, added_token(value)?)))
                .collect(),
            None => {
                merge_special_map(&mut init, sources.special_map);
                move_names(&mut init, &mut explicit);
                legacy_tokens(&init, sources)
            }
        };
        let extra_key = ["extra_special_tokens", "additional_special_tokens"]
            .into_iter()
            .find(|key| init.contains_key(*key));
        let extra = extra_key
            .and_then(|key| init[key].as_array())
            .into_iter()
            .flatten()
            .filter_map(ConfiguredToken::read)
            .collect();
        let configured = NAMED.map(|name| init.contains_key(name));
        add_defaults(&mut init, family, sources.file);
        let mut named = Vec::new();
        for (name, configured) in NAMED.into_iter().zip(configured) {
            if let Some(special) = init.get(name).and_then(ConfiguredToken::read) {
                // A token with an id and the same content takes its flags from there.
                let known = by_id.values().rev().find(|token| token.content == special.content());
                let token = match known {
                    Some(token) if configured => ConfiguredToken::Token(token.clone()),
                    _ => special,
                };
                named.push((name.to_owned(), token));
            }
        }
        let own = init.iter().filter(|(name, _)| is_own_name(name)).chain(&explicit);
        for (name, value) in own {
            if let Some(special) = ConfiguredToken::read(value) {
                named.retain(|(known, _)| known != name);
                named.push((name.clone(), special));
            }
        }
        Self { named, extra, by_id }
    }

    /// The named tokens, as variables for templates have them.
    pub(super) fn variables(&self) -> SpecialTokens {
        self.named
            .iter()
            .map(|(name, special)| (name.clone(), special.content().to_owned()))
            .collect()
    }

    /// What transformers adds to a tokenizer that has the tokens `present`.
    pub(super) fn missing(&self, present: &[AddedToken]) -> Vec<AddedToken> {
        let mut wanted: Vec<ConfiguredToken> = self
            .by_id
            .values()
            .filter(|token| !present.contains(token))
            .cloned()
            .map(ConfiguredToken::Token)
            .collect();
        let known = |content: &str| {
            present.iter().chain(self.by_id.values()).any(|token| token.content == content)
        };
        for special in self.named.iter().map(|(_, special)| special).chain(&self.extra) {
            if !known(special.content()) && !wanted.contains(special) {
                wanted.push(special.clone());
            }
        }
        let is_named = |content: &str| self.named.iter().any(|(_, name)| name.content() == content);
        wanted
            .into_iter()
            .map(|special| {
                let mut token = special.into_added();
                token.special |= is_named(&token.content);
                token
            })
            .collect()
    }

    /// The tokens that a class adds after the configured ones.
    pub(super) fn finishing(&self, finish: Finish) -> Vec<AddedToken> {
        let all = self.named.iter().map(|(_, special)| special).chain(&self.extra);
        match finish {
            Finish::Nothing => Vec::new(),
            Finish::PlainSpecials => {
                let mut tokens: Vec<AddedToken> = Vec::new();
                for special in all {
                    if !tokens.iter().any(|token| token.content == special.content()) {
                        tokens.push(AddedToken::from(special.content(), true));
                    }
                }
                tokens
            }
            Finish::MarkedSpecials => all
                .cloned()
                .map(|special| AddedToken { special: true, ..special.into_added() })
                .collect(),
        }
    }
}

/// Reads a serialised token. Missing flags are off; a token that is not special is matched in
/// normalised text.
fn added_token(value: &Value) -> Option<AddedToken> {
    let content = value.get("content")?.as_str()?;
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(false);
    Some(
        AddedToken::from(content, special)
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false))
            .normalized(flag("normalized").unwrap_or(!special)),
    )
}

/// Whether a list or an object is not empty, as Python tests it.
fn is_given(value: Option<&Value>) -> bool {
    match value {
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        _ => false,
    }
}

/// Moves extra tokens that are given as an object to the named tokens.
fn move_names(init: &mut Map<String, Value>, explicit: &mut Map<String, Value>) {
    if init.get("extra_special_tokens").is_some_and(Value::is_object)
        && let Some(Value::Object(names)) = init.shift_remove("extra_special_tokens")
    {
        explicit.extend(names);
    }
}

/// Older models have their special tokens in a separate file.
fn merge_special_map(init: &mut Map<String, Value>, special_map: &Map<String, Value>) {
    for (name, value) in special_map {
        let mut value = value.clone();
        let is_extra = name == "extra_special_tokens";
        if let Some(token) = value.as_object_mut().filter(|_| !is_extra) {
            token.insert("special".to_owned(), Value::Bool(true));
        }
        if let (true, Value::Array(more)) = (is_extra, &value) {
            let mut list = init.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
            for token in more {
                let mut token = token.clone();
                if let Some(token) = token.as_object_mut() {
                    token.insert("special".to_owned(), Value::Bool(true));
                }
                if !list.contains(&token) {
                    list.push(token);
                }
            }
            value = Value::Array(list);
        }
        init.insert(name.clone(), value);
    }
}

/// Added tokens of models whose configuration does not list them.
fn legacy_tokens(init: &Map<String, Value>, sources: &Sources<'_>) -> BTreeMap<u64, AddedToken> {
    let extra = init.get("extra_special_tokens").and_then(Value::as_array);
    let special: Vec<ConfiguredToken> = NAMED
        .iter()
        .filter_map(|name| init.get(*name))
        .chain(extra.into_iter().flatten())
        .filter_map(ConfiguredToken::read)
        .collect();
    let mut by_id = BTreeMap::new();
    for (content, id) in sources.added {
        if let Some(id) = id.as_u64() {
            let special = special.iter().any(|token| token.content() == content);
            by_id.insert(id, AddedToken::from(content.as_str(), special));
        }
    }
    for token in sources.file["added_tokens"].as_array().into_iter().flatten() {
        if let (Some(id), Some(token)) = (token["id"].as_u64(), added_token(token)) {
            by_id.insert(id, token);
        }
    }
    by_id
}

/// For names that the configuration leaves open, sets the class's own tokens, then the padding
/// token of a file that pads.
fn add_defaults(init: &mut Map<String, Value>, family: Option<Family>, file: &Value) {
    for (name, token) in family.map_or(&[][..], Family::default_tokens) {
        if !init.contains_key(*name) {
            init.insert((*name).to_owned(), token.map_or(Value::Null, Value::from));
        }
    }
    if !init.contains_key("pad_token")
        && let Some(token) = file["padding"]["pad_token"].as_str()
    {
        init.insert("pad_token".to_owned(), token.into());
    }
}
