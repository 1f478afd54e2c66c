//! Fields that a client may not steer an engine with, removed in one place.
//!
//! Hand-off fields decide from where a decode engine pulls KV; a single
//! `{"do_remote_prefill": true}` from outside stops a vLLM decode server. They are
//! removed wherever an engine reads them: at the top level and in the nested
//! objects whose members vLLM copies into its sampling parameters. Elsewhere (a
//! tool's schema with a property of that name) bytes stay untouched. Promise 12.

use super::json::JsonObject;
use crate::error::Error;

/// Objects whose members engines read as if they stood at the top level.
const CARRIERS: [&str; 5] =
    ["sampling_params", "vllm_xargs", "extra_args", "extra_body", "custom_params"];

/// Fields that only the router may set.
///
/// vLLM: `kv_transfer_params`, `ec_transfer_params`, `request_id`, `data_parallel_rank`.
/// SGLang: `bootstrap_*`, `rid`, `routed_dp_rank`, `disagg_prefill_dp_rank`.
/// TensorRT-LLM: `disaggregated_params`, `conversation_params`.
const FORBIDDEN: [&str; 9] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "conversation_params",
    "request_id",
    "rid",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
];

const FORBIDDEN_PREFIX: &str = "bootstrap_";

/// How deep carriers are followed into one another. The body's own depth is
/// bounded before; below this, a carrier is dropped instead of searched.
const CARRIER_DEPTH_MAX: u32 = 4;

/// Whether only the router may set this field.
pub fn is_forbidden(key: &str) -> bool {
    FORBIDDEN.contains(&key) || key.starts_with(FORBIDDEN_PREFIX)
}

/// Removes forbidden fields from a body; says how many there were.
///
/// # Errors
/// None beyond those of parsing a nested object, which the body's check excludes.
pub fn sanitise(body: &mut JsonObject) -> Result<usize, Error> {
    strip(body, CARRIER_DEPTH_MAX)
}

fn strip(object: &mut JsonObject, depth: u32) -> Result<usize, Error> {
    let mut removed = object.retain(|key| !is_forbidden(key));
    for carrier in CARRIERS {
        let Some(raw) = object.raw(carrier) else {
            continue;
        };
        if !raw.starts_with('{') {
            continue;
        }
        if depth == 0 {
            object.remove(carrier);
            removed += 1;
            continue;
        }
        let mut nested = JsonObject::parse_str(raw)?;
        let found = strip(&mut nested, depth - 1)?;
        if found > 0 {
            removed += found;
            object.set(carrier, nested.to_string());
        }
    }
    Ok(removed)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn clean(text: &str) -> (usize, String) {
        let mut object = JsonObject::parse_str(text).unwrap();
        let removed = sanitise(&mut object).unwrap();
        (removed, object.to_string())
    }

    #[test]
    fn p12_hand_off_fields_go_and_lookalikes_stay() {
        let tools = r#"[{"function":{"parameters":{"properties":{"kv_transfer_params":{"type":"string"}}}}}]"#;
        let text = format!(
            r#"{{"model":"m","kv\u005ftransfer_params":{{"do_remote_prefill":true}},"tools":{tools},"bootstrap_room":7,"vllm_xargs":{{"a":1,"kv_transfer_params":{{}}}}}}"#
        );
        let (removed, left) = clean(&text);
        assert_eq!(removed, 3);
        assert_eq!(left, format!(r#"{{"model":"m","tools":{tools},"vllm_xargs":{{"a":1}}}}"#));
    }

    fn nest(path: &[usize], field: &str) -> String {
        path.iter().rev().fold(format!("{{\"{field}\":{{\"x\":1}},\"keep\":1}}"), |inner, i| {
            format!("{{\"{}\":{inner},\"keep\":1}}", CARRIERS[*i])
        })
    }

    proptest! {
        #[test]
        fn p12_no_path_of_carriers_hides_a_forbidden_field(
            path in proptest::collection::vec(0..CARRIERS.len(), 0..8),
            which in 0..FORBIDDEN.len() + 1,
        ) {
            let field = FORBIDDEN.get(which).copied().unwrap_or("bootstrap_host");
            let (removed, left) = clean(&nest(&path, field));
            prop_assert_eq!(removed, 1);
            prop_assert!(!left.contains(field), "{left}");
            prop_assert!(left.contains("keep"));
        }
    }
}
