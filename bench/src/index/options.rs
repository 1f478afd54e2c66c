//! The command line of `index`.

use super::workloads::WORKLOADS;
use crate::options::known_workload;

/// The options of a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether to measure fewer sizes and rounds, which takes less than five minutes on two cores.
    pub quick: bool,
    /// The only workload to run; `None` for all.
    pub only: Option<String>,
    /// The file of a trace in Mooncake's JSONL format; `None` to generate requests.
    pub trace: Option<String>,
    /// The file for the rows as JSON.
    pub json: Option<String>,
    /// Set by this program for its child processes: the name of an index, and a case.
    pub child: Option<(String, String)>,
}

const USAGE: &str = "usage: index [--quick] [--only WORKLOAD] [--trace FILE] [--json FILE]";

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// A message that says what is wrong, with the usage or the names of the workloads.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--only" => {
                    let names = WORKLOADS.iter().map(|(name, _)| *name);
                    options.only = Some(known_workload(value()?, names)?);
                }
                "--trace" => options.trace = Some(value()?),
                "--json" => options.json = Some(value()?),
                "--child" => options.child = Some((value()?, value()?)),
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
        assert!(parse(&["--only", "dept"]).unwrap_err().contains("depth"));
        assert!(parse(&["--quik"]).unwrap_err().contains("usage"));
        let options = parse(&["--quick", "--only", "depth"]).unwrap();
        assert_eq!((options.quick, options.only.as_deref()), (true, Some("depth")));
    }
}
