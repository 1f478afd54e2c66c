//! Reads the counters, and makes snapshots of them.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;

use super::history::{History, Shed};
use super::pace::{INTERVAL, send_time};
use super::readings::CounterReading;
use super::snapshot::{Snapshot, snapshot};
use super::spans::LastReadings;
use crate::core::Core;

/// Makes snapshots from the readings of the last minute.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    readings: LastReadings,
}

impl Sampler {
    /// Reads the counters; if the reading is to be kept, adds a point to the history too.
    pub(super) fn read(&mut self, core: &Core, is_kept: bool, history: &Mutex<History>) {
        self.readings.add(CounterReading::new(core, Instant::now()));
        if is_kept {
            history.lock().unwrap_or_else(PoisonError::into_inner).add(&self.readings, core);
            self.readings.keep_newest();
        }
    }

    /// A snapshot as a server-sent event.
    pub(super) fn snapshot(&self, core: &Core, shed: &[Shed]) -> Bytes {
        event(&snapshot(&self.readings, core, shed))
    }
}

/// Frames a snapshot as an event, which says when the next one comes.
fn event(snapshot: &Snapshot) -> Bytes {
    let json = serde_json::to_string(snapshot).unwrap_or_default();
    let members = json.strip_prefix('{').unwrap_or_default();
    // As long as the framing and the number are.
    const FRAME_BYTES: usize = 60;
    let next_in = send_time(json.len() + FRAME_BYTES).max(INTERVAL).as_millis();
    format!("event: snapshot\ndata: {{\"next_in_ms\":{next_in},{members}\n\n").into()
}
