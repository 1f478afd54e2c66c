//! The command line.

use std::path::{Path, PathBuf};

/// What can be asked for alone.
pub(super) const WORKLOADS: [&str; 13] = [
    "aggregated",
    "pd",
    "kv_aware",
    "stream",
    "grpc",
    "slow",
    "logging",
    "threads",
    "access",
    "refusals",
    "watched",
    "tls",
    "memory",
];

/// What was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// Shorter, and without the long ones.
    pub(super) quick: bool,
    /// One workload only.
    pub(super) only: Option<String>,
    /// Where to write the rows as JSON.
    pub(super) json: Option<PathBuf>,
    /// Where to draw latency against load.
    pub(super) svg: Option<PathBuf>,
    /// The router's program.
    pub(super) splitrail: PathBuf,
    /// Another build of it, to be measured beside it.
    pub(super) beside: Option<PathBuf>,
    /// This many clients only.
    pub(super) clients: Option<usize>,
    /// More rounds, or fewer.
    pub(super) rounds: Option<usize>,
    /// A folder with a `tokenizer.json`.
    pub(super) tokenizer: PathBuf,
    /// Whether to fetch it where it is not there.
    pub(super) fetch: bool,
    /// Another router's program, if it is to be compared.
    pub(super) vllm_router: Option<PathBuf>,
    /// What the router logs.
    pub(super) log: String,
}

const USAGE: &str = "usage: frontdoor [--quick] [--only WORKLOAD] [--json FILE] [--svg FILE] \
                     [--splitrail PATH] [--beside PATH] [--clients N] [--rounds N] \
                     [--tokenizer FOLDER] [--vllm-router PATH] [--log FILTER]";

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// What is wrong, with the usage.
    pub(super) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let mut options = Self {
            quick: false,
            only: None,
            json: None,
            svg: None,
            splitrail: here.join("../target/release/splitrail"),
            beside: None,
            clients: None,
            rounds: None,
            tokenizer: here.join("target/frontdoor-tokenizer"),
            fetch: true,
            vllm_router: None,
            log: "info".to_owned(),
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--only" => options.only = Some(known(value()?)?),
                // Every benchmark takes one; here requests are made, not replayed.
                "--trace" => return Err("frontdoor makes its own requests".to_owned()),
                "--json" => options.json = Some(value()?.into()),
                "--svg" => options.svg = Some(value()?.into()),
                "--splitrail" => options.splitrail = value()?.into(),
                "--beside" => options.beside = Some(value()?.into()),
                "--clients" => options.clients = Some(count(&value()?)?),
                "--rounds" => options.rounds = Some(count(&value()?)?),
                "--tokenizer" => {
                    options.tokenizer = value()?.into();
                    options.fetch = false;
                }
                "--vllm-router" => options.vllm_router = Some(value()?.into()),
                "--log" => options.log = value()?,
                _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
            }
        }
        Ok(options)
    }

    /// The router's program, and what it logs.
    pub(super) fn program(&self) -> (&Path, &str) {
        (&self.splitrail, &self.log)
    }

    /// Whether a workload is to run.
    pub(super) fn wants(&self, workload: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only == workload)
    }
}

fn count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| format!("{text} is no number above 0\n{USAGE}"))
}

fn known(name: String) -> Result<String, String> {
    if WORKLOADS.contains(&name.as_str()) {
        return Ok(name);
    }
    Err(format!("no workload {name}; there are {}", WORKLOADS.join(", ")))
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
        assert!(parse(&["--only", "agg"]).unwrap_err().contains("kv_aware"));
        assert!(parse(&["--json"]).unwrap_err().contains("usage"));
        let options = parse(&["--quick", "--only", "pd", "--tokenizer", "t"]).unwrap();
        assert!(options.quick && options.wants("pd") && !options.wants("stream"));
        assert!(!options.fetch);
        assert!(parse(&["--rounds", "0"]).unwrap_err().contains("above 0"));
        assert_eq!(parse(&["--clients", "16"]).unwrap().clients, Some(16));
    }
}
