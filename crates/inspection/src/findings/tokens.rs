//! Tokens, and the small prompt that the engine served.

use splitrail_prompt::compare::Difference;

use super::list::Findings;
use crate::facts::{TokenDifference, TokensFact, TrialFact, WorkerFacts};
use crate::finding::FindingKind;

/// The remedy if only tokens at the ends differ.
const SPECIAL: &str = "the engine adds or leaves out a special token (BOS, EOS): use the same \
    `tokenizer_config.json` on both sides, and a template that does not write BOS twice";

pub(super) fn check(found: &mut Findings<'_>, worker: &WorkerFacts) {
    compared(found, FindingKind::TextDiffers, "text", &worker.text_tokens);
    // With another vocabulary, the effect of the template cannot be seen.
    let other_vocabulary = matches!(&worker.text_tokens, TokensFact::Differ(difference)
        if difference.shape == Difference::Other);
    if !other_vocabulary {
        compared(found, FindingKind::ChatDiffers, "chat", &worker.chat_tokens);
    }
    match &worker.trial {
        TrialFact::Untested | TrialFact::Served { reports_cached_tokens: true } => {}
        TrialFact::Served { reports_cached_tokens: false } => {
            let what = "the engine's usage has no `prompt_tokens_details.cached_tokens`";
            found.add(FindingKind::DetailsOff, what.to_owned());
        }
        TrialFact::Embedded => {}
        TrialFact::Refused { status, message } => {
            let what =
                format!("the engine does not serve a small prompt: status {status}: {message}");
            found.add(FindingKind::TrialFailed, what);
        }
        TrialFact::NoReply(why) => {
            found.add(
                FindingKind::TrialLate,
                format!("the engine does not serve a small prompt: {why}"),
            );
        }
    }
}

fn compared(found: &mut Findings<'_>, kind: FindingKind, what: &str, fact: &TokensFact) {
    match fact {
        TokensFact::Untested | TokensFact::Agree(_) => {}
        TokensFact::Inexact(reason) => {
            let what = format!("the router cannot tokenise a {what}: {reason}");
            found.add(FindingKind::TokenizerInexact, what);
        }
        TokensFact::Unavailable(status) => {
            // Once is enough.
            if found.list.last().is_none_or(|last| last.kind != FindingKind::TokensUnknown) {
                let why = status_text(*status);
                let what = format!("tokens are not compared: `/tokenize` of the engine: {why}");
                found.add(FindingKind::TokensUnknown, what);
            }
        }
        TokensFact::Missing(status) => {
            // Once is enough.
            if found.list.last().is_none_or(|last| last.kind != FindingKind::NoTokens) {
                let why = status_text(*status);
                let what = format!(
                    "the engine makes no tokens for the router (`tokenizer: engine`): `/tokenize`: {why}"
                );
                found.add(FindingKind::NoTokens, what);
            }
        }
        TokensFact::Differ(difference) => {
            let what = described(what, difference);
            match difference.shape {
                Difference::Ends => found.add_with(kind, what, SPECIAL.to_owned()),
                _ => found.add(kind, what),
            }
        }
    }
}

fn status_text(status: Option<u16>) -> String {
    status.map_or_else(|| "no reply".to_owned(), |status| format!("status {status}"))
}

/// The first difference in words. The prompt is the check's own, so that its tokens are no secret.
fn described(what: &str, difference: &TokenDifference) -> String {
    let token = |token: Option<u32>| match token {
        Some(id) => format!("token {id}"),
        None => "no token".to_owned(),
    };
    let TokenDifference { router_count, engine_count, at, router_token, engine_token, .. } =
        difference;
    let texts = difference.engine_text.as_ref().zip(difference.router_text.as_ref());
    let texts = texts.filter(|(engine, router)| engine != router).map(|(engine, router)| {
        format!("; around it, the engine has `{engine}` and the router `{router}`")
    });
    let numbers = format!(
        "the engine makes {engine_count} tokens of a {what} of which the router makes \
         {router_count}; the first difference is at position {at}: {} of the engine, {} of the \
         router",
        token(*engine_token),
        token(*router_token),
    );
    numbers + &texts.unwrap_or_default()
}
