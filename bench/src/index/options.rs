//! The command line.

use super::workloads::WORKLOADS;

/// What was asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Fewer sizes and rounds: under five minutes on two cores.
    pub quick: bool,
    /// One workload only.
    pub only: Option<String>,
    /// A trace in Mooncake's JSONL.
    pub trace: Option<String>,
    /// Where to write the rows as JSON.
    pub json: Option<String>,
    /// Set by this program for its child processes: an index and a case.
    pub child: Option<(String, String)>,
}

const USAGE: &str = "usage: index [--quick] [--only WORKLOAD] [--trace FILE] [--json FILE]";

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// What is wrong, with the usage.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--only" => options.only = Some(known(value()?)?),
                "--trace" => options.trace = Some(value()?),
                "--json" => options.json = Some(value()?),
                "--child" => options.child = Some((value()?, value()?)),
                _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

fn known(name: String) -> Result<String, String> {
    let names: Vec<&str> = WORKLOADS.iter().map(|(name, _)| *name).collect();
    if names.contains(&name.as_str()) {
        return Ok(name);
    }
    Err(format!("no workload {name}; there are {}", names.join(", ")))
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
