//! The command line of `frontdoor`.

use std::path::{Path, PathBuf};

use crate::options::known_workload;

/// The names of the workloads.
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

/// The options of a run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// Whether to measure for a shorter time, and to leave out long workloads.
    pub(super) quick: bool,
    /// The only workload to run; `None` for all.
    pub(super) only: Option<String>,
    /// The file for the rows as JSON.
    pub(super) json: Option<PathBuf>,
    /// The file for a plot of latency against load.
    pub(super) svg: Option<PathBuf>,
    /// The router's program.
    pub(super) splitrail: PathBuf,
    /// The program of another build of the router, which is measured in turns with the first one.
    pub(super) beside: Option<PathBuf>,
    /// The only number of clients to measure; `None` for the usual ones.
    pub(super) clients: Option<usize>,
    /// The number of rounds; `None` for the usual one.
    pub(super) rounds: Option<usize>,
    /// A folder with a `tokenizer.json`.
    pub(super) tokenizer: PathBuf,
    /// Whether to download the tokenizer if the folder has none.
    pub(super) downloads_tokenizer: bool,
    /// The program of vllm-router; `None` leaves this peer out.
    pub(super) vllm_router: Option<PathBuf>,
    /// The router's `RUST_LOG`.
    pub(super) log: String,
}

const USAGE: &str = "usage: frontdoor [--quick] [--only WORKLOAD] [--json FILE] [--svg FILE] \
                     [--splitrail PATH] [--beside PATH] [--clients N] [--rounds N] \
                     [--tokenizer FOLDER] [--vllm-router PATH] [--log FILTER]";

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// A message that says what is wrong, with the usage or the names of the workloads.
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
            downloads_tokenizer: true,
            vllm_router: None,
            log: "info".to_owned(),
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--only" => options.only = Some(known_workload(value()?, WORKLOADS)?),
                // `index` and `replay` take one; `frontdoor` makes its own requests.
                "--trace" => {
                    return Err("frontdoor takes no --trace: it makes its own requests".to_owned());
                }
                "--json" => options.json = Some(value()?.into()),
                "--svg" => options.svg = Some(value()?.into()),
                "--splitrail" => options.splitrail = value()?.into(),
                "--beside" => options.beside = Some(value()?.into()),
                "--clients" => options.clients = Some(count(&value()?)?),
                "--rounds" => options.rounds = Some(count(&value()?)?),
                "--tokenizer" => {
                    options.tokenizer = value()?.into();
                    options.downloads_tokenizer = false;
                }
                "--vllm-router" => options.vllm_router = Some(value()?.into()),
                "--log" => options.log = value()?,
                _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
            }
        }
        Ok(options)
    }

    /// The router's program, and its `RUST_LOG`.
    pub(super) fn program(&self) -> (&Path, &str) {
        (&self.splitrail, &self.log)
    }

    /// Whether the command line selects a workload.
    pub(super) fn wants(&self, workload: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only == workload)
    }
}

fn count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| format!("{text} is not a number above 0\n{USAGE}"))
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
        assert!(!options.downloads_tokenizer);
        assert!(parse(&["--rounds", "0"]).unwrap_err().contains("above 0"));
        assert_eq!(parse(&["--clients", "16"]).unwrap().clients, Some(16));
    }
}
