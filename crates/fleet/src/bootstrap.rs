//! Bootstrap servers of prefill workers, where both legs of a request are sent at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use http::uri::Authority;
use splitrail_engine::mooncake::{BOOTSTRAP_PORT, EngineIds, MAX_QUERY_BYTES, QUERY_PATH};
use tokio::sync::Mutex;

use splitrail_api::error::Error;
use splitrail_engine_client::{Engine, EngineClient};

/// A prefill worker's bootstrap server, and what it last said of its engine.
#[derive(Debug)]
pub struct Bootstrap {
    authority: Authority,
    known: ArcSwapOption<EngineIdentity>,
    /// One question at a time; with the instant of the last that was in vain.
    asking: Mutex<Option<Instant>>,
}

/// Between two questions to a server that does not answer: those who wait for the first
/// must not each ask again.
const QUIET: Duration = Duration::from_secs(1);

/// Who the engine behind a worker is, until it is started again.
#[derive(Debug, PartialEq, Eq)]
pub struct EngineIdentity(EngineIds);

impl EngineIdentity {
    /// Its id, and the rank that requests must be pinned to, if it has several: the one that
    /// is wished for, else its first. `None` if there is no such rank.
    pub fn of_rank(&self, rank: Option<u16>) -> Option<(&str, Option<u32>)> {
        let (rank, id, several) = match rank.map(u32::from) {
            Some(rank) => self.0.of_rank(rank).map(|(id, several)| (rank, id, several))?,
            None => self.0.first()?,
        };
        Some((id, several.then_some(rank)))
    }
}

impl Bootstrap {
    /// A bootstrap server at `configured` (`http://HOST:PORT`), else at its usual port on
    /// the worker's host.
    pub fn new(configured: Option<&str>, worker: &Authority) -> Option<Self> {
        let authority = match configured {
            Some(url) => url.strip_prefix("http://")?.parse().ok()?,
            None => format!("{}:{BOOTSTRAP_PORT}", worker.host()).parse().ok()?,
        };
        Some(Self { authority, known: ArcSwapOption::empty(), asking: Mutex::default() })
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// Its host, without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        let host = self.authority.host();
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(BOOTSTRAP_PORT)
    }

    /// The engine's id: as known, else as asked now.
    ///
    /// # Errors
    /// If the server cannot be asked, or answers nonsense.
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

    /// Forgets an engine with which a transfer failed, unless another one is known by now:
    /// an engine that was started again has another id.
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
}
