//! Bootstrap servers of prefill workers, needed by connectors that send both legs at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use http::uri::Authority;
use splitrail_engine::connectors::mooncake::{
    BOOTSTRAP_PORT, EngineIds, MAX_QUERY_BYTES, QUERY_PATH,
};
use tokio::sync::Mutex;

use splitrail_api::error::Error;
use splitrail_engine_client::{Engine, EngineClient};

/// A prefill worker's bootstrap server, and the engine ids that it last reported.
#[derive(Debug)]
pub struct Bootstrap {
    authority: Authority,
    known: ArcSwapOption<EngineIdentity>,
    /// Allows one query at a time. Holds the time of the last failed query.
    asking: Mutex<Option<Instant>>,
}

/// Minimum time after a failed query: requests that waited for it must not each query again.
const QUIET: Duration = Duration::from_secs(1);

/// The ids of the engine behind a worker. They change when the engine is restarted.
#[derive(Debug, PartialEq, Eq)]
pub struct EngineIdentity(EngineIds);

impl EngineIdentity {
    /// The engine id, and the rank that requests must be pinned to if there are several: the given
    /// rank, or otherwise the first. `None` if there is no such rank.
    pub fn of_rank(&self, rank: Option<u16>) -> Option<(&str, Option<u32>)> {
        let engine = self.0.of_rank(rank.map(u32::from))?;
        Some((engine.id, (!engine.is_only).then_some(engine.rank)))
    }
}

impl Bootstrap {
    /// A bootstrap server at `configured` (`http://HOST:PORT`), or otherwise at the default port on
    /// the worker's host. `None` if the address is invalid.
    pub fn new(configured: Option<&str>, worker: &Authority) -> Option<Self> {
        let authority = match configured {
            Some(url) => url.strip_prefix("http://")?.parse().ok()?,
            None => format!("{}:{BOOTSTRAP_PORT}", worker.host()).parse().ok()?,
        };
        Some(Self { authority, known: ArcSwapOption::empty(), asking: Mutex::default() })
    }

    /// The URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// Host and port of the server.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The host of the server, without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        let host = self.authority.host();
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }

    /// The port of the server.
    pub fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(BOOTSTRAP_PORT)
    }

    /// The engine's ids, queried from the server if they are not known yet.
    ///
    /// # Errors
    /// If the server cannot be queried or its reply is invalid.
    pub async fn engine(
        &self,
        client: &EngineClient,
        worker: &impl Engine,
    ) -> Result<Arc<EngineIdentity>, Error> {
        if let Some(engine) = self.known.load_full() {
            return Ok(engine);
        }
        let mut failed = self.asking.lock().await;
        if let Some(engine) = self.known.load_full() {
            return Ok(engine);
        }
        let unknown = |what: &str| {
            let what = format!("cannot hand over, its bootstrap server: {what}");
            Error::engine(worker.id(), &what)
        };
        if failed.is_some_and(|at| at.elapsed() < QUIET) {
            return Err(unknown("it did not answer a moment ago"));
        }
        match self.query(client, worker.is_guarded()).await {
            Ok(engine) => {
                *failed = None;
                let engine = Arc::new(engine);
                self.known.store(Some(Arc::clone(&engine)));
                Ok(engine)
            }
            Err(what) => {
                *failed = Some(Instant::now());
                Err(unknown(&what))
            }
        }
    }

    async fn query(&self, client: &EngineClient, guarded: bool) -> Result<EngineIdentity, String> {
        let text = client.ask(&self.authority, guarded, QUERY_PATH, MAX_QUERY_BYTES).await?;
        let ids = EngineIds::parse(&text).map_err(|error| error.to_string())?;
        Ok(EngineIdentity(ids))
    }

    /// Forgets all ids, since the engine's process is or may be another one.
    pub fn forget_process(&self) {
        self.known.store(None);
    }

    /// Forgets the ids of an engine with which a transfer failed, unless newer ids are known by
    /// now: a restarted engine has other ids.
    pub fn forget(&self, engine: &Arc<EngineIdentity>) {
        let known = self.known.load();
        if known.as_ref().is_some_and(|known| Arc::ptr_eq(known, engine)) {
            self.known.compare_and_swap(&known, None);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_where_it_is_configured_or_usual() {
        let at = |configured, worker: &str| {
            let server = Bootstrap::new(configured, &worker.parse().unwrap()).unwrap();
            (server.url(), server.host().to_owned(), server.port())
        };
        assert_eq!(
            at(None, "10.0.0.1:8000"),
            ("http://10.0.0.1:8998".into(), "10.0.0.1".into(), 8998)
        );
        assert_eq!(
            at(None, "[fd00::1]:80"),
            ("http://[fd00::1]:8998".into(), "fd00::1".into(), 8998)
        );
        assert_eq!(
            at(Some("http://boot:9"), "10.0.0.1:8000"),
            ("http://boot:9".into(), "boot".into(), 9)
        );
    }

    #[test]
    fn the_ids_of_an_engine_are_forgotten_with_its_process() {
        let worker = crate::worker::tests::worker("w");
        let server = worker.transfer.bootstrap.as_ref().unwrap();
        let ids = EngineIds::parse(r#"{"0": {"engine_id": "a"}}"#).unwrap();
        server.known.store(Some(Arc::new(EngineIdentity(ids))));
        worker.becomes_another();
        assert!(server.known.load().is_none());
    }
}
