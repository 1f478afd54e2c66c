//! Names of subjects and stores. The names of models and workers may contain characters
//! that a subject may not: so they are encoded as tokens, different ones for different names.

use xxhash_rust::xxh3::xxh3_128;

/// What all subjects begin with.
const ROOT: &str = "splitrail.v1";
/// Longest token; a longer one keeps its beginning only, with a hash behind it.
const TOKEN_MAX: usize = 120;

/// A name as one token: letters, digits and `-` as they are, any other byte as `_` and its
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
        // Two in a row stand in no other token.
        token.truncate(TOKEN_MAX - 34);
        token.push_str(&format!("__{:032x}", xxh3_128(name.as_bytes())));
    }
    token
}

/// Where a worker's changes are published.
#[must_use]
pub fn kv(model: &str, worker: &str) -> String {
    format!("{ROOT}.kv.{}.{}", token(model), token(worker))
}

/// Where those of all workers of a model are.
#[must_use]
pub fn kv_of_all(model: &str) -> String {
    format!("{ROOT}.kv.{}.*", token(model))
}

/// Where a worker's shim says how it is.
#[must_use]
pub fn load(model: &str, worker: &str) -> String {
    format!("{ROOT}.load.{}.{}", token(model), token(worker))
}

/// Where those of all workers of a model do.
#[must_use]
pub fn load_of_all(model: &str) -> String {
    format!("{ROOT}.load.{}.*", token(model))
}

/// Where all shims of a model are asked.
#[must_use]
pub fn ask_all(model: &str) -> String {
    format!("{ROOT}.ask.{}", token(model))
}

/// Where one is.
#[must_use]
pub fn ask(model: &str, worker: &str) -> String {
    format!("{ROOT}.ask.{}.{}", token(model), token(worker))
}

/// Where routers are asked how they hash blocks of a model, by the engine's name for it.
#[must_use]
pub fn terms(engine_model: &str) -> String {
    format!("{ROOT}.terms.{}", token(engine_model))
}

/// Where they are asked for any.
#[must_use]
pub fn terms_of_all() -> String {
    format!("{ROOT}.terms.*")
}

/// The stream that keeps a model's changes.
#[must_use]
pub fn stream(model: &str) -> String {
    format!("splitrail_kv_{}", token(model))
}

/// The bucket that keeps snapshots of a model's workers.
#[must_use]
pub fn bucket(model: &str) -> String {
    format!("splitrail_snapshots_{}", token(model))
}

/// The durable consumer of a router.
#[must_use]
pub fn durable(router: &str) -> String {
    format!("splitrail_{}", token(router))
}

/// The last token of a subject: the worker's, where there is one.
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
