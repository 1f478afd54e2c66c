//! A configuration that is given by flags of the command line instead of a file.

use std::net::SocketAddr;

use serde_json::{Map, json};
use splitrail_settings::variables::escaped_json;

use crate::Problem;

/// The name of the command line in problems.
pub(crate) const NAME: &str = "command line";

/// One model and its workers, as flags give them.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// The name under which the engines serve the model.
    pub model: String,
    /// The URLs of prefill workers.
    pub prefill: Vec<String>,
    /// The URLs of decode workers.
    pub decode: Vec<String>,
    /// The URLs of workers that do both.
    pub workers: Vec<String>,
    /// The tokenizer, as a text.
    pub tokenizer: Option<String>,
    /// The address of the OpenAI API.
    pub listen: Option<SocketAddr>,
    /// The address of the admin listener.
    pub admin: Option<SocketAddr>,
}

/// The flag of each list.
const LISTS: [(&str, &str); 3] =
    [("prefill", "--prefill"), ("decode", "--decode"), ("workers", "--worker")];

/// The text of a configuration with the content of flags.
pub(crate) fn document(flags: &Flags) -> String {
    let mut model = Map::new();
    model.insert("name".to_owned(), flags.model.as_str().into());
    for (list, urls) in
        [("prefill", &flags.prefill), ("decode", &flags.decode), ("workers", &flags.workers)]
    {
        if !urls.is_empty() {
            model.insert(list.to_owned(), urls.as_slice().into());
        }
    }
    if let Some(tokenizer) = &flags.tokenizer {
        model.insert("tokenizer".to_owned(), tokenizer.as_str().into());
    }
    let mut listen = Map::new();
    for (key, address) in [("http", flags.listen), ("admin", flags.admin)] {
        if let Some(address) = address {
            listen.insert(key.to_owned(), address.to_string().into());
        }
    }
    // JSON is YAML. The shell has filled in variables already.
    escaped_json(json!({"listen": listen, "models": [model]})).to_string()
}

/// Replaces keys by the flags that give them. There are no lines.
pub(crate) fn name_flags(problem: &mut Problem, flags: &Flags) {
    (problem.line, problem.column) = (0, 0);
    let counts = [flags.prefill.len(), flags.decode.len(), flags.workers.len()];
    for ((list, flag), count) in LISTS.into_iter().zip(counts) {
        for index in 0..count {
            let named = match count {
                1 => format!("`{flag}`"),
                _ => format!("`{flag}` (number {})", index + 1),
            };
            replace(&mut problem.message, &format!("`models[0].{list}[{index}]`"), &named);
        }
    }
    for (key, flag) in [
        ("models[0].name", "--model"),
        ("models[0].tokenizer", "--tokenizer"),
        ("models[0].workers", "--model"),
        ("models[0]", "--model"),
    ] {
        replace(&mut problem.message, &format!("`{key}`"), &format!("`{flag}`"));
    }
    for text in [&mut problem.message, &mut problem.hint] {
        for (key, flag) in [
            ("prefill:", "--prefill"),
            ("decode:", "--decode"),
            ("workers:", "--worker"),
            ("tokenizer:", "--tokenizer"),
            ("workers", "--worker"),
        ] {
            replace(text, &format!("`{key}`"), &format!("`{flag}`"));
        }
        for kind in ["engine", "none"] {
            replace(text, &format!("`tokenizer: {kind}`"), &format!("`--tokenizer {kind}`"));
        }
        replace(text, "the configuration's folder", "the current folder");
    }
}

fn replace(text: &mut String, from: &str, to: &str) {
    if text.contains(from) {
        *text = text.replace(from, to);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{ConfigText, Flow, Parts, Role};

    fn flags(prefill: &[&str], decode: &[&str]) -> Flags {
        let owned = |urls: &[&str]| urls.iter().map(|url| (*url).to_owned()).collect();
        Flags {
            model: "m".to_owned(),
            prefill: owned(prefill),
            decode: owned(decode),
            tokenizer: Some("none".to_owned()),
            listen: Some("127.0.0.1:0".parse().unwrap()),
            ..Flags::default()
        }
    }

    #[test]
    fn flags_make_a_cluster() {
        let flags = flags(&["http://p:1"], &["http://d:1", "http://e:1"]);
        let config = ConfigText::of_flags(flags).load(Parts::ALL).unwrap().config;
        let model = &config.models[0];
        let roles: Vec<_> = model.workers.iter().map(|worker| worker.role).collect();
        assert_eq!(roles, [Role::Prefill, Role::Decode, Role::Decode]);
        assert_eq!(model.flow, Flow::PrefillFirst);
        assert_eq!(config.listen.http.address.port(), 0);
        assert_eq!(config.listen.admin.address.to_string(), "127.0.0.1:9090");
    }

    #[test]
    fn mistakes_name_the_flag() {
        for (prefill, decode, expected) in [
            (
                &["p:1"][..],
                &["http://d:1"][..],
                "command line: `--prefill` has no scheme\n  hint: ",
            ),
            (
                &["http://p:1"],
                &["http://d:1", "d"],
                "command line: `--decode` (number 2) has no scheme",
            ),
            (
                &["http://d:1"],
                &["http://d:1"],
                "command line: `--decode` http://d:1 is already taken",
            ),
            (
                &[],
                &["http://d:1"],
                "command line: `--model` has no `flow`, and only workers for decode\n  hint: add `--prefill`",
            ),
            (&[], &[], "command line: `--model` has no `--worker`"),
        ] {
            let problems = ConfigText::of_flags(flags(prefill, decode));
            let problems = problems.load(Parts::ALL).unwrap_err();
            assert!(problems.to_string().starts_with(expected), "{problems}");
        }
    }

    #[test]
    fn a_tokenizer_that_is_not_on_this_host_is_told_with_what_to_do() {
        let tokenizer = Some("org/nowhere".to_owned());
        let flags = Flags { tokenizer, ..flags(&[], &["http://d:1"]) };
        let told = ConfigText::of_flags(flags).load(Parts::ALL).unwrap_err().to_string();
        assert!(told.contains("command line: `--tokenizer` \"org/nowhere\" is neither"), "{told}");
        assert!(told.contains("`hf download org/nowhere "), "{told}");
        assert!(told.contains("`--tokenizer engine` asks the engines"), "{told}");
    }
}
