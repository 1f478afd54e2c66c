//! Adapters (LoRA) that are loaded and unloaded while the engine runs, as by vLLM with
//! `VLLM_ALLOW_RUNTIME_LORA_UPDATING`. The path from which an adapter is loaded stands for its weights.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A loaded adapter.
#[derive(Debug, Clone)]
pub(crate) struct Adapter {
    /// The number of the load, as in events.
    pub(crate) id: u32,
    /// From where it was loaded.
    pub(crate) path: String,
}

/// The adapters that an engine has loaded, by name.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    loaded: Mutex<BTreeMap<String, Adapter>>,
    loads: Mutex<u32>,
}

impl Adapters {
    /// Loads adapters from paths that are their names.
    pub(crate) fn new(names: &[String]) -> Self {
        let adapters = Self::default();
        names.iter().for_each(|name| adapters.load(name, name.clone()));
        adapters
    }

    /// All loaded adapters.
    pub(crate) fn loaded(&self) -> MutexGuard<'_, BTreeMap<String, Adapter>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads an adapter. A load in place keeps the number of the one before.
    pub(crate) fn load(&self, name: &str, path: String) {
        let mut loaded = self.loaded();
        let id = loaded.get(name).map_or_else(
            || {
                let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
                *loads += 1;
                *loads
            },
            |before| before.id,
        );
        loaded.insert(name.to_owned(), Adapter { id, path });
    }
}
