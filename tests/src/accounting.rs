//! What an auditor needs: scraped metrics as a table, the ledger file as it lies on the
//! disk, and random numbers that are the same every time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use splitrail_kv::SplitMix64;

/// A series: its name, and its labels as they are spelled.
pub type Series = (String, BTreeMap<String, String>);

/// A scrape of `/metrics`, read by the rules of Prometheus' text format and not by
/// those of the router.
#[derive(Debug, Default)]
pub struct Scrape(BTreeMap<Series, f64>);

impl Scrape {
    /// Reads a scrape.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        Self(lines.map(sample).collect())
    }

    /// The series of a metric, its labels' values in the order of `labels`, without zeros.
    pub fn by(&self, name: &str, labels: &[&str]) -> BTreeMap<Vec<String>, u64> {
        let mut found = BTreeMap::new();
        for ((series, given), value) in &self.0 {
            if series == name && *value != 0.0 {
                let key = labels.iter().map(|label| given[*label].clone()).collect();
                *found.entry(key).or_insert(0) += *value as u64;
            }
        }
        found
    }

    /// The sum of all series of a metric.
    pub fn sum(&self, name: &str) -> f64 {
        self.0.iter().filter(|((series, _), _)| series == name).map(|(_, value)| value).sum()
    }
}

/// `name{label="value",...} number`; values in quotes may hold anything, escaped.
fn sample(line: &str) -> (Series, f64) {
    let (series, number) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
    let number = number.parse().unwrap_or_else(|error| panic!("{error}: {line}"));
    let Some((name, rest)) = series.split_once('{') else {
        return ((series.to_owned(), BTreeMap::new()), number);
    };
    let mut labels = BTreeMap::new();
    let mut rest = rest.strip_suffix('}').unwrap_or_else(|| panic!("{line}"));
    while !rest.is_empty() {
        let (label, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().unwrap_or_else(|| panic!("{line}")) {
                (at, '"') => break at,
                (_, '\\') => value.extend(chars.next().map(|(_, escaped)| escaped)),
                (_, plain) => value.push(plain),
            }
        };
        labels.insert(label.to_owned(), value);
        rest = after[end + 1..].trim_start_matches(',');
    }
    ((name.to_owned(), labels), number)
}

/// The lines of a ledger file and of those moved aside, oldest first. Every line is
/// whole and JSON.
pub fn ledger_lines(path: &Path) -> Vec<Value> {
    let aside = |number: u32| PathBuf::from(format!("{}.{number}", path.display()));
    let mut files: Vec<PathBuf> =
        (1..).map(aside).take_while(|file| file.exists()).collect::<Vec<_>>();
    files.reverse();
    files.push(path.to_owned());
    let mut lines = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a ledger file");
        assert!(text.is_empty() || text.ends_with('\n'), "half a line in {}", file.display());
        for line in text.lines() {
            let read = serde_json::from_str(line);
            lines.push(read.unwrap_or_else(|error| panic!("{error} in {line}")));
        }
    }
    lines
}

/// Random numbers from a seed: a failure can be had again.
#[derive(Clone, Debug)]
pub struct Dice(SplitMix64);

impl Dice {
    /// Dice that fall the same way for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.next_u64() % bound
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of several.
    pub fn one_of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn labels_with_anything_in_them_are_read() {
        let scrape = Scrape::parse(
            "# HELP x y\nx_total{a=\"b,c=\\\"}\",d=\"\"} 3\nx_total{a=\"e\",d=\"f\"} 4\ny 0.5\n",
        );
        assert_eq!(scrape.sum("x_total"), 7.0);
        assert_eq!(scrape.by("x_total", &["a"])[&vec!["b,c=\"}".to_owned()]], 3);
        assert_eq!(scrape.sum("y"), 0.5);
    }
}
