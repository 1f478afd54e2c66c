//! Parts that a reload replaced and that running requests may still use.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use splitrail_fleet::Serving;

/// Between two looks at whether the last request has ended.
const PERIOD: Duration = Duration::from_millis(500);

/// Indexes and tokenizers that are served no more. To take down millions of blocks takes a
/// while: the request that ends last must not be the one to do it, on the reactor.
#[derive(Default)]
pub(super) struct Leftovers(Vec<Arc<dyn Any + Send + Sync>>);

impl Leftovers {
    /// Takes charge of what was served before and is not any more.
    pub(super) fn take(&mut self, before: &Serving, after: &Serving) {
        let parts = |serving: &Serving| -> Vec<Arc<dyn Any + Send + Sync>> {
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

    /// Takes down what nobody uses any more, as it becomes so; never ends.
    pub(super) async fn clear(&mut self) {
        loop {
            let unused = |part: &mut Arc<dyn Any + Send + Sync>| Arc::strong_count(part) == 1;
            let unused: Vec<_> = self.0.extract_if(.., unused).collect();
            if !unused.is_empty() {
                // If the router ends meanwhile, so does this.
                let _done = tokio::task::spawn_blocking(move || drop(unused)).await;
            }
            if self.0.is_empty() {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(PERIOD).await;
        }
    }
}
