//! Restarts tasks that panic.

use std::time::Duration;

use tokio::task::JoinSet;

/// Pause before a task that has panicked starts again.
const PAUSE: Duration = Duration::from_secs(1);

/// A task, as the log names it.
#[derive(Clone, Debug, Default)]
pub struct TaskName {
    /// What the task does.
    pub task: &'static str,
    /// The model that the task is for, if it is for one.
    pub model: Option<String>,
    /// The worker that the task is for, if it is for one.
    pub worker: Option<String>,
    /// The source of workers, or the issuer of tokens, that the task follows, if it follows one.
    pub source: Option<String>,
}

impl TaskName {
    /// The name of a task that is for no model in particular.
    pub fn new(task: &'static str) -> Self {
        Self { task, ..Self::default() }
    }

    /// The name of a model's task.
    pub fn of_model(task: &'static str, model: &str) -> Self {
        Self { model: Some(model.to_owned()), ..Self::new(task) }
    }
}

/// Runs a task, and runs it again a second after it has panicked, which is logged as an error:
/// otherwise what the task keeps current would become outdated and still be in use. Ends when the
/// task ends by itself.
pub async fn restart_on_panic<F>(name: TaskName, run: impl Fn() -> F + Send)
where
    F: Future<Output = ()> + Send + 'static,
{
    let TaskName { task, model, worker, source } = name;
    loop {
        let mut running = JoinSet::new();
        running.spawn(run());
        match running.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                tracing::error!(task, model, worker, source, "a task panicked and is restarted");
                tokio::time::sleep(PAUSE).await;
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_is_started_again() {
        let started = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&started);
        let run = move || {
            let before = counted.fetch_add(1, Relaxed);
            async move { assert!(before > 0, "a defect") }
        };
        restart_on_panic(TaskName::new("a test"), run).await;
        assert_eq!(started.load(Relaxed), 2);
    }
}
