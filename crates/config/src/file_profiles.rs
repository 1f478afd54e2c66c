//! What the general checks of configuration files need to know about the router.

use splitrail_settings::FileProfile;

/// What the checks of the router's file need to know: renamed keys, keys whose values are secret, and
/// hints.
pub(super) const ROUTER_PROFILE: FileProfile = FileProfile {
    renamed_keys: RENAMED_KEYS,
    variables: true,
    secret_keys: &[
        "engine_api_key",
        "fleet.token",
        "events.login",
        "cache_salt_key",
        "tracing.otlp.headers",
    ],
    empty: "`splitrail init` writes a file to start from",
    too_large: "split the fleet over several routers",
};

/// Like `ROUTER_PROFILE`, for a worker that an operator adds while the router runs.
pub(super) const ADDITION_PROFILE: FileProfile = FileProfile {
    renamed_keys: &[("worker.honours_threshold", "worker.supports_cache_hit_threshold")],
    // The worker is in a request: its sender must not see the router's environment.
    variables: false,
    ..ROUTER_PROFILE
};

/// The hints of the checks of a file of API keys.
pub(super) const KEYS_PROFILE: FileProfile = FileProfile {
    renamed_keys: &[],
    variables: false,
    // The empty text is part of each path: a key may stand anywhere in place of its hash.
    secret_keys: &[""],
    empty: "write `keys: []`, or add keys with `splitrail keys new`",
    too_large: "use several entries of `auth`, each with a file of its own",
};

/// Keys that had another name before release 0.1, which accepts both names: the old and the new path.
/// The changelog lists them.
pub(super) const RENAMED_KEYS: &[(&str, &str)] = &[
    ("access_log.rotate.max_bytes", "access_log.rotate.size_max"),
    ("audit.rotate.max_bytes", "audit.rotate.size_max"),
    ("draw_seed", "rng_seed"),
    ("events.cut_off_max", "events.disconnect_grace"),
    ("events.durable", "events.durable_name"),
    ("events.replicas", "events.stream_replicas"),
    ("events.stream_max_bytes", "events.stream_size_max"),
    ("fleet.load_stale", "fleet.load_stale_after"),
    ("ledger.log_every", "ledger.log_interval"),
    ("ledger.rotate.keep", "ledger.rotate.files_max"),
    ("ledger.rotate.max_bytes", "ledger.rotate.size_max"),
    ("limits.answer_grace", "limits.reply_grace"),
    ("limits.answer_min_bytes_per_s", "limits.reply_rate_min"),
    ("limits.bodies_max_bytes", "limits.request_memory_max"),
    ("limits.body_max_bytes", "limits.body_size_max"),
    ("limits.body_min_bytes_per_s", "limits.body_rate_min"),
    ("limits.engine_reply_max_bytes", "limits.engine_reply_size_max"),
    ("limits.header_max_bytes", "limits.header_size_max"),
    ("limits.reply_min_bytes_per_s", "limits.reply_rate_min"),
    ("limits.request_memory_max_bytes", "limits.request_memory_max"),
    ("limits.schema_max_bytes", "limits.schema_size_max"),
    ("limits.tokenize_max_bytes", "limits.tokenize_size_max"),
    ("limits.unread_answers_max_bytes", "limits.unread_replies_size_max"),
    ("limits.unread_replies_max_bytes", "limits.unread_replies_size_max"),
    ("models[].assumed", "models[].speculative_index"),
    ("models[].assumed.approximate", "models[].speculative_index.approximate_ttl"),
    ("models[].assumed.max_blocks", "models[].speculative_index.blocks_max"),
    ("models[].assumed.speculative", "models[].speculative_index.speculative_ttl"),
    ("models[].auto.tbt_goal_ms", "models[].auto.tbt_goal"),
    ("models[].breaker.open", "models[].breaker.cooldown"),
    ("models[].busy", "models[].saturation"),
    ("models[].canary.again_after", "models[].canary.interval"),
    ("models[].discovery[].honours_threshold", "models[].discovery[].supports_cache_hit_threshold"),
    ("models[].discovery[].keep", "models[].discovery[].empty_grace"),
    ("models[].discovery[].refresh", "models[].discovery[].refresh_interval"),
    ("models[].drift.bound_blocks", "models[].drift.over_blocks_max"),
    ("models[].drift.bound_share", "models[].drift.over_share_max"),
    ("models[].drift.resync_min", "models[].drift.resync_interval_min"),
    ("models[].drift.under_bound_blocks", "models[].drift.under_blocks_max"),
    ("models[].drift.under_bound_share", "models[].drift.under_share_max"),
    ("models[].health.ejection.cap_percent", "models[].health.ejection.ejected_percent_max"),
    ("models[].health.ejection.min_requests", "models[].health.ejection.requests_min"),
    ("models[].health.ejection.time", "models[].health.ejection.base_time"),
    ("models[].health.fail_after", "models[].health.unhealthy_threshold"),
    ("models[].health.pass_after", "models[].health.healthy_threshold"),
    ("models[].loss", "models[].cache_loss_tracking"),
    ("models[].queue.fairness_ms", "models[].queue.fairness"),
    ("models[].queue.lead_ms", "models[].queue.lead"),
    ("models[].queue.max_wait_ms", "models[].queue.max_wait"),
    ("models[].queue.ttft_goal_ms", "models[].queue.ttft_goal"),
    ("models[].timeouts.answer", "models[].timeouts.reply"),
    ("models[].workers[].honours_threshold", "models[].workers[].supports_cache_hit_threshold"),
    ("record.rotate.keep", "record.rotate.files_max"),
    ("record.rotate.max_bytes", "record.rotate.size_max"),
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::{RENAMED_KEYS, ROUTER_PROFILE};
    use crate::{LoadedConfig, Problem, Problems, parse};

    /// A value that differs from the default, for each renamed key that is no section.
    fn sample(new: &str) -> Value {
        match new.rsplit('.').next().unwrap() {
            "durable_name" => json!("r0"),
            "supports_cache_hit_threshold" => json!(true),
            "over_share_max" | "under_share_max" => json!(0.75),
            "cache_loss_tracking" => json!({"window": "7m"}),
            "saturation" => json!({"requests": 7}),
            "speculative_index" => json!({"blocks_max": 7}),
            "disconnect_grace"
            | "load_stale_after"
            | "log_interval"
            | "reply_grace"
            | "approximate_ttl"
            | "speculative_ttl"
            | "cooldown"
            | "interval"
            | "empty_grace"
            | "refresh_interval"
            | "resync_interval_min"
            | "base_time"
            | "reply" => json!("7m"),
            "request_memory_max" => json!(2_u64 << 30),
            "unread_replies_size_max" | "stream_size_max" | "body_size_max" => json!(7 << 20),
            "engine_reply_size_max" | "header_size_max" | "tokenize_size_max" => json!(70 << 10),
            "schema_size_max" | "size_max" => json!(7 << 10),
            "fairness" | "lead" | "max_wait" | "ttft_goal" | "tbt_goal" => json!("7ms"),
            "stream_replicas" | "healthy_threshold" => json!(3),
            _ => json!(77),
        }
    }

    /// A configuration with a value at `path`, in lines: each key is on a line of its own.
    fn with(values: &[(&str, &Value)]) -> String {
        let mut config = json!({
            "events": {"kind": "nats", "servers": ["nats://127.0.0.1:4222"]},
            "models": [{
                "name": "m", "tokenizer": {"kind": "none"}, "flow": "aggregated",
                "workers": [{"id": "w", "role": "both", "url": "http://a:1"}],
                "discovery": [{"kind": "dns", "name": "d", "port": 1, "role": "both"}],
            }],
        });
        for (path, value) in values {
            let mut at = &mut config;
            for step in path.split('.') {
                let (key, is_list) =
                    step.strip_suffix("[]").map_or((step, false), |key| (key, true));
                at = &mut at[key];
                at = if is_list { &mut at[0] } else { at };
            }
            *at = (*value).clone();
        }
        format!("{config:#}")
    }

    fn read(text: &str) -> Result<LoadedConfig, Problems> {
        parse("f", text, Path::new(""))
    }

    fn old_names(loaded: &LoadedConfig) -> Vec<&Problem> {
        let is_one = |warning: &&Problem| warning.message.contains("is now called");
        loaded.warnings.iter().filter(is_one).collect()
    }

    /// Line and column of a key, whose name occurs once in the text.
    fn place(text: &str, key: &str) -> (usize, usize) {
        let named = format!("\"{key}\"");
        let mut found = text.lines().enumerate().filter(|(_, line)| line.contains(&named));
        let (line, content) = found.next().unwrap();
        assert!(found.next().is_none(), "{key} is twice in {text}");
        (line + 1, content.find(&named).unwrap() + 1)
    }

    fn last(path: &str) -> &str {
        path.rsplit('.').next().unwrap()
    }

    #[test]
    fn each_renamed_key_is_read_equally_under_both_names() {
        let default = json!(read(&with(&[])).unwrap().config);
        for (old, new) in RENAMED_KEYS {
            let value = sample(new);
            let old_value = if old.ends_with("_ms") { json!(7) } else { value.clone() };
            let (old_text, new_text) = (with(&[(old, &old_value)]), with(&[(new, &value)]));
            let [by_old, by_new] = [&old_text, &new_text].map(|text| {
                read(text).unwrap_or_else(|problems| panic!("{old}, {new}: {problems}"))
            });
            assert_ne!(json!(by_new.config), default, "{new} is read");
            assert_eq!(json!(by_old.config), json!(by_new.config), "{old}, {new}");
            assert!(old_names(&by_new).is_empty(), "{new}");
            let warnings = old_names(&by_old);
            let warning = warnings.last().unwrap_or_else(|| panic!("{old}: no warning"));
            assert_eq!((warning.line, warning.column), place(&old_text, last(old)), "{warning}");
            let path = old.replace("[]", "[0]");
            assert_eq!(warning.message, format!("`{path}` is now called `{}`", last(new)));
            assert!(warning.hint.starts_with(&format!("write `{}`", last(new))), "{warning}");
        }
    }

    #[test]
    fn an_old_and_a_new_name_side_by_side_are_an_error() {
        for (old, new) in RENAMED_KEYS {
            let value = sample(new);
            let beside = format!("{}.{}", new.rsplit_once('.').map_or("", |(at, _)| at), last(old));
            let beside = beside.trim_start_matches('.');
            let text = with(&[(beside, &value), (new, &value)]);
            let problems = read(&text).unwrap_err();
            let [problem] = problems.as_slice() else { panic!("{old}: {problems}") };
            assert_eq!((problem.line, problem.column), place(&text, last(old)), "{problem}");
            let (line, column) = place(&text, last(new));
            let path = beside.replace("[]", "[0]");
            let expected = format!(
                "`{path}` is now called `{}`, which is at {line}:{column} as well",
                last(new)
            );
            assert_eq!(problem.message, expected);
        }
    }

    #[test]
    fn unknown_keys_suggest_new_names_only() {
        for (_, new) in RENAMED_KEYS {
            let section = new.rsplit_once('.').map_or("", |(section, _)| section);
            let misspelt = format!("{section}.{}_", last(new));
            let text = with(&[(misspelt.trim_start_matches('.'), &sample(new))]);
            let problems = read(&text).unwrap_err();
            let [problem] = problems.as_slice() else { panic!("{new}: {problems}") };
            assert!(problem.message.contains("unknown key"), "{problem}");
            assert!(problem.hint.contains(&format!("did you mean `{}`?", last(new))), "{problem}");
            let (_, known) = problem.hint.split_once("known here: ").unwrap();
            for (old, same) in RENAMED_KEYS {
                let is_sibling = same.rsplit_once('.').map_or("", |(at, _)| at) == section;
                let is_known = known.split(", ").any(|key| key == last(old));
                assert!(!(is_sibling && is_known), "{old} in {problem}");
            }
        }
    }

    #[test]
    fn a_renamed_key_stays_in_its_section() {
        for (old, new) in RENAMED_KEYS {
            let Some((old_section, _)) = old.rsplit_once('.') else { continue };
            let (new_section, _) = new.rsplit_once('.').unwrap();
            let row = RENAMED_KEYS.iter().find(|(section, _)| *section == old_section);
            assert_eq!(row.map_or(old_section, |(_, section)| section), new_section, "{old}");
        }
    }

    /// Calls `found` with the path of each key of a schema that has a type of this name.
    fn walk(schema: &Value, at: &Value, path: &str, found: &mut dyn FnMut(&str)) {
        if let Some(name) = at["$ref"].as_str().and_then(|to| to.rsplit('/').next()) {
            match name {
                "Secret" => found(path),
                _ => walk(schema, &schema["$defs"][name], path, found),
            }
        }
        for (key, of) in at["properties"].as_object().into_iter().flatten() {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            walk(schema, of, &path, found);
        }
        if at["items"].is_object() {
            walk(schema, &at["items"], &format!("{path}[]"), found);
        }
        for choice in ["anyOf", "oneOf", "allOf"] {
            for of in at[choice].as_array().into_iter().flatten() {
                walk(schema, of, path, found);
            }
        }
    }

    #[test]
    fn no_message_repeats_a_text_that_was_written_in_place_of_a_secret() {
        let schema = crate::schema();
        let mut secrets = Vec::new();
        walk(&schema, &schema, "", &mut |path| secrets.push(path.to_owned()));
        assert!(secrets.len() >= 7, "{secrets:?}");
        for path in &secrets {
            let is_withheld = ROUTER_PROFILE.secret_keys.iter().any(|key| path.contains(key));
            assert!(is_withheld, "`{path}` is a secret: add it to `secret_keys`");
        }
    }
}
