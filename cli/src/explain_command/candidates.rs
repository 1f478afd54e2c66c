//! The candidates of a leg as a table that fits into the terminal.

use serde_json::Value;
use splitrail_settings::command::Paint;

use super::reason::name;
use crate::safe_text::{columns, printable};
use crate::table::{Column, lines};

/// Maximum width of a text, which may come from a client or a worker.
const TEXT_MAX_COLUMNS: usize = 1000;

/// The terms of a cost in milliseconds: the member, its name, and its sign in the cost.
pub(super) const TERMS: [(&str, &str, f64); 13] = [
    ("wait_ms", "wait", 1.0),
    ("fetch_ms", "fetch", 1.0),
    ("read_ms", "read-back", 1.0),
    ("load_ms", "load", 1.0),
    ("prefill_ms", "prefill", 1.0),
    ("hand_off_ms", "hand-off", 1.0),
    ("step_ms", "step", 1.0),
    ("extra_work_ms", "extra work", 1.0),
    ("copy_ms", "copy", 1.0),
    ("room_ms", "room", 1.0),
    ("later_turns_ms", "later turns", 1.0),
    ("shared_credit_ms", "shared credit", -1.0),
    ("resume_credit_ms", "resume credit", -1.0),
];

/// Columns after the terms: title and member.
const LOAD: [(&str, &str); 4] = [
    ("requests", "requests"),
    ("to prefill", "prefill_tokens"),
    ("active", "active_tokens"),
    ("discount", "overlap_discount"),
];

/// A column with its cells.
struct Cells {
    column: Column,
    cells: Vec<String>,
}

/// The lines of a table with one line per candidate, no wider than `width` columns if that is possible
/// without the first three. Columns without a figure are left out. `conditions` are what is known of
/// the workers of a dry run.
pub(super) fn table(
    candidates: &[&Value],
    conditions: &[Value],
    width: Option<usize>,
    paint: Paint,
) -> Vec<String> {
    let mut all = vec![
        cells(Column::text("  worker", TEXT_MAX_COLUMNS), candidates, |seen| {
            let mark = if seen["chosen"] == true { "* " } else { "  " };
            let veto = &seen["veto"];
            let veto = if veto.is_string() { format!(" ({})", text(veto)) } else { String::new() };
            format!("{mark}{}{veto}", name(seen))
        }),
        cells(Column::figure("cost"), candidates, |seen| figure(&seen["cost"])),
        cells(Column::figure("overlap"), candidates, |seen| match seen["spine_blocks"].as_u64() {
            // What full attention holds beyond it, the worker cannot use.
            Some(spine) => format!("{} of {spine}", figure(&seen["overlap_blocks"])),
            None => figure(&seen["overlap_blocks"]),
        }),
    ];
    let first = all.len();
    for (key, title, _) in TERMS {
        all.push(cells(Column::figure(title), candidates, |seen| figure(&seen["terms"][key])));
    }
    for (title, key) in LOAD {
        all.push(cells(Column::figure(title), candidates, |seen| figure(&seen[key])));
    }
    let speculative = |seen: &Value| match seen["speculative_blocks"] == seen["overlap_blocks"] {
        true => String::new(),
        false => figure(&seen["speculative_blocks"]),
    };
    all.push(cells(Column::figure("speculative"), candidates, speculative));
    let text_column = |title| Column::text(title, TEXT_MAX_COLUMNS);
    all.push(cells(text_column("by tier"), candidates, |seen| tiers(&seen["overlap_by_tier"])));
    all.push(cells(text_column("moves"), candidates, |seen| fetch(&seen["fetch"]) + &reads(seen)));
    all.push(cells(text_column("index"), candidates, |seen| {
        let condition = conditions.iter().find(|one| one["worker"] == seen["worker"]);
        age(condition.unwrap_or(seen))
    }));
    let is_empty =
        |cells: &Cells| cells.cells.iter().all(|cell| matches!(&**cell, "" | "0" | "0.0"));
    let mut place = 0;
    all.retain(|cells| {
        place += 1;
        place <= first || !is_empty(cells)
    });
    let drawn = loop {
        let titles: Vec<Column> = all.iter().map(|cells| cells.column).collect();
        let rows: Vec<Vec<String>> = (0..candidates.len())
            .map(|row| all.iter().map(|cells| cells.cells[row].clone()).collect())
            .collect();
        let drawn = lines(&titles, &rows);
        let widest = drawn.iter().map(|line| columns(line)).max().unwrap_or_default();
        if all.len() <= first || width.is_none_or(|width| widest <= width) {
            break drawn;
        }
        all.pop();
    };
    let is_chosen = |line: &String| line.starts_with("* ");
    drawn.into_iter().map(|line| if is_chosen(&line) { paint.good(&line) } else { line }).collect()
}

fn cells(column: Column, candidates: &[&Value], cell: impl Fn(&Value) -> String) -> Cells {
    Cells { column, cells: candidates.iter().map(|seen| cell(seen)).collect() }
}

fn tiers(by_tier: &Value) -> String {
    let tiers = by_tier.as_object().into_iter().flatten();
    let each = tiers.map(|(tier, blocks)| format!("{} {}", word(tier), figure(blocks)));
    each.collect::<Vec<_>>().join(", ")
}

/// The prefix that a candidate would fetch from another worker, if it would.
pub(super) fn fetch(fetch: &Value) -> String {
    match &fetch["source"] {
        Value::Null => String::new(),
        source => {
            let way = if fetch["way"] == "one_shot" { " in one shot" } else { "" };
            format!("fetches {} blocks from {}{way}", fetch["blocks"], text(source))
        }
    }
}

/// What a candidate would read back, if it would read anything.
fn reads(seen: &Value) -> String {
    match &seen["read_back_blocks"] {
        Value::Null => String::new(),
        blocks => format!("reads back up to block {blocks}"),
    }
}

/// The age of the index, from a condition or from a candidate of a past decision.
fn age(condition: &Value) -> String {
    // A replay has no events.
    let Some(age_ms) = condition.get("index_age_ms") else { return String::new() };
    let age = match age_ms.as_u64() {
        Some(ms) => format!("heard {ms} ms ago"),
        None => "never heard".to_owned(),
    };
    match condition["events_current"] == false {
        true => format!("{age}, not current"),
        false => age,
    }
}

/// A number with few digits.
pub(super) fn figure(value: &Value) -> String {
    match value.as_f64() {
        // Shares need more than one decimal digit.
        Some(number) if value.is_f64() && number > 0.0 && number < 1.0 => {
            let figure = format!("{number:.3}");
            figure.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        Some(number) if value.is_f64() => format!("{number:.1}"),
        _ if value.is_null() => String::new(),
        _ => text(value),
    }
}

/// A text, or a value as JSON.
pub(super) fn text(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    word(&text)
}

/// A name that another process has chosen.
pub(super) fn word(name: &str) -> String {
    printable(name, TEXT_MAX_COLUMNS)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn candidate(worker: &str, chosen: bool) -> Value {
        json!({
            "worker": worker, "chosen": chosen, "cost": 12.5, "overlap_blocks": 4,
            "speculative_blocks": 4, "overlap_by_tier": {"device": 4}, "requests": 2,
            "prefill_tokens": 0, "active_tokens": 900, "overlap_discount": 0.0,
            "terms": {"wait_ms": 0.0, "prefill_ms": 12.5}, "index_age_ms": 3,
        })
    }

    #[test]
    fn columns_without_figures_are_left_out_and_the_table_fits() {
        let (one, two) = (candidate("p0", true), candidate("p1", false));
        let wide = table(&[&one, &two], &[], None, Paint::NONE);
        assert_eq!(wide[0], "  worker  cost  overlap  prefill  requests  active  by tier   index");
        assert_eq!(
            wide[1],
            "* p0      12.5        4     12.5         2     900  device 4  heard 3 ms ago"
        );
        let narrow = table(&[&one, &two], &[], Some(50), Paint::NONE);
        assert!(narrow.iter().all(|line| columns(line) <= 50), "{narrow:?}");
        assert!(narrow[0].contains("prefill") && !narrow[0].contains("index"), "{narrow:?}");
    }
}
