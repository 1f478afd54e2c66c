//! `splitrail usage`: sums ledger files by tenant and model.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;
use splitrail_telemetry::clock::unix_ms;

mod files;

/// Endpoints whose requests use no tokens of the model.
const WITHOUT_TOKENS: [&str; 3] = ["tokenize", "detokenize", "count_tokens"];

/// Sums the ledger files of one or several routers by tenant and model.
#[derive(Args)]
pub(crate) struct UsageArgs {
    /// The ledger file (`ledger.path`); its rotated files `PATH.1`, `PATH.2`, ... are read, too, each
    /// once. Several files are those of several routers.
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    ledger: Vec<PathBuf>,
    /// Counts requests that ended within this time, for example `1d`, `12h` or `30m`.
    #[arg(long, value_parser = humantime::parse_duration)]
    since: Option<Duration>,
    /// Sums the requests of each session apart, those without one together.
    #[arg(long)]
    by_session: bool,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// A line of the ledger file, as far as it counts here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Line {
    lost_records: u64,
    tenant: Option<String>,
    session: Option<String>,
    model: String,
    outcome: String,
    ended_unix_ms: u64,
    unix_ms: u64,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    wasted_prompt_tokens: u64,
    endpoint: String,
    prompts: Vec<Prompt>,
}

/// A prompt of a line, as far as it counts here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Prompt {
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    further_sample: bool,
}

impl Line {
    /// The sum of a figure over the prompts for which it is known, where the request has none of its
    /// own because another prompt's is unknown.
    fn known(&self, figure: impl Fn(&Prompt) -> Option<u64>) -> u64 {
        // Requests that failed have none.
        self.prompts.iter().filter_map(figure).sum()
    }

    /// Whether not all tokens that the request has used are known. If its client left, those that had
    /// arrived are, unless no engine had begun.
    fn is_incomplete(&self) -> bool {
        let computes = !WITHOUT_TOKENS.contains(&self.endpoint.as_str());
        let lacks = self.prompt_tokens.is_none() || self.completion_tokens.is_none();
        let counts = match self.outcome.as_str() {
            "ok" => computes,
            _ => self.completion_tokens.is_some(),
        };
        counts && lacks
    }
}

/// The sums of one tenant and model, or of one session of them.
#[derive(Default, Serialize)]
struct Sums {
    /// Requests that ended with `ok`.
    requests: u64,
    /// Requests that ended otherwise. Only those whose client left have tokens besides wasted ones.
    other_requests: u64,
    /// Requests that ended with `ok` of which an engine did not report all tokens. Only what it
    /// reported is in the sums.
    incomplete_requests: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    wasted_prompt_tokens: u64,
}

/// Tenant, model and session.
type Payer = (Option<String>, String, Option<String>);

/// All sums.
#[derive(Default)]
struct Usage {
    sums: BTreeMap<Payer, Sums>,
    is_by_session: bool,
    lost_records: u64,
    unreadable_lines: u64,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// A ledger file cannot be read; the message names it.
pub(crate) fn run(args: &UsageArgs) -> Result<String, String> {
    let since_ms = args.since.map_or(0, |since| unix_ms().saturating_sub(since.as_millis() as u64));
    let mut usage = Usage { is_by_session: args.by_session, ..Usage::default() };
    let mut known = HashSet::new();
    for ledger in &args.ledger {
        for (path, file) in files::open(ledger, &mut known)? {
            usage.read(file, since_ms).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    Ok(if args.json { usage.to_json() } else { usage.to_table() })
}

impl Usage {
    fn read(&mut self, file: File, since_ms: u64) -> io::Result<()> {
        let mut lines = BufReader::new(file);
        let mut text = Vec::new();
        while lines.read_until(b'\n', &mut text)? > 0 {
            match serde_json::from_slice::<Line>(&text) {
                Ok(line) => self.add(line, since_ms),
                // The last line of a process that was killed while it wrote.
                Err(_) => self.unreadable_lines += 1,
            }
            text.clear();
        }
        Ok(())
    }

    fn add(&mut self, line: Line, since_ms: u64) {
        if line.ended_unix_ms.max(line.unix_ms) < since_ms {
            return;
        }
        self.lost_records += line.lost_records;
        if line.lost_records > 0 {
            return;
        }
        let of_prompt =
            |prompt: &Prompt, tokens: Option<u64>| tokens.filter(|_| !prompt.further_sample);
        let prompt_tokens = || line.known(|prompt| of_prompt(prompt, prompt.prompt_tokens));
        let cached_tokens = || line.known(|prompt| of_prompt(prompt, prompt.cached_tokens));
        let completion_tokens = || line.known(|prompt| prompt.completion_tokens);
        let session = line.session.clone().filter(|_| self.is_by_session);
        let key = (line.tenant.clone(), line.model.clone(), session);
        let sums = self.sums.entry(key).or_default();
        match line.outcome.as_str() {
            "ok" => sums.requests += 1,
            _ => sums.other_requests += 1,
        }
        sums.incomplete_requests += u64::from(line.is_incomplete());
        sums.prompt_tokens += line.prompt_tokens.unwrap_or_else(prompt_tokens);
        sums.cached_tokens += line.cached_tokens.unwrap_or_else(cached_tokens);
        sums.completion_tokens += line.completion_tokens.unwrap_or_else(completion_tokens);
        sums.wasted_prompt_tokens += line.wasted_prompt_tokens;
    }

    fn to_json(&self) -> String {
        let rows = self.sums.iter().map(|((tenant, model, session), sums)| {
            let mut row = match self.is_by_session {
                true => json!({ "tenant": tenant, "model": model, "session": session }),
                false => json!({ "tenant": tenant, "model": model }),
            };
            if let (Some(row), Ok(sums)) = (row.as_object_mut(), serde_json::to_value(sums)) {
                row.extend(sums.as_object().cloned().unwrap_or_default());
            }
            row
        });
        let rows: Vec<_> = rows.collect();
        json!({
            "usage": rows,
            "lost_records": self.lost_records,
            "unreadable_lines": self.unreadable_lines,
        })
        .to_string()
    }

    fn to_table(&self) -> String {
        // Session ids are long, so they are last.
        let mut table = format!(
            "{:<20} {:<24} {:>10} {:>8} {:>14} {:>14} {:>14} {:>12}{}\n",
            "tenant",
            "model",
            "requests",
            "others",
            "prompt",
            "of it cached",
            "completion",
            "wasted",
            if self.is_by_session { "  session" } else { "" },
        );
        for ((tenant, model, session), sums) in &self.sums {
            let session = session.as_deref().map(|session| format!("  {session}"));
            let tenant = tenant.as_deref().unwrap_or("-");
            table += &format!(
                "{tenant:<20} {model:<24} {:>10} {:>8} {:>14} {:>14} {:>14} {:>12}{}\n",
                sums.requests,
                sums.other_requests,
                sums.prompt_tokens,
                sums.cached_tokens,
                sums.completion_tokens,
                sums.wasted_prompt_tokens,
                session.unwrap_or_default(),
            );
        }
        let incomplete: u64 = self.sums.values().map(|sums| sums.incomplete_requests).sum();
        if incomplete > 0 {
            table += &format!(
                "{incomplete} requests count with a part of their tokens: engines did not report the rest\n"
            );
        }
        if self.lost_records > 0 {
            table += &format!("{} records are missing from the file\n", self.lost_records);
        }
        if self.unreadable_lines > 0 {
            table += &format!("{} lines cannot be read\n", self.unreadable_lines);
        }
        table.trim_end().to_owned()
    }
}
