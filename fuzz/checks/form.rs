//! A form with a recording, behind the first line, its content type: it is refused, or what is written
//! of it for engines reads the same and holds no field that clients must not set.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use splitrail_api::form::{self, Boundary};
use splitrail_api::memory_budget::{Allowance, MemoryBudget, Meter, full};
use splitrail_api::request::Prompt;
use splitrail_api::{Endpoint, Inbound};
use splitrail_config::Limits;

const FOR_ENGINES: &str = "0123456789abcdef0123456789abcdef";

fn for_engines() -> Boundary {
    let kind = format!("multipart/form-data; boundary={FOR_ENGINES}");
    Boundary::of_content_type(kind.as_bytes()).expect("a boundary")
}

pub(crate) fn check(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (kind, body) = (&data[..end], &data[(end + 1).min(data.len())..]);
    let Some(boundary) = Boundary::of_content_type(kind) else { return };
    // A client cannot know the boundary for engines.
    if body.windows(FOR_ENGINES.len()).any(|part| part == FOR_ENGINES.as_bytes()) {
        return;
    }
    let body = Bytes::copy_from_slice(body);
    let (fields, recording) = match form::read(&body, &boundary, for_engines()) {
        Ok(read) => read,
        Err(error) => return assert_eq!(error.status(), 400, "{error}"),
    };
    let charge = Arc::new(MemoryBudget::default()).charge();
    let (limits, mut work) = (Limits::default(), Meter::new(charge, usize::MAX, &full));
    let allowance = Allowance { limits: &limits, work: &mut work };
    let prompt = Some(Prompt::Recording(recording.clone()));
    let read = Inbound::read(Endpoint::Transcriptions, fields, prompt, allowance, |_| &[]);
    let Ok(inbound) = read else { return };
    let sent = inbound.body.to_bytes();
    let value: Value = serde_json::from_slice(&sent).expect("JSON");
    for name in ["kv_transfer_params", "rid", "priority", "cache_salt", "request_id"] {
        assert!(value[name].is_null() && value["vllm_xargs"][name].is_null(), "{name}");
    }
    let written = recording.write(&inbound.body).into_bytes();
    let (again, same) = form::read(&written, &for_engines(), for_engines()).expect("a form");
    let written_again = same.write(&again).into_bytes();
    assert_eq!(written_again, written);
}
