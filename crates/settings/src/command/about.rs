//! The commands by which both programs tell about themselves.

use std::path::PathBuf;

use clap::{Command, Subcommand};
use clap_complete::Shell;
use serde_json::{Map, Value, json};

use super::{Failure, exit, print_line, print_text};

/// What is known of a built program.
#[derive(Clone, Copy, Debug)]
pub struct Build {
    /// The name of the program.
    pub program: &'static str,
    /// The version.
    pub version: &'static str,
    /// The commit from which it was built, if the build knows it (`SPLITRAIL_COMMIT`).
    pub commit: Option<&'static str>,
    /// The optional parts, and whether the program has them.
    pub features: &'static [(&'static str, bool)],
    /// Whether it was optimised with an execution profile.
    pub is_profile_guided: bool,
}

impl Build {
    /// Version and commit on one line, without the name.
    #[must_use]
    pub fn line(&self) -> String {
        match self.commit() {
            Some(commit) => format!("{} ({commit})", self.version),
            None => self.version.to_owned(),
        }
    }

    fn commit(&self) -> Option<&'static str> {
        self.commit.filter(|commit| !commit.is_empty())
    }

    /// Whether the program was optimised with an execution profile, in a word.
    #[must_use]
    pub fn profile(&self) -> &'static str {
        if self.is_profile_guided { "guided" } else { "none" }
    }

    fn text(&self) -> String {
        let features: Vec<&str> =
            self.features.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
        let features = if features.is_empty() { "none".to_owned() } else { features.join(", ") };
        format!(
            "{} {}\ncommit    {}\nfeatures  {features}\ntarget    {}\nprofile   {}",
            self.program,
            self.version,
            self.commit().unwrap_or("unknown"),
            target(),
            self.profile()
        )
    }

    fn json(&self) -> Value {
        let features: Map<String, Value> =
            self.features.iter().map(|(name, has)| ((*name).to_owned(), json!(has))).collect();
        json!({
            "program": self.program,
            "version": self.version,
            "commit": self.commit(),
            "features": features,
            "target": target(),
            "profile": self.profile(),
        })
    }
}

/// Architecture, system and C library for which the program was built.
fn target() -> String {
    let library = match cfg!(target_env = "musl") {
        true => "musl",
        false => "gnu",
    };
    format!("{}-{}-{library}", std::env::consts::ARCH, std::env::consts::OS)
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum AboutCommand {
    /// Prints version, commit, features and target of the program.
    Version {
        /// Prints JSON.
        #[arg(long)]
        json: bool,
    },
    /// Prints a script by which a shell completes commands and flags.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Prints the manual page of the program, or writes those of all commands.
    Man {
        /// The folder for the pages of all commands, for example /usr/local/share/man/man1. It is
        /// made if it does not exist.
        #[arg(long, value_name = "FOLDER")]
        output: Option<PathBuf>,
    },
}

impl AboutCommand {
    /// Runs the command of a program with these arguments.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn run(self, build: &Build, mut arguments: Command) -> Result<(), Failure> {
        match self {
            Self::Version { json: true } => print_line(&build.json().to_string()),
            Self::Version { json: false } => print_line(&build.text()),
            Self::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut arguments, build.program, &mut script);
                print_text(&script)
            }
            Self::Man { output: None } => {
                let mut page = Vec::new();
                clap_mangen::Man::new(arguments).render(&mut page)?;
                print_text(&page)
            }
            Self::Man { output: Some(folder) } => {
                let written = std::fs::create_dir_all(&folder)
                    .and_then(|()| clap_mangen::generate_to(arguments, &folder));
                written.map_err(|error| {
                    let message = format!("cannot write to {}: {error}", folder.display());
                    Failure::new(exit::IO_ERROR, message)
                })
            }
        }
    }
}
