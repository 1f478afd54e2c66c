//! The same where replies have no choices: no engine says it there, and so the words are the
//! router's own, in the members where clients look for why an answer ended.

use bytes::Bytes;
use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;

use super::CACHE_THRESHOLD;
use crate::flow::context::Context;

/// A made-up answer.
pub(super) struct Told {
    dialect: Dialect,
    whole: Value,
}

impl Told {
    /// `None` where replies have choices.
    pub(super) fn new(
        context: &Context,
        id: &str,
        created_s: u64,
        usage: Option<&Value>,
    ) -> Option<Self> {
        let dialect = context.endpoint.dialect();
        let model = context.served.name();
        let whole = match dialect {
            Dialect::Chunks => return None,
            Dialect::Responses => json!({
                "id": format!("resp_{id}"), "object": "response", "created_at": created_s,
                "model": model, "status": "incomplete",
                "incomplete_details": {"reason": CACHE_THRESHOLD}, "error": null, "output": [],
                "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
                "usage": usage,
            }),
            Dialect::Messages => json!({
                "id": format!("msg_{id}"), "type": "message", "role": "assistant",
                "model": model, "content": [], "stop_reason": CACHE_THRESHOLD,
                "stop_sequence": null, "usage": usage,
            }),
        };
        Some(Self { dialect, whole })
    }

    pub(super) fn reply(&self) -> Bytes {
        self.whole.to_string().into()
    }

    pub(super) fn events(&self) -> Vec<Bytes> {
        let whole = &self.whole;
        match self.dialect {
            Dialect::Messages => {
                let mut message = whole.clone();
                message["stop_reason"] = Value::Null;
                vec![
                    event("message_start", json!({"message": message})),
                    event(
                        "message_delta",
                        json!({
                            "delta": {"stop_reason": CACHE_THRESHOLD, "stop_sequence": null},
                            "usage": whole["usage"],
                        }),
                    ),
                    event("message_stop", json!({})),
                ]
            }
            _ => {
                let mut begun = whole.clone();
                begun["status"] = json!("in_progress");
                begun["incomplete_details"] = Value::Null;
                begun["usage"] = Value::Null;
                vec![
                    event("response.created", json!({"response": begun, "sequence_number": 0})),
                    event("response.incomplete", json!({"response": whole, "sequence_number": 1})),
                ]
            }
        }
    }
}

fn event(name: &str, mut data: Value) -> Bytes {
    data["type"] = json!(name);
    format!("event: {name}\ndata: {data}").into()
}
