//! What a process asks of its system.

use std::io;
use std::path::Path;

/// Writes a file beside its place and moves it there, so that nobody reads half of it.
///
/// # Errors
/// If it cannot be written, with its name.
pub fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let beside = path.with_extension("partial");
    let written = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path));
    written.map_err(|error| {
        // What could not be finished is not left lying about; it may not even be there.
        let _absent = std::fs::remove_file(&beside);
        io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
    })
}

/// Raises the soft limit on open files to the hard one: a stream takes two, one for
/// its client and one for its engine. Warns where that is low for `streams_max` of them,
/// which the configuration's `key` allows.
pub fn raise_descriptor_limit(streams_max: usize, key: &str) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit on open files cannot be raised");
    }
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if files < 3 * streams_max as u64 {
        tracing::warn!(
            files,
            streams_max,
            "the limit on open files is low for {key}: 3 each are enough"
        );
    }
}
