//! A YAML file as a tree in which every value has its place.

use serde_json::Value as Json;

mod core_scalar;
mod read;

pub(crate) use core_scalar::resolve as resolve_plain;
pub(crate) use read::{allowed, read};

use crate::problem::Place;

/// A value and its place.
#[derive(Clone, Debug)]
pub struct Node {
    /// Where the value begins.
    pub at: Place,
    /// The value.
    pub value: Value,
    /// Number of values in the subtree, including this one.
    size: usize,
    /// Number of levels below this value.
    height: usize,
}

/// A value with its type by YAML 1.2's core schema.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An empty value, `~` or `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer; integers beyond 128 bits become the minimum or maximum.
    Int(i128),
    /// Any other number.
    Float(f64),
    /// A text.
    Str(String),
    /// A list.
    Seq(Vec<Node>),
    /// A mapping, in the order of the file; no key occurs twice.
    Map(Vec<Entry>),
}

/// One key of a mapping and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key begins.
    pub key_at: Place,
    /// Its value.
    pub value: Node,
}

/// Places are ignored: equal values are equal wherever they are in the file.
impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl Node {
    /// A value at a place.
    pub fn new(at: Place, value: Value) -> Self {
        let (size, height) = match &value {
            Value::Seq(items) => measure(items.iter()),
            Value::Map(entries) => measure(entries.iter().map(|entry| &entry.value)),
            _ => (1, 0),
        };
        Self { at, value, size, height }
    }

    /// The value under `key`, if this is a mapping that has the key.
    pub fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Map(entries) => {
                entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
            }
            _ => None,
        }
    }

    /// Takes a key and its value out of a mapping, if this is a mapping that has the key.
    pub fn take(&mut self, key: &str) -> Option<Entry> {
        let Value::Map(entries) = &mut self.value else { return None };
        let at = entries.iter().position(|entry| entry.key == key)?;
        Some(entries.remove(at))
    }

    /// Adds a key to a mapping, in place of the value that the key has already. Other values stay as
    /// they are.
    pub fn insert(&mut self, key: &str, value: Node) {
        self.take(key);
        if let Value::Map(entries) = &mut self.value {
            entries.push(Entry { key: key.to_owned(), key_at: value.at, value });
        }
    }

    /// The items of a list, to be changed; none of other values.
    pub fn items_mut(&mut self) -> &mut [Node] {
        match &mut self.value {
            Value::Seq(items) => items,
            _ => &mut [],
        }
    }

    /// The items of a list; empty for other values.
    pub fn items(&self) -> &[Node] {
        match &self.value {
            Value::Seq(items) => items,
            _ => &[],
        }
    }

    /// The entries of a mapping; empty for other values.
    pub fn entries(&self) -> &[Entry] {
        match &self.value {
            Value::Map(entries) => entries,
            _ => &[],
        }
    }

    /// The value under `key`, to be changed.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Node> {
        match &mut self.value {
            Value::Map(entries) => {
                entries.iter_mut().find(|entry| entry.key == key).map(|entry| &mut entry.value)
            }
            _ => None,
        }
    }

    /// The text, if this is a text.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The value as JSON, without places. Numbers that JSON cannot represent become null.
    pub fn to_json(&self) -> Json {
        match &self.value {
            Value::Null => Json::Null,
            Value::Bool(yes) => Json::Bool(*yes),
            Value::Int(number) => match (u64::try_from(*number), i64::try_from(*number)) {
                (Ok(number), _) => Json::from(number),
                (_, Ok(number)) => Json::from(number),
                _ => Json::from(*number as f64),
            },
            Value::Float(number) => Json::from(*number),
            Value::Str(text) => Json::String(text.clone()),
            Value::Seq(items) => items.iter().map(Node::to_json).collect(),
            Value::Map(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), entry.value.to_json())).collect()
            }
        }
    }
}

fn measure<'a>(children: impl Iterator<Item = &'a Node>) -> (usize, usize) {
    children.fold((1, 1), |(size, height), child| (size + child.size, height.max(child.height + 1)))
}
