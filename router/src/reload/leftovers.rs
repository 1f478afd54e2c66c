//! Parts that a reload replaced and that running requests may still use.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use splitrail_fleet::ServedModels;

/// Interval of the check whether the last request has ended.
const PERIOD: Duration = Duration::from_millis(500);

/// Indexes and tokenizers that are no longer served. Freeing millions of blocks takes long: it must
/// not be done by the last request, on the reactor.
#[derive(Default)]
pub(super) struct Leftovers(Vec<Arc<dyn Any + Send + Sync>>);

impl Leftovers {
    /// Takes over the parts that were served before and are not served any more.
    pub(super) fn take(&mut self, before: &ServedModels, after: &ServedModels) {
        let parts = |serving: &ServedModels| -> Vec<Arc<dyn Any + Send + Sync>> {
            let mut parts: Vec<Arc<dyn Any + Send + Sync>> = Vec::new();
            for served in &serving.models {
                parts.push(served.pool.clone());
                parts.extend(served.prompt.clone().map(|prompt| prompt as _));
            }
            parts
        };
        let kept = parts(after);
        let gone = |part: &Arc<_>| !kept.iter().any(|kept| std::ptr::addr_eq(&**kept, &**part));
        self.0.extend(parts(before).into_iter().filter(gone));
    }

    /// Frees parts that are no longer used; never ends.
    pub(super) async fn clear(&mut self) {
        loop {
            let unused = |part: &mut Arc<dyn Any + Send + Sync>| Arc::strong_count(part) == 1;
            let unused: Vec<_> = self.0.extract_if(.., unused).collect();
            if !unused.is_empty() {
                // If the router ends meanwhile, the process ends as well.
                let _done = tokio::task::spawn_blocking(move || drop(unused)).await;
            }
            if self.0.is_empty() {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(PERIOD).await;
        }
    }
}
