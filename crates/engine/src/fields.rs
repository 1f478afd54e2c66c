//! Decides which fields of a client's body are sent to an engine.
//!
//! Engines accept far more than the APIs of OpenAI and Anthropic define: fields that move KV,
//! choose a rank or a place in the queue, load an adapter or run code. An engine is therefore sent
//! only the fields that [`FIELDS`] lists for the endpoint. An operator can allow further fields by
//! name (`pass_unknown`), but never a field that only the router may set.

pub mod table;

pub use table::{FIELDS, VERSIONS};

/// Where a field may be: a set of endpoints, and of nested objects that have fields of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places(u16);

impl Places {
    const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// The treatment of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The field is passed to the engine unchanged, in these places.
    Passes(Places),
    /// Like `Passes`, for an object whose members have rules of their own, in the second place.
    PassesWith(Places, Places),
    /// An object for the operator's own extensions. It is passed in these places, with all members
    /// except those that steer an engine.
    PassesOpen(Places),
    /// The router uses the field; the engine gets at most what the router makes of it.
    Read,
    /// The field steers the engine; the text says what it decides. It is passed only if it is
    /// allowed by name.
    Steers(&'static str),
    /// Only the router may set the field. It cannot be allowed.
    RouterOnly,
}

/// A field that an engine or an API knows.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// The treatment of the field.
    pub rule: Rule,
}

/// Prefix of the fields by which the two engines of an SGLang pair find each other. Only the router
/// may set a field with this prefix.
const ROUTER_ONLY_PREFIX: &str = "bootstrap_";

/// Whether only the router may set this field.
pub fn is_router_only(name: &str) -> bool {
    rule(name) == Some(Rule::RouterOnly)
}

/// The rule of a field; `None` if the name is not in the table.
pub fn rule(name: &str) -> Option<Rule> {
    let mut slot = slot(name.as_bytes());
    loop {
        match INDEX[slot] {
            NOTHING => break,
            at if FIELDS[at as usize].name == name => return Some(FIELDS[at as usize].rule),
            _ => slot = (slot + 1) % SLOTS,
        }
    }
    name.starts_with(ROUTER_ONLY_PREFIX).then_some(Rule::RouterOnly)
}

impl Rule {
    /// Whether the field is passed to an engine in this place without being allowed explicitly.
    pub fn passes_in(self, place: Places) -> bool {
        match self {
            Self::Passes(places) | Self::PassesWith(places, _) | Self::PassesOpen(places) => {
                places.has(place)
            }
            // The router removes the field after it has read it.
            Self::Read => true,
            Self::Steers(_) | Self::RouterOnly => false,
        }
    }
}

/// Number of slots of the table's index: a power of two, about four times the number of fields, so
/// that most searches end at the first slot.
const SLOTS: usize = 1024;
const NOTHING: u16 = u16::MAX;
static INDEX: [u16; SLOTS] = index();

const fn index() -> [u16; SLOTS] {
    let mut index = [NOTHING; SLOTS];
    let mut at = 0;
    while at < FIELDS.len() {
        let mut slot = slot(FIELDS[at].name.as_bytes());
        while index[slot] != NOTHING {
            slot = (slot + 1) % SLOTS;
        }
        index[slot] = at as u16;
        at += 1;
    }
    index
}

/// The slot at which the search for a name begins, from its length and three of its bytes.
const fn slot(name: &[u8]) -> usize {
    let Some(last) = name.len().checked_sub(1) else { return 0 };
    let mixed = name.len() * 7 + name[0] as usize * 29 + name[last / 2] as usize * 149;
    (mixed + name[last] as usize * 53) % SLOTS
}

/// The table as Markdown, for the documentation.
pub fn reference_markdown() -> String {
    let mut out = format!(
        "Taken from the request classes of {VERSIONS}, and from the APIs of OpenAI and Anthropic.\n\n"
    );
    for (place, title) in table::PLACES {
        let names = FIELDS.iter().filter(|field| match field.rule {
            Rule::Passes(places) | Rule::PassesWith(places, _) | Rule::PassesOpen(places) => {
                places.has(place)
            }
            _ => false,
        });
        let names: Vec<_> = names.map(|field| format!("`{}`", field.name)).collect();
        out += &format!("**{title}**: {}\n\n", names.join(", "));
    }
    out += "| steers; passes only if `pass_unknown` names it | what it decides |\n|---|---|\n";
    for field in FIELDS {
        if let Rule::Steers(what) = field.rule {
            out += &format!("| `{}` | {what} |\n", field.name);
        }
    }
    let own = FIELDS.iter().filter(|field| field.rule == Rule::RouterOnly);
    let own: Vec<_> = own.map(|field| format!("`{}`", field.name)).collect();
    out += &format!(
        "\nOnly the router sets these, and nothing opens them: {}, and every name that begins with \
         `{ROUTER_ONLY_PREFIX}`.\n",
        own.join(", ")
    );
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_name_is_in_the_table_once_and_is_found() {
        let names: HashSet<_> = FIELDS.iter().map(|field| field.name).collect();
        assert_eq!(names.len(), FIELDS.len(), "a name stands twice");
        for field in FIELDS {
            assert_eq!(rule(field.name), Some(field.rule), "{}", field.name);
        }
        for name in
            ["", "a", "Priority", "prioritY", "messages ", "do_remote_prefill", "プロンプト"]
        {
            assert_eq!(rule(name), None, "{name}");
        }
        assert!(is_router_only("bootstrap_anything"));
    }

    #[test]
    fn few_names_share_a_slot() {
        let slots: HashSet<_> = FIELDS.iter().map(|field| slot(field.name.as_bytes())).collect();
        assert!(slots.len() * 10 > FIELDS.len() * 8, "{} of {}", slots.len(), FIELDS.len());
    }
}
