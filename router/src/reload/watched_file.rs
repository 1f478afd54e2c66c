//! Notices that the configuration file has another content.
//!
//! The content is compared, because a file may be replaced in ways that its time does not show: a
//! kubelet mounts a ConfigMap as links to a folder, and replaces the link to the folder.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::MissedTickBehavior;

/// How often the file is read.
const INTERVAL: Duration = Duration::from_secs(2);

/// A file of which changes are noticed.
pub struct WatchedFile {
    path: PathBuf,
    /// The digest of its content; `None` if it could not be read.
    seen: Option<u64>,
}

impl WatchedFile {
    /// A file with its present content.
    pub fn new(path: PathBuf) -> Self {
        let seen = std::fs::read(&path).ok().map(|content| digest(&content));
        Self { path, seen }
    }

    /// Calls `changed` whenever the file has another content. One that cannot be read has not changed,
    /// and is logged once. Never returns.
    pub async fn follow(mut self, changed: impl Fn()) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_readable = true;
        loop {
            ticks.tick().await;
            let path = self.path.clone();
            let read = spawn_blocking(move || std::fs::read(path)).await;
            let read = read.unwrap_or_else(|error| Err(error.into()));
            if let (Err(error), true) = (&read, is_readable) {
                let file = self.path.display();
                tracing::warn!(%file, %error, "the configuration file cannot be read: no change of it \
                    is noticed");
            }
            is_readable = read.is_ok();
            let Ok(content) = read else { continue };
            let now = Some(digest(&content));
            if std::mem::replace(&mut self.seen, now) != now {
                tracing::info!(file = %self.path.display(), "the configuration file has changed");
                changed();
            }
        }
    }
}

fn digest(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// Writes a version as a kubelet does: into a folder of its own, to which `..data` then leads.
    fn publish(folder: &std::path::Path, version: u32, content: &str) {
        let own = folder.join(format!("..{version}"));
        fs::create_dir(&own).unwrap();
        fs::write(own.join("file"), content).unwrap();
        symlink(format!("..{version}"), folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
        if version > 0 {
            fs::remove_dir_all(folder.join(format!("..{}", version - 1))).unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn another_content_behind_the_same_links_is_a_change_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        publish(folder, 0, "a");
        symlink("..data/file", folder.join("file")).unwrap();
        let watched = WatchedFile::new(folder.join("file"));
        let changes = Cell::new(0);
        let follow = watched.follow(|| changes.set(changes.get() + 1));
        tokio::pin!(follow);
        let mut until = async |seconds| {
            let _timeout = tokio::time::timeout(Duration::from_secs(seconds), &mut follow).await;
        };
        until(10).await;
        publish(folder, 1, "a");
        until(10).await;
        fs::rename(folder.join("file"), folder.join("away")).unwrap();
        until(10).await;
        fs::rename(folder.join("away"), folder.join("file")).unwrap();
        until(10).await;
        assert_eq!(changes.get(), 0, "nothing has changed");
        publish(folder, 2, "b");
        until(10).await;
        assert_eq!(changes.get(), 1);
    }
}
