//! Members that engines read leniently: counts as texts or with a fraction of zero, flags as texts or
//! numbers. They are rewritten as plain values, so that router and engine read the same.

use super::json::JsonObject;

/// The counts that the router reads.
const COUNTS: [&str; 6] =
    ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of"];

/// The flags that the router reads.
const FLAGS: [&str; 9] = [
    "stream",
    "store",
    "background",
    "echo",
    "use_beam_search",
    "add_special_tokens",
    "skip_reading_prefix_cache",
    "stream_include_usage",
    "stream_continuous_usage_stats",
];

/// Integers up to this one have an exact value as a floating-point number.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// Rewrites counts and flags that have another form than a plain value.
pub(crate) fn make_plain(body: &mut JsonObject) {
    for key in COUNTS {
        if let Some(count) = body.raw(key).and_then(plain_count) {
            body.set(key, count);
        }
    }
    for key in FLAGS {
        if let Some(flag) = body.raw(key).and_then(plain_flag) {
            body.set(key, flag);
        }
    }
}

/// The plain form of a count such as `16.0`, `1e3` or `"16"`; `None` for plain counts and for all
/// that is none.
fn plain_count(raw: &str) -> Option<String> {
    if raw.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    if let Some(text) = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        let is_count = text.bytes().all(|byte| byte.is_ascii_digit());
        return text.parse::<u64>().ok().filter(|_| is_count).map(|count| count.to_string());
    }
    let value = raw.parse::<f64>().ok()?;
    let is_count = value.fract() == 0.0 && (0.0..=EXACT_MAX).contains(&value);
    is_count.then(|| (value as u64).to_string())
}

/// The plain form of a flag such as `0` or `"true"`.
fn plain_flag(raw: &str) -> Option<&'static str> {
    let is_one_of = |forms: &[&str]| forms.iter().any(|form| raw.eq_ignore_ascii_case(form));
    if is_one_of(&["1", "1.0", "\"1\"", "\"true\""]) {
        Some("true")
    } else if is_one_of(&["0", "0.0", "\"0\"", "\"false\""]) {
        Some("false")
    } else {
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_flags_are_made_plain_if_an_engine_would_read_them() {
        for (key, given, plain) in [
            ("max_tokens", "16", "16"),
            ("max_tokens", "16.0", "16"),
            ("max_tokens", "1e3", "1000"),
            ("n", "\"2\"", "2"),
            ("max_tokens", "16.5", "16.5"),
            ("max_tokens", "-1", "-1"),
            ("max_tokens", "1e30", "1e30"),
            ("max_tokens", "\"\"", "\"\""),
            ("max_tokens", "\"+1\"", "\"+1\""),
            ("max_tokens", "\"many\"", "\"many\""),
            ("max_tokens", "null", "null"),
            ("max_tokens", "true", "true"),
            ("max_tokens", "[16.0]", "[16.0]"),
            ("stream", "true", "true"),
            ("stream", "0", "false"),
            ("stream", "\"False\"", "false"),
            ("stream", "1.0", "true"),
            ("stream", "2", "2"),
            ("stream", "\"yes\"", "\"yes\""),
            // What the router does not read stays as it is.
            ("seed", "1.0", "1.0"),
        ] {
            let mut body = JsonObject::parse_str(&format!("{{\"{key}\":{given}}}")).unwrap();
            make_plain(&mut body);
            assert_eq!(body.raw(key), Some(plain), "{key}: {given}");
        }
    }
}
