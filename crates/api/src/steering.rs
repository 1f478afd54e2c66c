//! The request headers with which a client influences routing.

use std::fmt::Display;
use std::str::FromStr;
use std::time::{Duration, Instant};

use http::header::{HeaderMap, HeaderName};

use super::request::check_threshold;
use crate::error::Error;
use crate::shares::ClientShare;
use splitrail_config::model::{Model, RequestFlow};

/// The common prefix of all these headers.
const PREFIX: &str = "x-splitrail-";
const FLOW: &str = "x-splitrail-flow";
/// Header that selects the flow.
pub const X_FLOW: HeaderName = HeaderName::from_static(FLOW);
/// Header with the `cache_hit_threshold` of a request whose body has none.
pub const X_THRESHOLD: HeaderName = HeaderName::from_static("x-splitrail-cache-hit-threshold");

/// Header with the priority: requests with higher numbers are served first.
pub const X_PRIORITY: HeaderName = HeaderName::from_static("x-splitrail-priority");
/// Header with the goal for the time to first token, in milliseconds from the request's arrival.
pub const X_TTFT: HeaderName = HeaderName::from_static("x-splitrail-ttft-ms");
const PRIORITY_MAX: i32 = 100;
const TTFT_MAX_MS: u32 = 86_400_000;

/// What determines a request's place in the queue.
#[derive(Clone, Copy, Debug)]
pub struct Urgency {
    /// When the request arrived.
    pub arrived: Instant,
    /// The priority; higher classes are served first.
    pub class: i32,
    /// The client whose share of the queue the request counts towards.
    pub client: ClientShare,
    /// A number for the session of the client; 0 if it names none.
    pub session: u64,
    /// When the first token should arrive.
    pub deadline: Option<Instant>,
}

/// What the headers of a request ask for. `None` means the model's configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Steering {
    /// The requested flow.
    pub flow: Option<RequestFlow>,
    /// The requested cache hit threshold, from 0 to 1.
    pub threshold: Option<f64>,
    /// The requested priority; higher ones are served first.
    pub priority: Option<i32>,
    /// The requested time to first token, in milliseconds from the request's arrival.
    pub ttft_ms: Option<u32>,
}

impl Steering {
    /// Reads a request's headers.
    ///
    /// # Errors
    /// A 400 that names the header.
    pub fn read(headers: &HeaderMap) -> Result<Self, Error> {
        // Fast path: few requests have such headers.
        if !headers.keys().any(|name| name.as_str().starts_with(PREFIX)) {
            return Ok(Self::default());
        }
        let flow = headers.get(X_FLOW).map(|value| {
            let text = value.to_str().unwrap_or_default().trim();
            let known = RequestFlow::ALL.into_iter().find(|flow| flow.name() == text);
            known.ok_or_else(|| Error::invalid(FLOW, unknown_flow()))
        });
        let threshold = headers.get(X_THRESHOLD).map(|value| {
            let number = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
            check_threshold(number.unwrap_or(f64::NAN))
        });
        let priority = number(headers, &X_PRIORITY, -PRIORITY_MAX, PRIORITY_MAX)?;
        let ttft_ms = number(headers, &X_TTFT, 1, TTFT_MAX_MS)?;
        Ok(Self { flow: flow.transpose()?, threshold: threshold.transpose()?, priority, ttft_ms })
    }

    /// The urgency of the request in the model's queue. The priority is limited to the model's
    /// `queue.priority_max`, and to `priority_max` of the client's tenant. The
    /// client's share of the queue is divided among its sessions.
    pub fn urgency(
        self,
        model: &Model,
        arrived: Instant,
        (client, session): (ClientShare, u64),
        priority_max: Option<i32>,
    ) -> Urgency {
        let most = model.queue.map_or(0, |queue| queue.priority_max);
        let most = priority_max.map_or(most, |of_tenant| of_tenant.min(most));
        let deadline = self.ttft_ms.map(|ms| arrived + Duration::from_millis(ms.into()));
        let class = self.priority.unwrap_or(0).min(most);
        Urgency { arrived, class, client, session, deadline }
    }

    /// The flow of the request: the requested one, or the model's.
    ///
    /// # Errors
    /// A 400 if the model's configuration does not allow it.
    pub fn flow_for(self, model: &Model) -> Result<RequestFlow, Error> {
        let own = RequestFlow::from(model.flow);
        match self.flow {
            Some(flow) if flow != own && !model.request_flows.contains(&flow) => {
                let name = flow.name();
                let message = format!("this model does not allow the flow {name} (request_flows)");
                Err(Error::invalid(FLOW, message))
            }
            flow => Ok(flow.unwrap_or(own)),
        }
    }
}

/// Reads an integer from a header, if the header is present.
fn number<N: FromStr + PartialOrd + Display>(
    headers: &HeaderMap,
    name: &HeaderName,
    least: N,
    most: N,
) -> Result<Option<N>, Error> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse::<N>().ok());
    let number = number.filter(|number| (&least..=&most).contains(&number));
    let message = || format!("`{name}` must be a whole number from {least} to {most}");
    number.map(Some).ok_or_else(|| Error::invalid(name.as_str().to_owned(), message()))
}

fn unknown_flow() -> String {
    let names = RequestFlow::ALL.map(RequestFlow::name).join(", ");
    format!("`{FLOW}` must be one of {names}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(name: HeaderName, value: &str) -> Result<Steering, Error> {
        Steering::read(&HeaderMap::from_iter([(name, value.parse().unwrap())]))
    }

    #[test]
    fn steering_headers_are_read_or_refused_by_name() {
        assert_eq!(Steering::read(&HeaderMap::new()).unwrap(), Steering::default());
        for flow in RequestFlow::ALL {
            assert_eq!(read(X_FLOW, flow.name()).unwrap().flow, Some(flow));
        }
        assert_eq!(read(X_THRESHOLD, " 0.25 ").unwrap().threshold, Some(0.25));
        for bad in ["", "Auto", "prefill-first", "auto, auto"] {
            let error = read(X_FLOW, bad).unwrap_err();
            assert!(error.to_openai().contains("x-splitrail-flow"), "{bad}");
        }
        assert_eq!(read(X_PRIORITY, "-3").unwrap().priority, Some(-3));
        assert_eq!(read(X_TTFT, " 250").unwrap().ttft_ms, Some(250));
        for (name, bad) in [(X_PRIORITY, "101"), (X_PRIORITY, "1.5"), (X_TTFT, "0")] {
            let error = read(name.clone(), bad).unwrap_err();
            assert!(error.to_openai().contains(name.as_str()), "{bad}");
        }
        for bad in ["", "1.01", "-0.1", "nan", "inf", "high", "0,5"] {
            assert_eq!(read(X_THRESHOLD, bad).unwrap_err().status(), 400, "{bad}");
        }
    }
}
