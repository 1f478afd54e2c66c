//! Formats an explanation for people.

use serde_json::{Map, Value};

use splitrail_settings::command::Paint;

use crate::safe_text::printable;

/// What the line of the chosen worker begins with.
const CHOSEN: &str = "* ";

/// Maximum width of a text, which may come from a client or a worker.
const TEXT_MAX_COLUMNS: usize = 1000;

/// Formats a reply of `POST /admin/explain`.
pub(super) fn write(out: &mut String, reply: &Value, paint: Paint) {
    if reply["dry_run"] == true {
        dry_run(out, &reply["explanation"], paint);
    } else {
        for one in list(&reply["decisions"]) {
            past(out, one, paint);
        }
    }
}

fn dry_run(out: &mut String, told: &Value, paint: Paint) {
    let unit = text(&told["cost_unit"]);
    line(
        out,
        "",
        &[
            ("model", &told["model"]),
            ("endpoint", &told["endpoint"]),
            ("flow asked", &told["flow_asked"]),
            ("policy", &told["policy"]["kind"]),
        ],
    );
    for prompt in list(&told["prompts"]) {
        out.push('\n');
        prompt_line(out, prompt);
        if let Some(gate) = prompt["gate"].as_object() {
            fields(out, "  gate: ", gate);
        }
        comparison(out, &prompt["auto"]);
        for step in list(&prompt["steps"]) {
            let leg = text(&step["step"]);
            choice(out, &leg, step, &unit, paint);
            candidates(
                out,
                list(&step["candidates"]).iter().collect(),
                list(&step["conditions"]),
                paint,
            );
            if leg == "decode_try" && prompt["gate"]["verdict"] == "asked" {
                push(out, "  and where that one turns the prompt away:");
            }
            for veto in list(&step["vetoed"]) {
                let reasons: Vec<_> = list(&veto["reasons"]).iter().map(text).collect();
                // Workers with another role are not listed.
                if !reasons.iter().any(|reason| reason == "role") {
                    vetoed(out, veto, &reasons.join(", "), paint);
                }
            }
        }
        if prompt["stops"].is_string() {
            push(out, &format!("  ends: {}", text(&prompt["stops"])));
        }
    }
}

fn past(out: &mut String, told: &Value, paint: Paint) {
    let decision = &told["decision"];
    let unit = text(&told["cost_unit"]);
    line(
        out,
        "",
        &[
            ("request", &decision["request_id"]),
            ("model", &decision["model"]),
            ("outcome", &decision["outcome"]),
            ("attempts", &decision["attempts"]),
        ],
    );
    prompt_line(out, decision);
    line(
        out,
        "  ",
        &[
            ("gate", &decision["gate"]),
            ("decode first", &decision["decode_try"]),
            ("threshold", &decision["cache_hit_threshold"]),
            ("hit rate", &decision["cache_hit_ratio"]),
            ("estimated cached tokens", &decision["estimated_cached_tokens"]),
            ("cached tokens", &decision["cached_tokens"]),
        ],
    );
    let mut times = vec![("ttft ms", &decision["ttft_ms"]), ("total ms", &decision["total_ms"])];
    let stages = decision["stages_ms"].as_object().into_iter().flatten();
    times.extend(stages.map(|(stage, took_ms)| (stage.as_str(), took_ms)));
    if decision["total_ms"].is_number() {
        line(out, "  took: ", &times);
    }
    comparison(out, &decision["auto"]);
    if let Some(fetch) = decision["fetch"].as_object() {
        fields(out, "  fetch: ", fetch);
    }
    let all = list(&decision["candidates"]);
    for made in list(&told["choices"]) {
        choice(out, &text(&made["leg"]), made, &unit, paint);
        candidates(out, all.iter().filter(|one| one["leg"] == made["leg"]).collect(), &[], paint);
        for veto in list(&decision["vetoed"]).iter().filter(|veto| veto["leg"] == made["leg"]) {
            vetoed(out, veto, &text(&veto["reason"]), paint);
        }
    }
}

/// The comparison of local and remote prefill, with what either way would fetch.
fn comparison(out: &mut String, auto: &Value) {
    let Some(auto) = auto.as_object() else { return };
    let ways = [("remote", auto.get("remote_fetch")), ("local", auto.get("local_fetch"))];
    let mut figures = auto.clone();
    figures.retain(|key, _| !key.ends_with("_fetch"));
    fields(out, "  auto: ", &figures);
    for (way, plan) in ways {
        if let Some(plan) = plan {
            push(out, &format!("    {way}{}", fetch(plan)));
        }
    }
}

/// A worker that could not take a leg, and why.
fn vetoed(out: &mut String, veto: &Value, reasons: &str, paint: Paint) {
    let said = format!("not {}: {reasons}", text(&veto["worker"]));
    push(out, &format!("    {}", paint.faint(&said)));
}

fn prompt_line(out: &mut String, prompt: &Value) {
    line(
        out,
        "",
        &[
            ("prompt", &prompt["prompt_index"]),
            ("tokens", &prompt["prompt_tokens"]),
            ("tokens unknown", &prompt["prompt_unknown"]),
            ("blocks", &prompt["prompt_blocks"]),
            ("block size", &prompt["block_size"]),
            ("namespace", &prompt["namespace"]),
            ("flow", &prompt["flow"]),
            ("local", &prompt["local_reason"]),
            ("no read-back", &prompt["no_read_back"]),
        ],
    );
}

fn choice(out: &mut String, name: &str, made: &Value, unit: &str, paint: Paint) {
    let rank =
        |which: &str| made[which].as_u64().map(|rank| format!("/{rank}")).unwrap_or_default();
    let chosen = text(&made["chosen"]) + &rank("chosen_rank");
    let mut said = format!("  {}: {}", paint.strong(name), paint.good(&chosen));
    if let (true, Some(margin)) = (made["runner_up"].is_string(), made["margin"].as_f64()) {
        let next = text(&made["runner_up"]);
        let rank = rank("runner_up_rank");
        said += &format!(" (next: {next}{rank}, by {margin:.1} {unit})");
    }
    for (what, key) in [("no fetch", "no_fetch"), ("no one shot", "no_one_shot")] {
        if let Some(why) = made[key].as_str() {
            said += &format!(", {what}: {why}");
        }
    }
    push(out, &said);
}

/// One line per worker.
fn candidates(out: &mut String, all: Vec<&Value>, conditions: &[Value], paint: Paint) {
    const COLUMNS: [(&str, &str); 7] = [
        ("cost", "cost"),
        ("overlap", "overlap_blocks"),
        ("speculative", "speculative_blocks"),
        ("discount", "overlap_discount"),
        ("requests", "requests"),
        ("to prefill", "prefill_tokens"),
        ("active", "active_tokens"),
    ];
    let mut rows = vec![header(&COLUMNS)];
    for seen in all {
        let mark = if seen["chosen"] == true { CHOSEN } else { "  " };
        let veto = &seen["veto"];
        let veto = if veto.is_string() { format!(" ({})", text(veto)) } else { String::new() };
        let rank = seen["rank"].as_u64().map(|rank| format!("/{rank}")).unwrap_or_default();
        let mut row = vec![format!("{mark}{}{rank}{veto}", text(&seen["worker"]))];
        row.extend(COLUMNS.iter().map(|(_, key)| match (*key, seen["spine_blocks"].as_u64()) {
            // What full attention holds beyond it, the worker cannot use.
            ("overlap_blocks", Some(spine)) => format!("{} of {spine}", figure(&seen[*key])),
            _ => figure(&seen[*key]),
        }));
        row.push(tiers(&seen["overlap_by_tier"]));
        row.push(terms(&seen["terms"]) + &fetch(&seen["fetch"]) + &reads(seen));
        let condition = conditions.iter().find(|one| one["worker"] == seen["worker"]);
        row.push(age(condition.unwrap_or(seen)));
        rows.push(row);
    }
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if column == 0 || column > COLUMNS.len() {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            }
        });
        let said = cells.collect::<Vec<_>>().join("  ");
        let said = said.trim_end();
        let said = if said.starts_with(CHOSEN) { paint.good(said) } else { said.to_owned() };
        push(out, &format!("    {said}"));
    }
}

fn header(columns: &[(&str, &str)]) -> Vec<String> {
    let mut row = vec!["  worker".to_owned()];
    row.extend(columns.iter().map(|(title, _)| (*title).to_owned()));
    row.extend(["by tier", "terms", "index"].map(str::to_owned));
    row
}

fn tiers(by_tier: &Value) -> String {
    let tiers = by_tier.as_object().into_iter().flatten();
    let each = tiers.map(|(tier, blocks)| format!("{} {}", word(tier), figure(blocks)));
    each.collect::<Vec<_>>().join(", ")
}

fn terms(terms: &Value) -> String {
    let terms = terms.as_object().into_iter().flatten();
    let each = terms.map(|(term, cost)| format!("{} {}", word(term), figure(cost)));
    each.collect::<Vec<_>>().join(" + ")
}

/// The prefix that a candidate would fetch from another worker, if it would.
fn fetch(fetch: &Value) -> String {
    match &fetch["source"] {
        Value::Null => String::new(),
        source => {
            let way = if fetch["way"] == "one_shot" { " in one shot" } else { "" };
            format!(" (fetches {} blocks from {}{way})", fetch["blocks"], text(source))
        }
    }
}

/// What a candidate would read back, if it would read anything.
fn reads(seen: &Value) -> String {
    match &seen["read_back_blocks"] {
        Value::Null => String::new(),
        blocks => format!(" (reads back up to block {blocks})"),
    }
}

/// The age of the index, from a condition or from a candidate of a past decision.
fn age(condition: &Value) -> String {
    let age = match condition["index_age_ms"].as_u64() {
        Some(ms) => format!("heard {ms} ms ago"),
        None => "never heard".to_owned(),
    };
    match condition["events_current"] == false {
        true => format!("{age}, not current"),
        false => age,
    }
}

/// The fields of an object that are not null, on one line.
fn fields(out: &mut String, lead: &str, object: &Map<String, Value>) {
    let said: Vec<(&str, &Value)> =
        object.iter().map(|(key, value)| (key.as_str(), value)).collect();
    line(out, lead, &said);
}

fn line(out: &mut String, lead: &str, fields: &[(&str, &Value)]) {
    let told = fields.iter().filter(|(_, value)| !value.is_null());
    let told =
        told.map(|(key, value)| format!("{} {}", word(&key.replace('_', " ")), figure(value)));
    push(out, &format!("{lead}{}", told.collect::<Vec<_>>().join(", ")));
}

fn figure(value: &Value) -> String {
    match value.as_f64() {
        // Shares need more than one decimal digit.
        Some(number) if value.is_f64() && number > 0.0 && number < 1.0 => {
            let figure = format!("{number:.3}");
            figure.trim_end_matches('0').to_owned()
        }
        Some(number) if value.is_f64() => format!("{number:.1}"),
        _ => text(value),
    }
}

fn text(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    word(&text)
}

/// A name that another process has chosen.
fn word(name: &str) -> String {
    printable(name, TEXT_MAX_COLUMNS)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn push(out: &mut String, said: &str) {
    out.push_str(said);
    out.push('\n');
}
