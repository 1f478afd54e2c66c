//! A router in this process, for workloads that call its parts directly, and configurations of
//! routers.

use std::sync::Arc;

use splitrail_fleet::ServedModel;
use splitrail_router::assemble::assemble;
use splitrail_router::run::Running;
use splitrail_sim::write_tokenizer;
use tempfile::TempDir;

use super::Failure;

/// The name of the only model.
pub(super) const MODEL: &str = "sim";

/// A running router whose configuration lists no workers.
pub(super) struct Router {
    /// The router.
    pub(super) running: Running,
    /// The model that the router serves.
    pub(super) served: Arc<ServedModel>,
    _files: TempDir,
}

impl Router {
    /// Starts a router.
    ///
    /// # Errors
    /// No port is free, or a file cannot be written.
    pub(super) async fn start(block_size: u32) -> Result<Self, Failure> {
        let files = tempfile::tempdir()?;
        write_tokenizer(files.path())?;
        let any = "127.0.0.1:0".parse()?;
        let yaml = yaml([any; 3], block_size);
        let loaded = splitrail_config::parse("bench.yaml", &yaml, files.path());
        let config = loaded.map_err(|problems| problems.to_string())?.config;
        let listen = config.listen.clone();
        let running = Running::start(assemble(config, None)?, &listen).await?;
        let serving = running.core.serving();
        let served = Arc::clone(serving.model(MODEL).ok_or("the router does not serve the model")?);
        Ok(Self { running, served, _files: files })
    }
}

/// A configuration with listeners for requests, operators and shims. The canary is disabled,
/// because scripted engines have no tokenizer.
pub(super) fn yaml([http, admin, fleet]: [std::net::SocketAddr; 3], block_size: u32) -> String {
    let listen = format!("{{ http: \"{http}\", admin: \"{admin}\", fleet: \"{fleet}\" }}");
    format!(
        "listen: {listen}
models:
  - name: {MODEL}
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: . }}
    flow: aggregated
    canary: {{ enabled: false }}
    policy: {{ kind: kv_overlap }}
    discovery: [ {{ kind: shim }} ]
"
    )
}
