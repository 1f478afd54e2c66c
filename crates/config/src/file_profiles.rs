//! What the general checks of configuration files need to know about the router.

use splitrail_settings::FileProfile;

/// What the checks of the router's file need to know: keys whose values are secret, and hints.
pub(super) const ROUTER_PROFILE: FileProfile = FileProfile {
    variables: true,
    secret_keys: &[
        "engine_api_key",
        "fleet.token",
        "quotas.login",
        "cache_salt_key",
        "tracing.otlp.headers",
    ],
    hints: &[(
        "auth",
        "write `- { kind: keys, file: keys.yaml }`; `splitrail keys new --tenant NAME --file keys.yaml` \
         makes a key and its entry there",
    )],
    empty: "write `models:` with the name and the engines of a model, or serve one without a file: \
            `splitrail serve --model NAME --prefill URL --decode URL`",
    too_large: "split the fleet over several routers",
};

/// Like `ROUTER_PROFILE`, for a worker that an operator adds while the router runs.
pub(super) const ADDITION_PROFILE: FileProfile = FileProfile {
    // The worker is in a request: its sender must not see the router's environment.
    variables: false,
    ..ROUTER_PROFILE
};

/// The hints of the checks of a file of API keys.
pub(super) const KEYS_PROFILE: FileProfile = FileProfile {
    variables: false,
    // The empty text is part of each path: a key may stand anywhere in place of its hash.
    secret_keys: &[""],
    hints: &[],
    empty: "write `keys: []`, or add keys with `splitrail keys new`",
    too_large: "use several entries of `auth`, each with a file of its own",
};

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::ROUTER_PROFILE;

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
