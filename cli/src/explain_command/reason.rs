//! Says in one sentence why a worker was chosen.

use serde_json::Value;

use super::candidates::{TERMS, text};

/// A term is named if it is at least this share of what decided.
const NAMED_SHARE: f64 = 0.25;

/// Why the chosen one of these candidates was chosen: `p1: 28.0 ms cheaper than p0 (prefill 20.0 less,
/// wait 8.0 less); it holds 16 of 20 blocks, p0 12`. `None` if none was chosen.
pub(super) fn reason(candidates: &[&Value], blocks: &Value, unit: &str) -> Option<String> {
    let chosen = candidates.iter().find(|one| one["chosen"] == true)?;
    let name = name(chosen);
    let cost = |candidate: &Value| candidate["cost"].as_f64();
    let others = candidates.iter().filter(|one| one["chosen"] != true && one["veto"].is_null());
    let next = others.filter(|one| one["up"] != false).min_by(|one, other| {
        let (one, other) = (cost(one).unwrap_or(f64::MAX), cost(other).unwrap_or(f64::MAX));
        one.total_cmp(&other)
    });
    let held = |candidate: &Value| candidate["overlap_blocks"].as_u64().unwrap_or(0);
    let of_all = blocks.as_u64().map(|all| format!(" of {all}")).unwrap_or_default();
    let Some(next) = next else {
        let held = held(chosen);
        return Some(format!("{name}: no other could take it; it holds {held}{of_all} blocks"));
    };
    let other = self::name(next);
    let margin = cost(next)? - cost(chosen)?;
    let compared = match margin {
        margin if margin > 0.0 => {
            format!("{margin:.1} {unit} cheaper than {other}{}", saved(chosen, next, margin))
        }
        margin if margin < 0.0 => {
            format!("chosen although {other} is {:.1} {unit} cheaper", -margin)
        }
        _ => format!("as cheap as {other}"),
    };
    let overlap = match (held(chosen), held(next)) {
        (one, two) if one == two => format!("both hold {one}{of_all} blocks"),
        (one, two) => format!("it holds {one}{of_all} blocks, {other} {two}"),
    };
    Some(format!("{name}: {compared}; {overlap}"))
}

/// The terms by which the chosen one is cheaper, the largest first.
fn saved(chosen: &Value, next: &Value, margin: f64) -> String {
    let term = |candidate: &Value, key: &str| candidate["terms"][key].as_f64().unwrap_or(0.0);
    let mut saved: Vec<_> = TERMS
        .iter()
        .map(|(key, name, sign)| (*name, (term(next, key) - term(chosen, key)) * sign))
        .filter(|(_, ms)| *ms > 0.0 && *ms >= margin * NAMED_SHARE)
        .collect();
    saved.sort_by(|one, other| other.1.total_cmp(&one.1));
    let named: Vec<_> = saved.iter().map(|(name, ms)| format!("{name} {ms:.1} less")).collect();
    if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) }
}

/// A worker's name, with the rank where there are several.
pub(super) fn name(candidate: &Value) -> String {
    let rank = candidate["rank"].as_u64().map(|rank| format!("/{rank}")).unwrap_or_default();
    text(&candidate["worker"]) + &rank
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn candidate(worker: &str, chosen: bool, prefill_ms: f64, wait_ms: f64, blocks: u32) -> Value {
        json!({
            "worker": worker, "up": true, "chosen": chosen, "cost": prefill_ms + wait_ms,
            "overlap_blocks": blocks, "terms": {"prefill_ms": prefill_ms, "wait_ms": wait_ms},
        })
    }

    #[test]
    fn the_terms_that_decided_are_named() {
        let (p0, p1) =
            (candidate("p0", false, 40.0, 1.0, 12), candidate("p1", true, 12.0, 1.0, 16));
        let said = |all: &[&Value]| reason(all, &json!(20), "ms").unwrap();
        assert_eq!(
            said(&[&p0, &p1]),
            "p1: 28.0 ms cheaper than p0 (prefill 28.0 less); it holds 16 of 20 blocks, p0 12"
        );
        assert_eq!(said(&[&p1]), "p1: no other could take it; it holds 16 of 20 blocks");
        let busy = candidate("p0", false, 12.0, 31.0, 16);
        assert_eq!(
            said(&[&p1, &busy]),
            "p1: 30.0 ms cheaper than p0 (wait 30.0 less); both hold 16 of 20 blocks"
        );
        let same = candidate("p2", false, 12.0, 1.0, 16);
        assert_eq!(said(&[&p1, &same]), "p1: as cheap as p2; both hold 16 of 20 blocks");
        let mut full = candidate("p3", false, 1.0, 1.0, 20);
        full["veto"] = json!("saturated");
        assert_eq!(said(&[&full, &p1]), "p1: no other could take it; it holds 16 of 20 blocks");
        assert_eq!(reason(&[&p0], &json!(20), "ms"), None);
    }
}
