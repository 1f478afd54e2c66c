//! Parses the arguments of both programs. Each flag can be given as a variable of the environment,
//! too; its name is made from that of the flag.

use std::ffi::OsStr;
use std::process::ExitCode;

use clap::builder::BoolishValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, Parser};

use super::{Build, exit};
use crate::logging::{self, LevelFilter, LogFormat};

/// The flag, of both programs, for the format of log lines.
const LOG_FORMAT: &str = "log-format";

/// The name of the variable for a flag of the command at `path` below the program, for example of
/// `file` of `["keys", "new"]`. The path of global flags is empty.
pub type VariableName = fn(path: &[&str], flag: &str) -> String;

/// The description of a program's arguments.
pub fn describe<A: CommandFactory>(build: &Build, variable: VariableName) -> Command {
    describe_without::<A>(build, variable, None)
}

/// The same, with one variable that no flag reads.
fn describe_without<A: CommandFactory>(
    build: &Build,
    variable: VariableName,
    unread: Option<&str>,
) -> Command {
    let command = A::command().version(build.line()).max_term_width(100);
    let globals = command.get_arguments().filter(|arg| arg.is_global_set()).cloned().collect();
    Describer { variable, globals, unread }.complete(command, &[])
}

/// The variable for a flag: `SPLITRAIL`, `keys`, `file` is `SPLITRAIL_KEYS_FILE`.
pub fn variable_name(parts: &[&str]) -> String {
    parts.join("_").replace('-', "_").to_ascii_uppercase()
}

struct Describer<'d> {
    variable: VariableName,
    /// The flags of all commands.
    globals: Vec<Arg>,
    unread: Option<&'d str>,
}

impl Describer<'_> {
    fn complete(&self, command: Command, path: &[&str]) -> Command {
        let command = command.mut_args(|arg| self.with_variable(arg, path));
        command.mut_subcommands(|below| {
            let name = below.get_name().to_owned();
            // The help of the program has them once for all commands.
            let hidden = |arg: &Arg| self.with_variable(arg.clone(), &[]).hide(true);
            let mut below = below.args(self.globals.iter().map(hidden));
            if below.get_after_help().is_none() {
                below = below.after_help(
                    "Options of all commands, such as --log-format, are in the help of the program.",
                );
            }
            self.complete(below, &[path, &[&*name]].concat())
        })
    }

    fn with_variable(&self, arg: Arg, path: &[&str]) -> Arg {
        let Some(flag) = arg.get_long().map(str::to_owned) else { return arg };
        let arg = match arg.get_action() {
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            ArgAction::Set | ArgAction::Append => arg,
            _ => return arg,
        };
        let arg = match arg.get_env() {
            Some(_) => arg,
            None => match (self.variable)(path, &flag) {
                name if self.unread == Some(&*name) => arg,
                name => arg.env(name),
            },
        };
        // Addresses may have been given with passwords.
        arg.hide_env_values(true)
    }
}

/// Parses the arguments of the process.
///
/// # Errors
/// The exit code with which the process must end, because the arguments are wrong or ask only for
/// help or the version; the reason or the text that was asked for has been printed.
pub fn parse<A: Parser>(build: &Build, variable: VariableName) -> Result<A, ExitCode> {
    let mut command = describe::<A>(build, variable);
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let matches = matches.or_else(|error| {
        let is_conflict = error.kind() == ErrorKind::ArgumentConflict;
        let overruled = is_conflict.then(|| overrule::<A>(build, variable, &command)).flatten();
        overruled.ok_or(error)
    });
    let parsed = matches.and_then(|matches| {
        A::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    });
    parsed.map_err(|mut error| {
        hide_password(&mut error);
        if !error.use_stderr() {
            // If the text cannot be written, only the exit code reports the error.
            let _unwritten = error.print();
            return ExitCode::SUCCESS;
        }
        if asks_for_json(variable) {
            logging::init(LogFormat::Json, LevelFilter::INFO, &[]);
            let text = error.render().to_string();
            let text = text.trim().trim_start_matches("error: ");
            tracing::error!(exit_code = exit::USAGE, "{text}");
        } else {
            let _unwritten = error.print();
        }
        exit::USAGE.into()
    })
}

/// Parses arguments that conflict with a variable of the environment as if it were not set: the
/// command line counts more. `None` if that is not the reason of the conflict, or if two variables
/// conflict.
fn overrule<A: Parser>(
    build: &Build,
    variable: VariableName,
    command: &Command,
) -> Option<ArgMatches> {
    let mut names = Vec::new();
    variables(command, &mut names);
    names.sort_unstable();
    names.dedup();
    let without = |name: String| {
        let command = describe_without::<A>(build, variable, Some(&name));
        command.try_get_matches_from(std::env::args_os()).ok()
    };
    let mut parsed = names.into_iter().filter_map(without);
    parsed.next().filter(|_| parsed.next().is_none())
}

/// The names of the variables that are set and belong to flags of a command or of those below it.
fn variables(command: &Command, names: &mut Vec<String>) {
    let of_flags = command.get_arguments().filter_map(|arg| arg.get_env()?.to_str());
    names.extend(of_flags.filter(|name| std::env::var_os(name).is_some()).map(str::to_owned));
    command.get_subcommands().for_each(|below| variables(below, names));
}

/// Hides what stands before the host of an address that was refused.
fn hide_password(error: &mut clap::Error) {
    let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else { return };
    let Some((before, host)) = value.rsplit_once('@') else { return };
    let scheme = before.find("://").map_or("", |end| &before[..end + 3]);
    let shown = ContextValue::String(format!("{scheme}***@{host}"));
    error.insert(ContextKind::InvalidValue, shown);
}

/// Whether log lines should be JSON, according to arguments that cannot be parsed.
fn asks_for_json(variable: VariableName) -> bool {
    let json = OsStr::new("json");
    let flag = format!("--{LOG_FORMAT}");
    let joined = format!("{flag}=json");
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let given = arguments.iter().any(|argument| argument.to_str() == Some(&*joined))
        || arguments.windows(2).any(|pair| pair[0] == *flag && pair[1] == json);
    given || std::env::var_os(variable(&[], LOG_FORMAT)).is_some_and(|value| value == json)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const BUILD: Build = Build {
        program: "program",
        version: "1.2.3",
        commit: None,
        features: &[],
        is_profile_guided: false,
    };

    #[derive(Parser)]
    struct Args {
        /// The format.
        #[arg(long, global = true)]
        log_format: Option<String>,
        #[command(subcommand)]
        command: Sub,
    }

    #[derive(clap::Subcommand)]
    enum Sub {
        /// Does it.
        Run {
            /// More than once.
            #[arg(long)]
            all: bool,
            /// Where.
            #[arg(long, env = "PLACE")]
            place: Option<String>,
            /// What.
            what: Option<String>,
        },
    }

    fn described() -> Command {
        describe::<Args>(&BUILD, |path, flag| {
            variable_name(&[&["program"], path, &[flag]].concat())
        })
    }

    #[test]
    fn every_flag_has_a_variable_whose_value_no_help_shows() {
        let command = described();
        let run = command.find_subcommand("run").unwrap();
        let variables: Vec<_> = run
            .get_arguments()
            .filter(|arg| arg.get_long().is_some())
            .map(|arg| {
                assert!(arg.is_hide_env_values_set(), "{arg}");
                arg.get_env().unwrap().to_str().unwrap()
            })
            .collect();
        assert_eq!(variables, ["PROGRAM_RUN_ALL", "PLACE", "PROGRAM_LOG_FORMAT"]);
    }

    #[test]
    fn flags_of_all_commands_are_in_the_help_of_the_program_alone() {
        let mut command = described();
        assert!(command.render_long_help().to_string().contains("--log-format <"));
        command.build();
        let run = command.find_subcommand_mut("run").unwrap();
        assert!(!run.render_long_help().to_string().contains("--log-format <"));
        let parsed = command.try_get_matches_from(["program", "run", "--log-format", "x"]).unwrap();
        let args = <Args as clap::FromArgMatches>::from_arg_matches(&parsed).unwrap();
        assert_eq!(args.log_format.as_deref(), Some("x"));
    }
}
