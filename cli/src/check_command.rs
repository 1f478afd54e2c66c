//! `splitrail check`: whether a configuration is valid, and with `--connect` whether its engines are
//! what it says.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use splitrail_config::{ConfigText, LoadedConfig, Problem, Problems};
use splitrail_inspection::{Finding, ModelFacts, Severity, findings};
use splitrail_prompt::PromptModel;
use splitrail_settings::command::{Failure, Paint, exit, print_error};

use crate::not_assembled;
use crate::output::Output;

mod connect;
mod json;
mod text;

/// The arguments.
#[derive(Args)]
pub(crate) struct CheckArgs {
    /// The configuration file; `-` for standard input.
    #[arg(required_unless_present = "config")]
    file: Option<PathBuf>,
    /// The configuration file, in the manner of `serve`.
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    config: Option<PathBuf>,
    /// Also asks every worker, and says what does not fit. Each engine serves a few small prompts.
    #[arg(long)]
    connect: bool,
    /// Maximum time in which all workers are asked.
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = humantime::parse_duration)]
    #[arg(requires = "connect")]
    timeout: Duration,
    /// Takes warnings as faults.
    #[arg(long)]
    strict: bool,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// A configuration, and what was found out about it.
struct CheckedConfig {
    /// The file, as it was named.
    file: String,
    /// The configuration; or its mistakes.
    loaded: Result<LoadedConfig, Problems>,
    /// Warnings about tokenizers, which have no place in the file.
    notes: Vec<String>,
    /// What is wrong with a file that the configuration names; then nothing is asked.
    unusable: Option<String>,
    /// Models with their facts and findings, if workers were asked.
    models: Option<Vec<InspectedModel>>,
    is_strict: bool,
}

/// A model whose workers were asked.
struct InspectedModel {
    facts: ModelFacts,
    findings: Vec<Finding>,
}

/// Checks the configuration; returns what the command prints.
///
/// # Errors
/// The file cannot be used, and no JSON was asked for.
pub(crate) async fn run(args: &CheckArgs) -> Result<Output, Failure> {
    let path = args.file.as_deref().or(args.config.as_deref()).unwrap_or(Path::new("-"));
    let is_stdin = path == Path::new("-");
    let loaded = load(path, is_stdin);
    let file = if is_stdin { "stdin".to_owned() } else { path.display().to_string() };
    let mut checked = CheckedConfig {
        file,
        loaded,
        notes: Vec::new(),
        unusable: None,
        models: None,
        is_strict: args.strict,
    };
    if let Some(prompts) = checked.load_prompts()
        && args.connect
    {
        checked.connect(prompts, args.timeout).await;
    }
    let code = checked.code();
    if args.json {
        return Ok(Output { text: format!("{:#}", json::render(&checked)), code });
    }
    if let Err(why) = &checked.loaded {
        return Err(Failure::of_problems(why, false));
    }
    if let Some(why) = &checked.unusable {
        print_error(why);
    }
    Ok(Output { text: text::render(&checked, Paint::of_stdout()), code })
}

fn load(path: &Path, is_stdin: bool) -> Result<LoadedConfig, Problems> {
    let text = match is_stdin {
        true => ConfigText::read_stdin(),
        false => ConfigText::read(path),
    };
    text?.load(splitrail_router::PARTS)
}

impl CheckedConfig {
    /// Loads the tokenizers of all models, whose notes become warnings; `None` if the configuration
    /// or one of them cannot be used.
    fn load_prompts(&mut self) -> Option<Vec<Option<PromptModel>>> {
        let loaded = self.loaded.as_ref().ok()?;
        let mut prompts = Vec::new();
        for model in &loaded.config.models {
            let prompt = match splitrail_fleet::models::load_prompt(model) {
                Ok(prompt) => prompt,
                Err(error) => {
                    self.unusable = Some(not_assembled(error.into()).message);
                    return None;
                }
            };
            let notes = prompt.iter().flat_map(|prompt| &prompt.notes);
            let notes = notes.map(|note| format!("model {}: tokenizer: {note}", model.name));
            self.notes.extend(notes);
            prompts.push(prompt);
        }
        Some(prompts)
    }

    /// Asks the workers of all models.
    async fn connect(&mut self, prompts: Vec<Option<PromptModel>>, timeout: Duration) {
        let Ok(loaded) = &self.loaded else { return };
        match connect::ask(&loaded.config, prompts, timeout).await {
            Ok(facts) => {
                let pairs = facts.into_iter().zip(&loaded.config.models);
                let models = pairs.map(|(facts, model)| {
                    let findings = findings(model, &facts);
                    InspectedModel { facts, findings }
                });
                self.models = Some(models.collect());
            }
            Err(why) => self.unusable = Some(why),
        }
    }

    fn warnings(&self) -> &[Problem] {
        self.loaded.as_ref().map(|loaded| &loaded.warnings[..]).unwrap_or_default()
    }

    /// Number of findings of a severity.
    fn found(&self, severity: Severity) -> usize {
        let findings = self.models.iter().flatten().flat_map(|model| &model.findings);
        findings.filter(|finding| finding.severity == severity).count()
    }

    /// Number of faults of the configuration and its engines.
    fn faults(&self) -> usize {
        let mistakes = self.loaded.as_ref().err().map_or(0, Problems::count);
        mistakes + usize::from(self.unusable.is_some()) + self.found(Severity::Fault)
    }

    /// Number of warnings about the configuration and its engines.
    fn all_warnings(&self) -> usize {
        self.warnings().len() + self.notes.len() + self.found(Severity::Warning)
    }

    /// The exit code: the configuration counts before its engines.
    fn code(&self) -> u8 {
        let warns = !self.warnings().is_empty() || !self.notes.is_empty();
        match &self.loaded {
            Err(problems) if problems.is_unreadable() => exit::NO_INPUT,
            Err(_) => exit::CONFIG,
            Ok(_) if self.unusable.is_some() || (self.is_strict && warns) => exit::CONFIG,
            Ok(_) if self.found(Severity::Fault) > 0 => exit::UNAVAILABLE,
            Ok(_) if self.is_strict && self.found(Severity::Warning) > 0 => exit::UNAVAILABLE,
            Ok(_) => 0,
        }
    }
}
