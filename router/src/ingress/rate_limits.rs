//! The headers that tell a tenant how much of its limits remains.

use std::time::{Duration, SystemTime};

use http::HeaderValue;
use http::header::{HeaderMap, HeaderName};
use splitrail_access::Tenant;
use splitrail_access::limits::{LimitStanding, Standing};
use splitrail_api::text::push_number;
use splitrail_engine::dialect::Dialect;

/// The names of the headers of one unit, as one API has them: limit, remaining and reset.
struct Names([HeaderName; 3]);

const OPENAI_REQUESTS: Names = Names([
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
]);
const OPENAI_TOKENS: Names = Names([
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
]);
const ANTHROPIC_REQUESTS: Names = Names([
    HeaderName::from_static("anthropic-ratelimit-requests-limit"),
    HeaderName::from_static("anthropic-ratelimit-requests-remaining"),
    HeaderName::from_static("anthropic-ratelimit-requests-reset"),
]);
const ANTHROPIC_TOKENS: Names = Names([
    HeaderName::from_static("anthropic-ratelimit-tokens-limit"),
    HeaderName::from_static("anthropic-ratelimit-tokens-remaining"),
    HeaderName::from_static("anthropic-ratelimit-tokens-reset"),
]);

/// Puts the headers of a tenant's limits into a reply of this dialect. Limits that the tenant does not
/// have are left out. Of the two limits on tokens, the one with less remaining is shown.
pub(super) fn put(headers: &mut HeaderMap, dialect: Dialect, tenant: &Tenant) {
    let Some(Standing { requests, tokens_per_minute, tokens_per_day }) = tenant.standing() else {
        return;
    };
    let tokens = [tokens_per_minute, tokens_per_day].into_iter().flatten();
    let tokens = tokens.min_by_key(|standing| standing.remaining);
    let is_anthropic = dialect == Dialect::Messages;
    let names = match is_anthropic {
        true => [ANTHROPIC_REQUESTS, ANTHROPIC_TOKENS],
        false => [OPENAI_REQUESTS, OPENAI_TOKENS],
    };
    for (Names([limit, remaining, reset]), standing) in names.into_iter().zip([requests, tokens]) {
        let Some(LimitStanding { limit: most, remaining: left, reset_ms }) = standing else {
            continue;
        };
        headers.insert(limit, most.into());
        headers.insert(remaining, left.into());
        let text = match is_anthropic {
            true => time_after(reset_ms),
            false => duration(reset_ms),
        };
        if let Ok(text) = HeaderValue::from_str(&text) {
            headers.insert(reset, text);
        }
    }
}

/// A duration as OpenAI writes it: `12ms`, `1.5s`, `6m0s`, `1h0m0s`.
fn duration(ms: u64) -> String {
    let mut text = String::with_capacity("24h00m00.000s".len());
    if ms < 1000 {
        push_number(&mut text, ms);
        text.push_str("ms");
        return text;
    }
    let (hours, minutes, rest_ms) = (ms / 3_600_000, ms / 60_000 % 60, ms % 60_000);
    if hours > 0 {
        push_number(&mut text, hours);
        text.push('h');
    }
    if hours > 0 || minutes > 0 {
        push_number(&mut text, minutes);
        text.push('m');
    }
    push_number(&mut text, rest_ms / 1000);
    if !rest_ms.is_multiple_of(1000) {
        let decimals = format!("{:03}", rest_ms % 1000);
        text.extend([".", decimals.trim_end_matches('0')]);
    }
    text.push('s');
    text
}

/// The time after a number of milliseconds, as RFC 3339.
fn time_after(ms: u64) -> String {
    let time = SystemTime::now() + Duration::from_millis(ms);
    humantime::format_rfc3339_seconds(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_have_the_form_that_clients_of_openai_know() {
        for (ms, expected) in [
            (0, "0ms"),
            (12, "12ms"),
            (1000, "1s"),
            (1500, "1.5s"),
            (1050, "1.05s"),
            (59_001, "59.001s"),
            (60_120, "1m0.12s"),
            (360_000, "6m0s"),
            (3_600_000, "1h0m0s"),
            (86_399_999, "23h59m59.999s"),
        ] {
            assert_eq!(duration(ms), expected);
        }
    }
}
