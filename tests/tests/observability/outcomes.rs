//! The outcomes of errors are known values of labels, so that their counters exist from the start.

use std::collections::BTreeSet;

use splitrail_api::error::{Error, ErrorKind, Fault, LimitReached};
use splitrail_flow::decide::plan::LocalReason;
use splitrail_telemetry::Metrics;

/// What the outcome of a kind of error may be the reason of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndOf {
    /// Attempts: an engine is at fault.
    Attempts,
    /// Requests whose model is known, and which may have made an engine work.
    Requests,
    /// Requests that never reach an engine.
    Arrivals,
}

/// Makes `end_of`, which does not compile without an entry for each kind of error, and the list of the
/// kinds.
macro_rules! kinds {
    ($($kind:pat => $example:expr, $end:ident;)+) => {
        fn end_of(kind: ErrorKind) -> EndOf {
            match kind {
                $($kind => EndOf::$end,)+
            }
        }

        fn kinds() -> Vec<ErrorKind> {
            vec![$($example),+]
        }
    };
}

const LIMIT: LimitReached =
    LimitReached { limit: "requests_per_minute", unit: "requests", retry_after_ms: Some(1) };

const FULL: ErrorKind = ErrorKind::EngineFull { status: 429, retry_after_s: 1 };

kinds! {
    ErrorKind::EngineRejected(_) => ErrorKind::EngineRejected(407), Attempts;
    ErrorKind::EngineFull { .. } => FULL, Attempts;
    ErrorKind::EngineLacksPath => ErrorKind::EngineLacksPath, Attempts;
    ErrorKind::EngineLacksModel => ErrorKind::EngineLacksModel, Attempts;
    ErrorKind::EngineLost => ErrorKind::EngineLost, Attempts;
    ErrorKind::EngineUnreachable => ErrorKind::EngineUnreachable, Attempts;
    ErrorKind::EngineFailed => ErrorKind::EngineFailed, Attempts;
    ErrorKind::StaleConnection => ErrorKind::StaleConnection, Attempts;
    ErrorKind::ForeignReply => ErrorKind::ForeignReply, Attempts;
    ErrorKind::ForeignHandOff => ErrorKind::ForeignHandOff, Attempts;
    ErrorKind::LoopDetected => ErrorKind::LoopDetected, Attempts;
    ErrorKind::EngineTimeout => ErrorKind::EngineTimeout, Attempts;
    ErrorKind::BelowThreshold => ErrorKind::BelowThreshold, Attempts;
    ErrorKind::LeaseExpired => ErrorKind::LeaseExpired, Attempts;
    ErrorKind::DecodeLost => ErrorKind::DecodeLost, Attempts;
    ErrorKind::ClientGone => ErrorKind::ClientGone, Requests;
    ErrorKind::NoWorker => ErrorKind::NoWorker, Requests;
    ErrorKind::Busy(_) => ErrorKind::Busy(1), Requests;
    ErrorKind::Overloaded => ErrorKind::Overloaded, Requests;
    ErrorKind::OverShare => ErrorKind::OverShare, Requests;
    ErrorKind::NotOffered => ErrorKind::NotOffered, Requests;
    ErrorKind::ReplyTooLarge => ErrorKind::ReplyTooLarge, Requests;
    ErrorKind::InvalidRequest => ErrorKind::InvalidRequest, Requests;
    ErrorKind::RouterStopping => ErrorKind::RouterStopping, Requests;
    ErrorKind::Internal => ErrorKind::Internal, Requests;
    ErrorKind::BodyTooLarge => ErrorKind::BodyTooLarge, Arrivals;
    ErrorKind::BodyTimeout => ErrorKind::BodyTimeout, Arrivals;
    ErrorKind::UnsupportedMedia => ErrorKind::UnsupportedMedia, Arrivals;
    ErrorKind::ForbiddenHost => ErrorKind::ForbiddenHost, Arrivals;
    ErrorKind::Unauthenticated => ErrorKind::Unauthenticated, Arrivals;
    ErrorKind::NotPermitted => ErrorKind::NotPermitted, Arrivals;
    ErrorKind::LimitReached(_) => ErrorKind::LimitReached(LIMIT), Arrivals;
    ErrorKind::UnknownModel => ErrorKind::UnknownModel, Arrivals;
    ErrorKind::UnknownPath => ErrorKind::UnknownPath, Arrivals;
    ErrorKind::MethodNotAllowed => ErrorKind::MethodNotAllowed, Arrivals;
}

/// The values of a label that the table of metrics lists.
fn values(metric: &str, label: &str) -> BTreeSet<&'static str> {
    let metric = Metrics::definitions().iter().find(|one| one.name == metric).unwrap();
    let label = metric.labels.iter().find(|one| one.name == label).unwrap();
    label.values.unwrap().iter().copied().collect()
}

fn errors(end: EndOf) -> Vec<Error> {
    let kinds = kinds().into_iter().filter(|kind| end_of(*kind) == end);
    kinds.map(|kind| Error::new(kind, "")).collect()
}

#[test]
fn the_outcomes_of_all_errors_are_known_values_of_labels() {
    let attempts = errors(EndOf::Attempts);
    assert!(attempts.iter().all(|error| error.fault() == Fault::Engine), "{attempts:?}");
    let failures: BTreeSet<_> = attempts.iter().map(Error::outcome).collect();
    for metric in ["retries_total", "worker_leg_failures_total"] {
        assert_eq!(values(metric, "reason"), failures, "{metric}");
    }
    let requests = errors(EndOf::Requests);
    let others: Vec<_> =
        requests.iter().chain(&errors(EndOf::Arrivals)).map(Error::fault).collect();
    assert!(!others.contains(&Fault::Engine), "engines make attempts fail: {others:?}");
    let mut waste = failures;
    waste.extend(requests.iter().map(Error::outcome));
    // A prefill leg that handed nothing over, and a leg that another attempt has replaced.
    waste.extend([LocalReason::NoHandOff, LocalReason::PrefillEnded].map(LocalReason::name));
    waste.insert("superseded");
    assert_eq!(values("wasted_prompt_tokens_total", "reason"), waste);
}

#[test]
fn the_results_of_all_errors_are_known_values_of_labels() {
    let known = values("request_results_total", "result");
    for kind in kinds() {
        let result = Error::new(kind, "").result();
        assert!(known.contains(result), "{kind:?}: {result}");
        let is_shed = matches!(
            kind,
            ErrorKind::Overloaded
                | ErrorKind::OverShare
                | ErrorKind::Busy(_)
                | ErrorKind::EngineFull { .. }
        );
        assert_eq!(result == "shed", is_shed, "{kind:?}: {result}");
    }
}
