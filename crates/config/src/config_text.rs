//! The text of a configuration that is not checked yet: from a file, standard input or flags.

use std::path::{Path, PathBuf};

use splitrail_settings::file;

use crate::file_profiles::ROUTER_PROFILE;
use crate::flags::{self, Flags};
use crate::short_forms::{Hub, KnownIds};
use crate::{LoadedConfig, Parts, Problems, parse_for};

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
        self.load_with(parts, &KnownIds::default())
    }

    pub(crate) fn load_with(
        &self,
        parts: Parts,
        known: &KnownIds,
    ) -> Result<LoadedConfig, Problems> {
        let sources = (&Hub::of_process(), known);
        let loaded = parse_for(parts, sources, &self.name, &self.text, &self.base_dir);
        let Some(flags) = &self.flags else { return loaded };
        match loaded {
            Ok(mut loaded) => {
                loaded.warnings.iter_mut().for_each(|problem| flags::name_flags(problem, flags));
                Ok(loaded)
            }
            Err(mut problems) => {
                problems.edit(|problem| flags::name_flags(problem, flags));
                Err(problems)
            }
        }
    }
}
