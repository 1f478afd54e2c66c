//! The text of a configuration that is not checked yet: from a file, standard input or flags.

use std::path::{Path, PathBuf};

use serde_json::Value;
use splitrail_settings::file;
use splitrail_settings::problem::{Place, ProblemReport};
use splitrail_settings::words::shown;

use crate::file_profiles::ROUTER_PROFILE;
use crate::flags::{self, Flags};
use crate::short_forms::{Hub, missing_tokenizers};
use crate::{LoadedConfig, Parts, Problems, parse_for, schema};

/// The text of a configuration.
#[derive(Clone, Debug)]
pub struct ConfigText {
    /// What problems call the text.
    name: String,
    text: String,
    /// The folder at which relative paths in the text start.
    base_dir: PathBuf,
    /// The flags from which the text was made.
    flags: Option<Flags>,
}

/// A tokenizer that a configuration names by its id on the Hugging Face hub, and that is not in the
/// cache of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingTokenizer {
    /// The model's id, `ORGANISATION/NAME` or `NAME`.
    pub id: String,
    /// The key that names it.
    path: String,
    /// Where the id is written.
    at: Place,
}

impl ConfigText {
    /// A text that is called `name` in problems. Relative paths start at `base_dir`.
    #[must_use]
    pub fn new(name: &str, text: String, base_dir: &Path) -> Self {
        Self { name: name.to_owned(), text, base_dir: base_dir.to_owned(), flags: None }
    }

    /// Reads a file. Relative paths start at its folder.
    ///
    /// # Errors
    /// The file cannot be read, is too large, or is not UTF-8.
    pub fn read(path: &Path) -> Result<Self, Problems> {
        let name = path.display().to_string();
        let text = file::read(path, &name, &ROUTER_PROFILE)?;
        Ok(Self::new(&name, text, file::folder(path)))
    }

    /// Reads standard input, which is called `stdin` in problems. Relative paths start at the current
    /// folder.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn read_stdin() -> Result<Self, Problems> {
        const NAME: &str = "stdin";
        let text = file::read_from(Ok(std::io::stdin().lock()), NAME, &ROUTER_PROFILE)?;
        Ok(Self::new(NAME, text, Path::new(".")))
    }

    /// Flags as a text with the same content. Relative paths start at the current folder.
    #[must_use]
    pub fn of_flags(flags: Flags) -> Self {
        let text = Self::new(flags::NAME, flags::document(&flags), Path::new("."));
        Self { flags: Some(flags), ..text }
    }

    /// Checks the text for a build with these parts.
    ///
    /// # Errors
    /// All mistakes, each with its position; those of flags by the flags in which they are.
    pub fn load(&self, parts: Parts) -> Result<LoadedConfig, Problems> {
        let loaded = parse_for(parts, &Hub::of_process(), &self.name, &self.text, &self.base_dir);
        let Some(flags) = &self.flags else { return loaded };
        match loaded {
            Ok(mut loaded) => {
                loaded.warnings.iter_mut().for_each(|problem| flags::name_flags(problem, flags));
                Ok(loaded)
            }
            Err(problems) => Err(self.by_flag(problems)),
        }
    }

    /// The tokenizers that would have to be fetched from the hub: those that `tokenizer` names by an
    /// id, and those of models without `tokenizer` whose names are ids with an organisation. None if
    /// the text has other mistakes.
    #[must_use]
    pub fn missing_tokenizers(&self) -> Vec<MissingTokenizer> {
        self.missing_in(&Hub::of_process())
    }

    fn missing_in(&self, hub: &Hub) -> Vec<MissingTokenizer> {
        let mut missing = Vec::new();
        let checked =
            file::parse::<Value>(&self.name, &self.text, &schema(), &ROUTER_PROFILE, |root, _| {
                missing = missing_tokenizers(root, &self.base_dir, hub)
            });
        match checked {
            Ok(_) => missing,
            Err(_) => Vec::new(),
        }
    }

    /// The mistake that a tokenizer cannot be fetched, at the place of its id. `why` follows a colon.
    #[must_use]
    pub fn not_fetched(&self, missing: &MissingTokenizer, why: &str, hint: &str) -> Problems {
        let MissingTokenizer { id, path, at } = missing;
        let mut report = ProblemReport::new(&self.name);
        let message = format!("`{path}` \"{}\" cannot be downloaded: {why}", shown(id));
        report.error(*at, message, hint);
        self.by_flag(report.into_problems())
    }

    fn by_flag(&self, mut problems: Problems) -> Problems {
        if let Some(flags) = &self.flags {
            problems.edit(|problem| flags::name_flags(problem, flags));
        }
        problems
    }
}

impl MissingTokenizer {
    pub(crate) fn new(id: &str, path: String, at: Place) -> Self {
        Self { id: id.to_owned(), path, at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(text: &str) -> Vec<(String, String, usize)> {
        let text = ConfigText::new("x.yaml", text.to_owned(), Path::new("/nowhere"));
        let missing = text.missing_in(&Hub::of(|_| None));
        missing.into_iter().map(|missing| (missing.id, missing.path, missing.at.line)).collect()
    }

    #[test]
    fn tokenizers_are_missing_if_they_are_named_by_an_id() {
        let models = |lines: &str| format!("models:\n  - name: Qwen/Qwen3-8B\n{lines}");
        let worker = "    workers: ['http://w:1']\n";
        let by_name = ("Qwen/Qwen3-8B".to_owned(), "models[0].name".to_owned(), 2);
        assert_eq!(missing(&models(worker)), [by_name]);
        let by_id = |id: &str| (id.to_owned(), "models[0].tokenizer".to_owned(), 3);
        for id in ["org/model", "gpt2"] {
            let text = models(&format!("    tokenizer: {id}\n{worker}"));
            assert_eq!(missing(&text), [by_id(id)]);
        }
        for tokenizer in ["none", "engine", "/models/x", "{ kind: none }", "../x"] {
            let text = models(&format!("    tokenizer: \"{tokenizer}\"\n{worker}"));
            assert_eq!(missing(&text.replace(['"'], "")), [], "{tokenizer}");
        }
        // A name without an organisation is rarely one of the hub.
        assert_eq!(missing(&models(worker).replace("Qwen/Qwen3-8B", "qwen3-8b")), []);
        // What is wrong otherwise is reported first.
        assert_eq!(missing(&models(&format!("    flov: auto\n{worker}"))), []);
    }

    #[test]
    fn a_failed_download_is_reported_at_the_place_of_the_id() {
        let at = Place { line: 3, column: 16 };
        let text = ConfigText::new("x.yaml", String::new(), Path::new("."));
        let missing = MissingTokenizer::new("org/x", "models[0].tokenizer".to_owned(), at);
        assert_eq!(
            text.not_fetched(&missing, "no such model", "look at it").to_string(),
            "x.yaml:3:16: `models[0].tokenizer` \"org/x\" cannot be downloaded: no such model\n  \
             hint: look at it"
        );
        let flags = ConfigText::of_flags(Flags::default());
        let told = flags.not_fetched(&missing, "no such model", "look at it").to_string();
        assert!(told.starts_with("command line: `--tokenizer` \"org/x\" cannot"), "{told}");
    }
}
