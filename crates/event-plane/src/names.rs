//! Names of subjects and stores. The names of models and workers may contain characters that a
//! subject may not, so they are encoded as tokens; different names have different tokens.

use xxhash_rust::xxh3::xxh3_128;

/// The prefix of all subjects.
const ROOT: &str = "splitrail.v1";
/// Maximum length of a token; a longer one is cut, and a hash is appended.
const TOKEN_MAX: usize = 120;

/// A name as one token: letters, digits and `-` are kept, any other byte becomes `_` and its two
/// hexadecimal digits.
#[must_use]
pub fn token(name: &str) -> String {
    let mut token = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte.is_ascii_alphanumeric() || byte == b'-' {
            true => token.push(char::from(byte)),
            false => token.push_str(&format!("_{byte:02x}")),
        }
    }
    if token.is_empty() || token.len() > TOKEN_MAX {
        // No other token contains two underscores in a row.
        token.truncate(TOKEN_MAX - 34);
        token.push_str(&format!("__{:032x}", xxh3_128(name.as_bytes())));
    }
    token
}

/// The subject of a worker's changes.
#[must_use]
pub fn kv(model: &str, worker: &str) -> String {
    format!("{ROOT}.kv.{}.{}", token(model), token(worker))
}

/// The subjects of all workers' changes of a model.
#[must_use]
pub fn kv_of_all(model: &str) -> String {
    format!("{ROOT}.kv.{}.*", token(model))
}

/// The subject of a shim's heartbeats.
#[must_use]
pub fn load(model: &str, worker: &str) -> String {
    format!("{ROOT}.load.{}.{}", token(model), token(worker))
}

/// The subjects of the heartbeats of all workers of a model.
#[must_use]
pub fn load_of_all(model: &str) -> String {
    format!("{ROOT}.load.{}.*", token(model))
}

/// The subject of requests to all shims of a model.
#[must_use]
pub fn ask_all(model: &str) -> String {
    format!("{ROOT}.ask.{}", token(model))
}

/// The subject of requests to one shim.
#[must_use]
pub fn ask(model: &str, worker: &str) -> String {
    format!("{ROOT}.ask.{}.{}", token(model), token(worker))
}

/// The subject at which shims ask routers how they hash the blocks of a model, by the engine's name
/// of the model.
#[must_use]
pub fn terms(engine_model: &str) -> String {
    format!("{ROOT}.terms.{}", token(engine_model))
}

/// The subjects of the requests for hash terms of all models.
#[must_use]
pub fn terms_of_all() -> String {
    format!("{ROOT}.terms.*")
}

/// The stream with a model's changes.
#[must_use]
pub fn stream(model: &str) -> String {
    format!("splitrail_kv_{}", token(model))
}

/// The bucket with the snapshots of a model's workers.
#[must_use]
pub fn bucket(model: &str) -> String {
    format!("splitrail_snapshots_{}", token(model))
}

/// The name of a router's durable consumer.
#[must_use]
pub fn durable(router: &str) -> String {
    format!("splitrail_{}", token(router))
}

/// The last token of a subject: the worker's, if the subject has one.
#[must_use]
pub fn last(subject: &str) -> &str {
    subject.rsplit('.').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_safe_and_different_for_different_names() {
        let long = "x".repeat(300);
        let longer = "x".repeat(301);
        let dots = ".".repeat(128);
        let names = [
            "qwen3-8b",
            "Qwen/Qwen3-8B",
            "Qwen_2fQwen3-8B",
            "p0",
            "p.0",
            "p_0",
            "a b",
            "*",
            ">",
            "",
            "é",
            &long,
            &longer,
            &dots,
        ];
        let tokens: std::collections::BTreeSet<_> = names.iter().map(|name| token(name)).collect();
        assert_eq!(tokens.len(), names.len());
        for token in &tokens {
            let is_safe = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            assert!(!token.is_empty() && token.len() <= TOKEN_MAX && token.chars().all(is_safe));
        }
        assert_eq!(token("Qwen/Qwen3-8B"), "Qwen_2fQwen3-8B");
        assert_eq!(kv("m", "p.0"), "splitrail.v1.kv.m.p_2e0");
        assert_eq!(last(&kv("m", "p.0")), token("p.0"));
    }
}
