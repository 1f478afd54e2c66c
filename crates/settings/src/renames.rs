//! Keys that had another name in an earlier version: they are read under their new name, with a warning.

use std::time::Duration;

use crate::problem::{Place, ProblemReport};
use crate::scalar::format_duration;
use crate::tree::{Entry, Node, Value};
use crate::words::{FileProfile, join};

/// The warnings about old names, which are added to the report after the tree has been checked: a
/// file with many workers may have more of them than a report lists.
pub(crate) struct OldNames(Vec<(Place, String, String)>);

impl OldNames {
    pub(crate) fn warn(self, report: &mut ProblemReport) {
        for (at, message, hint) in self.0 {
            report.warn(at, message, hint);
        }
    }
}

/// Replaces the old names of keys in the tree under `root` by their new names. A mapping with a key
/// under both names is an error; the value under the old name is then dropped.
pub(crate) fn apply(
    root: &mut Node,
    profile: &FileProfile,
    report: &mut ProblemReport,
) -> OldNames {
    let mut renamer = Renamer { report, found: Vec::new() };
    let rows: Vec<Row> = profile.renamed_keys.iter().map(|(old, new)| Row::new(old, new)).collect();
    renamer.node(root, "", &rows);
    OldNames(renamer.found)
}

/// One renamed key, as seen from a mapping above it.
#[derive(Clone, Copy)]
struct Row {
    /// The key's new path from that mapping: keys joined by dots, `[]` after those of lists.
    path: &'static str,
    /// The key's old name.
    old: &'static str,
}

impl Row {
    fn new(old: &'static str, new: &'static str) -> Self {
        Self { path: new, old: old.rsplit('.').next().unwrap_or(old) }
    }

    /// The new name, if the key is in the mapping itself.
    fn here(self) -> Option<&'static str> {
        (!self.path.contains('.')).then_some(self.path)
    }

    /// The same row as seen from the value of `entry`, or from each item of that list, if the row leads
    /// there.
    fn below(self, entry: &Entry) -> Option<Self> {
        let (first, path) = self.path.split_once('.')?;
        let key = match entry.value.value {
            Value::Seq(_) => first.strip_suffix("[]")?,
            _ => first,
        };
        (key == entry.key).then_some(Self { path, ..self })
    }
}

struct Renamer<'r> {
    report: &'r mut ProblemReport,
    found: Vec<(Place, String, String)>,
}

impl Renamer<'_> {
    /// Renames below `node`, which is at `path` as the file has it.
    fn node(&mut self, node: &mut Node, path: &str, rows: &[Row]) {
        if rows.is_empty() {
            return;
        }
        match &mut node.value {
            Value::Map(entries) => self.mapping(entries, path, rows),
            Value::Seq(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.node(item, &format!("{path}[{index}]"), rows);
                }
            }
            _ => {}
        }
    }

    fn mapping(&mut self, entries: &mut Vec<Entry>, path: &str, rows: &[Row]) {
        let mut twice = Vec::new();
        for index in 0..entries.len() {
            let written = join(path, &entries[index].key);
            let is_old = |row: &&Row| row.old == entries[index].key;
            let renamed = rows.iter().filter(is_old).find_map(|row| row.here());
            if let Some(new) = renamed {
                let beside =
                    entries.iter().find(|entry| entry.key == new).map(|entry| entry.key_at);
                if !self.old_name(&entries[index], &written, new, beside) {
                    twice.push(index);
                    continue;
                }
                with_unit(&entries[index].key.clone(), new, &mut entries[index].value);
                new.clone_into(&mut entries[index].key);
            }
            let entry = &mut entries[index];
            let below: Vec<Row> = rows.iter().filter_map(|row| row.below(entry)).collect();
            self.node(&mut entry.value, &written, &below);
        }
        for index in twice.into_iter().rev() {
            entries.remove(index);
        }
    }

    /// Reports an old name, and whether the key can be renamed: the new name must not be `beside` it.
    fn old_name(&mut self, entry: &Entry, written: &str, new: &str, beside: Option<Place>) -> bool {
        let old = &entry.key;
        let message = format!("`{written}` is now called `{new}`");
        match beside {
            Some(Place { line, column }) => {
                let message = format!("{message}, which is at {line}:{column} as well");
                self.report.error(entry.key_at, message, format!("delete `{old}`"));
                false
            }
            None => {
                let unit = match old.ends_with(MS) && !new.ends_with(MS) {
                    true => " with a unit, such as `10ms`",
                    false => "",
                };
                let hint = format!("write `{new}`{unit}; a later version will refuse `{old}`");
                self.found.push((entry.key_at, message, hint));
                true
            }
        }
    }
}

/// The end of the names of keys whose values were numbers of milliseconds.
const MS: &str = "_ms";

/// Gives the value of a renamed key its unit, if the old name had the unit.
fn with_unit(old: &str, new: &str, value: &mut Node) {
    if !old.ends_with(MS) || new.ends_with(MS) {
        return;
    }
    let ms = match &value.value {
        Value::Int(ms) => *ms as f64,
        Value::Float(ms) => *ms,
        // The number is in the environment.
        Value::Str(text) if text.contains("${") => {
            value.value = Value::Str(format!("{text}ms"));
            return;
        }
        _ => return,
    };
    // Other numbers are refused as any number is.
    if let Ok(duration) = Duration::try_from_secs_f64(ms / 1e3) {
        let us = (duration.as_secs_f64() * 1e6).round();
        value.value = Value::Str(format_duration(Duration::from_micros(us as u64)));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::tree;

    const DIALECT: FileProfile = FileProfile {
        renamed_keys: &[
            ("top", "first"),
            ("items[].old", "items[].section"),
            ("items[].old.leaf", "items[].section.value"),
            ("items[].parts[].name", "items[].parts[].id"),
            ("wait_ms", "wait"),
        ],
        variables: false,
        secret_keys: &[],
        empty: "",
        too_large: "",
    };

    /// The tree after the renames as JSON, the warnings, and the errors.
    fn renamed(text: &str) -> (serde_json::Value, Vec<String>, Vec<String>) {
        let mut report = ProblemReport::new("f");
        let mut root = tree::read(text, &DIALECT, &mut report).unwrap();
        let old_names = apply(&mut root, &DIALECT, &mut report);
        let found = old_names.0.into_iter();
        let warnings = found.map(|(at, message, _)| format!("{}:{} {message}", at.line, at.column));
        let warnings = warnings.collect();
        let problems = report.into_problems();
        let errors = problems.as_slice().iter();
        let errors = errors.map(|p| format!("{}:{} {}", p.line, p.column, p.message)).collect();
        (root.to_json(), warnings, errors)
    }

    #[test]
    fn keys_sections_and_items_of_lists_get_their_new_names() {
        let text = "top: 1\nitems:\n- old: { leaf: 2 }\n- section: { leaf: 3 }\n- old:\n    value: 4\n  \
                    parts: [{ name: 5 }, { id: 6, name_: 7 }]\n";
        let (json, warnings, errors) = renamed(text);
        let expected = serde_json::json!({"first": 1, "items": [
            {"section": {"value": 2}}, {"section": {"value": 3}},
            {"section": {"value": 4}, "parts": [{"id": 5}, {"id": 6, "name_": 7}]},
        ]});
        assert_eq!(json, expected);
        let expected = [
            "1:1 `top` is now called `first`",
            "3:3 `items[0].old` is now called `section`",
            "3:10 `items[0].old.leaf` is now called `value`",
            "4:14 `items[1].section.leaf` is now called `value`",
            "5:3 `items[2].old` is now called `section`",
            "7:13 `items[2].parts[0].name` is now called `id`",
        ];
        assert_eq!(warnings, expected);
        assert!(errors.is_empty(), "{errors:?}");
    }

    #[test]
    fn a_number_under_a_name_with_its_unit_gets_the_unit() {
        for (old, new) in [
            ("600000.0", "10m"),
            ("300", "300ms"),
            ("2.5", "2ms500us"),
            ("0", "0s"),
            ("\"${WAIT}\"", "${WAIT}ms"),
        ] {
            let (json, warnings, _) = renamed(&format!("wait_ms: {old}\n"));
            assert_eq!(json, serde_json::json!({"wait": new}));
            assert_eq!(warnings, ["1:1 `wait_ms` is now called `wait`"]);
        }
        for unlike in [serde_json::json!(-1), serde_json::json!("300ms"), serde_json::json!([])] {
            let (json, _, _) = renamed(&format!("wait_ms: {unlike}\n"));
            assert_eq!(json, serde_json::json!({"wait": unlike}));
        }
    }

    #[test]
    fn an_old_and_a_new_name_side_by_side_are_an_error_at_the_old_one() {
        let (json, warnings, errors) = renamed("first: 1\nitems: []\ntop: 2\n");
        assert_eq!(json, serde_json::json!({"first": 1, "items": []}));
        assert!(warnings.is_empty(), "{warnings:?}");
        assert_eq!(errors, ["3:1 `top` is now called `first`, which is at 1:1 as well"]);
    }

    #[test]
    fn old_names_in_other_places_are_left_alone() {
        let text = "{leaf: 1, old: 2, items: {old: 3}, other: {top: 4}}";
        let (json, warnings, _) = renamed(text);
        let expected = serde_json::json!(
            {"leaf": 1, "old": 2, "items": {"old": 3}, "other": {"top": 4}});
        assert_eq!((json, warnings.len()), (expected, 0));
    }
}
