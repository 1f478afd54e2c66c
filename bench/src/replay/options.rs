//! The command line of `replay`.

use std::path::PathBuf;

use super::WORKLOADS;
use crate::options::known_workload;

/// The options of a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    /// Whether to measure fewer loads and repetitions.
    pub(super) quick: bool,
    /// The only workload to run; `None` for all.
    pub(super) only: Option<String>,
    /// The file of the trace; `None` to generate requests.
    pub(super) trace: Option<PathBuf>,
    /// The file for the rows as JSON.
    pub(super) json: Option<String>,
}

const USAGE: &str = "usage: replay [--quick] [--only WORKLOAD] [--trace FILE] [--json FILE]";

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// A message that says what is wrong, with the usage or the names of the workloads.
    pub(super) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--only" => {
                    options.only = Some(known_workload(value()?, WORKLOADS.map(|(name, _)| name))?);
                }
                "--trace" => options.trace = Some(value()?.into()),
                "--json" => options.json = Some(value()?),
                _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_workload_is_answered_with_the_right_ones() {
        let parse = |args: &[&str]| Options::parse(args.iter().map(ToString::to_string));
        assert!(parse(&["--only", "fast"]).expect_err("no workload").contains("placement"));
        assert!(parse(&["--trace"]).expect_err("no value").contains("usage"));
        let options = parse(&["--quick", "--only", "speed"]).expect("fine");
        assert_eq!((options.quick, options.only.as_deref()), (true, Some("speed")));
    }
}
