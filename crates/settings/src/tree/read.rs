//! Parses YAML text into a tree, within bounds.

use std::borrow::Cow;
use std::collections::HashMap;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, ScanError, Span};

use super::core_scalar::resolve;
use super::{Entry, Node, Value};
use crate::problem::{Place, ProblemReport};
use crate::words::{FileProfile, shown};

/// Maximum number of values in a file after aliases were expanded. A worker has about six.
const NODES_MAX: usize = 250_000;
/// Maximum levels of nesting; a configuration needs six.
const DEPTH_MAX: usize = 32;

/// The tree of `text`. `None` means that the text could not be parsed to its end; a tree may be
/// returned although there are mistakes (such as a key that occurs twice).
pub(crate) fn read(text: &str, profile: &FileProfile, report: &mut ProblemReport) -> Option<Node> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if let Some((offset, found)) = text.char_indices().find(|(_, c)| !allowed(*c)) {
        // The parser would treat a NUL as the end of the file.
        let message = format!("the character U+{:04X} is not allowed in YAML", u32::from(found));
        report.error(Place::after(&text[..offset]), message, "delete it");
        return None;
    }
    let mut reader =
        Reader { profile, report, frames: Vec::new(), anchors: HashMap::new(), nodes: 0 };
    match reader.run(text) {
        Ok(root) => Some(root),
        Err((at, message, hint)) => {
            reader.report.error(at, message, hint);
            None
        }
    }
}

/// A mistake that ends the parsing: place, message and hint.
type FatalMistake = (Place, String, Cow<'static, str>);

/// A list or mapping that is still open.
struct Frame {
    at: Place,
    anchor: usize,
    content: Content,
}

enum Content {
    Seq(Vec<Node>),
    Map { entries: Vec<Entry>, seen: HashMap<String, Place>, key: Option<Key> },
}

/// What is wrong with a text that is not YAML.
fn not_yaml(text: &str, error: &ScanError) -> FatalMistake {
    let at = place(error.marker());
    // The parser may be at the end of the line before the tab.
    if let Some(tab) = (at.line..=at.line + 1).find_map(|line| tab_in_indentation(text, line)) {
        let message = "this line is indented with a tab".to_owned();
        return (tab, message, "indent with spaces: YAML allows no tabs there".into());
    }
    let line = text.lines().nth(at.line.saturating_sub(1));
    let is_block = error.info().contains("parsing a block");
    let (message, hint) = match line.is_some_and(|line| line.contains("${")) {
        true => (error.info(), "within `[...]` and `{...}`, put `\"${NAME}\"` in quotes"),
        false if is_block => (
            "this line does not continue the list or mapping above it",
            "begin it in the same column as the other items or keys, and close quotes and brackets",
        ),
        false => (error.info(), "check the indentation, the quotes and the brackets around here"),
    };
    (at, format!("this is not YAML: {message}"), hint.into())
}

/// The place of a tab in the indentation of a line, whose number is counted from 1.
fn tab_in_indentation(text: &str, line: usize) -> Option<Place> {
    let written = text.lines().nth(line.checked_sub(1)?)?;
    let indentation = written.len() - written.trim_start_matches([' ', '\t']).len();
    let column = written[..indentation].find('\t')? + 1;
    Some(Place { line, column })
}

/// A key that waits for its value.
struct Key {
    at: Place,
    /// `None` for a key that was refused: its value is parsed and dropped.
    name: Option<String>,
}

struct Reader<'r> {
    profile: &'r FileProfile,
    report: &'r mut ProblemReport,
    frames: Vec<Frame>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

impl Reader<'_> {
    fn run(&mut self, text: &str) -> Result<Node, FatalMistake> {
        let mut parser = Parser::new_from_str(text);
        let mut root = None;
        while let Some(event) = parser.next_event() {
            let (event, span) = event.map_err(|error| not_yaml(text, &error))?;
            if let Some(node) = self.event(event, span, root.is_some())? {
                root = Some(node);
            }
        }
        root.ok_or((Place::START, "the file is empty".to_owned(), self.profile.empty.into()))
    }

    /// Handles one event; returns the whole tree at the last event of a document.
    fn event(
        &mut self,
        event: Event<'_>,
        span: Span,
        done: bool,
    ) -> Result<Option<Node>, FatalMistake> {
        let at = place(&span.start);
        match event {
            Event::DocumentStart(_) if done => {
                let message = "a second document starts here".to_owned();
                Err((at, message, "keep one document per file: delete the `---`".into()))
            }
            Event::Scalar(text, style, anchor, tag) => {
                self.no_tag(at, tag.is_some());
                let value = match style {
                    ScalarStyle::Plain => resolve(&text),
                    _ => Value::Str(text.into_owned()),
                };
                // An empty value has no place of its own; the place of its key is used.
                let absent = style == ScalarStyle::Plain && span.is_empty();
                let at = if absent { self.key_place().unwrap_or(at) } else { at };
                self.count(at, 1)?;
                self.finish(Node::new(at, value), anchor)
            }
            Event::SequenceStart(anchor, tag) => {
                self.no_tag(at, tag.is_some());
                self.open(at, anchor, Content::Seq(Vec::new()))
            }
            Event::MappingStart(anchor, tag) => {
                self.no_tag(at, tag.is_some());
                let (entries, seen, key) = (Vec::new(), HashMap::new(), None);
                self.open(at, anchor, Content::Map { entries, seen, key })
            }
            Event::SequenceEnd | Event::MappingEnd => match self.frames.pop() {
                Some(frame) => {
                    let value = match frame.content {
                        Content::Seq(items) => Value::Seq(items),
                        Content::Map { entries, .. } => Value::Map(entries),
                    };
                    self.finish(Node::new(frame.at, value), frame.anchor)
                }
                None => Ok(None),
            },
            Event::Alias(anchor) => {
                let node = self.alias(at, anchor)?;
                self.finish(node, 0)
            }
            _ => Ok(None),
        }
    }

    fn open(
        &mut self,
        at: Place,
        anchor: usize,
        content: Content,
    ) -> Result<Option<Node>, FatalMistake> {
        self.count(at, 1)?;
        self.depth(at, 1)?;
        self.frames.push(Frame { at, anchor, content });
        Ok(None)
    }

    /// The anchored value, at the place of the alias; the values inside it keep their own places.
    fn alias(&mut self, at: Place, anchor: usize) -> Result<Node, FatalMistake> {
        let Some(target) = self.anchors.get(&anchor) else {
            let message = "this alias is inside the value that it stands for".to_owned();
            return Err((at, message, "write the value out".into()));
        };
        let (size, height) = (target.size, target.height);
        self.count(at, size)?;
        self.depth(at, height)?;
        let target = self.anchors.get(&anchor).cloned();
        Ok(target.map_or_else(|| Node::new(at, Value::Null), |node| Node { at, ..node }))
    }

    /// Adds a complete value to its parent; returns the outermost one.
    fn finish(&mut self, node: Node, anchor: usize) -> Result<Option<Node>, FatalMistake> {
        if anchor > 0 {
            self.count(node.at, node.size)?;
            self.anchors.insert(anchor, node.clone());
        }
        let Some(frame) = self.frames.last_mut() else {
            return Ok(Some(node));
        };
        match &mut frame.content {
            Content::Seq(items) => items.push(node),
            Content::Map { entries, seen, key } => match key.take() {
                None => *key = Some(accept_key(node, seen, self.report)),
                Some(Key { at, name: Some(key) }) => {
                    entries.push(Entry { key, key_at: at, value: node });
                }
                Some(Key { name: None, .. }) => {}
            },
        }
        Ok(None)
    }

    fn key_place(&self) -> Option<Place> {
        match &self.frames.last()?.content {
            Content::Map { key, .. } => key.as_ref().map(|key| key.at),
            Content::Seq(_) => None,
        }
    }

    fn no_tag(&mut self, at: Place, tagged: bool) {
        if tagged {
            let hint = "delete it; write numbers plainly and texts in quotes";
            self.report.error(at, "a tag (`!...`) has no meaning here".to_owned(), hint);
        }
    }

    fn count(&mut self, at: Place, nodes: usize) -> Result<(), FatalMistake> {
        self.nodes = self.nodes.saturating_add(nodes);
        if self.nodes > NODES_MAX {
            let message = format!("the file holds more than {NODES_MAX} values from here on");
            let hint = format!("use fewer aliases, or {}", self.profile.too_large);
            return Err((at, message, hint.into()));
        }
        Ok(())
    }

    fn depth(&self, at: Place, below: usize) -> Result<(), FatalMistake> {
        if self.frames.len() + below > DEPTH_MAX {
            let message = format!("this is nested deeper than {DEPTH_MAX} levels");
            return Err((at, message, "a configuration needs six levels".into()));
        }
        Ok(())
    }
}

fn accept_key(node: Node, seen: &mut HashMap<String, Place>, report: &mut ProblemReport) -> Key {
    let at = node.at;
    let Value::Str(name) = node.value else {
        let hint = "keys are texts; put numbers and the like in quotes";
        report.error(at, "this key is not a text".to_owned(), hint);
        return Key { at, name: None };
    };
    if let Some(first) = seen.get(&name) {
        let key = shown(&name);
        let message = format!(
            "`{key}` is here a second time; the first is at {}:{}",
            first.line, first.column
        );
        report.error(at, message, "keep one of the two");
        return Key { at, name: None };
    }
    seen.insert(name.clone(), at);
    Key { at, name: Some(name) }
}

/// YAML 1.2.2, production 1 (`c-printable`); a byte order mark is allowed only at the start of a
/// file.
pub(crate) fn allowed(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | '\u{85}' | '\u{20}'..='\u{7e}' | '\u{a0}'..='\u{fffd}' | '\u{10000}'..)
        && c != '\u{feff}'
}

fn place(marker: &Marker) -> Place {
    Place { line: marker.line().max(1), column: marker.col() + 1 }
}
