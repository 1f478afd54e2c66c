//! The command line.

use std::path::PathBuf;

use super::PARTS;

/// What was asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    /// Fewer loads and repetitions.
    pub(super) quick: bool,
    /// One workload only.
    pub(super) only: Option<String>,
    /// A trace to replay.
    pub(super) trace: Option<PathBuf>,
    /// Where to write the rows as JSON.
    pub(super) json: Option<String>,
}

const USAGE: &str = "usage: replay [--quick] [--only WORKLOAD] [--trace FILE] [--json FILE]";

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// What is wrong, with the usage.
    pub(super) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--only" => options.only = Some(known(value()?)?),
                "--trace" => options.trace = Some(value()?.into()),
                "--json" => options.json = Some(value()?),
                _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

fn known(name: String) -> Result<String, String> {
    let names: Vec<&str> = PARTS.iter().map(|(name, _)| *name).collect();
    if names.contains(&name.as_str()) {
        return Ok(name);
    }
    Err(format!("no workload {name}; there are {}", names.join(", ")))
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
