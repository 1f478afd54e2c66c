//! Formats an explanation for people.

use serde_json::{Map, Value};

use splitrail_settings::command::Paint;

use super::candidates::{fetch, figure, table, text, word};
use super::reason::reason;

/// What the lines of a table of candidates begin with.
const MARGIN: &str = "    ";

/// How an explanation is drawn.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) paint: Paint,
    /// The columns of the terminal; `None` if there is none.
    pub(super) width: Option<usize>,
}

/// Formats a reply of `POST /admin/explain`.
pub(super) fn write(out: &mut String, reply: &Value, layout: Layout) {
    if reply["dry_run"] == true {
        write_dry_run(out, &reply["explanation"], layout);
    } else {
        for one in list(&reply["decisions"]) {
            write_past(out, one, layout);
        }
    }
}

fn write_dry_run(out: &mut String, told: &Value, layout: Layout) {
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
            let candidates: Vec<_> = list(&step["candidates"]).iter().collect();
            let step_of = Step {
                leg: &leg,
                candidates,
                conditions: list(&step["conditions"]),
                blocks: &prompt["prompt_blocks"],
                unit: &unit,
            };
            choice(out, &step_of, step, layout);
            if leg == "decode_try" && prompt["gate"]["verdict"] == "asked" {
                push(out, "  and where that one turns the prompt away:");
            }
            for veto in list(&step["vetoed"]) {
                let reasons: Vec<_> = list(&veto["reasons"]).iter().map(text).collect();
                // Workers with another role are not listed.
                if !reasons.iter().any(|reason| reason == "role") {
                    vetoed(out, veto, &reasons.join(", "), layout.paint);
                }
            }
        }
        if prompt["stops"].is_string() {
            push(out, &format!("  ends: {}", text(&prompt["stops"])));
        }
    }
}

fn write_past(out: &mut String, told: &Value, layout: Layout) {
    let decision = &told["decision"];
    let unit = text(&told["cost_unit"]);
    push(out, &layout.paint.strong(&sentence(decision)));
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
        let step = Step {
            leg: &text(&made["leg"]),
            candidates: all.iter().filter(|one| one["leg"] == made["leg"]).collect(),
            conditions: &[],
            blocks: &decision["prompt_blocks"],
            unit: &unit,
        };
        choice(out, &step, made, layout);
        for veto in list(&decision["vetoed"]).iter().filter(|veto| veto["leg"] == made["leg"]) {
            vetoed(out, veto, &text(&veto["reason"]), layout.paint);
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
            push(out, &format!("    {way} {}", fetch(plan)));
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

/// A choice between candidates for a leg.
struct Step<'a> {
    leg: &'a str,
    candidates: Vec<&'a Value>,
    /// What is known of the workers of a dry run.
    conditions: &'a [Value],
    /// Blocks of the prompt.
    blocks: &'a Value,
    unit: &'a str,
}

/// Why the worker was chosen, and the candidates.
fn choice(out: &mut String, step: &Step<'_>, made: &Value, Layout { paint, width }: Layout) {
    let why = reason(&step.candidates, step.blocks, step.unit);
    let why = why.unwrap_or_else(|| text(&made["chosen"]));
    let mut said = format!("  {}: {}", paint.strong(step.leg), paint.good(&why));
    for (what, key) in [("no fetch", "no_fetch"), ("no one shot", "no_one_shot")] {
        if let Some(why) = made[key].as_str() {
            said += &format!(", {what}: {}", word(why));
        }
    }
    push(out, &said);
    let width = width.map(|width| width.saturating_sub(MARGIN.len()));
    for line in table(&step.candidates, step.conditions, width, paint) {
        push(out, &format!("{MARGIN}{line}"));
    }
}

/// What became of a request: `served by p0 and d1; 71 ms to the first token, 1,203 ms in all`.
fn sentence(decision: &Value) -> String {
    let outcome = match &decision["outcome"] {
        Value::Null => "in progress".to_owned(),
        outcome if *outcome == "ok" => "served".to_owned(),
        outcome => text(outcome),
    };
    let workers = [&decision["prefill_worker"], &decision["decode_worker"]];
    let workers: Vec<_> = workers.into_iter().filter(|id| id.is_string()).map(text).collect();
    let by =
        if workers.is_empty() { String::new() } else { format!(" by {}", workers.join(" and ")) };
    let ms = |key: &str| decision[key].as_f64().map(|ms| format!("{ms:.0} ms"));
    let first = ms("ttft_ms").map(|ms| format!("; {ms} to the first token"));
    let total = ms("total_ms").map(|ms| format!("; {ms} in all"));
    let attempts = decision["attempts"].as_u64().filter(|attempts| *attempts > 1);
    let attempts = attempts.map(|attempts| format!("; {attempts} attempts"));
    let parts = [first, total, attempts].into_iter().flatten().collect::<String>();
    format!("{outcome}{by}{parts}")
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
    let told: Vec<_> = told.collect();
    if !told.is_empty() {
        push(out, &format!("{lead}{}", told.join(", ")));
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn push(out: &mut String, said: &str) {
    out.push_str(said);
    out.push('\n');
}
