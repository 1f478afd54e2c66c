//! Any change of a configuration file leads to a configuration or to located errors, never to a
//! panic.

use std::io::Write;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::support::{VALID, parse};

/// One thing that an editor, a merge or a template may do to a file.
#[derive(Clone, Debug)]
enum Mutation {
    DropLine(Index),
    RepeatLine(Index, Index),
    SwapChars(Index, Index),
    Replace(Index, char),
    Insert(Index, String),
    Cut(Index),
    Indent(Index, usize),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let index = any::<Index>;
    let special = prop::sample::select(
        "{}[]:,-?&*!|>'\"#%@` \t\n\r\0~<.0\u{feff}\u{85}é".chars().collect::<Vec<_>>(),
    );
    prop_oneof![
        index().prop_map(Mutation::DropLine),
        (index(), index()).prop_map(|(from, to)| Mutation::RepeatLine(from, to)),
        (index(), index()).prop_map(|(a, b)| Mutation::SwapChars(a, b)),
        (index(), special).prop_map(|(at, c)| Mutation::Replace(at, c)),
        (index(), prop_oneof![".{0,8}", "[{}\\[\\]:,?&*!|>'\"# \n-]{0,8}"])
            .prop_map(|(at, text)| Mutation::Insert(at, text)),
        index().prop_map(Mutation::Cut),
        (index(), 0_usize..6).prop_map(|(line, by)| Mutation::Indent(line, by)),
    ]
}

fn apply(text: &str, mutation: &Mutation) -> String {
    let mut lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
    let mut chars: Vec<char> = text.chars().collect();
    if chars.is_empty() {
        return String::new();
    }
    match mutation {
        Mutation::DropLine(at) => {
            lines.remove(at.index(lines.len()));
        }
        Mutation::RepeatLine(from, to) => {
            let line = lines[from.index(lines.len())].clone();
            lines.insert(to.index(lines.len()), line);
        }
        Mutation::Indent(at, by) => {
            let at = at.index(lines.len());
            lines[at] = format!("{}{}", " ".repeat(*by), lines[at].trim_start());
        }
        Mutation::SwapChars(a, b) => {
            let (a, b) = (a.index(chars.len()), b.index(chars.len()));
            chars.swap(a, b);
            return chars.into_iter().collect();
        }
        Mutation::Replace(at, c) => {
            let at = at.index(chars.len());
            chars[at] = *c;
            return chars.into_iter().collect();
        }
        Mutation::Insert(at, text) => {
            let at = at.index(chars.len());
            chars.splice(at..at, text.chars());
            return chars.into_iter().collect();
        }
        Mutation::Cut(at) => {
            chars.truncate(at.index(chars.len()));
            return chars.into_iter().collect();
        }
    }
    lines.join("\n")
}

/// Loads, or says why and where: within the file, and with something to do about it.
fn ends_well(text: &str) -> Result<(), TestCaseError> {
    let Err(problems) = parse(text) else {
        return Ok(());
    };
    prop_assert!(!problems.as_slice().is_empty());
    // YAML ends lines at any of `\n`, `\r` and `\r\n`.
    let lines = text.chars().filter(|c| matches!(c, '\n' | '\r')).count() + 1;
    for problem in problems.as_slice() {
        prop_assert!((1..=lines + 1).contains(&problem.line), "{problem}\n{text}");
        prop_assert!((1..=text.chars().count() + 1).contains(&problem.column), "{problem}\n{text}");
        prop_assert!(!problem.message.is_empty() && !problem.hint.is_empty());
        prop_assert!(!problem.message.contains("configuration is not valid"), "{problem}\n{text}");
        prop_assert!(!problem.to_string().contains("fixture-engine-key"));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn mutated_configurations_never_panic_and_every_refusal_is_located(
        mutations in prop::collection::vec(mutation(), 1..5),
    ) {
        let mut text = VALID.to_owned();
        for mutation in &mutations {
            text = apply(&text, mutation);
        }
        ends_well(&text)?;
    }

    #[test]
    fn arbitrary_text_never_panics_and_every_refusal_is_located(
        text in prop_oneof![".{0,200}", "[a-c{}\\[\\]:,?&*!|>'\"#% \t\n\r.-]{0,80}"],
    ) {
        ends_well(&text)?;
    }
    #[test]
    fn files_of_mutated_bytes_never_panic_and_every_refusal_is_located(
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = VALID.as_bytes().to_vec();
        for (at, byte) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        if let Err(problems) = splitrail_config::load(file.path(), splitrail_config::Parts::ALL) {
            prop_assert!(!problems.as_slice().is_empty());
            let told = problems.to_string();
            prop_assert!(told.starts_with(&format!("{}:", file.path().display())), "{told}");
        }
    }
}
