//! Memory that one request can make the router hold, and processor time that it can take from
//! others.

mod batches;
mod members;
mod replies;
mod shares;
mod templates;
mod values;

use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::solo::Solo;

/// How much more memory was resident at most while something was done, in MiB.
async fn peak_mib(solo: &Solo, work: impl Future<Output = ()>) -> u64 {
    let pid = solo.router.pid();
    reset_peak(pid);
    let before = memory(pid).now_kib;
    work.await;
    memory(pid).peak_kib.saturating_sub(before) >> 10
}

/// `,"<prefix>0":0,"<prefix>1":0,...`
fn members(prefix: &str, count: usize) -> String {
    (0..count).map(|i| format!(",\"{prefix}{i:x}\":0")).collect()
}
