//! The command line of `fleet`.

use std::path::PathBuf;

use super::WORKLOADS;
use crate::options::known_workload;

/// The options of a run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// Whether to measure for a shorter time.
    pub(super) quick: bool,
    /// The only workload to run; `None` for all.
    pub(super) only: Option<String>,
    /// The file for the rows as JSON.
    pub(super) json: Option<String>,
    /// The router's program.
    pub(super) splitrail: PathBuf,
    /// The shim's program.
    pub(super) shim: PathBuf,
}

const USAGE: &str = "usage: fleet [--quick] [--only WORKLOAD] [--json FILE] [--splitrail PATH] \
                     [--shim PATH]";

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// A message that says what is wrong, with the usage or the names of the workloads.
    pub(super) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let built = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release");
        let mut options = Self {
            quick: false,
            only: None,
            json: None,
            splitrail: PathBuf::from(built).join("splitrail"),
            shim: PathBuf::from(built).join("splitrail-shim"),
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--only" => {
                    options.only = Some(known_workload(value()?, WORKLOADS.map(|(name, _)| name))?);
                }
                "--json" => options.json = Some(value()?),
                "--splitrail" => options.splitrail = value()?.into(),
                "--shim" => options.shim = value()?.into(),
                _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn parse(args: &[&str]) -> Result<Options, String> {
        Options::parse(args.iter().map(ToString::to_string))
    }

    #[test]
    fn a_wrong_workload_is_answered_with_the_right_ones() {
        assert!(parse(&["--only", "cold"]).unwrap_err().contains("cold_start"));
        assert!(parse(&["--quik"]).unwrap_err().contains("usage"));
        let options = parse(&["--quick", "--only", "cold_start", "--shim", "s"]).unwrap();
        assert_eq!((options.quick, options.only.as_deref()), (true, Some("cold_start")));
        assert_eq!(options.shim, PathBuf::from("s"));
    }
}
