//! `/score`, `/rerank` and `/classify`, as vLLM answers them.

use serde_json::{Value, json};

use super::embed::{embedding, inputs, list};
use crate::config::SimConfig;
use crate::error::ApiError;

/// The names under which vLLM takes the two texts of a score.
const PAIRS: [[&str; 2]; 4] =
    [["queries", "documents"], ["queries", "items"], ["data_1", "data_2"], ["text_1", "text_2"]];

/// The reply to `/score`: of one text with each of several, or of two lists of the same length.
pub(super) fn score(body: &Value, config: &SimConfig, id: &str) -> Result<Value, ApiError> {
    let is_given = |pair: &&[&str; 2]| pair.iter().all(|member| !body[*member].is_null());
    let missing = || ApiError::bad_request("text_1", "There is nothing to compare.");
    let [one, other] = *PAIRS.iter().find(is_given).ok_or_else(missing)?;
    let pairs = paired(inputs(&body[one], one, config)?, inputs(&body[other], other, config)?)?;
    let data: Vec<Value> = (0..)
        .zip(&pairs)
        .map(|(index, pair): (usize, _)| {
            json!({"index": index, "object": "score", "score": relevance(pair)})
        })
        .collect();
    Ok(list(&format!("score-{id}"), body, data, tokens(&pairs)))
}

/// The reply to `/rerank`: the documents, the most relevant ones first.
pub(super) fn rerank(body: &Value, config: &SimConfig, id: &str) -> Result<Value, ApiError> {
    let query = inputs(&body["query"], "query", config)?;
    let texts = &body["documents"];
    let pairs = paired(query, inputs(texts, "documents", config)?)?;
    let mut results: Vec<(usize, f32)> =
        pairs.iter().map(|pair| relevance(pair)).enumerate().collect();
    results.sort_by(|one, other| other.1.total_cmp(&one.1));
    match body["top_n"].as_u64().and_then(|most| usize::try_from(most).ok()) {
        None | Some(0) => {}
        Some(most) => results.truncate(most),
    }
    let result = |(index, relevance_score): (usize, f32)| {
        let text = if texts.is_array() { &texts[index] } else { texts };
        let document = json!({"text": text, "multi_modal": null});
        json!({"index": index, "document": document, "relevance_score": relevance_score})
    };
    let tokens = tokens(&pairs);
    Ok(json!({
        "id": format!("score-{id}"),
        "model": body["model"],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": results.into_iter().map(result).collect::<Vec<_>>(),
    }))
}

/// The reply to `/classify`: of a model with two classes.
pub(super) fn classify(body: &Value, config: &SimConfig, id: &str) -> Result<Value, ApiError> {
    let prompts = inputs(&body["input"], "input", config)?;
    let data: Vec<Value> = (0..)
        .zip(&prompts)
        .map(|(index, prompt): (usize, _)| {
            let share = relevance(prompt);
            let label = if share > 0.5 { "good" } else { "bad" };
            let probs = [1.0 - share, share];
            json!({"index": index, "label": label, "probs": probs, "num_classes": 2})
        })
        .collect();
    Ok(list(&format!("classify-{id}"), body, data, tokens(&prompts)))
}

/// Each pair as one prompt.
fn paired(one: Vec<Vec<u32>>, other: Vec<Vec<u32>>) -> Result<Vec<Vec<u32>>, ApiError> {
    if one.len() != 1 && one.len() != other.len() {
        let message = "The lists must have the same length, or the first one entry.";
        return Err(ApiError::bad_request("text_1", message));
    }
    let first = one.iter().cycle();
    Ok(first.zip(&other).map(|(one, other)| [&one[..], &other[..]].concat()).collect())
}

fn tokens(prompts: &[Vec<u32>]) -> usize {
    prompts.iter().map(Vec::len).sum()
}

/// The same number for the same tokens, from 0 to 1 in steps of a sixteenth.
fn relevance(prompt: &[u32]) -> f32 {
    embedding(prompt, 1).sum::<f32>() / 2.0 + 0.5
}
